"""Expert parallelism: every rank has whole experts of a layer instead of a part of each one.

The ranks of one engine read only the weights of their own experts. Engines that share the weights
in memory (:mod:`sdk.models.experts.lockstep`) have those of all experts, and each computes some of
them.
"""

from __future__ import annotations

from itertools import chain

from sdk.kernels.groups import CollectiveGroup
from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.routes import RankExperts, RankTokens
from sdk.models.experts.placement import Placement, place_experts
from sdk.models.parallel import Mesh


class ExpertShare:
    """Which experts of one layer this rank has, and what its routing needs to know.

    ``weights``: the experts whose weights this rank has, in their order. ``placement``: the experts
    that each rank computes. ``tokens``: of ranks that have weights of all experts, and tokens of
    their own.
    """

    def __init__(
        self,
        rank: int,
        group: CollectiveGroup,
        placement: Placement,
        count: int,
        layer: int,
        tokens: RankTokens | None = None,
    ) -> None:
        self.layer = layer
        self.weights = list(placement[rank] if tokens is None else range(count))
        self.routing = RankExperts(
            rank,
            group,
            len(self.weights),
            first=torch.empty(count + 1, dtype=torch.int32),
            ranks=torch.empty(sum(map(len, placement)), dtype=torch.int32),
            local=torch.empty(count, dtype=torch.int32),
            load=torch.zeros(count, dtype=torch.int64),
            tokens=tokens,
        )
        self._write(placement)

    @classmethod
    def of_rank(cls, mesh: Mesh, count: int, layer: int) -> ExpertShare:
        """The first share of a rank that reads only its own experts."""
        assert mesh.group is not None and mesh.redundant_experts is not None
        placement = place_experts([0] * count, mesh.size, mesh.redundant_experts, layer)
        return cls(mesh.rank, mesh.group, placement, count, layer)

    def arrivals(self, placement: Placement) -> list[tuple[int, int]]:
        """``(index, expert)``: what :attr:`weights` gets with another placement of the same size,
        in the place of experts that leave."""
        if self.routing.tokens is not None:
            return []
        after = placement[self.routing.rank]
        leaving = [index for index, expert in enumerate(self.weights) if expert not in after]
        return list(zip(leaving, sorted(set(after) - set(self.weights)), strict=True))

    def move(self, placement: Placement) -> None:
        """Route by another placement, once this rank has its experts."""
        for index, expert in self.arrivals(placement):
            self.weights[index] = expert
        self._write(placement)

    def _write(self, placement: Placement) -> None:
        self.placement = placement
        count = self.routing.local.shape[0]
        ranks = [[r for r, own in enumerate(placement) if e in own] for e in range(count)]
        numbers = torch.tensor([0, *map(len, ranks)], dtype=torch.int32)
        self.routing.first.copy_(numbers.cumsum(0))
        self.routing.ranks.copy_(torch.tensor(list(chain(*ranks)), dtype=torch.int32))
        self.routing.local.fill_(-1)
        own = placement[self.routing.rank]
        for number, expert in enumerate(self.weights):
            if expert in own:
                self.routing.local[expert] = number
