"""``LLM``: the one class an application needs."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from sdk.engine.engine import Output
from sdk.errors import RequestError
from sdk.loading.load import load
from sdk.loading.progress import reporting
from sdk.memory.alternatives import plan, planned_config
from sdk.memory.engine_memory import EngineMemory
from sdk.memory.machine import release_free_memory
from sdk.memory.plan import MemoryPlan
from sdk.options import EngineOptions, engine_config, takes_options
from sdk.outputs import EmbeddingOutput, RequestOutput, ScoringOutput
from sdk.params import RequestOutputKind, SamplingParams
from sdk.persistence.saved_prefixes import SavedPrefixes
from sdk.persistence.snapshot import Snapshot
from sdk.reports.explain import explain
from sdk.reports.quant_report import QuantReport, quant_report
from sdk.requests.async_stream import AnswerStream, DeferredJob
from sdk.requests.conversations import ChatOptions, Message
from sdk.requests.driver import Driver, Job
from sdk.requests.embedding import check_pairs, cosines, embedding_of
from sdk.requests.jobs import JobMaker, ParamsLike, once_each, run_jobs
from sdk.requests.mailboxes import AsyncMailbox, Collector, Mailbox
from sdk.requests.prompts import (
    Prompt,
    PromptLike,
    PromptReader,
    as_list,
    is_conversation,
)
from sdk.tokenizer import LLMTokenizer

if TYPE_CHECKING:  # typing has it from Python 3.11 on
    from typing_extensions import Unpack

T = TypeVar("T")


class LLM:
    """A model loaded into this process, and the engine that serves it.

    ``model`` is a GGUF file, a folder with safetensors and ``config.json``, or a hub id. The
    options are the fields of :class:`sdk.config.EngineConfig`; the ones to know are
    ``memory="2GiB"`` (a hard budget for weights, KV cache and workspace), ``max_model_len``,
    ``num_threads`` and ``compute="exact"``.

    One object serves sync, async and streaming callers from any thread and any event loop. Use it
    as a context manager, or call :meth:`close`; a forgotten one is closed when it is collected.
    ``LLM(plan=plan)`` loads what :meth:`plan` planned, or one of its alternatives.

    :raises CheckpointError: the file is missing, damaged or of an unsupported kind.
    :raises OutOfMemoryError: the budget cannot hold the model; nothing has been loaded then.
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
        self.config = planned_config(plan, model, **options)
        loaded = load(self.config)
        self.model_config = loaded.model_config
        self.max_model_len = loaded.plan.max_model_len
        self.load_warnings = loaded.warnings
        self._kv_scales = loaded.kv_scales
        self._defaults = loaded.defaults
        self._default_params = loaded.defaults.params
        self._runner = weakref.ref(loaded.runner)
        self._reader = PromptReader(
            loaded.tokenizer,
            vocab_size=loaded.model_config.vocab_size,
            max_model_len=self.max_model_len,
            chat_template=self.config.chat_template,
        )
        self._jobs = JobMaker(
            self._reader,
            self._default_params,
            vocab_size=loaded.model_config.vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            max_model_len=self.max_model_len,
            results=loaded.results,
        )
        self._driver = Driver(loaded.engine, loaded.current)
        self._collector = Collector()
        self._prefixes = SavedPrefixes(self._driver, loaded, self._jobs)
        self._memory = EngineMemory(self._driver, loaded)
        self._close = weakref.finalize(self, self._driver.close)

    @staticmethod
    @takes_options
    def plan(model: str | PathLike[str], **options: Unpack[EngineOptions]) -> MemoryPlan:
        """What ``LLM(model, **options)`` would occupy and run, from the file's headers alone.

        A plan that does not fit has ``fits == False``, the sums in ``problem`` and what would fit
        in ``alternatives``.
        """
        return plan(engine_config(model, **options))

    def quantize(self, out: str | PathLike[str], scheme: str | None = None, **options: Any) -> Path:
        """This model's checkpoint, quantized into ``out``: see :func:`sdk.quantize`."""
        from sdk.loaders.hub import HubAccess
        from sdk.loaders.open import locate
        from sdk.quantizing import quantize  # with the writers

        config = self.config
        hub = HubAccess(config.revision, config.local_files_only, config.download_dir)
        model = locate(config.model, config.filename, hub)
        return quantize(model, out, scheme, **options)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End what is running and give back memory, threads and processes. Idempotent."""
        try:
            self._driver.close()  # again after an interrupt, which self._close would not do
        finally:
            self._close.detach()
            self._reader.close()
            release_free_memory()

    # ---- batches ---------------------------------------------------------------------------------

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts together and wait; one output per prompt, in their order.

        ``sampling_params``: one for all or one each (default: the model's own).
        Ctrl-C, or any exception here, aborts exactly this call's requests.

        :raises RequestError: before anything runs, when a prompt or parameter is not acceptable.
        :raises EngineDeadError: when a worker died.
        :raises EngineClosedError: on or after ``close``.
        """
        read, params = self._jobs.read(prompts, sampling_params)
        return self._run(read, params, priority, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        priority: int | Sequence[int] | None = None,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Like :meth:`generate` for one conversation or several, through the model's chat template.

        ``template``: ``add_generation_prompt``, ``chat_template``, ``tools``,
        ``chat_template_kwargs``.
        """
        read, params = self._jobs.read_chats("chat", messages, sampling_params, template)
        return self._run(read, params, priority, use_tqdm)

    def _run(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: int | Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        mailbox = Mailbox()
        finals = once_each(params, _final)
        jobs = self._jobs.make(prompts, finals, mailbox, priority=priority)
        return [_text(o) for o in self._wait(jobs, mailbox, "generate", use_tqdm)]

    def _wait(
        self, jobs: Sequence[Job], mailbox: Mailbox, stage: str, use_tqdm: bool
    ) -> list[Output]:
        bar = use_tqdm and len(jobs) > 1
        with reporting(stage, "request", self.config.on_progress, bar=bar) as report:
            return run_jobs(self._driver, jobs, mailbox, report)

    # ---- streams ---------------------------------------------------------------------------------

    def stream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        **template: Any,
    ) -> Iterator[RequestOutput]:
        """Yield the answer to one prompt or conversation piece by piece; ``text`` is the new part.

        With ``output_kind=FINAL_ONLY`` the whole answer comes at its end. The request starts at
        once. Leaving the loop early aborts it.
        """
        job = self._stream_job("stream", prompt, sampling_params, priority, template)
        reader = self._read_stream(job)
        next(reader)  # submits; from here on dropping the reader, even unread, aborts the request
        return reader

    def _read_stream(self, job: Job) -> Iterator[Any]:
        finished, mailbox = False, Mailbox()
        try:
            self._driver.submit([replace(job, listener=mailbox)])
            yield None
            while not finished:
                output = _text(mailbox.get())
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._driver.abort([job.request_id])

    def _stream_job(
        self,
        method: str,
        prompt: Any,
        sampling_params: SamplingParams | None,
        priority: int | None,
        template: Mapping[str, Any],
        *,
        request_id: str | None = None,
        kind: RequestOutputKind = RequestOutputKind.DELTA,
    ) -> Job:
        """The job of one stream, without a listener that anybody reads.

        Outputs are of ``kind``, unless the parameters ask for the last alone.
        """
        params = self._jobs.params(sampling_params, 1)[0]
        read = self._reader.read_one(method, prompt, params, template)
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            params = params.clone(output_kind=kind)
        return self._jobs.make(
            [read], [params], Mailbox(), priority=priority, request_ids=request_id
        )[0]

    # ---- async twins -----------------------------------------------------------------------------

    async def agenerate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: ParamsLike = None,
        *,
        priority: int | Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """:meth:`generate` for an event loop; cancelling the task aborts its requests.

        Long prompts are read in a thread, so that the loop goes on meanwhile.
        """
        read, params = await self._read_aside(prompts, self._jobs.read, prompts, sampling_params)
        return await self._arun(read, params, priority)

    async def achat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        priority: int | Sequence[int] | None = None,
        **template: Any,
    ) -> list[RequestOutput]:
        """:meth:`chat` for an event loop."""
        read, params = await self._read_aside(
            messages, self._jobs.read_chats, "achat", messages, sampling_params, template
        )
        return await self._arun(read, params, priority)

    async def _read_aside(self, prompts: Any, read: Callable[..., T], *arguments: Any) -> T:
        """What ``read`` returns; called in a thread where ``prompts`` are long."""
        self._driver.check_usable()
        if self._reader.is_short(prompts):
            return read(*arguments)
        return await asyncio.to_thread(read, *arguments)

    async def _arun(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        priority: int | Sequence[int] | None,
    ) -> list[RequestOutput]:
        mailbox = AsyncMailbox()
        finals = once_each(params, _final)
        jobs = self._jobs.make(prompts, finals, mailbox, priority=priority)
        done: dict[str, Output] = {}
        try:
            self._driver.submit(jobs)
            while len(done) < len(jobs):
                output = await mailbox.get()
                if output.finished:
                    done[output.request_id] = output
        except BaseException:
            self._driver.abort(job.request_id for job in jobs)
            raise
        return [_text(done[job.request_id]) for job in jobs]

    def astream(
        self,
        prompt: PromptLike | Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        priority: int | None = None,
        **template: Any,
    ) -> AnswerStream:
        """:meth:`stream` for an event loop: ``async for piece in llm.astream(...)``.

        The call refuses a bad request; the request starts with the first piece. A long prompt is
        read in a thread with the first piece, or by ``stream = await llm.astream(...)``.
        """
        return self._astream("astream", prompt, sampling_params, priority, template)

    def _astream(
        self,
        method: str,
        prompt: Any,
        sampling_params: SamplingParams | None,
        priority: int | None,
        template: Mapping[str, Any],
        **how: Any,
    ) -> AnswerStream:
        """``how``: see :meth:`_stream_job`."""
        self._driver.check_usable()
        ChatOptions.of(method, template)
        self._jobs.params(sampling_params, 1)
        make = partial(self._stream_job, method, prompt, sampling_params, priority, template, **how)
        return AnswerStream(self._driver, DeferredJob(make, at_once=self._reader.is_short(prompt)))

    # ---- stepping by hand ------------------------------------------------------------------------

    def enqueue(
        self,
        prompts: PromptLike | Sequence[Message] | Sequence[PromptLike | Sequence[Message]],
        sampling_params: ParamsLike = None,
        *,
        priority: int | Sequence[int] | None = None,
        request_id: str | Sequence[str] | None = None,
        **template: Any,
    ) -> list[str]:
        """Queue prompts or conversations and return their request ids at once.

        Nothing runs until :meth:`step`, :meth:`pump` or :meth:`wait_for_completion` is called (or
        another call keeps the engine running). ``request_id``: ids of your own, one for each
        prompt. ``template``: for conversations, as for :meth:`chat`.

        :raises RequestError: also when an id is that of a request that is unfinished or whose
            last output was not collected.
        """
        read, params = self._jobs.read_mixed("enqueue", prompts, sampling_params, template)
        jobs = self._jobs.make(
            read, params, self._collector, priority=priority, request_ids=request_id
        )
        deltas = {job.request_id: job.params.output_kind is RequestOutputKind.DELTA for job in jobs}
        self._collector.expect(deltas, lambda: self._driver.submit(jobs, run=False))
        return list(deltas)

    def wait_for_completion(self) -> list[RequestOutput]:
        """Finish everything enqueued so far; final outputs in the order of enqueueing.

        What other threads enqueue meanwhile is left for the next call. When a request fails, its
        error is raised and the next call returns the others. Ctrl-C aborts what is waited for; the
        next call returns what was generated until then.
        """
        self._driver.check_usable()
        requests = self._collector.expected()
        self._driver.run(requests)
        try:
            return [_text(output) for output in self._collector.wait(requests)]
        except BaseException:
            self._driver.abort(requests)
            raise

    def step(self) -> list[RequestOutput]:
        """Run one engine step in this thread; return the new outputs of enqueued requests.

        Steps of other threads may have produced some of them. What those threads wait for
        themselves is not returned here. Raises what a request failed with, when there is nothing
        else to return. What a signal handler raises in the middle of a step may end the engine.
        """
        self._driver.check_usable()
        self._driver.step()
        return [_text(output) for output in self._collector.take()]

    def pump(self, max_ms: float) -> list[RequestOutput]:
        """Step for about ``max_ms`` milliseconds, for a host with a frame to draw.

        Runs as many steps as are expected to end in time, with as much of a waiting prompt as fits:
        what a step takes is learnt from those before, the first are small. At least one step runs
        when there is work, unless another thread is in one all the time; returns early when there
        is none. A step in progress is not interrupted.

        :raises RequestError: ``max_ms`` is negative or not a number.
        """
        if not max_ms >= 0:
            raise RequestError(f"pump: expected max_ms of at least 0, found {max_ms!r:.80}")
        self._driver.check_usable()
        self._driver.pump(max_ms / 1000)
        return [_text(output) for output in self._collector.take()]

    @property
    def has_unfinished_requests(self) -> bool:
        """Whether a step would do or return anything."""
        return self._driver.has_work or self._collector.has_news

    def abort(self, request_id: str | Sequence[str]) -> None:
        """End requests with ``finish_reason="abort"``; unknown and finished ids are ignored."""
        self._driver.abort([request_id] if isinstance(request_id, str) else request_id)

    # ---- prefixes that stay ----------------------------------------------------------------------

    def snapshot(
        self,
        prompt: PromptLike | Sequence[Message] | None = None,
        *,
        request_id: str | None = None,
        **template: Any,
    ) -> Snapshot:
        """The keys and values of a prompt, a conversation or an unfinished request, to save.

        What is not cached of a prompt is computed. Whole pages are taken: up to ``block_size - 1``
        tokens at the end are left out.

        :raises RequestError: neither or both are given, less than a page, an unknown request.
        :raises OutOfMemoryError: the KV cache cannot hold the prompt beside what runs.
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
        """Put a snapshot or a saved one into the prefix cache, between two steps.

        How many tokens of its prompt are in the cache now: without ``pin`` as many as there are
        pages that nobody holds, and only until others need them.

        :raises SnapshotError: it is damaged, or of another model. :raises OutOfMemoryError: it is
            to be pinned and does not fit; the sums.
        """
        return self._prefixes.restore(snapshot, cache_salt, pin=pin)

    def pin(self, prompt: PromptLike | Sequence[Message], **template: Any) -> int:
        """Keep the whole pages of a prompt in the cache until :meth:`unpin`, computing them if need
        be; how many tokens. Their pages are not there for others.

        :raises OutOfMemoryError: what would be left is too little, with the sums.
        """
        return self._prefixes.pin(self._read_one("pin", prompt, template))

    def unpin(self, prompt: PromptLike | Sequence[Message], **template: Any) -> bool:
        """Give up the pin of this very prompt or snapshot's tokens. ``False``: there is none."""
        return self._prefixes.unpin(self._read_one("unpin", prompt, template))

    def _read_one(self, method: str, prompt: Any, template: Mapping[str, Any]) -> Prompt:
        """One prompt or, through the template without an opening for the answer, conversation."""
        if is_conversation(prompt):
            template = {"add_generation_prompt": False, **template}
        return self._reader.read_one(method, prompt, self._default_params, template)

    # ---- memory ----------------------------------------------------------------------------------

    @property
    def memory_plan(self) -> MemoryPlan:
        """What this LLM may take."""
        return self._memory.plan

    def trim(self) -> None:
        """Forget cached prefixes and return the memory of all KV pages that nobody uses."""
        self._memory.trim()

    def resize(self, memory: int | str) -> MemoryPlan:
        """Another budget while requests run: fewer or more KV pages, up to four times as many.

        Requests that lose their pages start over when there is room, with the same answers.

        :raises OutOfMemoryError: not even a page fits, or the machine has less. :raises
            RequestError: an unfinished request or the pinned prefixes need more. Nothing has
            changed then.
        """
        return self._memory.resize(memory)

    def sleep(self, level: int = 1) -> None:
        """Give memory back for a while: level 1 the KV cache, 2 the weights too.

        Requests are refused until :meth:`wake_up`, which reads the weights again.

        :raises RequestError: requests are unfinished, another level.
        """
        self._memory.sleep(level)

    def wake_up(self) -> None:
        """Serve again; no effect on one that does not sleep.

        After ``sleep(2)`` the weights are read from the model's files again.

        :raises CheckpointError: the files are not those it was loaded from; it stays asleep.
        :raises OutOfMemoryError: its memory pool has no room for it now.
        """
        self._runner = weakref.ref(self._memory.wake_up())

    # ---- embeddings ------------------------------------------------------------------------------

    def embed(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[EmbeddingOutput]:
        """The last token's hidden state of each prompt after the final norm, scaled to length 1."""
        params = SamplingParams(truncate_prompt_tokens=truncate_prompt_tokens)
        read = [self._reader.read(item, params, room=0) for item in as_list(prompts)]
        mailbox = Mailbox()
        jobs = self._jobs.make(read, [params] * len(read), mailbox, kind="embed")
        return [embedding_of(o) for o in self._wait(jobs, mailbox, "embed", use_tqdm)]

    def score(
        self,
        data_1: PromptLike | Sequence[PromptLike],
        data_2: PromptLike | Sequence[PromptLike],
    ) -> list[ScoringOutput]:
        """Cosine of embeddings, pair by pair; one ``data_1`` may meet many ``data_2``."""
        left, right = as_list(data_1), as_list(data_2)
        check_pairs(len(left), len(right))
        embedded = self.embed([*left, *right], use_tqdm=False)
        return cosines(embedded[: len(left)], embedded[len(left) :])

    # ---- information -----------------------------------------------------------------------------

    def explain(self) -> str:
        """What runs where and why: memory, kernels per layer, and why faster ones declined."""
        self._driver.check_usable()
        runner = self._runner()
        assert runner is not None
        facts = (self.config, self.model_config, self.memory_plan, self._defaults)
        return explain(*facts, runner, self.load_warnings)

    def quant_report(self) -> QuantReport:
        """Format, bits, bytes and kernel of every linear layer, and why no faster one took it."""
        self._driver.check_usable()
        runner = self._runner()
        assert runner is not None
        return quant_report(runner.model.linears(), self._kv_scales)

    def get_metrics(self) -> dict[str, float]:
        """Counters of the engine since it started."""
        self._driver.check_usable()
        return self._driver.metrics()

    def reset_prefix_cache(self) -> bool:
        """Forget all cached and pinned prefixes; always possible, so always ``True``."""
        self._driver.check_usable()
        return self._prefixes.forget()

    def get_tokenizer(self) -> LLMTokenizer:
        """The model's tokenizer, by transformers' names. :raises RequestError: it has none."""
        self._driver.check_usable()
        if self._reader.tokenizer is None:
            raise RequestError("this LLM has no tokenizer")
        return LLMTokenizer(self._reader.tokenizer)

    def get_default_sampling_params(self) -> SamplingParams:
        """What a call without ``sampling_params`` uses; ``explain()`` says who chose it."""
        return self._default_params


def _final(params: SamplingParams) -> SamplingParams:
    return params.clone(output_kind=RequestOutputKind.FINAL_ONLY)


def _text(output: Output) -> RequestOutput:
    assert isinstance(output, RequestOutput)
    return output
