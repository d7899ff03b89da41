"""Runs the jobs of ``LLM``'s methods: waits for them and streams them, for threads and event loops,
and lets a host step them by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

from sdk.api.config import ProgressCallback
from sdk.api.errors import RequestError
from sdk.api.load_progress import reporting
from sdk.api.outputs import RequestOutput
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.engine.running_requests import RequestInfo
from sdk.requests.as_completed import AsCompleted
from sdk.requests.async_stream import AnswerStream, DeferredJob
from sdk.requests.driving.job_driver import JobDriver
from sdk.requests.driving.mailboxes import AsyncMailbox, Collector, Mailbox
from sdk.requests.job_maker import JobMaker, ParamsLike, PromptBatch, once_each
from sdk.requests.progress import Advice, RequestProgress, counting
from sdk.requests.prompts.kinds import ChatOptions
from sdk.requests.prompts.reader import PromptReader, as_items

if TYPE_CHECKING:
    from sdk.requests.answer_formats import Formatter

T = TypeVar("T")


class Progress(Protocol):
    """Shows how far a call has come."""

    @property
    def look_every(self) -> float | None:
        """Show something after this many seconds even if no request has ended; None: only then."""

    def show(self, done: Mapping[str, Output]) -> None:
        """``done``: the last outputs of requests that have ended."""


class JobBatch(NamedTuple):
    """Jobs that run together; progress is reported under ``name``, if it has one."""

    jobs: Sequence[Job]
    name: str = ""


#: A call that generates no text: it yields batches, gets their last outputs, and returns a result.
#: So one definition serves threads and event loops.
BatchedCall: TypeAlias = Generator[JobBatch, Sequence[Output], T]


class JobRunner:
    """Runs the jobs of one ``LLM`` and returns their outputs as its methods do: all at the end, as
    they end, or as a stream.
    """

    def __init__(
        self,
        driver: JobDriver,
        job_maker: JobMaker,
        reader: PromptReader,
        on_progress: ProgressCallback | None,
        list_requests: Callable[[], list[RequestInfo]],
        *,
        read_ahead: int,
    ) -> None:
        """``list_requests``: the unfinished ones. ``read_ahead``: see :meth:`as_completed`."""
        self._driver = driver
        self._job_maker = job_maker
        self._reader = reader
        self._on_progress = on_progress
        self._list_requests = list_requests
        self._read_ahead = read_ahead
        self.advice = Advice()

    # ---- batches ---------------------------------------------------------------------------------

    def run(
        self,
        method: str,
        batch: PromptBatch,
        priority: int | Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Generate for all prompts and wait; the final outputs, in the order of the prompts."""
        self.advice.blocking(method)
        unlimited = any(params.max_tokens is None for params in batch.params)
        batch = batch._replace(params=once_each(batch.params, _final_only))
        jobs = self._job_maker.make(batch.prompts, batch.params, priority=priority)
        advice = self.advice if unlimited else None
        with counting(jobs, self._on_progress, self._list_requests, use_tqdm, advice) as progress:
            found = run_jobs(self._driver, jobs, progress)
        return _formatted(batch, found)

    def wait(
        self, jobs: Sequence[Job], name: str, use_tqdm: bool, *, goes_on: bool = False
    ) -> list[Output]:
        """Run jobs and wait; their last outputs. Reports progress as ``name``, if there is one.
        ``goes_on``: the call has run requests before."""
        if not name:
            return run_jobs(self._driver, jobs, goes_on=goes_on)
        bar = use_tqdm and len(jobs) > 1
        with reporting(name, "request", self._on_progress, bar=bar) as report:
            progress = RequestProgress(report, len(jobs))
            return run_jobs(self._driver, jobs, progress, goes_on=goes_on)

    async def abatch(
        self,
        read: Callable[[], PromptBatch],
        prompts: Any,
        sampling_params: Any,
        priority: int | Sequence[int] | None,
        lora: Any,
    ) -> list[RequestOutput]:
        """:meth:`run` for an event loop, of what ``read`` makes of the other arguments."""
        batch = await self._read_without_blocking(prompts, sampling_params, read, lora)
        batch = batch._replace(params=once_each(batch.params, _final_only))
        jobs = self._job_maker.make(batch.prompts, batch.params, priority=priority)
        found = await arun_jobs(self._driver, jobs)
        return _formatted(batch, found)

    async def _read_without_blocking(
        self, prompts: Any, sampling_params: Any, read: Callable[[], T], lora: Any = None
    ) -> T:
        """What ``read`` returns. It runs in a thread if ``prompts`` are long or an adapter is new,
        so that the event loop goes on."""
        self._driver.check_usable()
        if self._is_quick(prompts, sampling_params, lora):
            return read()
        import asyncio  # see LoopInboxes.current

        return await asyncio.to_thread(read)

    def _is_quick(self, prompts: Any, sampling_params: Any, lora: Any) -> bool:
        return self._reader.is_short(prompts, sampling_params) and self._job_maker.adapters.knows(
            lora
        )

    # ---- work in batches -------------------------------------------------------------------------

    def do(self, method: str, work: BatchedCall[T], use_tqdm: bool = False) -> T:
        """What ``work`` returns."""
        try:
            self.advice.blocking(method)
            batch, goes_on = next(work), False
            while True:
                outputs = self.wait(batch.jobs, batch.name, use_tqdm, goes_on=goes_on)
                batch, goes_on = work.send(outputs), True
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            work.close()

    async def ado(self, work: BatchedCall[T], prompts: object, lora: Any = None) -> T:
        """:meth:`do` for an event loop. ``prompts``, ``lora``: what the work begins by reading."""
        try:
            first = partial(_send, work)
            batch, result = await self._read_without_blocking(prompts, None, first, lora)
            goes_on = False
            while batch is not None:
                outputs = await arun_jobs(self._driver, batch.jobs, goes_on=goes_on)
                batch, result = _send(work, outputs)
                goes_on = True
        finally:
            work.close()
        assert result is not None
        return result

    # ---- answers as they end ---------------------------------------------------------------------

    def as_completed(
        self,
        prompts: Any,
        sampling_params: SamplingParams | None,
        priority: int | None,
        template: Mapping[str, Any],
        returns: Any = None,
        lora: Any = None,
    ) -> AsCompleted[Any]:
        """See :meth:`sdk.LLM.as_completed`."""
        self._driver.check_usable()
        ChatOptions.of("as_completed", template)
        [params] = self._job_maker.params(sampling_params, 1)
        params = _final_only(params)
        how: dict[str, Any] = {"template": template, "returns": returns, "lora": lora}

        def make(index: int, prompt: Any) -> tuple[Job, Formatter]:
            try:
                return self._stream_job("as_completed", prompt, params, priority, **how)
            except RequestError as error:
                raise RequestError(f"prompts[{index}]: {error}") from error

        async def amake(index: int, prompt: Any) -> tuple[Job, Formatter]:
            read = partial(make, index, prompt)
            return await self._read_without_blocking(prompt, params, read, lora)

        return AsCompleted(
            self._driver,
            as_items(prompts),
            make,
            amake,
            ahead=self._read_ahead,
            before=lambda: self.advice.blocking("as_completed"),
        )

    # ---- streams ---------------------------------------------------------------------------------

    def stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None,
        priority: int | None,
        template: Mapping[str, Any],
        returns: Any = None,
        lora: Any = None,
    ) -> Iterator[Any]:
        """Start one request; its outputs as they come."""
        self.advice.blocking("stream")
        job, formatter = self._stream_job(
            "stream", prompt, sampling_params, priority, template, returns=returns, lora=lora
        )
        pieces = self._pieces(job, formatter)
        next(pieces)  # submits; from here on dropping the iterator, even unread, aborts the request
        return pieces

    def _pieces(self, job: Job, formatter: Formatter) -> Iterator[Any]:
        finished, mailbox = False, Mailbox()
        try:
            self._driver.submit([job], mailbox)
            yield None
            while not finished:
                output = as_text(mailbox.get())
                finished = output.finished
                yield formatter(output)
        finally:
            if not finished:
                self._driver.abort([job.request_id])

    def astream(
        self,
        method: str,
        prompt: Any,
        sampling_params: SamplingParams | None,
        priority: int | None,
        template: Mapping[str, Any],
        returns: Any = None,
        lora: Any = None,
        **how: Any,
    ) -> AnswerStream:
        """:meth:`stream` for an event loop; ``how``: see :meth:`_stream_job`."""
        how |= {"returns": returns, "lora": lora}
        self._driver.check_usable()
        ChatOptions.of(method, template)
        self._job_maker.params(sampling_params, 1)
        at_once = self._is_quick(prompt, sampling_params, lora)
        make = partial(self._stream_job, method, prompt, sampling_params, priority, template, **how)
        return AnswerStream(self._driver, DeferredJob(make, at_once=at_once))

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
        returns: Any = None,
        lora: Any = None,
    ) -> tuple[Job, Formatter]:
        """The job of one stream, and how its outputs are shown. They are of ``kind``, unless the
        parameters ask for the last one only."""
        batch = self._job_maker.read_one(method, prompt, sampling_params, template, returns, lora)
        [params] = batch.params
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            batch = batch._replace(params=[params.clone(output_kind=kind)])
        jobs = self._job_maker.make(
            batch.prompts, batch.params, priority=priority, request_ids=request_id
        )
        return jobs[0], _formatters(batch)[0]


