"""What a rank has of a model: a part of each layer (tensor parallelism), some layers (stages).

A rank has whole attention heads. Key/value heads are distributed first, in ranges that differ by at
most one (3 heads on 2 ranks: 1 and 2); query heads follow their key head. With more ranks than
key/value heads several ranks have the same key/value head. The MLP is split in multiples of 256 (or
the next smaller power of two that divides its width), so that no quantization group is split. The
vocabulary is split in equal ranges, of which the last may be shorter.

Each block is one column-parallel product (outputs split), work on the rank's own part, and one
row-parallel product (inputs split) whose outputs are summed over the ranks.

With several stages each one runs consecutive layers, and sends what comes out of its last one, the
residual stream, to the next stage: float32 ``[T, hidden]``. The ranks of a stage hold the same
stream, so each sends to the rank of the next stage that has the same number.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.dataclass import dataclass
from sdk.kernels.groups import CollectiveGroup, Link
from sdk.models.architecture import architecture
from sdk.quant.errors import AlignmentError


@dataclass(frozen=True, slots=True)
class HeadShard:
    """The query heads and key/value heads of one rank, as ranges ``start : start + count``.

    ``kv_copies``: the number of ranks that have the same key/value heads.
    """

    start: int
    count: int
    kv_start: int
    kv_count: int
    kv_copies: int = 1


@dataclass(frozen=True, slots=True)
class Mesh:
    """This rank among ``size`` ranks, which exchange tensors over ``group``. One rank has none.

    The ranks are those of one of ``stages`` stages. ``upstream``, ``downstream``: the links to the
    rank of the same number in the stage before and in the next one. ``redundant_experts``: ``None``
    if every rank has a part of each expert. Otherwise it has whole experts, of which this many more
    than the model has are copies (models/experts/parallel.py).
    """

    rank: int = 0
    size: int = 1
    group: CollectiveGroup | None = None
    stage: int = 0
    stages: int = 1
    upstream: Link | None = None
    downstream: Link | None = None
    redundant_experts: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"mesh: expected a rank in 0..{self.size - 1}, found {self.rank}")
        if self.size > 1 and self.group is None:
            raise ValueError(f"mesh: {self.size} ranks need a group")
        if not 0 <= self.stage < self.stages:
            raise ValueError(f"mesh: expected a stage in 0..{self.stages - 1}, found {self.stage}")
        if (self.upstream is None) != self.is_first or (self.downstream is None) != self.is_last:
            raise ValueError(f"mesh: stage {self.stage} of {self.stages} needs other links")

    @property
    def is_first(self) -> bool:
        """Whether the embedding is here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether the final norm and the head are here."""
        return self.stage == self.stages - 1

    @property
    def number(self) -> int:
        """This rank among those of all stages, numbered from the last stage on."""
        return (self.stages - 1 - self.stage) * self.size + self.rank

    @property
    def samples(self) -> bool:
        """Whether this rank draws tokens: the first one of the last stage."""
        return self.is_last and self.rank == 0

    @property
    def waited_seconds(self) -> float:
        """How long the rank has waited for its neighbours so far."""
        links = self.upstream, self.downstream
        return sum(link.waited_seconds for link in links if link is not None)

    def reserve(self, nbytes: int) -> None:
        """Make room for transfers of this size. All ranks call it."""
        for link in (self.upstream, self.downstream):
            if link is not None:
                link.reserve(nbytes)

    def heads(self, num_heads: int, num_kv_heads: int) -> HeadShard:
        """This rank's attention heads.

        :raises AlignmentError: not every rank would have heads.
        """
        if num_kv_heads >= self.size:
            group = num_heads // num_kv_heads
            start, end = self._run(num_kv_heads)
            return HeadShard(start * group, (end - start) * group, start, end - start)
        if self.size % num_kv_heads or num_heads % self.size:
            raise AlignmentError(
                f"cannot split {num_heads} query and {num_kv_heads} key/value heads over "
                f"{self.size} ranks: expected a tensor parallel size of at most {num_kv_heads}, or "
                f"a multiple of it that divides {num_heads}"
            )
        count = num_heads // self.size
        copies = self.size // num_kv_heads
        return HeadShard(self.rank * count, count, self.rank // copies, 1, copies)

    def columns(self, width: int) -> tuple[int, int]:
        """This rank's range ``(start, count)`` of an MLP's ``width`` features."""
        unit = 256
        while width % unit or width // unit < self.size:
            if unit == 1:
                raise AlignmentError(f"cannot split {width} features over {self.size} ranks")
            unit //= 2
        start, end = self._run(width // unit)
        return start * unit, (end - start) * unit

    def vocabulary(self, size: int) -> tuple[int, int]:
        """This rank's range ``(start, count)`` of the vocabulary."""
        step = -(-size // self.size)
        start = self.rank * step
        if (self.size - 1) * step >= size:
            raise AlignmentError(f"cannot split a vocabulary of {size} over {self.size} ranks")
        return start, min(step, size - start)

    def _run(self, count: int) -> tuple[int, int]:
        return self.rank * count // self.size, (self.rank + 1) * count // self.size


def sent_per_step(model_type: str) -> int:
    """How many tensors ``[tokens, hidden]``, or a rank's part of one, a stage sends on: its
    residual stream and, if all layers read them, the values of the first layer."""
    own = architecture(model_type)
    return 2 if own is not None and own.layer.value_residual else 1


def split_layers(costs: Sequence[float], stages: int, last: float = 0.0) -> tuple[range, ...]:
    """Consecutive layers for each stage, so that the most expensive stage costs the least.

    ``costs``: of the layers. ``last``: what the last stage costs in addition to its layers. Every
    stage has at least one layer. Of equal divisions, the one whose later stages have fewer layers.

    :raises AlignmentError: there are fewer layers than stages.
    """
    count = len(costs)
    if count < stages:
        raise AlignmentError(f"cannot split {count} layers over {stages} stages")
    # best[i]: the best division of the first i layers over the stages so far, and its largest cost
    best: list[tuple[float, list[range]]] = [(sum(costs[:i]), [range(i)]) for i in range(count + 1)]
    for stage in range(1, stages):
        extra = last if stage == stages - 1 else 0.0
        known = best
        best = [(float("inf"), [])] * (count + 1)
        for end in range(stage + 1, count + 1):
            for begin in range(stage, end):
                cost = max(known[begin][0], sum(costs[begin:end]) + extra)
                if cost <= best[end][0]:
                    best[end] = cost, [*known[begin][1], range(begin, end)]
    return tuple(best[count][1])
