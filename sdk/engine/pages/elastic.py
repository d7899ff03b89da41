"""A KV cache that grows and shrinks while it is used. All of this happens between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sdk.engine.pages.kept_prefixes import most_pages, run_copies
from sdk.engine.rank.key_centres import centre_keys
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.errors import RequestError
from sdk.executors.base import Executor

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner


class ElasticPages:
    """Changes how many pages one engine has. Not thread-safe."""

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self._scheduler = scheduler
        self._executor = executor

    @property
    def least(self) -> int:
        """Pages that must stay: the pinned ones and one more, or all that a request may need."""
        scheduler = self._scheduler
        prefixes, size = scheduler.prefixes, scheduler.config.page_size
        capacity = scheduler.pool.capacity
        spare = [capacity - prefixes.num_pinned - 1]
        for request in scheduler.queues.unfinished.values():  # it may share what is pinned
            spare.append(prefixes.room(request) - most_pages(request, size))
        return capacity - min(spare)

    def resize(self, capacity: int) -> None:
        """Have ``capacity`` pages. Requests that lose theirs start over when there is room.

        :raises RequestError: that is more than there is room for, or an unfinished request could
            never end; nothing has changed then.
        """
        pool, least = self._scheduler.pool, self.least
        most = pool.num_pages - 1
        if not least <= capacity <= most:
            raise RequestError(
                f"resize: {capacity} KV pages of {pool.page_size} tokens; expected {least} (pinned "
                f"prefixes and the longest unfinished request) to {most} (set aside at load)"
            )
        self._vacate(self._scheduler.resize(capacity))

    def give_back(self, count: int) -> int:
        """Withhold up to ``count`` pages that nobody uses; how many."""
        pool = self._scheduler.pool
        pages = pool.withhold(min(count, max(pool.capacity - self.least, 0)))
        self._vacate(pages)
        return len(pages)

    def trim(self) -> None:
        """Forget cached prefixes, and return the memory of all pages that nobody uses; of a GPU,
        while no request is unfinished, that of recorded steps."""
        self._vacate(self._scheduler.pool.drop_cached())
        if not self._scheduler.queues.unfinished:
            self._executor.on_ranks(_record_anew)
        self._executor.on_ranks(_empty_cache)

    def rest(self) -> None:
        """Return the memory of all pages, none of which is in use, until :meth:`wake`."""
        self._executor.on_ranks(_rest)

    def wake(self) -> None:
        """Have pages again. :raises OutOfMemoryError: there is no memory for them now."""
        self._executor.on_ranks(_wake)

    def _vacate(self, pages: Sequence[int]) -> None:
        run_copies(self._scheduler, self._executor)
        if pages:
            self._executor.on_ranks(_vacate, list(pages))


def _vacate(runner: ModelRunner, pages: list[int]) -> None:
    runner.kv.vacate(pages)


def _record_anew(runner: ModelRunner) -> None:
    """A GPU's steps are recorded as they are needed: until then the old ones' memory is free."""
    if not runner.kv.can_vacate and runner.records:
        runner.record()


def _empty_cache(runner: ModelRunner) -> None:
    """What torch keeps of a GPU's memory for its next tensors."""
    if runner.ops.device.type == "cuda":
        torch.cuda.empty_cache()


def _rest(runner: ModelRunner) -> None:
    """Pages that lie in one allocation go with it, and so do the graphs that point into it."""
    if not runner.kv.can_vacate:
        runner.forget_graphs()
        runner.kv.close()
        _empty_cache(runner)


def _wake(runner: ModelRunner) -> None:
    if not runner.kv.can_vacate:
        runner.kv.allocate()
        centre_keys(runner.kv, runner.model)
        _record_anew(runner)
