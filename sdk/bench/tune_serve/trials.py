"""Runs of real engines for the search: opened with options, loaded, closed."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.bench.serve.arrivals import Arrivals
from sdk.bench.serve.record import Record
from sdk.bench.serve.slo import Slo
from sdk.bench.serve.summary import Summary, summarize
from sdk.bench.serve.workload import Workload
from sdk.bench.tune_serve.replay import Replay
from sdk.bench.tune_serve.search import ImpossibleOptions, OutOfTime
from sdk.bench.tune_serve.space import Options

#: Requests before the first run of an engine: they record its steps.
_WARM_UP = 4


class EngineTrials:
    """Replays a workload on engines that ``open_engine(options)`` makes.

    One engine is open at a time, and stays open while the options are the same. A run ends as soon
    as this many requests are bad that it has failed, with a share of at least ``needed``.
    """

    def __init__(
        self,
        open_engine: Callable[[Options], Any],
        workload: Workload,
        arrivals: Arrivals,
        slo: Slo,
        requests: int,
        needed: float,
        *,
        chat: bool = False,
        clock: Callable[[], float] = time.thread_time,
        seconds: float = math.inf,
    ) -> None:
        self._open_engine = open_engine
        self._workload = workload
        self._arrivals = arrivals
        self._slo = slo
        self._requests = requests
        self._allowed = requests - math.ceil(requests * needed - 1e-9)
        self._chat = chat
        self._clock = clock
        self._end = time.monotonic() + seconds
        self._options: Options | None = None
        self._llm: Any = None
        self.runs = 0

    def run(self, options: Options, rate: float) -> Summary:
        """See :class:`sdk.bench.tune_serve.search.Trials`."""
        if time.monotonic() > self._end:
            raise OutOfTime
        self._open(options)
        self.runs += 1
        sessions = self._workload.timed(self._requests, self.runs, self._arrivals.at(rate))
        bad = 0

        def failed(ended: Sequence[Record]) -> bool:
            nonlocal bad
            bad += bool(self._slo.broken_by(ended[-1]))
            return bad > self._allowed

        replay = Replay(self._llm, chat=self._chat, clock=self._clock)
        return summarize(replay.run(sessions, failed), self._slo)

    def close(self) -> None:
        """Close the engine that is open, if there is one."""
        if self._llm is not None:
            self._llm.close()
        self._llm = self._options = None

    def _open(self, options: Options) -> None:
        if self._options == options:
            return
        self.close()
        try:
            self._llm = self._open_engine(options)
        except (RequestError, OutOfMemoryError) as error:
            raise ImpossibleOptions(str(error).partition("\n")[0]) from error
        self._options = options
        warm_up = self._workload.timed(_WARM_UP, -1, self._arrivals.at(1000.0))
        Replay(self._llm, chat=self._chat, clock=self._clock).run(warm_up)
