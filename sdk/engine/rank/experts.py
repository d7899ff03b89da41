"""The experts of one rank, where every rank has whole ones: their load, and moves between ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Protocol

from sdk.engine.rank.runner_config import RunnerConfig
from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.system import SYSTEM
from sdk.models.decoder import CausalLM, Decoder
from sdk.models.experts.moe import ExpertArrival, ExpertMLP
from sdk.models.experts.parallel import ExpertShare
from sdk.models.experts.placement import Placement
from sdk.models.parallel import Mesh
from sdk.models.source import Source
from sdk.quant.checkpoint import VISION_ROOT, Checkpoint

_ONE_EXPERT = re.compile(r"\blayers\.(\d+)\..*\bexperts\.(\d+)\.")


class RankWithExperts(Protocol):
    """A rank: :class:`sdk.engine.rank.runner.ModelRunner`."""

    config: RunnerConfig
    mesh: Mesh
    ops: Ops
    model: CausalLM
    records: bool
    moving: MovingExperts | None

    def forget_graphs(self) -> None: ...

    def record(self) -> None: ...


def shares_of(model: CausalLM) -> dict[int, ExpertShare]:
    """The layers with experts that are spread over ranks."""
    return {layer: mlp.share for layer, mlp in mixtures(model).items() if mlp.share is not None}


def mixtures(model: CausalLM) -> Mapping[int, ExpertMLP]:
    """The layers with experts."""
    if not isinstance(model, Decoder):
        return {}
    blocks = zip(
        model.numbers, (getattr(layer, "mlp", None) for layer in model.layers), strict=True
    )
    return {layer: mlp for layer, mlp in blocks if isinstance(mlp, ExpertMLP)}


def unused_tensors(checkpoint: Checkpoint, model: CausalLM) -> list[str]:
    """Tensors that no rank uses: not those of experts of other ranks, and not those of the encoder
    of images, which may be left out."""
    shares = shares_of(model)

    def elsewhere(name: str) -> bool:
        if name.startswith(VISION_ROOT):
            return True
        found = _ONE_EXPERT.search(name)
        share = shares.get(int(found[1])) if found else None
        return bool(found and share and int(found[2]) < len(share.routing.local))

    return [name for name in checkpoint.unused() if not elsewhere(name)]


def all_record(mesh: Mesh, records: bool) -> bool:
    """Whether every rank can record its steps: they must all do the same, because a recorded step
    reserves the memory of its exchanges at once. Ranks differ if some experts have other formats.
    """
    if mesh.group is None or mesh.redundant_experts is None:
        return True
    return all(bool(flag) for flag in mesh.group.all_gather(torch.tensor([float(records)])))


class MovingExperts:
    """The moves of one rank, between two steps: the checkpoint, and what was loaded from it."""

    def __init__(self, runner: RankWithExperts) -> None:
        config, model = runner.config, runner.model
        self._mixtures = mixtures(model)
        self._arrivals: list[ExpertArrival] = []
        self._checkpoint = config.open_model()
        self._source = Source(
            self._checkpoint, model.config, runner.mesh, runner.ops, config.max_model_len
        )

    def load(self, layer: int, placement: Placement) -> None:
        """Load what this rank gets in one layer."""
        self._arrivals = []
        self._arrivals = self._mixtures[layer].load(self._source, placement)

    def move(self, layer: int, placement: Placement) -> int:
        """Use what was loaded, and the new placement; returns the number of experts."""
        arrivals, self._arrivals = self._arrivals, []
        self._mixtures[layer].move(arrivals, placement)
        return len(arrivals)

    def close(self) -> None:
        """Close the checkpoint."""
        self._arrivals = []
        self._checkpoint.close()


# What executors call on every rank. An exception would end the ranks, so errors are returned.


def begin_moves(runner: RankWithExperts) -> Exception | None:
    """Open the checkpoint again; why it failed."""
    try:
        runner.moving = MovingExperts(runner)
    except Exception as error:
        return error
    return None


def load_experts(runner: RankWithExperts, layer: int, placement: Placement) -> Exception | None:
    """See :meth:`MovingExperts.load`; why it failed."""
    assert runner.moving is not None
    try:
        runner.moving.load(layer, placement)
    except Exception as error:
        return error
    return None


def move_experts(runner: RankWithExperts, layer: int, placement: Placement) -> int:
    """See :meth:`MovingExperts.move`."""
    assert runner.moving is not None
    runner.forget_graphs()  # they have the addresses of experts that leave
    return runner.moving.move(layer, placement)


def end_moves(runner: RankWithExperts, begun: bool) -> None:
    """Begin to count again. If moves have ``begun``, on this rank or on another one, close the
    checkpoint and record steps again: ranks record together (:func:`all_record`)."""
    for share in shares_of(runner.model).values():
        share.routing.load.zero_()  # on all ranks: they assign rows to copies by it
    if not begun:
        return
    if runner.moving is not None:
        runner.moving.close()
        runner.moving = None
    if runner.records:
        runner.record()
    SYSTEM.trim_heap()
