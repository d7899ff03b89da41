"""Engines that run their steps together, and share the work of experts: data parallel attention.

Every engine has requests, keys and values of its own, and runs attention and everything else for
their tokens alone. In a layer with experts the engines gather the tokens of all, each one computes
some of the experts, and each combines the rows of its own tokens. So a step reads an expert once
for the tokens of all engines. The engines share the weights in memory.

Before each step they exchange the numbers of their tokens. An engine without requests takes part
with none (:meth:`Lockstep.begin`), because others need the experts that it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.routes import RankTokens
from sdk.models.experts.moe import ExpertMLP
from sdk.models.experts.parallel import ExpertShare
from sdk.models.experts.placement import place_experts, rebalanced

if TYPE_CHECKING:
    from sdk.kernels.cpu.rank_group import SharedGroup
    from sdk.kernels.operators.ops import Ops


class Lockstep:
    """An engine among those that run their steps together and share the experts.

    ``rank`` of ``size`` engines, which exchange over ``group``. ``most_tokens``: of one of them in
    a step. ``row_floats``: the most numbers per token that an exchange moves. ``redundant``: copies
    of experts. ``ring``: tells the other engines that a step begins here.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        group: SharedGroup,
        *,
        most_tokens: int,
        row_floats: int,
        redundant: int,
        ring: Callable[[], None],
    ) -> None:
        starts = torch.zeros(size + 1, dtype=torch.int32)
        self.tokens = RankTokens(rank, group, starts, size * most_tokens)
        self._redundant = redundant
        #: How many experts the last rebalancing moved.
        self.num_moved = 0
        self._group = group
        self._size = size
        self._row_bytes = 4 * row_floats
        self._ring = ring
        self._layers: list[ExpertMLP] = []
        self._shares: list[ExpertShare] = []

    def share(self, layers: Mapping[int, ExpertMLP]) -> None:
        """Compute only some experts of these layers, which have the weights of all.

        Replaces the layers of an earlier call.
        """
        self._layers, self._shares = list(layers.values()), []
        for layer, mlp in layers.items():
            count = mlp.spec.count
            placement = place_experts([0] * count, self._size, self._redundant, layer)
            tokens = self.tokens
            mlp.share = ExpertShare(tokens.rank, tokens.group, placement, count, layer, tokens)
            self._shares.append(mlp.share)

    def begin(self, num_tokens: int, *, rebalance: bool = False) -> bool:
        """Begin a step with the others, which may be busy with the last one; whether any has
        tokens.

        ``rebalance``: all spread their experts anew first, by the load, which all have counted
        alike.

        :raises CollectiveError: another engine is lost.
        """
        self._ring()
        starts = self.tokens.starts
        mine = torch.tensor([num_tokens, rebalance], dtype=torch.int64)
        all_of_them = [one.tolist() for one in self._group.all_gather(mine)]
        total = 0
        for rank, (count, _) in enumerate(all_of_them):
            total += count
            starts[rank + 1] = total
        if any(asked for _, asked in all_of_them):
            self._rebalance()
        self._group.reserve(total * self._row_bytes)
        return total > 0

    def run_empty(self, ops: Ops, hidden_size: int) -> None:
        """The part of a step, operator by operator, that an engine without tokens takes part in."""
        for mlp in self._layers:
            mlp(ops.zeros(0, hidden_size))

    def _rebalance(self) -> None:
        self.num_moved = 0
        for share in self._shares:
            loads = share.routing.load.tolist()
            placement = rebalanced(share.placement, loads, self._redundant, share.layer)
            before = share.placement
            self.num_moved += sum(
                len(set(own) - set(old)) for own, old in zip(placement, before, strict=True)
            )
            share.move(placement)
            share.routing.load.zero_()
