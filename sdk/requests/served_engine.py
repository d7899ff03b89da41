"""The parts of an ``LLM`` whose requests run on one engine in this process."""

from __future__ import annotations

from typing import Any

from sdk.engine.expert_balance import ExpertBalance
from sdk.engine.rank.runner import ModelRunner
from sdk.loading.explain import explain
from sdk.loading.fork import fork_config
from sdk.loading.load import Loaded, fork
from sdk.loading.quant_report import QuantReport, quant_report
from sdk.requests.adapters import Adapters, EngineResidency
from sdk.requests.driver import Driver
from sdk.requests.engine_memory import EngineMemory
from sdk.requests.monitoring import Monitoring
from sdk.requests.saved_prefixes import SavedPrefixes
from sdk.requests.served import frontend_of


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
        config = fork_config(self.memory.plan, self.facts.values, **options)

        weights = self.driver.between_steps(lambda: self._loaded.runner.weights)
        return ServedEngine(fork(self._loaded, weights, config))

    def quant_report(self) -> QuantReport:
        """See :class:`sdk.requests.served.Served`."""
        loaded = self._loaded
        linears = loaded.runner.model.linears()
        return quant_report(linears, self.facts.kv_scales, loaded.other_layers)