async def arun_jobs(
    driver: JobDriver, jobs: Sequence[Job], *, goes_on: bool = False
) -> list[Output]:
    """:func:`run_jobs` for an event loop."""
    done: dict[str, Output] = {}
    mailbox = AsyncMailbox(driver.loop_inbox())
    try:
        driver.submit(jobs, mailbox, goes_on=goes_on)
        while len(done) < len(jobs):
            output = await mailbox.get()
            if output.finished:
                done[output.request_id] = output
    except BaseException:
        driver.abort(job.request_id for job in jobs)
        raise
    return [done[job.request_id] for job in jobs]


def run_jobs(
    driver: JobDriver,
    jobs: Sequence[Job],
    progress: Progress | None = None,
    *,
    goes_on: bool = False,
) -> list[Output]:
    """Submit jobs and wait; their last outputs, in order. Any exception aborts them.

    ``goes_on``: see :meth:`Driver.submit`.
    """
    done: dict[str, Output] = {}
    mailbox = Mailbox()
    try:
        driver.submit(jobs, mailbox, goes_on=goes_on)
        while len(done) < len(jobs):
            output = mailbox.get(None if progress is None else progress.look_every)
            if output is not None and output.finished:
                done[output.request_id] = output
            if progress is not None:
                progress.show(done)
    except BaseException:
        driver.abort(job.request_id for job in jobs)
        raise
    return [done[job.request_id] for job in jobs]


