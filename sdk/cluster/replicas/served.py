"""The parts of an ``LLM`` whose requests run on replicas."""

from __future__ import annotations

from dataclasses import replace
from os import PathLike
from typing import Any

from sdk.api.config import EngineConfig
from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.api.load_progress import reporting
from sdk.api.lora import KnownAdapter, LoRARequest
from sdk.api.sizes import parse_bytes
from sdk.cluster.replicas.replica_set import ReplicaSet
from sdk.cluster.replicas.totals import total_stats
from sdk.engine.rank.runner import ModelRunner
from sdk.engine.running_requests import RequestInfo
from sdk.engine.snapshot import Snapshot
from sdk.kernels.system import SYSTEM
from sdk.loading.alternatives import checked_plan
from sdk.loading.load import ModelFacts, read_facts
from sdk.loading.quant_report import QuantReport
from sdk.memory.plan import MemoryPlan
from sdk.memory.resolve import open_model, threads_of
from sdk.metrics.slo import SLO
from sdk.metrics.stats import EngineStats
from sdk.metrics.trace import Trace
from sdk.requests.adapters import Adapters
from sdk.requests.prompts.reader import Prompt
from sdk.requests.served import Served, frontend_of


def replica_config(config: EngineConfig, memory: MemoryPlan) -> EngineConfig:
    """The options of each replica: its part of the threads and of the memory."""
    spread = config.lockstep_engines == 1  # over the ranks of each replica, if at all
    return replace(
        config,
        data_parallel_size=1,
        prefill_replicas=0,
        enable_expert_parallel=config.enable_expert_parallel and spread,
        num_redundant_experts=config.num_redundant_experts if spread else 0,
        num_threads=max(threads_of(config) // config.data_parallel_size, 1),
        memory=None,
        kv_cache_memory_bytes=memory.kv_cache,
        max_model_len=memory.max_model_len,
        max_waiting=None,
        on_progress=None,
        image_fetcher=None,  # prompts are read here
    )


class ServedReplicas:
    """See :class:`sdk.requests.served.Served`: every replica is an ``LLM`` with one engine."""

    def __init__(self, config: EngineConfig) -> None:
        checkpoint = open_model(config)
        try:
            memory = checked_plan(config, checkpoint)
            self.facts = read_facts(config, checkpoint, memory)
        finally:
            checkpoint.close()
        SYSTEM.trim_heap()
        with reporting("load", "B", config.on_progress) as report:
            own = replica_config(config, memory)
            self.driver = ReplicaSet(config, own, threads_of(config), report)
        self.config, self.model_config = config, self.facts.model_config
        open_adapter = self._open_adapter if config.enable_lora else None
        self.frontend = frontend_of(self.facts, Adapters(open_adapter, _Residency(self.driver)))
        self.prefixes = _Prefixes(self.driver, memory.page_size)
        self.memory = _Memory(self.driver, self.facts)
        self.monitoring = _Monitoring(self.driver)

    @property
    def warnings(self) -> tuple[str, ...]:
        """See :class:`sdk.requests.served.Served`."""
        return self.driver.warnings

    def expert_load(self) -> dict[int, list[int]]:
        """See :class:`sdk.requests.served.Served`: of all replicas together."""
        if self._in_lockstep:  # each counts the tokens of all
            found: dict[int, list[int]] = self.driver.call_one(0, "", "expert_load")
            return found
        parts: list[dict[int, list[int]]] = self.driver.call_all("", "expert_load")
        return {
            layer: [sum(counts) for counts in zip(*(part[layer] for part in parts), strict=True)]
            for layer in parts[0]
        }

    def rebalance_experts(self) -> int:
        """See :class:`sdk.requests.served.Served`: each replica by its own load, unless they share
        the experts."""
        if self._in_lockstep:
            moved: int = self.driver.call_one(0, "", "rebalance_experts")
            return moved
        return sum(self.driver.call_all("", "rebalance_experts"))

    @property
    def _in_lockstep(self) -> bool:
        return self.facts.config.lockstep_engines > 1

    def model_runner(self) -> ModelRunner:
        """See :class:`sdk.requests.served.Served`."""
        raise RequestError("with data_parallel_size > 1 the ranks are in other processes")

    def explain(self) -> str:
        """See :class:`sdk.requests.served.Served`."""
        count = self.facts.config.data_parallel_size
        first: str = self.driver.call_one(0, "", "explain")
        return f"replicas   {count}, in processes of their own; this is the first one:\n{first}"

    def fork(self, **options: Any) -> Served:
        """See :class:`sdk.requests.served.Served`."""
        raise RequestError(
            "fork: the weights of this LLM are in other processes (data_parallel_size > 1)"
        )

    def quant_report(self) -> QuantReport:
        """See :class:`sdk.requests.served.Served`."""
        found: QuantReport = self.driver.call_one(0, "", "quant_report")
        return found

    def _open_adapter(self, request: LoRARequest) -> KnownAdapter:
        """A replica checks the files against the model; all read them when a request needs them."""
        opened = self.driver.call_one(0, "calls", "describe_adapter", request)
        return KnownAdapter(**opened, read=_read_elsewhere)


def _read_elsewhere() -> Any:
    raise RequestError("an adapter of replicas is read by them")


class _Residency:
    """See :class:`sdk.requests.adapters.Residency`."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    def load(self, adapter: KnownAdapter, *, pin: bool) -> None:
        key = "adapter", adapter.name
        self._replicas.call_always(key, "calls", "load_adapter", adapter.lora_request, pin)

    def remove(self, adapter: KnownAdapter) -> None:
        self._replicas.call_no_more(("adapter", adapter.name))
        self._replicas.call_all("", "remove_lora", adapter.name)

    def state(self, adapter: KnownAdapter) -> tuple[bool, bool, int]:
        states = self._replicas.call_all("calls", "adapter_state", adapter.name)
        return any(s[0] for s in states), any(s[1] for s in states), sum(s[2] for s in states)


class _Monitoring:
    """See :class:`sdk.requests.served.Monitor`."""

    def __init__(self, replicas: ReplicaSet) -> None:
        self._replicas = replicas

    def metrics(self) -> dict[str, float]:
        self._replicas.check_usable()
        return dict(self.stats().metrics)

    def stats(self) -> EngineStats:
        # the requests of the first ones are the prompts of the others' requests
        first, others = self._replicas.alive()
        found = total_stats(self._replicas.call_each(others, "", "stats"))
        prompts = 0.0
        if first:
            parts = self._replicas.call_each(first, "", "get_metrics")
            prompts = sum(one["num_prompt_tokens"] for one in parts)
        counts = {
            "num_prompt_tokens": found.metrics["num_prompt_tokens"] + prompts,
            "num_hand_overs": self._replicas.num_hand_overs,
            "num_hand_overs_failed": self._replicas.num_failed_hand_overs,
            "num_replicas": self._replicas.processes.num_ready,
            "num_replicas_replaced": self._replicas.processes.num_replaced,
        }
        return replace(found, metrics={**found.metrics, **counts})

    def set_slo(self, slo: SLO | str | None) -> None:
        self._replicas.call_always("slo", "", "set_slo", slo)

    def list_requests(self) -> list[RequestInfo]:
        found = [one for part in self._replicas.call_all("", "list_requests") for one in part]
        return sorted(found, key=lambda one: -one.age)

    def trace(self, path: str | PathLike[str]) -> Trace:
        raise RequestError(
            "trace: with data_parallel_size > 1 the steps run in other processes; trace the same "
            "load with data_parallel_size=1"
        )

    def close(self) -> None:
        """Nothing: there is no trace."""


class _Prefixes:
    """See :class:`sdk.requests.served.Prefixes`. Every replica keeps what is pinned."""

    def __init__(self, replicas: ReplicaSet, page_size: int) -> None:
        self._replicas = replicas
        self._page_size = page_size

    def _key(self, token_ids: tuple[int, ...], salt: str | None, adapter: str | None) -> Any:
        """The key of a pin, which holds whole pages."""
        whole = len(token_ids) // self._page_size * self._page_size
        return "pin", token_ids[:whole], salt, adapter

    def _key_of(self, prompt: Prompt) -> Any:
        adapter = None if prompt.adapter is None else prompt.adapter.key
        return self._key(tuple(prompt.token_ids), prompt.cache_salt, adapter)

    def snapshot(self, prompt: Prompt) -> Snapshot:
        found: Snapshot = self._replicas.call_one(0, "_prefixes", "snapshot", prompt)
        return found

    def snapshot_of(self, request_id: str) -> Snapshot:
        number = self._replicas.replica_of(request_id)
        found: Snapshot = self._replicas.call_one(number, "_prefixes", "snapshot_of", request_id)
        return found

    def restore(
        self, source: Snapshot | str | PathLike[str], salt: str | None, *, pin: bool
    ) -> int:
        call = "calls", "restore", source, salt, pin
        if not pin:
            found: list[int] = self._replicas.call_all(*call)
            return min(found)
        snapshot = source if isinstance(source, Snapshot) else Snapshot.load(source)
        key = self._key(tuple(snapshot.token_ids), salt, None)
        return int(min(self._replicas.call_always(key, *call)))

    def pin(self, prompt: Prompt) -> int:
        args = _without_adapter(prompt)
        found: list[int] = self._replicas.call_always(self._key_of(prompt), "calls", "pin", *args)
        return min(found)

    def unpin(self, prompt: Prompt) -> bool:
        self._replicas.call_no_more(self._key_of(prompt))
        return any(self._replicas.call_all("calls", "unpin", *_without_adapter(prompt)))

    def forget(self) -> bool:
        return all(self._replicas.call_all("_prefixes", "forget"))


def _without_adapter(prompt: Prompt) -> tuple[Prompt, LoRARequest | None]:
    if prompt.adapter is None:
        return prompt, None
    return replace(prompt, adapter=None), prompt.adapter.lora_request


class _Memory:
    """See :class:`sdk.requests.served.Memory`."""

    def __init__(self, replicas: ReplicaSet, facts: ModelFacts) -> None:
        self.plan = facts.plan
        self._replicas = replicas

    def hold_vocabulary(self) -> None:
        """Nothing: a replica does it with its first structure."""

    def trim(self) -> None:
        self._replicas.call_all("", "trim")
        SYSTEM.trim_heap()

    def resize(self, memory: int | str) -> MemoryPlan:
        budget, plan = parse_bytes(memory, "resize"), self.plan
        others = (plan.replicas - 1) * plan.shared
        own = (budget + others) // plan.replicas
        if plan.config is not None and plan.config.prefill_replicas:
            own -= plan.hand_over  # replicas do not know of it
        if own <= plan.shared:
            raise OutOfMemoryError(
                f"resize: {budget} bytes leave no room for {plan.replicas} replicas, which take "
                f"{plan.total - plan.replicas * plan.kv_cache} without their KV caches"
            )
        found: list[MemoryPlan] = self._replicas.call_always("resize", "", "resize", own)
        self.plan = replace(plan, budget=budget, num_pages=min(one.num_pages for one in found))
        return self.plan

    def sleep(self, level: int) -> None:
        self._replicas.sleep(f"this LLM sleeps (level {level}): call wake_up() first")
        try:
            if self._replicas.has_work:
                raise RequestError("sleep: requests are unfinished: wait for them or abort() them")
            self._replicas.call_always("sleep", "", "sleep", level)
        except BaseException:
            self.wake_up()  # those that sleep already
            raise

    def wake_up(self) -> None:
        self._replicas.call_no_more("sleep")
        self._replicas.call_all("", "wake_up")
        self._replicas.sleep("")
