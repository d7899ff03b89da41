"""The parts of an ``LLM`` whose requests run on one engine in this process: its memory, its saved
and pinned prefixes, and the engine itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from os import PathLike
from typing import TYPE_CHECKING, Any, TypeVar

from sdk.api.errors import CheckpointError, OutOfMemoryError, RequestError, SnapshotError
from sdk.api.flags import check_flags
from sdk.api.machine import installed_memory
from sdk.api.memory_pool import Lease
from sdk.api.outputs import RequestOutput
from sdk.api.params import SamplingParams
from sdk.api.sizes import format_bytes, parse_bytes
from sdk.engine.expert_balance import ExpertBalance
from sdk.engine.pages.budget import Budget
from sdk.engine.pages.image_keys import key_ids, placed, placed_before
from sdk.engine.rank.runner import ModelRunner
from sdk.kernels.system import SYSTEM
from sdk.loading.load import Loaded, fork
from sdk.loading.quant_report import QuantReport, quant_report
from sdk.memory.demand import STRUCTURE_WORD_BYTES
from sdk.memory.plan import MemoryPlan
from sdk.memory.resolve import available_to, device_of
from sdk.quant.caches import AttentionCache, Cache, StateCache
from sdk.requests.adapters import Adapters, EngineResidency
from sdk.requests.driving.driver import Driver
from sdk.requests.driving.monitoring import Monitoring
from sdk.requests.job_maker import JobMaker
from sdk.requests.job_runner import run_jobs
from sdk.requests.prompts.reader import Prompt
from sdk.requests.served import frontend_of

if TYPE_CHECKING:
    from sdk.engine.snapshot import Snapshot


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
        if not size:  # no layer keeps all tokens: the model owns all that it needs
            return
        budget = self._budget
        if budget is None:
            count = min(count, self._pages.num_withheld)
        if count and not self._lease.take(count * size, urgent=urgent):
            count = min(count, max(self._lease.pool.free, 0) // size)
            if count and not self._lease.take(count * size):
                return
        given = self._pages.grant(count)
        if budget is not None:
            budget.grow((count - given) * size)

    @property
    def _cache_bytes(self) -> int:
        """What the KV cache may take now."""
        budget = self._budget
        if budget is not None and budget.nbytes is not None:
            return budget.nbytes
        return self._pages.capacity * self.plan.page_bytes

    @property
    def _budget(self) -> Budget | None:
        """That of pages, frames and slots, if memory moves between them."""
        groups = self._engine.scheduler.groups
        return None if groups is None or groups.budget.nbytes is None else groups.budget

    def _give_back(self) -> None:
        """Give unused pages to models that want them, never those that came with this model."""
        lease, size = self._lease, self.plan.page_bytes
        assert lease is not None
        if not size:
            return
        lent = max(self._cache_bytes - self.plan.kv_cache, 0)
        wanted = -(-lease.wanted // size) * size
        lease.give_back(self._elastic.give_back(min(wanted, lent), size))
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
            size = plan.page_bytes
            fewer = -(-(plan.serving + nbytes - plan.budget) // size) if size else 0
            if not size or self._pages.capacity - fewer < self._elastic.min_pages:
                raise RequestError(
                    f"structured output needs {format_bytes(nbytes)} for this model's vocabulary, "
                    f"and memory={format_bytes(plan.budget)} has no room for it next to the KV "
                    "cache that requests and pinned prefixes need; raise memory, or ask again when "
                    "they have ended"
                )
            self._elastic.resize(self._pages.capacity - fewer)
            pages -= fewer
            SYSTEM.trim_heap()
        self.plan = replace(plan, structures=nbytes, num_pages=pages)

    # Shrinking and growing

    def trim(self) -> None:
        """See :meth:`sdk.LLM.trim`."""
        self._driver.between_steps(self._trim)
        SYSTEM.trim_heap()

    def _trim(self) -> None:
        self._elastic.trim()
        if self._lease is not None:
            self._lease.wanted = self._cache_bytes
            self._give_back()

    def resize(self, memory: int | str) -> MemoryPlan:
        """See :meth:`sdk.LLM.resize`."""
        if self._lease is not None:
            raise RequestError(
                "resize: this LLM takes its pages from a memory pool and cannot be resized"
            )
        budget = parse_bytes(memory, "resize")
        plan = self.plan
        if not plan.page_bytes:
            raise RequestError(
                "resize: no layer of this model keeps all tokens, so its cache has the size that "
                "its requests need; load it again with another max_num_seqs or memory"
            )
        fixed, most = plan.serving - plan.kv_cache, self._pages.num_pages - 1
        # memory may have moved from pages to frames of window groups, or back
        more = min((budget - plan.serving) // plan.page_bytes, most - self._pages.capacity)
        pages = plan.num_pages + more
        if pages < 1:
            raise OutOfMemoryError(
                f"resize: {format_bytes(budget)} leave no room for a KV page: weights, workspace "
                f"and tokenizer take {format_bytes(fixed)}, a page {format_bytes(plan.page_bytes)}"
            )
        self._check_machine(budget, more * plan.page_bytes)
        self._driver.between_steps(lambda: self._elastic.resize(self._pages.capacity + more))
        self.plan = replace(self.plan, budget=budget, num_pages=pages)
        SYSTEM.trim_heap()
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
            if self._engine.scheduler.images is not None:
                self._engine.scheduler.images.reset()
            self._trim()
            if level == 2:
                self._executor.stop()
            else:
                self._elastic.sleep()
            self._level = level

        self._driver.sleep(rest, f"this LLM sleeps (level {level}): call wake_up() first")
        if level == 2 and self._lease is not None:
            self._lease.give_back(self._lease.nbytes)
        SYSTEM.trim_heap()

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


T = TypeVar("T")
_ONE = SamplingParams(temperature=0.0, max_tokens=1)
#: A prefix is computed at most this many times: other requests may evict its pages between
#: the step that wrote them and the moment they are read.
_ATTEMPTS = 3


class SavedPrefixes:
    """The saved prefixes of one ``LLM``."""

    def __init__(self, driver: Driver, loaded: Loaded, job_maker: JobMaker) -> None:
        self._driver = driver
        self._engine = loaded.engine
        self.kept = loaded.kept
        self.model_key = loaded.model_key
        self._config = loaded.facts.model_config
        self._max_model_len = loaded.facts.plan.max_model_len
        self._job_maker = job_maker

    def snapshot(self, prompt: Prompt) -> Snapshot:
        """The full pages of a prompt; missing ones are computed."""
        if prompt.embeds is not None:
            raise RequestError("snapshot: expected a prompt of tokens, found prompt_embeds")
        if prompt.adapter is not None:
            raise RequestError("snapshot: a prompt with an adapter cannot be saved; use pin")
        from sdk.engine.snapshot import Snapshot

        ids, salt = _ids_of(prompt), prompt.cache_salt
        stored = self._when_cached(prompt, lambda: self.kept.read(ids, salt))
        images = placed_before(stored.num_tokens, placed(prompt.images))
        return Snapshot(self.model_key, prompt.token_ids[: stored.num_tokens], stored, images)

    def snapshot_of(self, request_id: str) -> Snapshot:
        """The full pages of an unfinished request so far."""
        from sdk.engine.snapshot import Snapshot

        def read() -> Snapshot:
            ids, salt, images = self.kept.tokens_of(request_id)
            stored = self.kept.read(key_ids(ids, images), salt)
            if stored is None:
                raise RequestError(
                    f"request {request_id!r}: its pages are no longer in the prefix cache; take "
                    "the snapshot again once it runs"
                )
            return Snapshot(self.model_key, tuple(ids), stored, images)

        return self._driver.between_steps(read)

    def restore(
        self, source: Snapshot | str | PathLike[str], salt: str | None, *, pin: bool
    ) -> int:
        """Put a snapshot back; returns how many of its tokens are in the cache now."""
        from sdk.engine.snapshot import Snapshot

        check_flags(pin=pin)
        snapshot = source if isinstance(source, Snapshot) else Snapshot.load(source)
        self._check(snapshot)
        ids = snapshot.token_ids[: self._max_model_len - 1]  # the most that a prompt can use
        keys = key_ids(ids, placed_before(len(ids), snapshot.images))
        return self._driver.between_steps(
            lambda: self.kept.restore(keys, salt, snapshot.kv, pin=pin)
        )

    def _check(self, snapshot: Snapshot) -> None:
        given, own = snapshot.model, self.model_key
        if given.digest != own.digest:
            raise SnapshotError(
                f"the snapshot belongs to {given.name} ({given.digest}), but this LLM runs "
                f"{own.name} ({own.digest})"
            )
        spec, config = snapshot.kv.spec, self._config
        shape = (spec.num_layers, spec.kv_heads, spec.head_dim)
        expected = (len(config.caches), config.num_kv_heads, config.head_dim)
        ids = snapshot.token_ids
        if shape != expected or not 0 <= min(ids) <= max(ids) < config.vocab_size:
            raise SnapshotError(
                f"the snapshot contradicts itself: layers, heads and head size {shape} for "
                f"{own.name}, which has {expected}, and token ids up to {max(ids)} of "
                f"{config.vocab_size}"
            )
        plain = AttentionCache(spec.kv_heads, spec.head_dim, spec.head_dim)
        for layer, cache in enumerate(config.caches):
            expected_cache: Cache = cache
            if not spec.caches and isinstance(cache, AttentionCache):
                expected_cache = cache._replace(window=None)
            found = spec.caches[layer] if spec.caches else plain
            states = isinstance(found, StateCache) and isinstance(cache, StateCache)
            if found != expected_cache and not states:  # states: see PrefixStore.restore
                raise SnapshotError(
                    f"the snapshot contradicts itself: layer {layer} has {found} for {own.name}, "
                    f"which has {cache}"
                )

    def pin(self, prompt: Prompt) -> int:
        """Pin a prompt's full pages, computing missing ones; returns the number of tokens."""
        ids, salt, adapter = _ids_of(prompt), prompt.cache_salt, _key_of(prompt)
        return self._when_cached(prompt, lambda: self.kept.pin(ids, salt, adapter))

    def unpin(self, prompt: Prompt) -> bool:
        """Remove the pin of exactly these pages. False: there is none."""
        return self._driver.between_steps(
            lambda: self.kept.unpin(_ids_of(prompt), prompt.cache_salt, _key_of(prompt))
        )

    def forget(self) -> bool:
        """Forget all prefixes, in every tier."""
        return self._driver.between_steps(self._engine.reset_prefix_cache)

    def _when_cached(self, prompt: Prompt, action: Callable[[], T | None]) -> T:
        """What ``action`` returns once the pages of ``prompt`` are in the cache.

        :raises OutOfMemoryError: other requests evict them again and again.
        """
        for attempt in range(_ATTEMPTS + 1):
            found = self._driver.between_steps(action)
            if found is not None:
                return found
            if attempt < _ATTEMPTS:
                self._compute(prompt)
        raise OutOfMemoryError(
            f"the prefix of {len(prompt.token_ids)} tokens does not stay in the KV cache, because "
            "other requests need its pages; try again when fewer requests run"
        )

    def _compute(self, prompt: Prompt) -> None:
        """Run a prompt, so that its pages are in the cache.

        :raises RequestError: the request failed or was aborted.
        """
        [output] = run_jobs(self._driver, self._job_maker.make([prompt], [_ONE]))
        assert isinstance(output, RequestOutput)
        [answer] = output.outputs
        if answer.finish_reason not in ("stop", "length"):
            raise RequestError(f"the prefix was not computed: {answer.stop_reason}")


