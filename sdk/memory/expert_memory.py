"""Experts of a model that is larger than memory: how many stay, and what must be read.

The others are read from the cache of weights (``weight_cache=``) when a token is routed to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from sdk.api.config import EngineConfig
from sdk.api.memory_pool import MemoryPool
from sdk.kernels.dataclass import dataclass
from sdk.kernels.weights.expert_slots import slot_bytes

if TYPE_CHECKING:
    from sdk.models.configs.config import ModelConfig

#: Of the experts that are not in memory a token needs fewer than their share, because tokens that
#: follow each other choose alike: that share to this power (docs/log/memory.md has the numbers).
_ALIKE = 1.5
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
    ``least``: of how many there is room at least. ``read``: what a token needs of them."""

    total: int
    resident: int
    least: int
    read: int
    experts: int

    @property
    def missed(self) -> int:
        """Bytes that a token reads from the disk if all experts are used equally often."""
        return int(self.read * (1 - self.resident / self.total))

    @property
    def usual(self) -> int:
        """Bytes that a token usually reads from the disk, which is less."""
        return int(self.read * (1 - self.resident / self.total) ** _ALIKE)


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
