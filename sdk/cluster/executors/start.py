"""Makes the ranks of an engine that has several: child processes, other hosts, or actors of Ray."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.api.remote_workers import RemoteWorkers
from sdk.engine.rank.runner import ModelRunner
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.executors.local import RankFactory
from sdk.kernels.lazy_torch import import_torch
from sdk.kernels.packages import missing
from sdk.loading.load import ModelFacts
from sdk.models.parallel import sent_per_step

if TYPE_CHECKING:
    from sdk.cluster.executors.process import ProcessExecutor, Workers


def make_ranks(facts: ModelFacts, own: RankFactory[ModelRunner]) -> ProcessExecutor[ModelRunner]:
    """The executor of ``facts.config.num_ranks`` ranks, not started yet. ``own`` makes rank 0's.

    Ranks of other processes read the model's files themselves.

    :raises RequestError: a package is missing.
    """
    # For the exchange between ranks, and before the modules that import it: in this thread Ctrl-C
    # could abort its import, and a cycle in it would keep the frames of our callers.
    import_torch()
    from sdk.cluster.executors.nccl import Cards, process_may_end
    from sdk.cluster.executors.process import ProcessExecutor

    config, runner_config = facts.config, facts.runner_config
    on_cards = runner_config.device != "cpu"
    return ProcessExecutor(
        ModelRunner,
        runner_config,
        config.tensor_parallel_size,
        stages=config.pipeline_parallel_size,
        sent_per_step=sent_per_step(facts.model_config.model_type),
        engines=runner_config.engines_here,
        num_threads=runner_config.num_threads,
        own_factory=own,
        workers=_workers(config, runner_config),
        cards=Cards() if on_cards else None,
        warning=process_may_end() if on_cards else None,
    )


def _workers(config: EngineConfig, runner_config: RunnerConfig) -> Callable[[], Workers]:
    """What starts the ranks other than 0."""
    if config.remote_workers is not None:
        from sdk.cluster.executors.remote.ranks import RemoteRanks

        assert isinstance(config.remote_workers, RemoteWorkers)  # EngineConfig has read it
        return partial(RemoteRanks, config.remote_workers)
    if config.distributed_executor_backend != "ray":
        from sdk.cluster.executors.children import Children

        return Children
    try:
        from sdk.cluster.executors.ray_ranks import RayRanks
    except ModuleNotFoundError as error:
        raise RequestError(
            str(missing(error, "distributed_executor_backend='ray' needs"))
        ) from error
    return partial(RayRanks, runner_config.num_threads)
