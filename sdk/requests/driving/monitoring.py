"""Numbers about one engine for its host: metrics, unfinished requests, traces."""

from __future__ import annotations

import threading
from contextlib import suppress
from os import PathLike, fspath

from sdk.api.errors import EngineClosedError, EngineDeadError, RequestError
from sdk.engine.job import Job
from sdk.engine.running_requests import RequestInfo
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.requests.driving.driver import Driver


class Monitoring:
    """See the methods of :class:`sdk.LLM`. No method waits for a step that runs."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._lock = threading.RLock()  # of the trace
        self._trace: Trace | None = None

    def metrics(self) -> dict[str, float]:
        """See :meth:`sdk.LLM.get_metrics`."""
        self._driver.check_usable()
        return self._driver.engine.get_metrics()

    def stats(self) -> EngineStats:
        """See :meth:`sdk.LLM.stats`."""
        self._driver.check_usable(asleep=True)
        return self._driver.engine.stats()

    def set_slo(self, slo: SLO | str | None) -> None:
        """See :meth:`sdk.LLM.set_slo`."""
        self._driver.check_usable(asleep=True)
        if isinstance(slo, str):
            slo = SLO.parse(slo)
        elif not (slo is None or isinstance(slo, SLO)):
            raise RequestError(
                f"set_slo: expected an SLO, a text like 'ttft=0.5,tpot=0.05' or None, found "
                f"{slo!r:.80}"
            )
        self._driver.engine.scheduler.recorder.slo = slo

    def list_requests(self) -> list[RequestInfo]:
        """See :meth:`sdk.LLM.list_requests`."""
        self._driver.check_usable(asleep=True)
        jobs = self._driver.waiting_jobs()  # first: the engine may take them meanwhile
        found = self._driver.observe(self._driver.engine.list_requests)
        known = {one.request_id for one in found}
        now = self._driver.engine.scheduler.queues.clock()
        return found + [_waiting(job, now) for job in jobs if job.request_id not in known]

    def trace(self, path: str | PathLike[str]) -> Trace:
        """See :meth:`sdk.LLM.trace`."""
        self._driver.check_usable(asleep=True)
        engine = self._driver.engine
        with self._lock:
            if self._trace is not None:
                raise RequestError(
                    f"trace: this LLM already records one, to {str(self._trace.path)!r}; stop() "
                    "it first"
                )
            trace = Trace(fspath(path), engine.scheduler.queues.clock, self._detach)
            self._trace = engine.trace = trace
        return trace

    def _detach(self, trace: Trace) -> None:
        """The trace has ended: add the requests that have not."""
        engine = self._driver.engine
        with self._lock:
            self._trace = None
        try:
            with suppress(EngineClosedError, EngineDeadError):  # they have ended all requests
                self._driver.observe(lambda: engine.trace_unfinished(trace))
        finally:
            engine.trace = None

    def close(self) -> None:
        """End a trace; the engine was closed."""
        with self._lock:
            trace, self._trace = self._trace, None
        if trace is not None:
            trace.stop()


def _waiting(job: Job, now: float) -> RequestInfo:
    """A request that the engine does not have yet."""
    params, num_prompt = job.params, len(job.prompt_token_ids)
    return RequestInfo(
        request_id=job.request_id,
        index=0,
        kind=job.spec.kind,
        state="waiting",
        tenant=params.tenant,
        adapter=None,
        priority=params.priority if job.priority is None else job.priority,
        num_prompt_tokens=num_prompt,
        num_cached_tokens=0,
        num_computed_tokens=0,
        num_generated_tokens=0,
        max_tokens=(params.max_tokens or 0) if job.spec.kind == "generate" else 0,
        num_preemptions=0,
        age=0.0 if job.arrival_time is None else max(now - job.arrival_time, 0.0),
        kv_pages={},
    )
