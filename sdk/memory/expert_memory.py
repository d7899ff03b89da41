"""Experts of a model that is larger than memory: how many stay, and what must be read.

The others are read from the cache of weights (``weight_cache=``) when a token is routed to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.config import EngineConfig
from sdk.api.errors import CheckpointError
from sdk.api.memory_pool import MemoryPool
from sdk.kernels.dataclass import dataclass
from sdk.kernels.weights.expert_slots import slot_bytes

if TYPE_CHECKING:
    from sdk.models.configs.config import ModelConfig

#: Of the experts that are not in memory a token needs fewer than their share, because tokens that
#: follow each other choose alike: that share to this power (docs/log/memory.md has the numbers).
_ALIKE = 1.5
#: Bytes read for each byte that counted uses predict to be missed: 1.2 to 1.4 were measured, for
#: wrong guesses and the experts that they push out (the same log).
_GUESSED = 1.3
#: Matrices of each size that have a slot in addition to those of a token's experts: for what is
#: read ahead.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ExpertBytes:
    """The experts of a model.

    ``matrices``: how many there are by their bytes: of an expert, what widens its input is one
    matrix (gate and up), and what narrows it another. ``stacks``: the bytes of those of one layer,
    of each size. ``read``: what a token reads.
    """

    matrices: Mapping[int, int]
    stacks: int
    read: int

    @property
    def total(self) -> int:
        return sum(size * count for size, count in self.matrices.items())


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """Of all ``total`` bytes of the ``experts`` of all layers ``resident`` stay in memory.
    ``least``: of how many there is room at least. ``read``: what a token needs of them.

    ``counted``: tokens whose experts were counted in earlier runs. ``curve``: from these counts the
    share of uses that is missed with 0, 1 / n, 2 / n ... 1 of the experts in memory; empty: too few
    tokens were ranked.
    """

    total: int
    resident: int
    least: int
    read: int
    experts: int
    counted: int = 0
    curve: tuple[float, ...] = ()

    @property
    def missed(self) -> int:
        """Bytes that a token reads from the disk if all experts are used equally often."""
        return int(self.read * (1 - self.resident / self.total))

    @property
    def usual(self) -> int:
        """Bytes that a token usually reads from the disk, by :attr:`basis`."""
        share = self.resident / self.total
        if not self.curve:
            return int(self.read * (1 - share) ** _ALIKE)
        place = min(share, 1.0) * (len(self.curve) - 1)
        low = min(int(place), len(self.curve) - 2)
        missed = self.curve[low] + (place - low) * (self.curve[low + 1] - self.curve[low])
        return int(self.read * missed * _GUESSED)

    @property
    def basis(self) -> str:
        """What :attr:`usual` and so the speed of a plan assume."""
        if self.curve:
            return f"as the last {self.counted} tokens used them"
        return "if all are used about equally often"


def with_uses(
    share: ExpertShare, path: Path, quantization: str | None, overrides: Mapping[str, Any]
) -> ExpertShare:
    """The share with what is known of the experts' uses from earlier runs."""
    from sdk.engine.weight_cache.expert_uses import read_uses, uses_name
    from sdk.engine.weight_cache.folder import weights_folder

    try:
        known = read_uses(weights_folder(), uses_name(path, quantization, overrides))
    except (CheckpointError, RuntimeError):  # the model has no file, or this user no home
        return share
    if known is None or sum(map(len, known.chosen)) != share.experts:
        return share
    return replace(share, counted=known.tokens, curve=known.missed())


def why_all_stay(config: EngineConfig, model: ModelConfig) -> str:
    """Why experts cannot be read when they are needed; empty: they can, with a cache of weights."""
    reasons = {
        "the model has no experts": model.experts is None,
        "weights are on a GPU": config.device == "cuda",
        "several ranks (tensor_parallel_size, pipeline_parallel_size) have parts of them": (
            config.num_ranks > 1
        ),
        "several replicas (data_parallel_size) share them": config.data_parallel_size > 1,
        "a memory pool counts all weights": isinstance(config.memory, MemoryPool),
        "disk_offload has a file of its own": bool(config.disk_offload),
    }
    return next((reason for reason, is_so in reasons.items() if is_so), "")


def least_bytes(experts: ExpertBytes, per_token: int, threads: int) -> tuple[int, int]:
    """The fewest matrices of each size that must have a slot: those of a token's experts in one
    layer, and one for each thread; and the bytes of these slots."""
    least = max(per_token, threads + 1) + _AHEAD
    slots = (slot_bytes(size) * min(least, count) for size, count in experts.matrices.items())
    return least, sum(slots)
