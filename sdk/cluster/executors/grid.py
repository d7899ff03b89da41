"""Where the ranks of one executor are: which stage, and which rank of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sdk.cluster.executors.groups import RankGroup, Transport, connect
from sdk.cluster.executors.nccl import Cards
from sdk.cluster.executors.torch_group import TorchGroup, TorchLink
from sdk.kernels.cpu.rank_group import SharedGroup, SharedLink
from sdk.models.parallel import Mesh


@dataclass(frozen=True, slots=True)
class Grid:
    """``stages`` stages of ``width`` ranks each.

    Ranks are numbered from the last stage on, because rank 0, the process of the host, samples.
    """

    width: int = 1
    stages: int = 1
    #: Such grids that compute on this machine at the same time.
    engines: int = 1
    #: The GPUs of the ranks; ``None``: they are on CPUs.
    cards: Cards | None = None
    #: How many tensors a stage sends on in each step.
    sent_per_step: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.width * self.stages

    @property
    def processes(self) -> int:
        """How many ranks compute on this machine."""
        return self.size * self.engines

    def stage(self, rank: int) -> int:
        """The stage of a rank."""
        return self.stages - 1 - rank // self.width

    def name(self, rank: int) -> str:
        """A rank in messages."""
        return f"rank {rank}" + (f" (stage {self.stage(rank)})" if self.stages > 1 else "")

    def join(
        self, rank: int, kind: Transport, folder: str, *, connect_s: float, limit_s: float
    ) -> tuple[Mesh, list[RankGroup]]:
        """Connect a rank to its neighbours, which meet in ``folder``; all ranks call it.

        Returns its mesh, and what has to be closed.

        :raises CollectiveError: the others do not connect in time.
        """
        stage, number = self.stage(rank), rank % self.width
        times = {"connect_s": connect_s, "limit_s": limit_s}
        group: SharedGroup | TorchGroup | None = None
        if self.width > 1:
            own = folder if kind == "tcp" else _made(folder, f"stage-{stage}")
            if self.cards is not None:
                card = self.cards.of(rank)
                group = self.cards.connect(own, number, self.width, card=card, connect_s=connect_s)
            else:
                group = connect(kind, own, number, self.width, processes=self.processes, **times)
        ends: list[SharedLink | TorchLink | None] = [None, None]
        # stage 0 waits only for stage 1, which then waits for stage 2, and so on
        for index, first in enumerate((stage - 1, stage)):
            if 0 <= first < self.stages - 1:
                ends[index] = self._link(
                    rank, _made(folder, f"link-{first}-{number}"), sends=index == 1, **times
                )
        upstream, downstream = ends
        mesh = Mesh(number, self.width, group, stage, self.stages, upstream, downstream)
        return mesh, [each for each in (group, upstream, downstream) if each is not None]

    def _link(
        self, rank: int, folder: str, *, sends: bool, connect_s: float, limit_s: float
    ) -> SharedLink | TorchLink:
        if self.cards is not None:
            card = self.cards.of(rank)
            return self.cards.link(folder, sends=sends, card=card, connect_s=connect_s)
        return SharedLink(
            folder,
            sends=sends,
            slots=self.stages * self.sent_per_step,  # there are as many steps in flight as stages
            processes=self.processes,
            connect_s=connect_s,
            limit_s=limit_s,
        )


def _made(folder: str, name: str) -> str:
    path = Path(folder, name)
    path.mkdir(mode=0o700, exist_ok=True)
    return str(path)
