"""What a call that waits tells its caller: how far it has come, and what would suit better.

*Progress* counts requests that have ended, and on a terminal the tokens so far. Outputs come when
a request ends, because building one for each token would cost time. So a bar looks at the engine's
unfinished requests about twice a second.

*Advice* is a Python warning, at most once for each ``LLM`` and topic. These are warnings and not
log lines because nobody reads the log of a library that seems to work. They go where the host's
warning filters send them, and name the line of the caller.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from sdk.api.config import ProgressCallback
from sdk.api.errors import SdkError
from sdk.api.load_progress import bar_of, reporting
from sdk.api.outputs import RequestOutput
from sdk.engine.engine import Output
from sdk.engine.job import Job
from sdk.engine.running_requests import RequestInfo

#: The call to use instead of one that stops the event loop.
_TWINS = {
    "stream": "async for piece in llm.astream(...)",
    "as_completed": "async for index, output in llm.as_completed(...)",
    "wait_for_completion": "await llm.agenerate(...)",
    "beam_search": "await AsyncLLM(llm).beam_search(...)",
    "snapshot": "await asyncio.to_thread(llm.snapshot, ...)",
    "pin": "await asyncio.to_thread(llm.pin, ...)",
}
_OURS = ("sdk", "embedlm")


class Advice:
    """What one ``LLM`` has already said."""

    def __init__(self) -> None:
        self._given: set[str] = set()

    def once(self, topic: str, text: str, category: type[Warning] = UserWarning) -> None:
        """Warn with ``text``, unless something was said about ``topic``."""
        if self.is_new(topic):
            warnings.warn(text, category, stacklevel=_caller_level())

    def is_new(self, topic: str) -> bool:
        """Whether nothing was said about ``topic`` before; now something is."""
        if topic in self._given:
            return False
        self._given.add(topic)  # before the warning, which a filter may turn into an exception
        return True

    def blocking(self, method: str) -> None:
        """Warn if ``method``, which waits for the engine, was called by a coroutine.

        Not in a cell of a notebook: IPython's kernel runs cells in its event loop, which waits for
        each of them anyway, so that a call that waits is the normal one there.
        """
        if "loop" in self._given or not _loop_runs() or _in_a_cell():
            return
        twin = _TWINS.get(method, f"await llm.a{method}(...)")
        self.once(
            "loop",
            f"{method}() was called in a running event loop, which stands still until it returns; "
            f"use `{twin}`, or call it in a thread (asyncio.to_thread)",
            RuntimeWarning,
        )


def _loop_runs() -> bool:
    """Whether an asyncio loop runs in this thread."""
    asyncio = sys.modules.get("asyncio")  # a program without loops need not import it: 20 ms
    # Another thread may be importing it.
    running = getattr(asyncio, "_get_running_loop", None)
    return running is not None and running() is not None


def _in_a_cell() -> bool:
    """Whether the code that runs was called by a cell of IPython."""
    if "IPython" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__") == "IPython.core.interactiveshell":
            return True
        frame = frame.f_back
    return False


def _caller_level() -> int:
    """The ``stacklevel`` of the first caller outside this library, counted from the
    function that called this one."""
    level, frame = 1, sys._getframe(1)
    while str(frame.f_globals.get("__name__")).partition(".")[0] in _OURS:
        if frame.f_back is None:
            break
        level, frame = level + 1, frame.f_back
    return level


#: Seconds between two looks, at least; and the most of its time that a call spends on them.
_LOOK_EVERY_S = 0.5
_MOST_OF_TIME = 0.02
#: A call that has been running so long without ``max_tokens`` gets a line of advice.
_ADVICE_AFTER_S = 5.0


class RequestProgress:
    """Counts requests."""

    look_every: float | None = None

    def __init__(self, report: Callable[[int, int], None], total: int) -> None:
        self._report = report
        self._total = total
        self._done = 0

    def show(self, done: Mapping[str, Output]) -> None:
        """See :class:`sdk.requests.job_runner.Progress`."""
        if len(done) > self._done:
            self._done = len(done)
            self._report(self._done, self._total)


class TokenProgress:
    """Counts requests and tokens on a bar of tqdm: of one request its tokens and the most that it
    may get, of several the requests, with the tokens behind.

    ``advice``: of the call's ``LLM``, if a request has no ``max_tokens``.
    """

    def __init__(
        self,
        bar: Any,
        jobs: Sequence[Job],
        list_requests: Callable[[], list[RequestInfo]],
        advice: Advice | None,
    ) -> None:
        self.look_every: float | None = _LOOK_EVERY_S
        self._bar = bar
        bar.total = len(jobs) if len(jobs) > 1 else None
        self._ids = {job.request_id for job in jobs}
        self._list_requests = list_requests
        self._advice = advice
        self._began = self._next_look = time.monotonic()
        self._counted: set[str] = set()
        self._ended_tokens = 0

    def show(self, done: Mapping[str, Output]) -> None:
        """See :class:`sdk.requests.job_runner.Progress`."""
        now = time.monotonic()
        if now < self._next_look:
            return
        live: list[RequestInfo] = []
        with suppress(SdkError):  # the call itself will raise it
            live = [one for one in self._list_requests() if one.request_id in self._ids]
        for name in done.keys() - self._counted:
            self._counted.add(name)
            self._ended_tokens += _num_tokens(done[name])
        running = [one for one in live if one.request_id not in done]
        tokens = self._ended_tokens + sum(one.num_generated_tokens for one in running)
        self._draw(len(done), tokens, sum(one.max_tokens for one in running), now)
        if self._advice is not None and running and now - self._began >= _ADVICE_AFTER_S:
            self._advise(max(one.max_tokens for one in running))
        took = time.monotonic() - now
        self._next_look = now + took + max(_LOOK_EVERY_S, took / _MOST_OF_TIME)

    def _draw(self, done: int, tokens: int, most: int, now: float) -> None:
        bar = self._bar
        if len(self._ids) == 1:
            bar.total = most or tokens
            bar.update(tokens - bar.n)
            return
        speed = tokens / max(now - self._began, 1e-3)
        bar.set_postfix_str(f"{tokens} tokens, {speed:.0f} tokens/s", refresh=False)
        bar.update(done - bar.n)
        bar.refresh()

    def _advise(self, most: int) -> None:
        assert self._advice is not None
        if most and self._advice.is_new("max_tokens"):  # 0: the engine has not taken it yet
            self._bar.write(
                f"embedlm: without max_tokens an answer may take {most} tokens here, up to the end "
                "of the context. SamplingParams(max_tokens=256) ends it sooner, Ctrl-C now.",
                file=self._bar.fp,
            )
        self._advice = None


def _num_tokens(output: Output) -> int:
    if not isinstance(output, RequestOutput):
        return 0
    return sum(len(answer.token_ids) for answer in output.outputs)


@contextmanager
def counting(
    jobs: Sequence[Job],
    callback: ProgressCallback | None,
    list_requests: Callable[[], list[RequestInfo]],
    use_tqdm: bool,
    advice: Advice | None,
) -> Iterator[RequestProgress | TokenProgress | None]:
    """The progress of a call that generates: the callback's, a bar's where standard error shows
    one, or none."""
    if callback is not None:
        with reporting("generate", "request", callback) as report:
            yield RequestProgress(report, len(jobs))
        return
    one = len(jobs) == 1
    with bar_of("generate", " tokens" if one else " requests", bar=use_tqdm) as bar:
        yield None if bar is None else TokenProgress(bar, jobs, list_requests, advice)
