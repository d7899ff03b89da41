"""Balances the experts of a mixture over the ranks, by the rows that were routed to each."""

from __future__ import annotations

from collections.abc import Callable
from operator import methodcaller

from sdk.api.errors import RequestError
from sdk.engine.executor import Executor
from sdk.engine.rank.experts import (
    RankWithExperts,
    begin_moves,
    end_moves,
    load_experts,
    move_experts,
    shares_of,
)
from sdk.models.experts.placement import rebalanced


class ExpertBalance:
    """Reads loads and moves experts between two steps. ``own_rank``: rank 0, in this process.

    ``redundant``: copies of experts in each layer; ``None``: experts are not spread over ranks.
    ``lockstep``: experts are spread over engines that have the weights of all.
    """

    def __init__(
        self,
        executor: Executor,
        own_rank: Callable[[], RankWithExperts],
        redundant: int | None,
        *,
        lockstep: bool = False,
    ) -> None:
        self._lockstep = lockstep
        self._executor = executor
        self._own_rank = own_rank
        self._redundant = redundant

    def check(self, what: str) -> int:
        """:raises RequestError: this engine does not spread experts over ranks."""
        if self._redundant is None:
            raise RequestError(
                f"{what} needs enable_expert_parallel=True and a tensor_parallel_size or "
                "data_parallel_size of at least 2"
            )
        return self._redundant

    def load(self) -> dict[int, list[int]]:
        """See :meth:`sdk.LLM.expert_load`."""
        shares = shares_of(self._own_rank().model)
        return {layer: share.routing.load.tolist() for layer, share in shares.items()}

    def rebalance(self) -> int:
        """See :meth:`sdk.LLM.rebalance_experts`. Raises what a rank raised while it loaded; layers
        after that one stay as they are."""
        redundant = self.check("rebalance_experts")
        if self._lockstep:
            return int(self._executor.on_ranks(methodcaller("join_step", rebalance=True))[0])
        wanted = {}
        for layer, share in shares_of(self._own_rank().model).items():
            loads = share.routing.load.tolist()
            placement = rebalanced(share.placement, loads, redundant, layer)
            if placement != share.placement:
                wanted[layer] = placement
        moved = 0
        try:
            if wanted:
                self._all_succeed(self._executor.on_ranks(begin_moves))
            for layer, placement in wanted.items():
                self._all_succeed(self._executor.on_ranks(load_experts, layer, placement))
                moved += sum(self._executor.on_ranks(move_experts, layer, placement))
        finally:
            self._executor.on_ranks(end_moves, bool(wanted))
        return moved

    @staticmethod
    def _all_succeed(answers: list[Exception | None]) -> None:
        for error in answers:
            if error is not None:
                raise error
