"""Expert parallelism: every rank has whole experts of a layer instead of a part of each one."""

from __future__ import annotations

from itertools import chain

import torch

from sdk.kernels.routes import RankExperts
from sdk.models.expert_placement import Placement, place_experts
from sdk.models.parallel import Mesh


class ExpertShare:
    """Which experts of one layer this rank has, and what its routing needs to know.

    ``own``: the experts of this rank, in the order of its weights. ``placement``: those of all.
    """

    def __init__(self, mesh: Mesh, count: int, layer: int) -> None:
        assert mesh.group is not None and mesh.redundant_experts is not None
        placement = place_experts([0] * count, mesh.size, mesh.redundant_experts, layer)
        self.layer = layer
        self.own = list(placement[mesh.rank])
        copies = count + mesh.redundant_experts
        self.routing = RankExperts(
            mesh.rank,
            mesh.group,
            len(self.own),
            first=torch.empty(count + 1, dtype=torch.int32),
            ranks=torch.empty(copies, dtype=torch.int32),
            local=torch.empty(count, dtype=torch.int32),
            load=torch.zeros(count, dtype=torch.int64),
        )
        self._write(placement)

    def arrivals(self, placement: Placement) -> list[tuple[int, int]]:
        """``(index, expert)``: what :attr:`own` gets with another placement of the same size, in
        the place of experts that leave."""
        after = placement[self.routing.rank]
        leaving = [index for index, expert in enumerate(self.own) if expert not in after]
        return list(zip(leaving, sorted(set(after) - set(self.own)), strict=True))

    def move(self, placement: Placement) -> None:
        """Route by another placement, once this rank has its experts."""
        for index, expert in self.arrivals(placement):
            self.own[index] = expert
        self._write(placement)

    def _write(self, placement: Placement) -> None:
        self.placement = placement
        count = self.routing.local.shape[0]
        ranks = [[r for r, own in enumerate(placement) if e in own] for e in range(count)]
        numbers = torch.tensor([0, *map(len, ranks)], dtype=torch.int32)
        self.routing.first.copy_(numbers.cumsum(0))
        self.routing.ranks.copy_(torch.tensor(list(chain(*ranks)), dtype=torch.int32))
        self.routing.local.fill_(-1)
        self.routing.local[self.own] = torch.arange(len(self.own), dtype=torch.int32)
