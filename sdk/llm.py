"""``LLM``: the one class an application needs."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar, overload

from sdk.api.beam_search import BeamSearchOutput, BeamSearchParams
from sdk.api.display import Explanation, html_table, llm_facts
from sdk.api.errors import RequestError
from sdk.api.lora import LoRAInfo, LoRALike, LoRARequest, LoRAsLike
from sdk.api.machine import release_free_memory
from sdk.api.near_misses import names_keywords, no_attribute
from sdk.api.options import EngineOptions, engine_config, takes_options
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
from sdk.engine.plan import PoolingMode
from sdk.engine.running_requests import RequestInfo
from sdk.loading.around import part_around
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.requests.as_completed import AsCompleted
from sdk.requests.async_pooling import AsyncPooling
from sdk.requests.async_stream import AnswerStream
from sdk.requests.calls import Calls
from sdk.requests.conversations import Message
from sdk.requests.jobs import ParamsLike
from sdk.requests.prompts import Prompt, PromptLike, is_conversation
from sdk.requests.stepping import Stepping
from sdk.requests.vectors import OutputDtype, Wanted
from sdk.tokenizer import LLMTokenizer

if TYPE_CHECKING:  # Self, Unpack: in typing from Python 3.11 on; the others come with a model
    from typing_extensions import Self, Unpack

    from sdk.engine.snapshot import Snapshot
    from sdk.loading.quant_report import QuantReport
    from sdk.memory.plan import MemoryPlan
    from sdk.models.config import ModelConfig
    from sdk.requests.served import Served
    from sdk.requests.typed_outputs import MessageOutput, ParsedOutput
    from sdk.tools import ToolRun
    from sdk.tools.definitions import ToolLike

T = TypeVar("T")


class LLM(AsyncPooling):
    """A model loaded into this process, and the engine that serves it.

    ``model`` is a GGUF file, a folder with safetensors and ``config.json``, or a hub id. The
    options are those of :class:`sdk.api.options.EngineOptions`. The most important ones are
    ``memory="2GiB"`` (a hard budget for weights, KV cache and workspace), ``max_model_len``,
    ``num_threads`` and ``compute="exact"``.

    One object serves sync, async and streaming callers from any thread and any event loop. Use it
    as a context manager, or call :meth:`close`; otherwise the garbage collector closes it.
    ``LLM(plan=plan)`` loads what :meth:`plan` planned, or one of its alternatives.

    :raises CheckpointError: the file is missing, damaged or of an unsupported kind.
    :raises OutOfMemoryError: the budget cannot hold the model; nothing has been loaded.
    :raises RequestError: an option has a bad value. :raises TypeError: an option is unknown.
    """

    @takes_options
    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        *,
        plan: MemoryPlan | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        from sdk.loading.alternatives import planned_config

        self.config = config = planned_config(plan, model, **options)
        if config.data_parallel_size == 1:
            from sdk.loading.load import load
            from sdk.requests.served_engine import ServedEngine

            self._open(ServedEngine(load(config)))
        else:
            self._open(part_around("replicas")(config))

    @classmethod
    def _on(cls, served: Served) -> LLM:
        """An LLM whose parts exist."""
        llm = cls.__new__(cls)
        llm.config = served.config
        llm._open(served)
        return llm

    def _open(self, served: Served) -> None:
        self.load_warnings = served.warnings
        self._served = served
        self._driver, self._monitoring = served.driver, served.monitoring
        self._prefixes, self._memory = served.prefixes, served.memory
        self._runner = served.model_runner
        frontend = served.frontend
        self._reader, self._jobs, self._pooling, self._beam_searches, self._defaults = frontend
        self._default_params = self._defaults.params
        self.max_model_len = self._reader.max_model_len
        self._stepping = Stepping(self._driver, self._jobs)
        self._calls = Calls(
            self._driver,
            self._jobs,
            self._reader,
            self.config.on_progress,
            self._monitoring.list_requests,
            read_ahead=2 * self.config.max_num_seqs * self.config.data_parallel_size,
        )
        self._jobs.before_structures = self._memory.hold_vocabulary
        self._close = weakref.finalize(self, self._driver.close)

    @staticmethod
    @takes_options
    def plan(model: str | PathLike[str], **options: Unpack[EngineOptions]) -> MemoryPlan:
        """Plan the memory of ``LLM(model, **options)`` from the file's headers alone.

        A plan that does not fit has ``fits == False``, the memory breakdown in ``problem`` and
        options that fit in ``alternatives``.
        """
        from sdk.loading.alternatives import plan

        return plan(engine_config(model, **options))

    @takes_options
    def fork(self, **options: Unpack[EngineOptions]) -> LLM:
        """A second ``LLM`` with the weights of this one, which are in memory once.

        It has its own requests, KV cache, threads and options: those of this one, except for
        ``options``. It adds its KV cache and workspace to the memory of the process; ``memory``
        limits these (default: a KV cache of as many bytes). No file is read. Each of the two can be
        closed first; the weights are freed with the last one. On a CPU only.

        :raises RequestError: an option needs other weights, or this engine cannot share its own:
            several ranks or replicas, ``disk_offload``, a memory pool, a GPU, transformers' code.
        :raises OutOfMemoryError: the budget or the machine has no room for it.
        """
        return LLM._on(self._served.fork(**options))

    def quantize(self, out: str | PathLike[str], scheme: str | None = None, **options: Any) -> Path:
        """Quantize this model's checkpoint into ``out``: see :func:`sdk.quantize`."""
        from sdk.loaders.hub import HubAccess
        from sdk.loaders.open import locate
        from sdk.quantizing import quantize  # imports the writers

        config = self.config
        hub = HubAccess(config.revision, config.local_files_only, config.download_dir)
        model = locate(config.model, config.filename, hub)
        return quantize(model, out, scheme, **options)

    if not TYPE_CHECKING:  # type checkers report unknown attributes themselves

        def __getattr__(self, name: str) -> NoReturn:
            no_attribute(self, name)

        def __call__(self, *args: Any, **given: Any) -> NoReturn:
            raise TypeError(
                "an LLM is not called like a function: use generate(prompts), chat(messages) or "
                "stream(prompt)"
            )

    def __repr__(self) -> str:
        if "_driver" not in vars(self):  # not loaded yet
            return object.__repr__(self)
        shown = [text for name, text in llm_facts(self) if name != "warning"]
        return f"LLM({', '.join(shown)})"

    def _repr_html_(self) -> str:
        return html_table([*llm_facts(self), ("more", "print(llm.explain()), llm.memory_plan")])

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "an LLM cannot be pickled: it has threads and memory of this process; pass the model's "
            "path and options, and make an LLM there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End all requests and give back memory, threads and processes. Idempotent."""
        try:
            self._driver.close()  # not self._close, which would not run again after an interrupt
        finally:
            self._close.detach()
            self._monitoring.close()
            self._reader.close()
            self._jobs.close()
            release_free_memory()

    # ---- batches ---------------------------------------------------------------------------------

    @overload
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: None = None,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]: ...
    @overload
    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[ParsedOutput[T]]: ...
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
        """Complete all prompts and wait; returns one output per prompt, in their order.

        ``sampling_params``: one for all prompts or one for each (default: the model's own).
        ``returns``: a Python type or a JSON schema; ``output.parsed`` is then a value of it.
        Ctrl-C, or any exception raised here, aborts this call's requests and no others.

        :raises RequestError: before anything runs, if a prompt or a parameter is invalid.
        :raises EngineDeadError: a worker died.
        :raises EngineClosedError: during or after ``close``.
        """
        calling = self._jobs.read(prompts, sampling_params, returns, lora_request)
        return self._calls.run("generate", calling, priority, use_tqdm)

    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        tools: Sequence[ToolLike],
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[MessageOutput]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[ParsedOutput[T]]: ...
    @overload
    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        lora_request: LoRAsLike = None,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]: ...
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
        """Like :meth:`generate`, for one or more conversations, through the model's chat template.

        ``template``: ``add_generation_prompt``, ``continue_final_message``, ``chat_template``,
        ``chat_template_kwargs``, ``cache_salt``; ``tools`` (functions, dicts or ``Tool`` objects;
        then ``output.message`` has the text, the reasoning and the tool calls), ``tool_choice``,
        ``parallel_tool_calls``, ``tool_format``.
        """
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
        """Chat, call the functions the model asks for, and go on until it answers without a call.

        ``tool_choice`` holds for the first answer. See :func:`sdk.tools.run_tools`.
        """
        parsed = self._jobs.parses_arguments(template)
        from sdk.requests.views import ToolTurns

        turns = ToolTurns(tools, tool_choice, sampling_params, template, parsed, lora_request)
        self._calls.advice.blocking("run_tools")
        return turns.run(self.chat, messages, max_turns, on_error)

    @names_keywords
    def beam_search(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        params: BeamSearchParams,
        *,
        lora_request: LoRALike | None = None,
        use_tqdm: bool = True,
    ) -> list[BeamSearchOutput]:
        """Search each prompt's most probable answers; returns ``beam_width`` of each, best first.

        :raises RequestError: a prompt or a parameter is invalid, or logits are not finite.
        """
        work = self._beam_searches.search(prompts, params, use_tqdm, lora_request)
        return self._calls.do("beam_search", work)

    @overload
    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolLike],
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[MessageOutput]: ...
    @overload
    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[ParsedOutput[T]]: ...
    @overload
    def as_completed(
        self,
        prompts: PromptLike | Iterable[PromptLike | Sequence[Message]],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> AsCompleted[RequestOutput]: ...
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
        """Answer many prompts or conversations: ``for index, output in llm.as_completed(...)``, and
        ``async for`` in an event loop. Pairs come in the order in which answers end.

        ``prompts``: any iterable, also a generator; it is read ``2 * max_num_seqs`` ahead of the
        answers, so that what has ended can be stored while the rest runs. Leaving the loop aborts
        the rest. ``template``: for conversations, as in :meth:`chat`.

        :raises RequestError: in the loop, for an invalid prompt, with its index; unfinished ones
            are aborted then.
        """
        return self._calls.as_completed(
            prompts, sampling_params, priority, template, returns, lora_request
        )

    # ---- streams ---------------------------------------------------------------------------------

    @overload
    def stream(
        self,
        prompt: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[ToolLike],
        tool_choice: str | Mapping[str, Any] = "auto",
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[MessageOutput]: ...
    @overload
    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        returns: type[T] | Mapping[str, Any],
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[ParsedOutput[T]]: ...
    @overload
    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRALike | None = None,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[RequestOutput]: ...
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
        """Yield the answer to one prompt or conversation piece by piece; ``text`` is the new part.

        ``output_kind=FINAL_ONLY`` yields the whole answer once, at its end. The request starts
        right away. Leaving the loop early aborts it. With ``returns``, ``outputs[0].partial`` is
        the value so far; with ``tools``, ``outputs[0].delta`` is what is new in the message.
        """
        return self._calls.stream(
            prompt, sampling_params, priority, template, returns, lora_request
        )

    # ---- async twins -----------------------------------------------------------------------------

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
        """:meth:`generate` for an event loop; cancelling the task aborts its requests.

        Long prompts are tokenized in a thread, so that the loop goes on meanwhile.
        """
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
        """:meth:`chat` for an event loop."""
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
        """:meth:`run_tools` for an event loop; coroutine functions of one answer run together."""
        parsed = self._jobs.parses_arguments(template)
        from sdk.requests.views import ToolTurns

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
        """:meth:`stream` for an event loop: ``async for piece in llm.astream(...)``.

        The call itself rejects an invalid request. The request starts when the first piece is
        awaited. A long prompt is tokenized and checked in a thread, with the first piece or by
        ``stream = await llm.astream(...)``.
        """
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
        """Queue prompts or conversations and return their request ids at once.

        Nothing runs until :meth:`step`, :meth:`pump` or :meth:`wait_for_completion` is called (or
        another call keeps the engine running). ``request_id``: your own ids, one for each
        prompt. ``template``: for conversations, as in :meth:`chat`.

        :raises RequestError: an invalid request, or an id that belongs to a request that is
            unfinished or whose last output has not been collected.
        """
        return self._stepping.enqueue(
            prompts, sampling_params, priority, request_id, template, lora_request
        )

    def wait_for_completion(self) -> list[RequestOutput]:
        """Finish all requests enqueued so far; final outputs in the order of enqueueing.

        Requests that other threads enqueue meanwhile are left for the next call. If a request
        fails, its error is raised and the next call returns the others. Ctrl-C aborts the
        requests; the next call returns what they had generated.
        """
        self._calls.advice.blocking("wait_for_completion")
        return self._stepping.wait_for_completion()

    def step(self) -> list[RequestOutput]:
        """Run one engine step in this thread; return the new outputs of enqueued requests.

        Some outputs may come from steps of other threads. Outputs that other threads wait for are
        not returned here. If there is nothing to return and a request has failed, its error is
        raised. An exception of a signal handler in the middle of a step may end the engine.
        """
        return self._stepping.step()

    def pump(self, max_ms: float) -> list[RequestOutput]:
        """Run steps for about ``max_ms`` milliseconds, for a host that draws frames.

        Runs as many steps as should end in time, with as much of a waiting prompt as fits. The
        time of a step is predicted from the steps before; the first steps are small. At least one
        step runs if there is work, unless another thread is always inside a step. Returns early
        when there is no work. A step in progress is not interrupted.

        :raises RequestError: ``max_ms`` is negative or not a number.
        """
        return self._stepping.pump(max_ms)

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or return anything."""
        return self._stepping.has_unfinished_requests

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests with ``finish_reason="abort"``; unknown and finished ids are ignored."""
        self._stepping.abort(request_id)

    # ---- scheduling ------------------------------------------------------------------------------

    def set_tenant_weight(self, tenant: str | None, weight: float) -> None:
        """Give a tenant another weight, from now on; ``None``: requests without a tenant.

        A tenant of weight 4 gets four times the tokens of one of weight 1, the default, while both
        have requests. See ``docs/scheduling.md``.

        :raises RequestError: ``scheduling_policy`` is not ``"fair"``, or a bad value.
        """
        self._driver.set_tenant_weight(tenant, weight)

    def estimate(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        **template: Any,
    ) -> Estimate:
        """Seconds until the first token and the end of a request, if it came now. Nothing runs.

        Looks ahead from the running and waiting requests, cached prefixes, measured times of steps
        and the lengths of the last answers. ``docs/scheduling.md`` says how good it is. A shortage
        of pages and requests that come later are not foreseen. Without ``ignore_eos`` the end is a
        guess, because nobody knows how long an answer becomes.

        :raises RequestError: a prompt or a parameter is invalid.
        """
        params = sampling_params or self._default_params
        read = self._reader.read_one("estimate", prompt, params, template)
        return self._driver.estimate(read, params, priority)

    # ---- saved prefixes --------------------------------------------------------------------------

    def snapshot(
        self,
        prompt: PromptLike | Sequence[Message] | None = None,
        *,
        request_id: str | None = None,
        **template: Any,
    ) -> Snapshot:
        """Copy the keys and values of a prompt, a conversation or an unfinished request.

        Parts of the prompt that are not cached are computed. Only whole pages are copied: up to
        ``block_size - 1`` tokens at the end are left out.

        :raises RequestError: neither or both arguments are given, the prompt is shorter than a
            page, or the request is unknown.
        :raises OutOfMemoryError: the KV cache cannot hold the prompt next to the running requests.
        """
        if (prompt is None) == (request_id is None):
            raise RequestError("snapshot: expected either a prompt or a request_id")
        if request_id is not None:
            return self._prefixes.snapshot_of(request_id)
        return self._prefixes.snapshot(self._read_one("snapshot", prompt, template))

    def restore(
        self,
        snapshot: Snapshot | str | PathLike[str],
        *,
        cache_salt: str | None = None,
        pin: bool = False,
    ) -> int:
        """Put a snapshot, or a saved one, into the prefix cache between two steps.

        Returns how many tokens of its prompt are in the cache now. Without ``pin`` only free pages
        are used, and they are evicted when requests need them.

        :raises SnapshotError: it is damaged, or belongs to another model.
        :raises OutOfMemoryError: it cannot be pinned because it does not fit; with a breakdown.
        """
        return self._prefixes.restore(snapshot, cache_salt, pin=pin)

    def pin(
        self,
        prompt: PromptLike | Sequence[Message],
        *,
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> int:
        """Keep the whole pages of a prompt in the cache until :meth:`unpin`, computed if needed.

        Returns how many tokens they hold. Requests cannot use these pages for anything else.

        :raises OutOfMemoryError: too few pages would be left; with a breakdown.
        """
        return self._prefixes.pin(self._read_one("pin", prompt, template, lora_request))

    def unpin(
        self,
        prompt: PromptLike | Sequence[Message],
        *,
        lora_request: LoRALike | None = None,
        **template: Any,
    ) -> bool:
        """Remove the pin of exactly this prompt, or of a snapshot's tokens. ``False``: no pin."""
        return self._prefixes.unpin(self._read_one("unpin", prompt, template, lora_request))

    def _read_one(
        self, method: str, prompt: Any, template: Mapping[str, Any], lora: LoRALike | None = None
    ) -> Prompt:
        """Read one prompt or conversation; the latter without the opening of an answer."""
        if method != "unpin":  # which computes nothing
            self._calls.advice.blocking(method)
        if is_conversation(prompt):
            template = {"add_generation_prompt": False, **template}
        read = self._reader.read_one(method, prompt, self._default_params, template)
        return self._jobs.adapted([read], lora)[0]

    # ---- adapters --------------------------------------------------------------------------------

    def add_lora(
        self,
        lora: LoRARequest | str,
        path: str | PathLike[str] | None = None,
        *,
        pin: bool = False,
    ) -> LoRARequest:
        """Load an adapter: ``add_lora("sql", "path/to/adapter")``, or with a ``LoRARequest``.

        Then ``lora_request="sql"`` selects it. It needs ``enable_lora=True``. If running requests
        use all slots (``max_loras``), a request loads it later. ``pin``: see :meth:`pin_lora`.

        :raises CheckpointError: the files are missing, damaged, or for another model.
        :raises UnsupportedError: the adapter is of a kind that is not supported.
        :raises RequestError: the name is taken, or a limit is exceeded.
        """
        return self._jobs.adapters.add(lora, path, pin=pin)

    def remove_lora(self, lora: LoRARequest | str | int) -> bool:
        """Forget an adapter, by its name or number. Requests that use it finish first.

        Returns ``False`` if there is none.
        """
        return self._jobs.adapters.remove(lora)

    def pin_lora(self, lora: LoRARequest | str | int) -> bool:
        """Load an adapter and keep it in memory until :meth:`remove_lora`.

        :raises RequestError: it was not added, or requests use all slots now.
        """
        return self._jobs.adapters.pin(lora)

    def list_loras(self) -> list[LoRAInfo]:
        """All adapters that were added, or came with a request."""
        return self._jobs.adapters.list()

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def model_config(self) -> ModelConfig:
        """The model's config as the engine reads it."""
        return self._served.model_config

    @property
    def memory_plan(self) -> MemoryPlan:
        """The memory this LLM may use."""
        return self._memory.plan

    def trim(self) -> None:
        """Forget cached prefixes and give back the memory of all unused KV pages."""
        self._memory.trim()

    def resize(self, memory: int | str) -> MemoryPlan:
        """Change the budget while requests run: fewer or more KV pages, up to four times as many.

        Requests that lose their pages start over when there is room, with the same answers.
        After an error nothing has changed.

        :raises OutOfMemoryError: not even one page fits, or the machine has too little memory.
        :raises RequestError: an unfinished request or the pinned prefixes need more.
        """
        return self._memory.resize(memory)

    def sleep(self, level: int = 1) -> None:
        """Give memory back for a while: level 1 the KV cache, level 2 the weights too.

        Requests are rejected until :meth:`wake_up`.

        :raises RequestError: requests are unfinished, or ``level`` is neither 1 nor 2.
        """
        self._memory.sleep(level)

    def wake_up(self) -> None:
        """Accept requests again; no effect unless it sleeps.

        After ``sleep(2)`` this reads the weights from the model's files again.

        :raises CheckpointError: the files have changed since it was loaded; it stays asleep.
        :raises OutOfMemoryError: its memory pool has too little free memory now.
        """
        self._memory.wake_up()

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
        """Each prompt's last hidden state after the final norm, scaled to length 1.

        If the files describe embeddings (sentence-transformers' ``modules.json``, a GGUF file's
        ``pooling_type``), it is what they describe: the pooling, dense layers, the length, and the
        default prompt before texts.

        ``prompt_name``: one of the prompts of a sentence-transformers folder (``"query"``), or
        ``prompt``: any text; it is put before every text. ``dimensions``: only the first so many
        numbers, scaled to length 1 again, for models that were trained for it (Matryoshka).
        ``output_dtype``: vectors as integers, see docs/embeddings.md. ``truncate_prompt_tokens``:
        texts with more tokens lose their end; ``-1``: than the model was trained for.
        ``tenant``: see :class:`SamplingParams`.
        """
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
        """Each prompt's hidden states after the final norm, pooled into ``outputs.data``.

        ``pooling``: the last token's state, the first token's (``"cls"``), the ``"mean"`` or
        ``"max"`` over all tokens, ``"weightedmean"`` (weights 1, 2, 3, ...), ``"mean_sqrt_len"``
        (the sum over the square root of the number), or every token's (``"token"``). Default: what
        the files describe (see :meth:`embed`), else the last token's. ``normalize`` scales each
        vector to length 1. ``prompt_name``, ``prompt``: see :meth:`embed`. A model of late
        interaction (ColBERT) has a vector for each token by default.

        :raises RequestError: an invalid argument, or more results than memory is set aside for.
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
        """Each prompt's classes, with a checkpoint that has a classification head.

        ``use_activation=False`` returns logits instead of probabilities.

        :raises RequestError: the checkpoint has no classification head.
        """
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
        """How well texts match, pair by pair; one ``data_1`` may be compared with many ``data_2``.

        With a reranker the probability that ``data_2`` answers ``data_1``. With an embedding model
        the cosine of their embeddings. With any other model the cosine of its last hidden states,
        which says little about relevance; the first such call warns.
        ``chat_template``: see :meth:`rerank`. ``cache_salt``: cached prefixes are shared only with
        requests that have the same one. ``truncate_prompt_tokens``: of a pair with more tokens the
        longer text loses its end; ``-1``: than the context holds.

        :raises RequestError: the lengths do not match.
        """
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
        """The ``top_n`` documents (default: all) that match ``query`` best, best first.

        Scores are those of :meth:`score`, so a model that is neither a reranker nor an embedding
        model sorts badly, and the first call warns. ``chat_template`` formats a pair for a
        reranker: it gets two messages with the roles ``query`` and ``document``. The default is the
        checkpoint's.

        :raises RequestError: an invalid argument, or a head with other classes.
        """
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

    # ---- information -----------------------------------------------------------------------------

    def explain(self) -> Explanation:
        """What runs where and why: memory, each layer's kernel, and why faster ones reject it.

        A string; a notebook shows a table.
        """
        self._driver.check_usable()
        return Explanation(self._served.explain())

    def quant_report(self) -> QuantReport:
        """Format, bits, bytes and kernel of every linear layer, and why faster ones reject it."""
        self._driver.check_usable()
        return self._served.quant_report()

    def get_metrics(self) -> dict[str, float]:
        """Numbers of the engine since it started, flat: see docs/metrics.md for every name."""
        return self._monitoring.metrics()

    def stats(self) -> EngineStats:
        """Histograms and counts: of all requests, by tenant and by adapter, and of the steps.

        The difference of two snapshots' histograms has the values in between.
        """
        return self._monitoring.stats()

    def set_slo(self, slo: SLO | str | None) -> None:
        """Count answers that keep a service level objective, from now on (see :class:`sdk.SLO`).

        ``slo``: also as a text, ``"ttft=0.5,tpot=0.05"``, in seconds. ``None``: none.

        :raises RequestError: it is something else.
        """
        self._monitoring.set_slo(slo)

    def expert_load(self) -> dict[int, list[int]]:
        """The rows that were routed to each expert, by layer, since the engine was loaded or since
        the last :meth:`rebalance_experts`. A token counts once for each of its experts.

        :raises RequestError: the engine does not spread its experts (``enable_expert_parallel``).
        """
        return self._served.expert_load()

    def rebalance_experts(self) -> int:
        """Spread experts over the ranks by their load (:meth:`expert_load`), and give the copies of
        ``num_redundant_experts`` to the busiest ones. Returns how many experts moved.

        Runs between two steps, which wait: ranks load what they get from the model's files. While a
        layer moves, its new experts are in memory in addition to the old ones; the plan counts
        them. Answers stay the same, also of unfinished requests. Afterwards counting begins again.
        ``sleep(2)`` forgets the placement.

        :raises CheckpointError: the files have changed or cannot be read; all experts stay usable.
        :raises RequestError: the engine does not spread its experts (``enable_expert_parallel``).
        """
        return self._served.rebalance_experts()

    def list_requests(self) -> list[RequestInfo]:
        """The unfinished requests, oldest first, one entry for each of a request's answers.

        A consistent view between two steps that does not wait for a step in progress.
        """
        return self._monitoring.list_requests()

    def trace(self, path: str | PathLike[str]) -> Trace:
        """Record steps and requests until ``stop()`` or ``close()``, for https://ui.perfetto.dev.

        ``with llm.trace("trace.json"): ...`` also ends it. The file is written then, in Chrome's
        trace event format, compressed if its name ends in ``.gz``. The last 100,000 steps and
        10,000 answers are kept.

        :raises RequestError: the file cannot be written, or a trace is recorded already.
        """
        return self._monitoring.trace(path)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached and pinned prefixes. Always succeeds, so always ``True``."""
        self._driver.check_usable()
        return self._prefixes.forget()

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer with transformers' calls. :raises RequestError: it has none."""
        self._driver.check_usable()
        if self._reader.tokenizer is None:
            raise RequestError(
                "this LLM has no tokenizer: load it with tokenizer=FOLDER, and without "
                "skip_tokenizer_init"
            )
        return LLMTokenizer(self._reader.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """The parameters of a call without ``sampling_params``; ``explain()`` names the source."""
        return self._default_params
