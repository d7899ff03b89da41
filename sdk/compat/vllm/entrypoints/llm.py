"""vLLM's ``LLM`` on an :class:`sdk.LLM`, in this process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk import LLM as _OurLLM
from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams as OurSamplingParams
from sdk.compat.vllm._logits import AnswerProcessors, processors_of
from sdk.compat.vllm._missing import missing
from sdk.compat.vllm._options import LLM_SIGNATURE, llm_options, structure_options
from sdk.compat.vllm.config import VllmConfig, pooler_of, profiler_of
from sdk.compat.vllm.engine.arg_utils import EngineArgs
from sdk.compat.vllm.inputs import check_absent, our_prompt
from sdk.compat.vllm.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
    beam_output,
    class_output,
    embedding_output,
    pooling_output,
    request_output,
    score_output,
)
from sdk.compat.vllm.pooling_params import PoolingParams
from sdk.compat.vllm.sampling_params import BeamSearchParams, SamplingParams, our_params
from sdk.compat.vllm.v1.metrics.reader import Metric, MetricsReader
from sdk.kernels.host.torch_import import torch_module
from sdk.loading.sampling_defaults import OWN, OWN_SOURCE
from sdk.metrics.trace import Trace
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.reader import as_list
from sdk.tokenizer import LLMTokenizer

#: Sampling parameters of a model's files that vLLM uses too.
_FROM_FILES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_TASKS = ("embed", "token_embed", "classify")


class LLM:
    """A model with the methods and results of vLLM's ``LLM``.

    ``kwargs`` are the other fields of :class:`EngineArgs`, or options of ``sdk.LLM`` that vLLM does
    not have (``memory="2GiB"``).

    :raises RequestError: an option cannot be honored; the message names it.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self._structure = structure_options(options)
        self._pooler = pooler_of(options.get("pooler_config"))
        self._profiler = profiler_of(options.get("profiler_config"))
        self._trace: Trace | None = None
        self._processors = processors_of(options.get("logits_processors"))
        self.llm = _OurLLM(model, **llm_options(options))

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLM:
        """An LLM with these options."""
        return cls(**vars(engine_args))

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """What to do instead of a method that vLLM has."""
            raise missing("LLM", name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and give back memory and threads."""
        self.llm.close()

    # ---- text ------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete all prompts; outputs come in their order."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        items = [our_prompt(one) for one in as_list(prompts)]
        params = self._params(sampling_params)
        found = self.llm.generate(
            [prompt for prompt, _ in items],
            params,
            lora_request=lora_request,
            priority=priority,
            use_tqdm=bool(use_tqdm),
        )
        pairs = zip(found, items, strict=True)
        return [request_output(output, self._text_of, text) for output, (_, text) in pairs]

    def chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or more conversations."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        template = _template(
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        params = self._params(sampling_params)
        found = self.llm.chat(
            messages,
            params,
            lora_request=lora_request,
            priority=priority,
            use_tqdm=bool(use_tqdm),
            **template,
        )
        return [request_output(output, self._text_of) for output in found]

    def beam_search(
        self,
        prompts: Any,
        params: BeamSearchParams,
        lora_request: Any = None,
        use_tqdm: bool = False,
        concurrency_limit: int | None = None,
    ) -> list[BeamSearchOutput]:
        """Search each prompt's most probable answers."""
        if not isinstance(params, BeamSearchParams):
            raise RequestError(f"params: expected BeamSearchParams, found {safe_repr(params)}")
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        step = max(1, len(items)) if concurrency_limit is None else concurrency_limit
        if not isinstance(step, int) or step < 1:
            raise RequestError(f"concurrency_limit: expected at least 1, found {safe_repr(step)}")
        adapters = self.llm._job_maker.adapters.of(lora_request, len(items))
        found = [
            output
            for first in range(0, len(items), step)
            for output in self.llm._job_runner.do(
                "beam_search",
                self.llm._beam_searches.search(
                    items[first : first + step],
                    params.ours(),
                    use_tqdm,
                    [one and one.lora_request for one in adapters[first : first + step]],
                ),
            )
        ]

        def decode(ids: list[int]) -> str:
            return self.get_tokenizer().decode(ids, params.skip_special_tokens)

        parts = zip(items, found, adapters, strict=True)
        return [
            beam_output(
                item, one, decode, self._text_of, None if lora is None else lora.lora_request
            )
            for item, one, lora in parts
        ]

    def get_default_sampling_params(self) -> SamplingParams:
        """vLLM's defaults, changed by the model's files."""
        found = self.llm.get_default_sampling_params()
        own = OWN if self.llm._defaults.source.endswith(OWN_SOURCE) else {}
        values = {name: getattr(found, name) for name in _FROM_FILES}
        given = {name: value for name, value in values.items() if own.get(name) != value}
        return SamplingParams.from_optional(**given, max_tokens=found.max_tokens)

    def _text_of(self, token: int) -> str:
        data = self.get_tokenizer().decode_bytes([token])
        return data.decode("utf-8", errors="ignore")

    def _params(self, given: Any) -> Any:
        """Parameters for ``self.llm``."""
        chosen = self.get_default_sampling_params() if given is None else given
        if isinstance(chosen, Sequence):
            return [self._params(one) for one in chosen]
        params = our_params(chosen, self._structure)
        return self._processed(params, chosen) if self._processors else params

    def _processed(self, params: OurSamplingParams, given: Any) -> OurSamplingParams:
        for one in self._processors:
            try:
                one.validate_params(given)
            except ValueError as error:
                raise RequestError(f"sampling_params: {one.__name__}: {error}") from error
        config = VllmConfig(model_config=self.llm.model_config)
        added = AnswerProcessors(self._processors, config, given)
        return params.clone(logits_processors=(*(params.logits_processors or ()), added))

    def enqueue(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: Any = True,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue prompts; :meth:`wait_for_completion` runs them."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        params = self._params(sampling_params)
        return self.llm.enqueue(items, params, lora_request=lora_request, priority=priority)

    def enqueue_chat(
        self,
        messages: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        priority: int | Sequence[int] | None = None,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: list[dict[str, Any]] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        mm_processor_kwargs: dict[str, Any] | None = None,
    ) -> list[str]:
        """Queue conversations; :meth:`wait_for_completion` runs them."""
        _check(tokenization_kwargs, mm_processor_kwargs)
        template = _template(
            chat_template,
            add_generation_prompt,
            continue_final_message,
            tools,
            chat_template_kwargs,
        )
        params = self._params(sampling_params)
        return self.llm.enqueue(
            messages, params, lora_request=lora_request, priority=priority, **template
        )

    def wait_for_completion(
        self, output_type: Any = None, *, use_tqdm: Any = True
    ) -> list[RequestOutput]:
        """Run all queued requests; their outputs, in the order of queueing."""
        found = self.llm.wait_for_completion()
        return [request_output(output, self._text_of) for output in found]

    # ---- embeddings ------------------------------------------------------------------------------

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | None = None,
        *,
        use_tqdm: Any = True,
        lora_request: Any = None,
        pooling_task: str | None = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Pooled hidden states. ``pooling_task``: "embed", "token_embed" or "classify"."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        params = _pooling(pooling_params)
        task = pooling_task or params.task
        if task not in _TASKS:
            raise RequestError(
                f"pooling_task: expected one of {', '.join(_TASKS)}, found {safe_repr(task)}"
            )
        if task == "classify":
            torch_module("encode, which returns tensors (classify returns lists),")
            classes = self.classify(prompts, pooling_params=params, lora_request=lora_request)
            return [_as_tensor(one) for one in classes]
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        found = self.llm.encode(
            items,
            pooling="token" if task == "token_embed" else self._pooler.mode,
            normalize=self._pooler.activates(params),
            lora_request=lora_request,
            use_tqdm=bool(use_tqdm),
        )
        return [pooling_output(output) for output in found]

    def embed(
        self,
        prompts: Any,
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Each prompt's last hidden state; scaled to length 1 unless ``use_activation=False``."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        activates = self._pooler.activates(_pooling(pooling_params))
        found = self.llm.encode(
            items,
            pooling=self._pooler.mode,
            normalize=activates,
            lora_request=lora_request,
            use_tqdm=bool(use_tqdm),
        )
        return [embedding_output(output) for output in found]

    def classify(
        self,
        prompts: Any,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: Any = True,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        """Each prompt's classes, with a checkpoint that has a classification head."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        items = [our_prompt(one)[0] for one in as_list(prompts)]
        activates = self._pooler.activates(_pooling(pooling_params))
        found = self.llm.classify(
            items, use_activation=activates, lora_request=lora_request, use_tqdm=bool(use_tqdm)
        )
        return [class_output(output) for output in found]

    def score(
        self,
        data_1: Any,
        data_2: Any,
        /,
        *,
        use_tqdm: Any = True,
        pooling_params: PoolingParams | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts match, pair by pair."""
        check_absent(tokenization_kwargs=tokenization_kwargs)
        activates = self._pooler.activates(_pooling(pooling_params))
        if not activates or self._pooler.mode not in (None, "last"):
            raise RequestError(
                "score: use_activation=False and other poolings than LAST are not supported; use "
                "embed"
            )
        found = self.llm.score(
            data_1, data_2, lora_request=lora_request, chat_template=chat_template
        )
        return [score_output(output) for output in found]

    # ---- the engine ------------------------------------------------------------------------------

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer with transformers' methods."""
        return self.llm.get_tokenizer()

    def get_world_size(self, include_dp: bool = True) -> int:
        """The number of ranks."""
        return self.llm.config.tensor_parallel_size

    def get_metrics(self) -> list[Metric]:
        """Counters, gauges and histograms with vLLM's names (``vllm:num_requests_running``).

        :raises ImportError: prometheus-client is missing.
        """
        return self._metrics.read()

    @cached_property
    def _metrics(self) -> MetricsReader:
        return MetricsReader(self.llm)

    def start_profile(
        self,
        profile_prefix: str | None = None,
        *,
        delay_iterations: int | None = None,
        max_iterations: int | None = None,
    ) -> None:
        """Record steps and requests until :meth:`stop_profile`, for https://ui.perfetto.dev.

        The file goes into ``torch_profiler_dir`` of ``profiler_config``. It has the engine's parts,
        not the operators of torch.

        :raises RequestError: there is no such folder or a recording runs; or a number of steps is
            asked for.
        """
        config = self._profiler
        if not config.profiler:
            raise RequestError(
                "start_profile: pass profiler_config={'profiler': 'torch', 'torch_profiler_dir': "
                "FOLDER} to LLM"
            )
        if delay_iterations or max_iterations or config.delay_iterations or config.max_iterations:
            raise RequestError(
                "start_profile: delay_iterations and max_iterations are not supported: call "
                "start_profile and stop_profile around what is to be recorded"
            )
        folder = Path(config.torch_profiler_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self._trace = self.llm.trace(
            folder / f"{profile_prefix or 'embedlm'}.{time.time_ns()}.json.gz"
        )

    def stop_profile(self) -> None:
        """Write the file. :raises RequestError: nothing is recorded."""
        if self._trace is None:
            raise RequestError("stop_profile: call start_profile first")
        self._trace.stop()
        self._trace = None

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes."""
        return self.llm.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give memory back: level 1 the KV cache, level 2 the weights too. Nothing may run."""
        self.llm.sleep(level)

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """Take the memory again. ``tags`` has no effect: everything wakes up."""
        self.llm.wake_up()
        return True


LLM.__signature__ = LLM_SIGNATURE  # type: ignore[attr-defined]


def _check(tokenization_kwargs: Any, mm_processor_kwargs: Any) -> None:
    check_absent(tokenization_kwargs=tokenization_kwargs, mm_processor_kwargs=mm_processor_kwargs)


def _template(
    source: str | None,
    add_generation_prompt: bool,
    continue_final_message: bool,
    tools: list[dict[str, Any]] | None,
    variables: dict[str, Any] | None,
) -> dict[str, Any]:
    """The keywords of our ``chat``. vLLM shows tools to the model and does not parse calls."""
    given: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "continue_final_message": continue_final_message,
        "chat_template": source,
        "tools": tools or None,
        "chat_template_kwargs": variables,
    }
    return {name: value for name, value in given.items() if value is not None}


def _pooling(given: PoolingParams | None) -> PoolingParams:
    if given is None:
        return PoolingParams()
    if not isinstance(given, PoolingParams):
        raise RequestError(f"pooling_params: expected PoolingParams, found {safe_repr(given)}")
    return given


def _as_tensor(found: ClassificationRequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    import torch

    data = PoolingOutput(torch.tensor(found.outputs.probs))
    return PoolingRequestOutput(found.request_id, data, found.prompt_token_ids, 0, found.finished)
