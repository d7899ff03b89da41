"""Traces for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

The format is Chrome's trace event format (JSON). All slices are complete events (``"X"``), so a
trace whose oldest entries were dropped is still valid. Steps are one track with their parts nested
in them. Requests are tracks of their own: one that ends leaves its track to the next.
"""

from __future__ import annotations

import gzip
import heapq
import json
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, NamedTuple

from sdk.api.errors import RequestError
from sdk.api.timeline import Timeline

#: The last steps and answers that a trace keeps: some 35 MB and, with long timelines, 50 MB.
MAX_STEPS = 100_000
MAX_REQUESTS = 10_000
_ENGINE, _REQUESTS = 1, 2  # processes, as Perfetto calls groups of tracks
_Event = dict[str, Any]


class _Step(NamedTuple):
    started: float
    planned: float
    executed: float
    committed: float
    ended: float
    num_requests: int
    num_tokens: int
    num_running: int
    num_waiting: int
    num_pages_used: int


class Trace:
    """Records an engine's steps and requests until :meth:`stop`, which writes the file.

    A context manager. The engine's thread records; :meth:`stop` may be called from any thread.
    """

    def __init__(
        self,
        path: str | Path,
        clock: Callable[[], float],
        detach: Callable[[Trace], None],
    ) -> None:
        """``detach`` makes the engine forget the trace, after it has added what is unfinished.

        :raises RequestError: the file cannot be written.
        """
        self.path = Path(path)
        self._file = _open(self.path)
        self._clock, self._detach = clock, detach
        self._begun = clock()
        self._steps: deque[_Step] = deque(maxlen=MAX_STEPS)
        self._requests: deque[tuple[str, str | None, Timeline]] = deque(maxlen=MAX_REQUESTS)
        self._num_steps = self._num_requests = 0
        self._stopped = False
        #: Of the step that runs: when the ranks were done, and when it was committed.
        self.executed = self.committed = self._begun

    def __enter__(self) -> Trace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.stop()

    # Recording

    def step(self, started: float, planned: float, ended: float, *counts: int) -> None:
        """A step has ended. ``counts``: its requests and tokens; then the requests running and
        waiting, and the KV pages in use, after it."""
        self._num_steps += 1
        times = started, planned, self.executed, self.committed, ended
        self._steps.append(_Step(*times, *counts))

    def request(self, name: str, tenant: str | None, timeline: Timeline) -> None:
        """An answer has ended, or the trace ends before it."""
        self._num_requests += 1
        self._requests.append((name, tenant, timeline))

    # The file

    def stop(self) -> Path:
        """Write the file; returns its path. Idempotent."""
        if not self._stopped:
            self._stopped = True
            try:
                self._detach(self)
            finally:
                with self._file as file:
                    _write(file, self._events(), self._facts())
        return self.path

    def _facts(self) -> _Event:
        return {
            "steps": self._num_steps,
            "steps_dropped": self._num_steps - len(self._steps),
            "requests": self._num_requests,
            "requests_dropped": self._num_requests - len(self._requests),
        }

    def _events(self) -> Iterator[_Event]:
        yield _name("process_name", _ENGINE, 0, "engine")
        yield _name("process_name", _REQUESTS, 0, "requests")
        yield _name("thread_name", _ENGINE, 1, "steps")
        counts: tuple[int, ...] = ()
        for step in list(self._steps):
            yield from self._step_events(step)
            if step[-3:] != counts:
                counts = step[-3:]
                running, waiting = {"running": counts[0]}, {"waiting": counts[1]}
                for name, values in (
                    ("requests", running | waiting),
                    ("KV pages", {"used": counts[2]}),
                ):
                    at = self._microseconds(step.ended)
                    yield {"ph": "C", "name": name, "pid": _ENGINE, "ts": at, "args": values}
        yield from self._request_events()

    def _step_events(self, step: _Step) -> Iterator[_Event]:
        of_step = {"tokens": step.num_tokens, "requests": step.num_requests}
        yield self._slice("step", (_ENGINE, 1), step.started, step.ended, of_step)
        begin = step.started
        for name, end in (
            ("plan", step.planned),
            ("execute", step.executed),
            ("commit", step.committed),
            ("output", step.ended),
        ):
            yield self._slice(name, (_ENGINE, 1), begin, end)
            begin = end

    def _request_events(self) -> Iterator[_Event]:
        """Each answer on the lowest track that is free from its arrival to its end."""
        now, free, busy = self._clock(), list[int](), list[tuple[float, int]]()
        num_tracks = 0
        for name, tenant, timeline in sorted(self._requests, key=_arrival):
            begin, end = timeline.arrival_time, _end(timeline, now)
            while busy and busy[0][0] <= begin:
                heapq.heappush(free, heapq.heappop(busy)[1])
            if free:
                track = heapq.heappop(free)
            else:
                num_tracks += 1
                track = num_tracks
                yield _name("thread_name", _REQUESTS, track, f"requests {track}")
            heapq.heappush(busy, (end, track))
            where = _REQUESTS, track
            about = {"timeline": str(timeline).split("\n")}
            if tenant is not None:
                about["tenant"] = [tenant]
            yield self._slice(name, where, begin, end, about)
            for what, start, stop in phases(timeline, end):
                if stop >= self._begun:
                    yield self._slice(what, where, start, stop)
            for event in timeline:
                if event.kind in ("recoded", "swapped_in"):
                    at = self._microseconds(event.ts)
                    mark = {"ph": "i", "s": "t", "name": event.kind, "ts": at}
                    yield {**mark, "pid": where[0], "tid": where[1]}

    def _slice(
        self,
        name: str,
        where: tuple[int, int],
        begin: float,
        end: float,
        about: _Event | None = None,
    ) -> _Event:
        first = self._microseconds(begin)
        made = {"ph": "X", "name": name, "cat": "embedlm", "pid": where[0], "tid": where[1]}
        made |= {"ts": first, "dur": round(max(self._microseconds(end) - first, 0.0), 3)}
        return made if about is None else {**made, "args": about}

    def _microseconds(self, moment: float) -> float:
        """Since the trace began. What was there before is cut off."""
        return round(max(moment - self._begun, 0.0) * 1e6, 3)