def _send(
    work: BatchedCall[T], outputs: Sequence[Output] | None = None
) -> tuple[JobBatch | None, T | None]:
    """The next batch of ``work``, or its result. (A coroutine must not raise StopIteration.)"""
    try:
        return (next(work) if outputs is None else work.send(outputs)), None
    except StopIteration as done:
        return None, done.value


def _formatted(batch: PromptBatch, found: Sequence[Output]) -> list[RequestOutput]:
    return [show(as_text(one)) for show, one in zip(_formatters(batch), found, strict=True)]


def _formatters(batch: PromptBatch) -> list[Formatter]:
    """How the outputs of each prompt are shown."""
    if batch.answer_format is None:
        return [as_text] * len(batch.prompts)
    pairs = zip(batch.params, batch.prompts, strict=True)
    return [batch.answer_format.formatter(params, prompt) for params, prompt in pairs]


def as_text(output: Output) -> RequestOutput:
    """An output of a request that generates."""
    assert isinstance(output, RequestOutput)
    return output


def _final_only(params: SamplingParams) -> SamplingParams:
    return params.clone(output_kind=RequestOutputKind.FINAL_ONLY)


class Stepping:
    """The enqueued requests of one ``LLM``, and their outputs until they are taken."""

    def __init__(self, driver: JobDriver, job_maker: JobMaker) -> None:
        self._driver = driver
        self._job_maker = job_maker
        self._collector = Collector()

    def enqueue(
        self,
        prompts: Any,
        sampling_params: ParamsLike,
        priority: int | Sequence[int] | None,
        request_id: str | Sequence[str] | None,
        template: Mapping[str, Any],
        lora: Any = None,
    ) -> list[str]:
        """See :meth:`sdk.LLM.enqueue`."""
        batch = self._job_maker.read_mixed("enqueue", prompts, sampling_params, template, lora)
        jobs = self._job_maker.make(
            batch.prompts, batch.params, priority=priority, request_ids=request_id
        )
        deltas = {job.request_id: job.params.output_kind is RequestOutputKind.DELTA for job in jobs}
        self._collector.expect(
            deltas, lambda: self._driver.submit(jobs, self._collector, run=False)
        )
        return list(deltas)

    def wait_for_completion(self) -> list[RequestOutput]:
        """See :meth:`sdk.LLM.wait_for_completion`."""
        self._driver.check_usable()
        requests = self._collector.expected()
        self._driver.run(requests)
        try:
            return [as_text(output) for output in self._collector.wait(requests)]
        except BaseException:
            self._driver.abort(requests)
            raise

    def step(self) -> list[RequestOutput]:
        """See :meth:`sdk.LLM.step`."""
        self._driver.check_usable()
        self._driver.step()
        return [as_text(output) for output in self._collector.take()]

    def pump(self, max_ms: float) -> list[RequestOutput]:
        """See :meth:`sdk.LLM.pump`."""
        if not max_ms >= 0:
            raise RequestError(f"pump: expected max_ms of at least 0, found {max_ms!r:.80}")
        self._driver.check_usable()
        self._driver.pump(max_ms / 1000)
        return [as_text(output) for output in self._collector.take()]

    @property
    def has_unfinished_requests(self) -> bool:
        """See :meth:`sdk.LLM.has_unfinished_requests`."""
        return self._driver.has_work or self._collector.has_news

    def abort(self, request_id: str | Sequence[str]) -> None:
        """See :meth:`sdk.LLM.abort`: of any request, enqueued or not."""
        self._driver.abort([request_id] if isinstance(request_id, str) else request_id)
        self._driver.take_aborts()
