"""``FakeLLM``: the methods and outputs of :class:`sdk.LLM` without a model.

Prompts, parameters, streams, aborts and errors go through the code that ``LLM`` uses: the reader,
the scheduler, the engine and its thread. Only the executor is different: its tokens come from a
script.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from sdk.api.beam_search import BeamSearchOutput, BeamSearchParams
from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError, UnsupportedError
from sdk.api.lora import LoRAInfo, LoRALike, LoRARequest, LoRAsLike
from sdk.api.near_misses import names_keywords, no_attribute
from sdk.api.options import EngineOptions, takes_options
from sdk.api.outputs import (
    ClassificationOutput,
    EmbeddingOutput,
    Estimate,
    PoolingRequestOutput,
    RequestOutput,
    RerankOutput,
    ScoringOutput,
)
from sdk.api.params import SamplingParams
from sdk.api.scheduling_policy import PolicyName, SchedulingPolicy
from sdk.engine.engine import Engine
from sdk.engine.plan import PoolingMode
from sdk.engine.running_requests import RequestInfo
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.requests.as_completed import AsCompleted
from sdk.requests.async_pooling import AsyncPooling
from sdk.requests.async_stream import AnswerStream
from sdk.requests.calls import Calls
from sdk.requests.conversations import Message
from sdk.requests.driver import Driver
from sdk.requests.jobs import ParamsLike
from sdk.requests.monitoring import Monitoring
from sdk.requests.pooling import PoolingCalls
from sdk.requests.prompts import PromptLike
from sdk.requests.stepping import Stepping
from sdk.requests.vectors import OutputDtype, Wanted
from sdk.requests.views import ToolTurns
from sdk.testing.fake_executor import ScriptedExecutor
from sdk.testing.fake_jobs import FakeReader, ScriptedJobs
from sdk.testing.fake_tokenizer import END, VOCAB_SIZE, FakeTokenizer
from sdk.testing.script import Answers, FakeRequest, Script
from sdk.tokenizer import LLMTokenizer
from sdk.tools import ToolRun
from sdk.tools.definitions import ToolLike

if TYPE_CHECKING:  # Unpack: in typing from Python 3.11 on; the others import torch
    from typing_extensions import Unpack

    from sdk.api.display import Explanation
    from sdk.engine.snapshot import Snapshot
    from sdk.llm import LLM
    from sdk.loading.quant_report import QuantReport
    from sdk.memory.plan import MemoryPlan

_PAGE_SIZE = 16
_ANSWER = "This is the answer of a fake model."
_NO_EXPERTS = "a fake model has no experts"


def _limits(config: EngineConfig, max_model_len: int) -> SchedulerConfig:
    """A scheduler's limits; there are pages for all slots at full length."""
    slots = config.max_num_seqs
    return SchedulerConfig(
        num_pages=1 - (-max_model_len // _PAGE_SIZE) * slots,
        page_size=_PAGE_SIZE,
        max_model_len=max_model_len,
        max_num_seqs=slots,
        max_num_batched_tokens=max(max_model_len, slots),
        eos_token_ids=frozenset({END}),
        policy=config.scheduling_policy,
        tenant_weights=config.tenant_weights,
    )


class FakeLLM(AsyncPooling):
    """An :class:`sdk.LLM` for unit tests: the same methods and outputs, scripted answers.

    ``answers`` is one of:

    * a text: every request gets it;
    * a list: request ``i`` gets item ``i`` (with ``n=2`` a request takes two items);
    * a dict by prompt; for a conversation by the content of its last message;
    * a function of the prompt: of the text, or of the list of messages.

    An answer is a text, a :class:`FakeAnswer` or an exception. ``errors={2: error}`` replaces the
    answer of the third request. The call raises an exception before anything runs, as ``LLM`` does
    for an invalid request; an :class:`EngineDeadError` instead stops the engine. A request for
    which the script has no answer raises an ``AssertionError``.

    A token is a word. ``max_tokens``, ``stop``, ``n``, ``logprobs`` (every token has probability
    1), deadlines, priorities, tenants and ``max_waiting`` work; parameters that would change the
    model's choice, among them structured outputs and banned strings, have no effect.
    ``embeddings`` maps a text to a vector; by default texts with the same words are similar.
    ``requests`` lists what was asked.

    A step takes ``seconds_per_token``, and ``seconds_to_first_token`` more for a new prompt.
    ``clock`` and ``sleep`` replace the system's (:class:`ManualClock` has both).

    Methods that need weights (``snapshot``, ``explain``, ...) raise an :class:`UnsupportedError`.
    """

    def __init__(
        self,
        answers: Answers = _ANSWER,
        *,
        errors: Mapping[int, Exception] | None = None,
        seconds_per_token: float = 0.0,
        seconds_to_first_token: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
        embeddings: Callable[[str], Sequence[float]] | None = None,
        default_sampling_params: SamplingParams | None = None,
        max_model_len: int = 4096,
        max_num_seqs: int = 64,
        max_waiting: int | None = None,
        scheduling_policy: PolicyName | SchedulingPolicy = "fcfs",
        tenant_weights: Mapping[str, float] | None = None,
    ) -> None:
        for name, value in (
            ("seconds_per_token", seconds_per_token),
            ("seconds_to_first_token", seconds_to_first_token),
        ):
            if not value >= 0:
                raise RequestError(f"{name}: expected at least 0, found {value!r:.80}")
        self.config = EngineConfig(
            model="fake",
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_waiting=max_waiting,
            scheduling_policy=scheduling_policy,
            tenant_weights=tenant_weights,
        )
        self.max_model_len = max_model_len
        self.load_warnings: tuple[str, ...] = ()
        tokenizer = FakeTokenizer()
        executor = ScriptedExecutor(
            tokenizer,
            seconds_per_token=seconds_per_token,
            seconds_to_first_token=seconds_to_first_token,
            sleep=sleep,
            embeddings=embeddings,
        )
        scheduler = Scheduler(_limits(self.config, max_model_len), clock)
        self._engine = Engine(scheduler, executor, tokenizer, vocab_size=VOCAB_SIZE)
        self._default_params = default_sampling_params or SamplingParams()
        self._reader = FakeReader(tokenizer, vocab_size=VOCAB_SIZE, max_model_len=max_model_len)
        script = Script(answers, errors)
        self._jobs = ScriptedJobs(self._reader, self._default_params, script, clock, max_model_len)
        self._driver = Driver(self._engine, max_waiting=max_waiting)
        self._pooling = PoolingCalls(self._jobs, self._reader, None)
        self._beam_searches = _NoBeams()
        self._stepping = Stepping(self._driver, self._jobs)
        self._monitoring = Monitoring(self._driver)
        self._calls = Calls(
            self._driver,
            self._jobs,
            self._reader,
            None,
            self._monitoring.list_requests,
            read_ahead=2 * max_num_seqs,
        )
        self._close = weakref.finalize(self, self._driver.close)

    @property
    def requests(self) -> list[FakeRequest]:
        """The accepted requests, in order."""
        return list(self._jobs.accepted)

    if not TYPE_CHECKING:  # as LLM

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name)

        def __call__(self, *args: Any, **given: Any) -> NoReturn:
            raise TypeError(
                "an LLM is not called like a function: use generate(prompts), chat(messages) or "
                "stream(prompt)"
            )

    def __repr__(self) -> str:
        return f"FakeLLM(max_model_len={self.max_model_len}, {len(self.requests)} requests)"

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """See :meth:`sdk.LLM.close`."""
        try:
            self._driver.close()
        finally:
            self._close.detach()
            self._monitoring.close()
            self._reader.close()
            self._jobs.close()

    # ---- batches, streams and their async twins --------------------------------------------------

    @names_keywords
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> Any:
        """See :meth:`sdk.LLM.generate`."""
        calling = self._jobs.read(prompts, sampling_params, returns, lora_request)
        return self._calls.run("generate", calling, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> Any:
        """See :meth:`sdk.LLM.chat`."""
        given = sampling_params, template, returns, lora_request
        calling = self._jobs.read_chats("chat", messages, *given)
        return self._calls.run("chat", calling, priority, use_tqdm)

    def run_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolLike],
        sampling_params: SamplingParams | None = None,
        *,
        max_turns: int = 8,
        tool_choice: str | Mapping[str, Any] = "auto",
        on_error: Literal["message", "raise"] = "message",
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> ToolRun:
        """See :meth:`sdk.LLM.run_tools`."""
        parsed = self._jobs.parses_arguments(template)
        turns = ToolTurns(tools, tool_choice, sampling_params, template, parsed, lora_request)
        self._calls.advice.blocking("run_tools")
        return turns.run(self.chat, messages, max_turns, on_error)

    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        returns: Any = None,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[Any]:
        """See :meth:`sdk.LLM.as_completed`."""
        return self._calls.as_completed(
            prompts, sampling_params, priority, template, returns, lora_request
        )

    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        returns: Any = None,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[Any]:
        """See :meth:`sdk.LLM.stream`. Every piece is a word."""
        return self._calls.stream(
            prompt, sampling_params, priority, template, returns, lora_request
        )

    @names_keywords
    async def agenerate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[Any]:
        """See :meth:`sdk.LLM.agenerate`."""
        read = partial(self._jobs.read, prompts, sampling_params, returns, lora_request)
        return await self._calls.abatch(read, prompts, sampling_params, priority, lora_request)

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        returns: Any = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        **template: Any,
    ) -> list[Any]:
        """See :meth:`sdk.LLM.achat`."""
        given = sampling_params, template, returns, lora_request
        read = partial(self._jobs.read_chats, "achat", messages, *given)
        return await self._calls.abatch(read, messages, sampling_params, priority, lora_request)

    async def arun_tools(
        self,
        messages: Sequence[Message],
        tools: Sequence[ToolLike],
        sampling_params: SamplingParams | None = None,
        *,
        max_turns: int = 8,
        tool_choice: str | Mapping[str, Any] = "auto",
        on_error: Literal["message", "raise"] = "message",
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> ToolRun:
        """See :meth:`sdk.LLM.arun_tools`."""
        parsed = self._jobs.parses_arguments(template)
        turns = ToolTurns(tools, tool_choice, sampling_params, template, parsed, lora_request)
        return await turns.arun(self.achat, messages, max_turns, on_error)

    def astream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        returns: Any = None,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AnswerStream:
        """See :meth:`sdk.LLM.astream`."""
        return self._calls.astream(
            "astream", prompt, sampling_params, priority, template, returns, lora_request
        )

    # ---- stepping by hand ------------------------------------------------------------------------

    def enqueue(
        self,
        prompts: PromptLike | Sequence[Message] | Sequence[PromptLike | Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        request_id: str | Sequence[str] | None = None,
        **template: Any,
    ) -> list[str]:
        """See :meth:`sdk.LLM.enqueue`."""
        return self._stepping.enqueue(
            prompts, sampling_params, priority, request_id, template, lora_request
        )

    def wait_for_completion(self) -> list[RequestOutput]:
        """See :meth:`sdk.LLM.wait_for_completion`."""
        self._calls.advice.blocking("wait_for_completion")
        return self._stepping.wait_for_completion()

    def step(self) -> list[RequestOutput]:
        """See :meth:`sdk.LLM.step`."""
        return self._stepping.step()

    def pump(self, max_ms: float) -> list[RequestOutput]:
        """See :meth:`sdk.LLM.pump`. Time is that of the system, not of ``clock``."""
        return self._stepping.pump(max_ms)

    @property
    def has_unfinished_requests(self) -> bool:
        """See :meth:`sdk.LLM.has_unfinished_requests`."""
        return self._stepping.has_unfinished_requests

    def abort(self, request_id: str | Sequence[str]) -> None:
        """See :meth:`sdk.LLM.abort`."""
        self._stepping.abort(request_id)

    # ---- scheduling ------------------------------------------------------------------------------

    def set_tenant_weight(self, tenant: str | None, weight: float) -> None:
        """See :meth:`sdk.LLM.set_tenant_weight`."""
        self._driver.set_tenant_weight(tenant, weight)

    def estimate(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        **template: Any,
    ) -> Estimate:
        """See :meth:`sdk.LLM.estimate`."""
        params = sampling_params or self._default_params
        read = self._reader.read_one("estimate", prompt, params, template)
        return self._driver.estimate(read, params, priority)

    # ---- embeddings ------------------------------------------------------------------------------

    @names_keywords
    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        dimensions: int | None = None,
        output_dtype: OutputDtype = "float32",
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """See :meth:`sdk.LLM.embed`."""
        wanted = Wanted(prompt_name, prompt, dimensions, output_dtype)
        work = self._pooling.embed(prompts, truncate_prompt_tokens, lora_request, tenant, wanted)
        return self._calls.do("embed", work, use_tqdm)

    @names_keywords
    def encode(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        pooling: PoolingMode | None = None,
        normalize: bool = True,
        truncate_prompt_tokens: int | None = None,
        prompt_name: str | None = None,
        prompt: str | None = None,
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
        use_tqdm: bool = True,
    ) -> list[PoolingRequestOutput]:
        """See :meth:`sdk.LLM.encode`. Imports torch, because it returns tensors.

        Vectors have length 1, and all values of ``pooling`` except "token" mean the same.
        """
        wanted = Wanted(prompt_name, prompt)
        work = self._pooling.encode(
            prompts, pooling, normalize, truncate_prompt_tokens, lora_request, tenant, wanted
        )
        return self._calls.do("encode", work, use_tqdm)

    @names_keywords
    def classify(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        use_activation: bool = True,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRAsLike = None,
        tenant: str | None = None,
        use_tqdm: bool = True,
    ) -> list[ClassificationOutput]:
        """Raises the error of a model without a classification head."""
        work = self._pooling.classify(
            prompts, use_activation, truncate_prompt_tokens, lora_request, tenant
        )
        return self._calls.do("classify", work, use_tqdm)

    @names_keywords
    def score(
        self,
        data_1: PromptLike | Sequence[PromptLike],
        data_2: PromptLike | Sequence[PromptLike],
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRALike | None = None,
        chat_template: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[ScoringOutput]:
        """See :meth:`sdk.LLM.score`."""
        return self._calls.do(
            "score",
            self._pooling.score(
                data_1,
                data_2,
                chat_template,
                lora_request,
                tenant,
                cache_salt,
                truncate_prompt_tokens,
            ),
        )

    @names_keywords
    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        top_n: int | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        lora_request: LoRALike | None = None,
        chat_template: str | None = None,
        tenant: str | None = None,
        cache_salt: str | None = None,
    ) -> list[RerankOutput]:
        """See :meth:`sdk.LLM.rerank`."""
        work = self._pooling.rerank(
            query,
            documents,
            top_n,
            chat_template,
            lora_request,
            tenant,
            cache_salt,
            truncate_prompt_tokens,
        )
        return self._calls.do("rerank", work)

    # ---- adapters --------------------------------------------------------------------------------

    def add_lora(
        self,
        lora: LoRARequest | str,
        path: str | PathLike[str] | None = None,
        *,
        pin: bool = False,
    ) -> LoRARequest:
        """See :meth:`sdk.LLM.add_lora`."""
        return self._jobs.adapters.add(lora, path, pin=pin)

    def remove_lora(self, lora: LoRARequest | str | int) -> bool:
        """See :meth:`sdk.LLM.remove_lora`."""
        return self._jobs.adapters.remove(lora)

    def pin_lora(self, lora: LoRARequest | str | int) -> bool:
        """See :meth:`sdk.LLM.pin_lora`."""
        return self._jobs.adapters.pin(lora)

    def list_loras(self) -> list[LoRAInfo]:
        """See :meth:`sdk.LLM.list_loras`."""
        return self._jobs.adapters.list()

    # ---- the engine ------------------------------------------------------------------------------

    def get_metrics(self) -> dict[str, float]:
        """See :meth:`sdk.LLM.get_metrics`."""
        return self._monitoring.metrics()

    def stats(self) -> EngineStats:
        """See :meth:`sdk.LLM.stats`."""
        return self._monitoring.stats()

    def set_slo(self, slo: SLO | str | None) -> None:
        """See :meth:`sdk.LLM.set_slo`."""
        self._monitoring.set_slo(slo)

    def expert_load(self) -> dict[int, list[int]]:
        """:raises RequestError: always; there are no experts."""
        raise RequestError(_NO_EXPERTS)

    def rebalance_experts(self) -> int:
        """:raises RequestError: always; there are no experts."""
        raise RequestError(_NO_EXPERTS)

    def list_requests(self) -> list[RequestInfo]:
        """See :meth:`sdk.LLM.list_requests`."""
        return self._monitoring.list_requests()

    def trace(self, path: str | PathLike[str]) -> Trace:
        """See :meth:`sdk.LLM.trace`."""
        return self._monitoring.trace(path)

    def get_tokenizer(self) -> LLMTokenizer:
        """A tokenizer whose tokens are words."""
        self._driver.check_usable()
        return LLMTokenizer(self._reader.need_tokenizer("FakeLLM"))

    def get_default_sampling_params(self) -> SamplingParams:
        """See :meth:`sdk.LLM.get_default_sampling_params`."""
        return self._default_params

    def reset_prefix_cache(self) -> bool:
        """See :meth:`sdk.LLM.reset_prefix_cache`."""
        self._driver.check_usable()
        return self._driver.between_steps(self._engine.reset_prefix_cache)

    def trim(self) -> None:
        """See :meth:`sdk.LLM.trim`."""
        self.reset_prefix_cache()

    def sleep(self, level: int = 1) -> None:
        """See :meth:`sdk.LLM.sleep`."""
        if level not in (1, 2):
            raise RequestError(f"sleep: expected level 1 or 2, found {level!r:.80}")

        def check_idle() -> None:
            if self._driver.has_work:
                raise RequestError("sleep: requests are unfinished: wait for them or abort() them")

        self._driver.sleep(check_idle, f"this LLM sleeps (level {level}): call wake_up() first")

    def wake_up(self) -> None:
        """See :meth:`sdk.LLM.wake_up`."""
        self._driver.wake(lambda: None)

    # ---- what needs weights ----------------------------------------------------------------------

    @staticmethod
    def plan(model: str | PathLike[str], **options: Any) -> MemoryPlan:
        """Not supported."""
        _needs_weights("plan")

    @property
    def memory_plan(self) -> MemoryPlan:
        """Not supported."""
        _needs_weights("memory_plan")

    @property
    def model_config(self) -> Any:
        """Not supported."""
        _needs_weights("model_config")

    @takes_options
    def fork(self, **options: Unpack[EngineOptions]) -> LLM:
        """Not supported."""
        _needs_weights("fork")

    def quantize(self, out: str | PathLike[str], scheme: str | None = None, **options: Any) -> Path:
        """Not supported."""
        _needs_weights("quantize")

    @names_keywords
    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        lora_request: LoRALike | None = None,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """Not supported: a script has one answer, not the most probable ones."""
        self._beam_searches.search(prompts, params)

    def snapshot(
        self,
        prompt: PromptLike | Sequence[Message] | None = None,
        *,
        request_id: str | None = None,
        **template: Any,
    ) -> Snapshot:
        """Not supported."""
        _needs_weights("snapshot")

    def restore(
        self,
        snapshot: Snapshot | str | PathLike[str],
        *,
        cache_salt: str | None = None,
        pin: bool = False,
    ) -> int:
        """Not supported."""
        _needs_weights("restore")

    def pin(
        self,
        prompt: PromptLike | Sequence[Message],
        *,
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> int:
        """Not supported."""
        _needs_weights("pin")

    def unpin(
        self,
        prompt: PromptLike | Sequence[Message],
        *,
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> bool:
        """Not supported."""
        _needs_weights("unpin")

    def resize(self, memory: int | str) -> MemoryPlan:
        """Not supported."""
        _needs_weights("resize")

    def explain(self) -> Explanation:
        """Not supported."""
        _needs_weights("explain")

    def quant_report(self) -> QuantReport:
        """Not supported."""
        _needs_weights("quant_report")


class _NoBeams:
    """In place of :class:`sdk.requests.beam_searches.BeamSearches`."""

    def search(self, *_: object) -> NoReturn:
        _needs_weights("beam_search")


def _needs_weights(name: str) -> NoReturn:
    raise UnsupportedError(
        f"FakeLLM: {name} needs a model; use LLM(tiny_model(folder)) from sdk.testing"
    )
