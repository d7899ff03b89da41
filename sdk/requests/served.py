"""What an ``LLM`` is made of: one engine in this process, or replicas in other ones."""

from __future__ import annotations

from os import PathLike
from typing import Any, Protocol

from sdk.engine.expert_balance import ExpertBalance
from sdk.engine.rank.runner import ModelRunner
from sdk.engine.running_requests import RequestInfo
from sdk.engine.snapshot import Snapshot
from sdk.loading.explain import explain
from sdk.loading.fork import fork_config
from sdk.loading.load import Loaded, ModelFacts, fork
from sdk.loading.quant_report import QuantReport, quant_report
from sdk.memory.plan import MemoryPlan
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.requests.adapter_residency import EngineResidency
from sdk.requests.adapters import Adapters
from sdk.requests.driver import Driver
from sdk.requests.engine_memory import EngineMemory
from sdk.requests.job import JobDriver
from sdk.requests.jobs import JobMaker
from sdk.requests.monitoring import Monitoring
from sdk.requests.prompts import Prompt
from sdk.requests.saved_prefixes import SavedPrefixes


class Prefixes(Protocol):
    """See the methods of :class:`sdk.LLM`."""

    def snapshot(self, prompt: Prompt) -> Snapshot: ...
    def snapshot_of(self, request_id: str) -> Snapshot: ...
    def restore(
        self, source: Snapshot | str | PathLike[str], salt: str | None, *, pin: bool
    ) -> int: ...
    def pin(self, prompt: Prompt) -> int: ...
    def unpin(self, prompt: Prompt) -> bool: ...
    def forget(self) -> bool: ...


class Memory(Protocol):
    """See the methods of :class:`sdk.LLM`."""

    @property
    def plan(self) -> MemoryPlan: ...
    def hold_vocabulary(self) -> None: ...
    def trim(self) -> None: ...
    def resize(self, memory: int | str) -> MemoryPlan: ...
    def sleep(self, level: int) -> None: ...
    def wake_up(self) -> None: ...


class Monitor(Protocol):
    """See the methods of :class:`sdk.LLM`."""

    def metrics(self) -> dict[str, float]: ...
    def stats(self) -> EngineStats: ...
    def set_slo(self, slo: SLO | str | None) -> None: ...
    def list_requests(self) -> list[RequestInfo]: ...
    def trace(self, path: str | PathLike[str]) -> Trace: ...
    def close(self) -> None: ...


class Served(Protocol):
    """The parts of an :class:`sdk.LLM` that depend on where its requests run."""

    @property
    def facts(self) -> ModelFacts: ...
    @property
    def driver(self) -> JobDriver: ...
    @property
    def adapters(self) -> Adapters: ...
    @property
    def monitoring(self) -> Monitor: ...
    @property
    def warnings(self) -> tuple[str, ...]: ...

    def saved_with(self, jobs: JobMaker) -> tuple[Prefixes, Memory]:
        """The parts that run jobs of their own."""

    def expert_load(self) -> dict[int, list[int]]:
        """See :meth:`sdk.LLM.expert_load`."""

    def rebalance_experts(self) -> int:
        """See :meth:`sdk.LLM.rebalance_experts`."""

    def model_runner(self) -> ModelRunner:
        """Rank 0's; a new one after a sleep that freed the weights.

        :raises RequestError: it is in another process.
        """

    def explain(self, memory: MemoryPlan) -> str:
        """See :meth:`sdk.LLM.explain`."""

    def quant_report(self) -> QuantReport:
        """See :meth:`sdk.LLM.quant_report`."""

    def fork(self, **options: Any) -> Served:
        """See :meth:`sdk.LLM.fork`."""


class ServedEngine:
    """See :class:`Served`: one engine in this process."""

    def __init__(self, loaded: Loaded) -> None:
        self.facts = loaded.facts
        self.warnings = loaded.warnings
        config = loaded.facts.config
        self.driver = Driver(loaded.engine, max_waiting=config.max_waiting)
        residency = None
        if loaded.open_adapter is not None:
            residency = EngineResidency(self.driver, loaded.engine)
        self.adapters = Adapters(loaded.open_adapter, residency)
        self.monitoring = Monitoring(self.driver)
        self._memory = EngineMemory(self.driver, loaded)
        lockstep = loaded.facts.runner_config.lockstep_redundant
        self._experts = ExpertBalance(
            loaded.executor,
            lambda: loaded.runner,  # a method would keep this object in a reference cycle
            config.redundant_experts if lockstep is None else lockstep,
            lockstep=lockstep is not None,
        )
        self._loaded = loaded

    def saved_with(self, jobs: JobMaker) -> tuple[Prefixes, Memory]:
        """See :class:`Served`."""
        loaded = self._loaded
        return SavedPrefixes(self.driver, loaded, jobs), self._memory

    def expert_load(self) -> dict[int, list[int]]:
        """See :class:`Served`."""
        self._experts.check("expert_load")
        return self.driver.between_steps(self._experts.load)

    def rebalance_experts(self) -> int:
        """See :class:`Served`."""
        self._experts.check("rebalance_experts")

        def rebalance() -> int:
            self._memory.expect_same_model("rebalance_experts")
            return self._experts.rebalance()

        return self.driver.between_steps(rebalance)

    def explain(self, memory: MemoryPlan) -> str:
        """See :class:`Served`."""
        facts = self.facts
        return explain(
            facts.config,
            facts.model_config,
            memory,
            facts.defaults,
            self._loaded.runner,
            self.warnings,
            self._loaded.other_layers,
            self.facts.device,
        )

    def model_runner(self) -> ModelRunner:
        """See :class:`Served`."""
        return self._loaded.runner

    def fork(self, **options: Any) -> ServedEngine:
        """See :class:`Served`."""
        config = fork_config(self._memory.plan, self.facts.values, **options)

        weights = self.driver.between_steps(lambda: self._loaded.runner.weights)
        return ServedEngine(fork(self._loaded, weights, config))

    def quant_report(self) -> QuantReport:
        """See :class:`Served`."""
        loaded = self._loaded
        linears = loaded.runner.model.linears()
        return quant_report(linears, self.facts.kv_scales, loaded.other_layers)