def phases(timeline: Timeline, end: float) -> Iterator[tuple[str, float, float]]:
    """What an answer did from when to when: queued, prefill (each chunk), decode, preempted."""
    doing, since = "queued", timeline.arrival_time
    for event in timeline:
        if event.kind == "admitted" and doing == "queued":
            yield doing, since, event.ts
            doing = "prefill"
        elif event.kind == "prefill":
            stop = event.ts + event.seconds
            yield f"prefill {event.num_tokens}", event.ts, stop
            if doing == "decode":  # again, after a preemption
                since = max(since, stop)
        elif event.kind in ("first_token", "resumed"):
            if doing == "preempted":
                yield doing, since, event.ts
            doing, since = "decode", event.ts
        elif event.kind == "preempted":
            if doing == "decode" and event.ts > since:
                yield doing, since, event.ts
            doing, since = "preempted", event.ts
    if doing != "prefill" and end > since:
        yield doing, since, end


def _end(timeline: Timeline, now: float) -> float:
    last = timeline.events[-1] if timeline.events else None
    return last.ts if last is not None and last.kind == "finished" else now


def _arrival(entry: tuple[str, str | None, Timeline]) -> float:
    return entry[2].arrival_time


def _name(what: str, process: int, track: int, name: str) -> _Event:
    return {"ph": "M", "name": what, "pid": process, "tid": track, "args": {"name": name}}


def _open(path: Path) -> IO[str]:
    try:
        if path.suffix == ".gz":
            return gzip.open(path, "wt", encoding="utf-8")
        return path.open("w", encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"trace: {str(path)!r} cannot be written ({error.strerror}); give the path of a file "
            "in a folder that exists"
        ) from error


def _write(file: IO[str], events: Iterator[_Event], facts: _Event) -> None:
    """One event in each line."""
    file.write('{"displayTimeUnit": "ms", "otherData": ' + json.dumps(facts))
    file.write(', "traceEvents": [')
    for number, event in enumerate(events):
        file.write((",\n" if number else "\n") + json.dumps(event))
    file.write("\n]}\n")
