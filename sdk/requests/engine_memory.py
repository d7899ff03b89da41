"""Changes to the memory of a loaded ``LLM``: lending, shrinking, growing, sleeping."""

from __future__ import annotations

from dataclasses import replace

from sdk.api.errors import CheckpointError, OutOfMemoryError, RequestError
from sdk.api.machine import installed_memory, release_free_memory
from sdk.api.memory_pool import Lease
from sdk.api.sizes import format_bytes, parse_bytes
from sdk.loading.load import Loaded
from sdk.memory.demand import STRUCTURE_WORD_BYTES
from sdk.memory.plan import MemoryPlan
from sdk.memory.resolve import available_to, device_of
from sdk.requests.driver import Driver


class EngineMemory:
    """The memory of one ``LLM``; ``plan`` is what it may use now."""

    def __init__(self, driver: Driver, loaded: Loaded) -> None:
        self.plan: MemoryPlan = loaded.facts.plan
        self._driver = driver
        self._engine = loaded.engine
        self._executor = loaded.executor
        self._elastic = loaded.elastic
        self._pages = loaded.engine.scheduler.pool
        self._lease = loaded.lease
        self._key = loaded.model_key
        self._current_key = loaded.facts.key
        self._words = loaded.facts.model_config.vocab_size
        self._level = 0
        self._is_fork = loaded.is_fork
        if self._lease is not None:
            driver.lease, driver.give_back = self._lease, self._give_back
            self._lease.reclaim = self._reclaim
            self._pages.on_shortage = self._borrow

    # Lending

    def _borrow(self, count: int, urgent: bool) -> None:
        """Grant up to ``count`` withheld pages, as many as the memory pool has memory for."""
        assert self._lease is not None
        size = self.plan.page_bytes
        count = min(count, self._pages.num_withheld)
        if count and not self._lease.take(count * size, urgent=urgent):
            count = min(count, max(self._lease.pool.free, 0) // size)
            if count and not self._lease.take(count * size):
                return
        self._pages.grant(count)

    def _give_back(self) -> None:
        """Give unused pages to models that want them, never those that came with this model."""
        lease, size = self._lease, self.plan.page_bytes
        assert lease is not None
        lent = self._pages.capacity - self.plan.num_pages
        given = self._elastic.give_back(min(-(-lease.wanted // size), lent))
        lease.give_back(given * size)
        lease.wanted = 0  # models that still need more ask again

    def _reclaim(self) -> None:
        self._driver.try_between_steps(self._give_back)

    # Structured output

    def hold_vocabulary(self) -> None:
        """Before the first structure: count what llguidance takes to read the vocabulary.

        If the budget has no room for it, the KV cache gives up pages. On a GPU it does not count:
        the vocabulary is in host memory.

        :raises RequestError: requests or pinned prefixes need the pages, or the memory pool is
            full. Then nothing has changed.
        """
        assert self.plan.config is not None
        if not self.plan.structures and device_of(self.plan.config) == "cpu":
            self._driver.between_steps(self._hold_vocabulary)

    def _hold_vocabulary(self) -> None:
        plan, nbytes = self.plan, STRUCTURE_WORD_BYTES * self._words
        if plan.structures:  # for a request that came at the same time
            return
        pages = plan.num_pages
        if self._lease is not None:
            if not self._lease.take(nbytes, urgent=True):
                raise RequestError(
                    f"structured output needs {format_bytes(nbytes)} for this model's vocabulary, "
                    f"and its memory pool has {format_bytes(max(self._lease.pool.free, 0))} left; "
                    "use a larger pool, or close() another model"
                )
        elif plan.budget is not None and plan.serving + nbytes > plan.budget:
            pages -= -(-(plan.serving + nbytes - plan.budget) // plan.page_bytes)
            if pages < self._elastic.min_pages:
                raise RequestError(
                    f"structured output needs {format_bytes(nbytes)} for this model's vocabulary, "
                    f"and memory={format_bytes(plan.budget)} has no room for it next to the KV "
                    "cache that requests and pinned prefixes need; raise memory, or ask again when "
                    "they have ended"
                )
            self._elastic.resize(pages)
            release_free_memory()
        self.plan = replace(plan, structures=nbytes, num_pages=pages)

    # Shrinking and growing

    def trim(self) -> None:
        """See :meth:`sdk.LLM.trim`."""
        self._driver.between_steps(self._trim)
        release_free_memory()

    def _trim(self) -> None:
        self._elastic.trim()
        if self._lease is not None:
            self._lease.wanted = self._pages.capacity * self.plan.page_bytes
            self._give_back()

    def resize(self, memory: int | str) -> MemoryPlan:
        """See :meth:`sdk.LLM.resize`."""
        if self._lease is not None:
            raise RequestError(
                "resize: this LLM takes its pages from a memory pool and cannot be resized"
            )
        budget = parse_bytes(memory, "resize")
        plan = self.plan
        fixed, most = plan.serving - plan.kv_cache, self._pages.num_pages - 1
        pages = min((budget - fixed) // plan.page_bytes, most)
        if pages < 1:
            raise OutOfMemoryError(
                f"resize: {format_bytes(budget)} leave no room for a KV page: weights, workspace "
                f"and tokenizer take {format_bytes(fixed)}, a page {format_bytes(plan.page_bytes)}"
            )
        self._check_machine(budget, (pages - plan.num_pages) * plan.page_bytes)
        self._driver.between_steps(lambda: self._elastic.resize(pages))
        self.plan = replace(self.plan, budget=budget, num_pages=pages)
        release_free_memory()
        return self.plan

    def _check_machine(self, budget: int, more: int) -> None:
        """:raises OutOfMemoryError: the machine has less, or lacks ``more`` free bytes now."""
        assert self.plan.config is not None
        if self.plan.config.device != "cuda" and budget > installed_memory():
            raise OutOfMemoryError(
                f"resize: expected at most the machine's {format_bytes(installed_memory())}, "
                f"found {format_bytes(budget)}"
            )
        available = available_to(self.plan.config)
        if more > available:
            raise OutOfMemoryError(
                f"resize: {format_bytes(more)} of new KV pages are needed; the machine has only "
                f"{format_bytes(available)} left"
            )

    # Sleeping

    def sleep(self, level: int) -> None:
        """See :meth:`sdk.LLM.sleep`."""
        if level not in (1, 2):
            raise RequestError(f"sleep: expected level 1 or 2, found {level!r}")
        if level == 2 and self._is_fork:
            raise RequestError(
                "sleep: a fork has no weights of its own to give back: use level 1, or close() it"
            )

        def rest() -> None:
            if self._driver.has_work:
                raise RequestError("sleep: requests are unfinished: wait for them or abort() them")
            self._engine.reset_prefix_cache()
            self._trim()
            if level == 2:
                self._executor.stop()
            else:
                self._elastic.sleep()
            self._level = level

        self._driver.sleep(rest, f"this LLM sleeps (level {level}): call wake_up() first")
        if level == 2 and self._lease is not None:
            self._lease.give_back(self._lease.nbytes)
        release_free_memory()

    def wake_up(self) -> None:
        """See :meth:`sdk.LLM.wake_up`."""
        self._driver.check_usable(asleep=True)
        self._driver.wake(self._start)

    def _start(self) -> None:
        if self._level == 2:
            self.expect_same_model("wake_up")
            self._take_again(self._lease)
            try:
                self._executor.start()
            except BaseException:
                if self._lease is not None:
                    self._lease.give_back(self._lease.nbytes)
                raise
            if self._lease is not None:
                self._lease.give_back(self.plan.total - self.plan.serving)
            if self._engine.adapters is not None:
                self._engine.adapters.restart()
        elif self._level == 1:
            self._elastic.wake()
        self._level = 0

    def expect_same_model(self, what: str) -> None:
        """:raises CheckpointError: the model's files have changed, so ``what`` cannot read them."""
        found = self._current_key()
        if found.digest != self._key.digest:
            raise CheckpointError(
                f"{what}: the files of {self._key.name} have changed or are gone since this LLM "
                "was loaded, so it would answer as another model: put them back and call "
                f"{what}() again, or close() this LLM and load the new files"
            )

    def _take_again(self, lease: Lease | None) -> None:
        if lease is not None and not lease.take(self.plan.total, urgent=True):
            raise OutOfMemoryError(
                f"wake_up: {lease.name} needs {format_bytes(self.plan.total)} of its memory pool, "
                f"but only {format_bytes(max(lease.pool.free, 0))} are free:\n{lease.pool}"
            )
