"""Requests that a host enqueues and steps by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.outputs import RequestOutput
from sdk.api.params import RequestOutputKind
from sdk.requests.calls import as_text
from sdk.requests.job import JobDriver
from sdk.requests.jobs import JobMaker, ParamsLike
from sdk.requests.mailboxes import Collector


class Stepping:
    """The enqueued requests of one ``LLM``, and their outputs until they are taken."""

    def __init__(self, driver: JobDriver, jobs: JobMaker) -> None:
        self._driver = driver
        self._jobs = jobs
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
        calling = self._jobs.read_mixed("enqueue", prompts, sampling_params, template, lora)
        jobs = self._jobs.make(
            calling.prompts, calling.params, priority=priority, request_ids=request_id
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