def _ids_of(prompt: Prompt) -> Sequence[int]:
    """The ids by which its prefixes are found: of an image those of its pixels."""
    if not prompt.images:
        return prompt.token_ids
    return key_ids(prompt.token_ids, placed(prompt.images))


def _key_of(prompt: Prompt) -> str | None:
    """The hash of its adapter: prefixes of other adapters are others."""
    return None if prompt.adapter is None else prompt.adapter.key


class ServedEngine:
    """See :class:`sdk.requests.served.Served`."""

    def __init__(self, loaded: Loaded) -> None:
        self.facts = loaded.facts
        self.warnings = loaded.warnings
        self.config = config = loaded.facts.config
        self.model_config = loaded.facts.model_config
        self.driver = Driver(loaded.engine, max_waiting=config.max_waiting)
        residency = None
        if loaded.open_adapter is not None:
            residency = EngineResidency(self.driver, loaded.engine)
        self.frontend = frontend_of(self.facts, Adapters(loaded.open_adapter, residency))
        self.monitoring = Monitoring(self.driver)
        self.prefixes = SavedPrefixes(self.driver, loaded, self.frontend.job_maker)
        self.memory = EngineMemory(self.driver, loaded)
        lockstep = loaded.facts.runner_config.lockstep_redundant
        self._experts = ExpertBalance(
            loaded.executor,
            lambda: loaded.runner,  # a method would keep this object in a reference cycle
            config.redundant_experts if lockstep is None else lockstep,
            lockstep=lockstep is not None,
        )
        self._loaded = loaded

    def expert_load(self) -> dict[int, list[int]]:
        """See :class:`sdk.requests.served.Served`."""
        self._experts.check("expert_load")
        return self.driver.between_steps(self._experts.load)

    def rebalance_experts(self) -> int:
        """See :class:`sdk.requests.served.Served`."""
        self._experts.check("rebalance_experts")

        def rebalance() -> int:
            self.memory.expect_same_model("rebalance_experts")
            return self._experts.rebalance()

        return self.driver.between_steps(rebalance)

    def explain(self) -> str:
        """See :class:`sdk.requests.served.Served`."""
        from sdk.loading.explain import explain

        facts = self.facts
        return explain(
            facts.config,
            facts.model_config,
            self.memory.plan,
            facts.defaults,
            self._loaded.runner,
            self.warnings,
            self._loaded.other_layers,
            self.facts.device,
        )

    def model_runner(self) -> ModelRunner:
        """See :class:`sdk.requests.served.Served`."""
        return self._loaded.runner

    def fork(self, **options: Any) -> ServedEngine:
        """See :class:`sdk.requests.served.Served`."""
        from sdk.loading.fork import fork_config

        config = fork_config(self.memory.plan, self.facts.values, **options)
        weights = self.driver.between_steps(lambda: self._loaded.runner.weights)
        return ServedEngine(fork(self._loaded, weights, config))

    def quant_report(self) -> QuantReport:
        """See :class:`sdk.requests.served.Served`."""
        loaded = self._loaded
        linears = loaded.runner.model.linears()
        return quant_report(linears, self.facts.kv_scales, loaded.other_layers)
