"""A KV cache that grows and shrinks while it is in use. All of this happens between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from sdk.api.errors import RequestError
from sdk.engine.executor import Executor
from sdk.engine.pages.prefix_store import max_pages, run_copies
from sdk.engine.rank.key_centres import centre_keys
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.kernels.lazy_torch import torch

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner


class ElasticPages:
    """Changes the number of pages of one engine. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor

    @property
    def min_pages(self) -> int:
        """The smallest capacity: the pinned pages and one more, and what each request may need."""
        capacity = self._scheduler.pool.capacity
        return capacity - self._spare_pages(capacity - self._scheduler.prefixes.num_pinned)

    def _spare_pages(self, unpinned: int) -> int:
        """How many of these pages nobody may need; one stays."""
        scheduler = self._scheduler
        prefixes, size = scheduler.prefixes, scheduler.config.page_size
        spare = [unpinned - 1]
        for request in scheduler.queues.unfinished.values():  # they may share pinned pages
            spare.append(prefixes.available_pages(request) - max_pages(request, size))
        return min(spare)

    def resize(self, capacity: int) -> None:
        """Set the number of pages. Requests that lose their pages start over when some are free.

        :raises RequestError: there is no memory for as many, or with so few an unfinished request
            could never end; nothing has changed then.
        """
        pool, least = self._scheduler.pool, self.min_pages
        most = pool.num_pages - 1
        if not least <= capacity <= most:
            raise RequestError(
                f"resize: {capacity} KV pages of {pool.page_size} tokens; expected {least} (pinned "
                f"prefixes and the longest unfinished request) to {most} (reserved at load)"
            )
        self._vacate(self._scheduler.resize(capacity))

    def give_back(self, nbytes: int, page_bytes: int) -> int:
        """Withhold up to ``nbytes`` of unused pages, and of frames and slots; returns how many."""
        pool, groups = self._scheduler.pool, self._scheduler.groups
        if groups is None or groups.budget.nbytes is None:
            count = max(pool.capacity - self.min_pages, 0)
            pages = pool.withhold(min(nbytes // page_bytes, count))
            self._vacate(pages)
            return len(pages) * page_bytes
        pinned = self._scheduler.prefixes.num_pinned
        if pinned or self._scheduler.queues.unfinished:
            spare = max(self._spare_pages(groups.most_pages(1, pinned)), 0)
            nbytes = min(nbytes, spare * page_bytes)
        given = groups.budget.shrink(nbytes)
        run_copies(self._scheduler, self._executor)  # of what goes to the swap space
        for region, places in enumerate(groups.take_vacated().places):  # no plan is in flight
            self._executor.on_ranks(_vacate_region, list(places), region)
        return given

    def trim(self) -> None:
        """Forget cached prefixes and return the memory of all unused pages. On a GPU without
        unfinished requests, also return the memory of recorded steps; they are captured again when
        the engine is next idle after requests."""
        self._vacate(self._scheduler.pool.drop_cached())
        if (groups := self._scheduler.groups) is not None:
            for region, places in enumerate(groups.unused, 1):
                self._executor.on_ranks(_vacate_region, places, region)
        if not self._scheduler.queues.unfinished:
            self._executor.on_ranks(_record_anew)
        self._executor.on_ranks(_empty_cache)

    def prepare(self) -> bool:
        """Capture one more size of a GPU's steps, while there are no requests; whether any was
        left. Takes some 0.2 s."""
        return any(self._executor.on_ranks(capture_next))

    def sleep(self) -> None:
        """Return the memory of all pages until :meth:`wake`. No page may be in use."""
        self._executor.on_ranks(_sleep)

    def wake(self) -> None:
        """Allocate the pages again. :raises OutOfMemoryError: there is no memory for them now."""
        self._executor.on_ranks(_wake)

    def _vacate(self, pages: Sequence[int]) -> None:
        run_copies(self._scheduler, self._executor)
        if pages:
            self._executor.on_ranks(_vacate, list(pages))


def _vacate(runner: ModelRunner, pages: list[int]) -> None:
    runner.kv.vacate(pages)
    if runner.drafting is not None:
        runner.drafting.vacate(pages)


def _vacate_region(runner: ModelRunner, places: list[int], region: int) -> None:
    runner.kv.vacate(places, region)


def _record_anew(runner: ModelRunner) -> None:
    """A GPU's steps are captured again by :func:`capture_next`: until then the memory of the old
    graphs is free."""
    if not runner.kv.can_vacate and runner.records:
        runner.record()


def _empty_cache(runner: ModelRunner) -> None:
    """Return the GPU memory that torch keeps for its next tensors."""
    if runner.ops.device.type == "cuda":
        torch.cuda.empty_cache()


def _sleep(runner: ModelRunner) -> None:
    """Pages in one allocation can only be freed together, with the graphs that point into it."""
    if not runner.kv.can_vacate:
        runner.forget_graphs()
        runner.kv.close()
        _empty_cache(runner)


def _wake(runner: ModelRunner) -> None:
    if not runner.kv.can_vacate:
        runner.kv.allocate()
        centre_keys(runner.kv, runner.model)
        _record_anew(runner)
        runner.capture_all()


def capture_next(runner: ModelRunner) -> bool:
    """See :meth:`sdk.engine.rank.runner.ModelRunner.capture_next`."""
    return runner.capture_next()


#: What this module calls on every rank, by reference; ranks on other hosts know these by name.
ON_RANKS = (_vacate, _vacate_region, _record_anew, _empty_cache, _sleep, _wake, capture_next)
