"""Runs the requests of ``LLM``'s methods: waits for them, streams them, for threads and asyncio."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

from sdk.api.config import ProgressCallback
from sdk.api.errors import RequestError
from sdk.api.load_progress import reporting
from sdk.api.outputs import RequestOutput
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.engine.running_requests import RequestInfo
from sdk.requests.advice import Advice
from sdk.requests.as_completed import AsCompleted
from sdk.requests.async_stream import AnswerStream, DeferredJob
from sdk.requests.conversations import ChatOptions
from sdk.requests.job import JobDriver
from sdk.requests.jobs import Calling, JobMaker, arun_jobs, once_each, run_jobs
from sdk.requests.mailboxes import Mailbox
from sdk.requests.progress import RequestProgress, counting
from sdk.requests.prompts import PromptReader, as_items

if TYPE_CHECKING:
    from sdk.requests.views import View

T = TypeVar("T")


class Stage(NamedTuple):
    """Requests that run together; progress is reported under ``name``, if it has one."""

    jobs: Sequence[Job]
    name: str = ""


#: A call that generates no text: it yields stages, gets their last outputs, and returns a result.
#: So one definition serves threads and event loops.
Work: TypeAlias = Generator[Stage, Sequence[Output], T]


class Calls:
    """The calls of one ``LLM``."""

    def __init__(
        self,
        driver: JobDriver,
        jobs: JobMaker,
        reader: PromptReader,
        on_progress: ProgressCallback | None,
        list_requests: Callable[[], list[RequestInfo]],
        *,
        read_ahead: int,
    ) -> None:
        """``list_requests``: the unfinished ones. ``read_ahead``: see :meth:`as_completed`."""
        self._driver = driver
        self._jobs = jobs
        self._reader = reader
        self._on_progress = on_progress
        self._list_requests = list_requests
        self._read_ahead = read_ahead
        self.advice = Advice()

    # ---- batches ---------------------------------------------------------------------------------

    def run(
        self,
        method: str,
        calling: Calling,
        priority: int | Sequence[int] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """Generate for all prompts and wait; the final outputs, in the order of the prompts."""
        self.advice.blocking(method)
        unlimited = any(params.max_tokens is None for params in calling.params)
        calling = calling._replace(params=once_each(calling.params, _final_only))
        jobs = self._jobs.make(calling.prompts, calling.params, priority=priority)
        advice = self.advice if unlimited else None
        with counting(jobs, self._on_progress, self._list_requests, use_tqdm, advice) as progress:
            found = run_jobs(self._driver, jobs, progress)
        return [view(as_text(o)) for view, o in zip(_views(calling), found, strict=True)]

    def wait(
        self, jobs: Sequence[Job], stage: str, use_tqdm: bool, *, goes_on: bool = False
    ) -> list[Output]:
        """Run jobs and wait; their last outputs. Reports progress as ``stage``, if it is named.
        ``goes_on``: the call has run requests before."""
        if not stage:
            return run_jobs(self._driver, jobs, goes_on=goes_on)
        bar = use_tqdm and len(jobs) > 1
        with reporting(stage, "request", self._on_progress, bar=bar) as report:
            progress = RequestProgress(report, len(jobs))
            return run_jobs(self._driver, jobs, progress, goes_on=goes_on)

    async def abatch(
        self,
        read: Callable[[], Calling],
        prompts: Any,
        sampling_params: Any,
        priority: int | Sequence[int] | None,
        lora: Any,
    ) -> list[RequestOutput]:
        """:meth:`run` for an event loop, of what ``read`` makes of the other arguments."""
        calling = await self._read_without_blocking(prompts, sampling_params, read, lora)
        calling = calling._replace(params=once_each(calling.params, _final_only))
        jobs = self._jobs.make(calling.prompts, calling.params, priority=priority)
        found = await arun_jobs(self._driver, jobs)
        return [view(as_text(o)) for view, o in zip(_views(calling), found, strict=True)]

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
        return self._reader.is_short(prompts, sampling_params) and self._jobs.adapters.knows(lora)

    # ---- work in stages --------------------------------------------------------------------------

    def do(self, method: str, work: Work[T], use_tqdm: bool = False) -> T:
        """What ``work`` returns."""
        try:
            self.advice.blocking(method)
            stage, goes_on = next(work), False
            while True:
                outputs = self.wait(stage.jobs, stage.name, use_tqdm, goes_on=goes_on)
                stage, goes_on = work.send(outputs), True
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            work.close()

    async def ado(self, work: Work[T], prompts: object, lora: Any = None) -> T:
        """:meth:`do` for an event loop. ``prompts``, ``lora``: what the work begins by reading."""
        try:
            first = partial(_send, work)
            stage, result = await self._read_without_blocking(prompts, None, first, lora)
            goes_on = False
            while stage is not None:
                outputs = await arun_jobs(self._driver, stage.jobs, goes_on=goes_on)
                stage, result = _send(work, outputs)
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
        [params] = self._jobs.params(sampling_params, 1)
        params = _final_only(params)
        how: dict[str, Any] = {"template": template, "returns": returns, "lora": lora}

        def make(index: int, prompt: Any) -> tuple[Job, View]:
            try:
                return self._stream_job("as_completed", prompt, params, priority, **how)
            except RequestError as error:
                raise RequestError(f"prompts[{index}]: {error}") from error

        async def amake(index: int, prompt: Any) -> tuple[Job, View]:
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
        job, view = self._stream_job(
            "stream", prompt, sampling_params, priority, template, returns=returns, lora=lora
        )
        pieces = self._pieces(job, view)
        next(pieces)  # submits; from here on dropping the iterator, even unread, aborts the request
        return pieces

    def _pieces(self, job: Job, view: View) -> Iterator[Any]:
        finished, mailbox = False, Mailbox()
        try:
            self._driver.submit([job], mailbox)
            yield None
            while not finished:
                output = as_text(mailbox.get())
                finished = output.finished
                yield view(output)
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
        self._jobs.params(sampling_params, 1)
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
    ) -> tuple[Job, View]:
        """The job of one stream, and how its outputs are shown. They are of ``kind``, unless the
        parameters ask for the last one only."""
        calling = self._jobs.read_one(method, prompt, sampling_params, template, returns, lora)
        [params] = calling.params
        if params.output_kind is RequestOutputKind.CUMULATIVE:
            calling = calling._replace(params=[params.clone(output_kind=kind)])
        jobs = self._jobs.make(
            calling.prompts, calling.params, priority=priority, request_ids=request_id
        )
        return jobs[0], _views(calling)[0]


def _send(work: Work[T], outputs: Sequence[Output] | None = None) -> tuple[Stage | None, T | None]:
    """The next stage of ``work``, or its result. (A coroutine must not raise StopIteration.)"""
    try:
        return (next(work) if outputs is None else work.send(outputs)), None
    except StopIteration as done:
        return None, done.value


def _views(calling: Calling) -> list[View]:
    """How the outputs of each prompt are shown."""
    if calling.wish is None:
        return [as_text] * len(calling.prompts)
    pairs = zip(calling.params, calling.prompts, strict=True)
    return [calling.wish.view(params, prompt) for params, prompt in pairs]


def as_text(output: Output) -> RequestOutput:
    """An output of a request that generates."""
    assert isinstance(output, RequestOutput)
    return output


def _final_only(params: SamplingParams) -> SamplingParams:
    return params.clone(output_kind=RequestOutputKind.FINAL_ONLY)
