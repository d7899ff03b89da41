"""vLLM's engine that a program steps by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from sdk.api.errors import RequestError
from sdk.compat.vllm._missing import missing
from sdk.compat.vllm.engine.arg_utils import EngineArgs
from sdk.compat.vllm.entrypoints.llm import LLM
from sdk.compat.vllm.inputs import check_absent, our_prompt
from sdk.compat.vllm.lora.request import LoRARequest
from sdk.compat.vllm.outputs import PoolingRequestOutput, RequestOutput, request_output
from sdk.compat.vllm.pooling_params import PoolingParams
from sdk.compat.vllm.sampling_params import SamplingParams
from sdk.compat.vllm.v1.metrics.reader import Metric
from sdk.requests.adapters import as_ours
from sdk.tokenizer import LLMTokenizer


class LLMEngine:
    """Requests are added, and :meth:`step` returns what is new in them.

    Make one with :meth:`from_engine_args`. ``LLMEngine(llm)`` shares an :class:`LLM`, which its
    owner closes; ``llm`` is the :class:`sdk.LLM`.
    """

    def __init__(self, llm: LLM) -> None:
        self._offline = llm
        self.llm = llm.llm
        self.model_config = self.llm.model_config
        #: Unfinished requests: the text that came with token ids.
        self._texts: dict[str, str | None] = {}
        self._pooling: dict[str, tuple[Any, PoolingParams, Any]] = {}
        self._sleeping = False

    @classmethod
    def from_engine_args(
        cls,
        engine_args: EngineArgs,
        usage_context: Any = None,
        stat_loggers: Any = None,
        enable_multiprocessing: bool = False,
    ) -> LLMEngine:
        """An engine with these options. It is closed with :meth:`close`, or when it is dropped."""
        options = dict(vars(engine_args))
        options.pop("enable_log_requests", None)
        return cls(LLM(**options))

    if not TYPE_CHECKING:  # else type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """What to do instead of a method that vLLM has."""
            raise missing("LLMEngine", name)

    def close(self) -> None:
        """End all requests and give back memory and threads."""
        self._offline.close()

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        session_id: str | None = None,
        prompt_text: str | None = None,
        kv_hints: Any = None,
    ) -> str:
        """Queue a request; its id. Nothing runs until :meth:`step`.

        :raises RequestError: it is invalid, or the id belongs to an unfinished request.
        """
        check_absent(tokenization_kwargs=tokenization_kwargs)
        if not isinstance(request_id, str):
            raise TypeError(f"request_id: expected text, found {type(request_id).__name__}")
        if request_id in self._texts or request_id in self._pooling:
            raise RequestError(f"request_id: {request_id!r:.80} belongs to an unfinished request")
        if isinstance(params, PoolingParams):
            self._pooling[request_id] = (prompt, params, lora_request)
            return request_id
        item, text = our_prompt(prompt)
        self.llm.enqueue(
            [item],
            self._offline._params(params),
            lora_request=lora_request,
            priority=priority,
            request_id=[request_id],
        )
        self._texts[request_id] = prompt_text or text
        return request_id

    def step(self) -> list[RequestOutput | PoolingRequestOutput[Any]]:
        """Run one step; the new outputs. Requests that pool are computed whole."""
        outputs: list[RequestOutput | PoolingRequestOutput[Any]] = []
        while self._pooling:
            request_id = next(iter(self._pooling))
            prompt, params, lora_request = self._pooling.pop(request_id)
            [pooled] = self._offline.encode(
                [prompt], params, use_tqdm=False, lora_request=lora_request
            )
            pooled.request_id = request_id
            outputs.append(pooled)
        for found in self.llm.step() if self._texts else ():
            if found.request_id not in self._texts:  # aborted
                continue
            text = self._texts[found.request_id]
            if found.finished:
                del self._texts[found.request_id]
            outputs.append(request_output(found, self._offline._text_of, text))
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or return anything."""
        return self.get_num_unfinished_requests() > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose last output :meth:`step` has not returned."""
        return len(self._texts) + len(self._pooling)

    def abort_request(self, request_ids: str | Iterable[str], internal: bool = False) -> None:
        """End requests; they have no further output. Unknown ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.llm.abort([one for one in ids if one in self._texts])
        for one in ids:
            self._texts.pop(one, None)
            self._pooling.pop(one, None)
        if not self._texts:  # the engine drops aborted requests in a step
            self.llm.step()

    # ---- the engine ------------------------------------------------------------------------------

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer with transformers' methods."""
        return self._offline.get_tokenizer()

    @property
    def tokenizer(self) -> LLMTokenizer:
        """The same."""
        return self.get_tokenizer()

    def get_metrics(self) -> list[Metric]:
        """See :meth:`LLM.get_metrics`."""
        return self._offline.get_metrics()

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Forget all cached prefixes."""
        return self.llm.reset_prefix_cache()

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """See :meth:`LLM.sleep`."""
        self._offline.sleep(level, mode)
        self._sleeping = True

    def wake_up(self, tags: list[str] | None = None) -> bool:
        """See :meth:`LLM.wake_up`."""
        self._sleeping = False
        return self._offline.wake_up(tags)

    def is_sleeping(self) -> bool:
        """Whether :meth:`sleep` was called last."""
        return self._sleeping

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Load an adapter."""
        self.llm.add_lora(as_ours(lora_request))
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Forget an adapter. ``False``: there is none of this number."""
        return self.llm.remove_lora(lora_id)

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter in memory."""
        return self.llm.pin_lora(lora_id)

    def list_loras(self) -> set[int]:
        """The numbers of all adapters."""
        return {known.int_id for known in self.llm.list_loras()}

    def do_log_stats(self) -> None:
        """Nothing is logged; :meth:`get_metrics` has the numbers."""
