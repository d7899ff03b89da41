"""Which rows of a step belong to which expert of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator

from sdk.kernels.dataclass import dataclass
from sdk.kernels.groups import CollectiveGroup
from sdk.kernels.lazy_torch import Tensor

#: Rows of the tiles into which ``Routes.tiles`` divides the rows of experts.
TILE_ROWS = (16, 32, 64, 128)


def tiles_at(rows: int, experts: int, size: int) -> int:
    """Where the tiles of ``size`` rows begin in ``Routes.tiles``; after the last size: its end."""
    return sum(1 + most_tiles(rows, experts, s) for s in TILE_ROWS if s < size)


def most_tiles(rows: int, experts: int, size: int) -> int:
    """The largest number of tiles of ``size`` rows, however so many rows are routed."""
    return rows // size + min(rows, experts)


@dataclass(frozen=True, slots=True)
class RankTokens:
    """Where every rank has tokens of its own in a step: data parallel attention.

    ``starts`` int32 ``[ranks + 1]``, on the CPU and changed in place before each step: rank r has
    the tokens ``starts[r] : starts[r + 1]`` of all. ``most``: of all ranks together.
    """

    rank: int
    group: CollectiveGroup
    starts: Tensor
    most: int


@dataclass(frozen=True, slots=True)
class RankExperts:
    """Which ranks have which of a layer's E experts, where every rank has whole experts.

    Several ranks may have copies of an expert: the n-th row of the expert since its counter in
    ``load`` was zero goes to the ``n % copies``-th of them. All ranks see all rows, so they agree.
    The tensors are on the CPU and are changed in place. ``first`` int32 ``[E + 1]`` and ``ranks``
    int32: expert e is on the ranks ``ranks[first[e] : first[e + 1]]``. ``local`` int32 ``[E]``: its
    number among the ``count`` experts of this rank, or -1. ``load`` int64 ``[E]``: its rows so far.
    ``tokens``: whose they are; ``None``: all ranks have all tokens.
    """

    rank: int
    group: CollectiveGroup
    count: int
    first: Tensor
    ranks: Tensor
    local: Tensor
    load: Tensor
    tokens: RankTokens | None = None


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of a step's T tokens, k per token, which gives R = T * k rows sorted by expert.

    ``weights`` is float32 ``[T, k]``, everything else int32. ``places [T, k]``: the row of a
    token's j-th expert. ``tokens [R]`` and ``owners [R]``: the token and the expert of each row.
    Expert e has the rows ``starts[e] : starts[e + 1]``, with ``starts [E + 1]``. ``active [E + 1]``
    lists the experts that have rows; its last element is their number.

    ``tiles [.., 2]``, for kernels that multiply tiles of rows, from a ``group`` operator that
    ``writes_tiles``: for each size of :data:`TILE_ROWS`, at :func:`tiles_at`, their number (and a
    place without a value), then the expert and the first row of each, by expert and row. Places
    behind have no values.

    ``experts``: where the experts are if every rank has whole ones. E is then the number of those
    of this rank, and its rows are the first ``starts[E]`` of the R; the other rows, and ``tokens``
    and ``owners`` of them, have no values. ``places`` is -1 for a row of another rank. ``servers``
    int32 ``[T, k]``: the rank of each row. If ranks have tokens of their own, T are those of all.
    """

    weights: Tensor
    places: Tensor
    tokens: Tensor
    owners: Tensor
    starts: Tensor
    active: Tensor
    experts: RankExperts | None = None
    servers: Tensor | None = None
    tiles: Tensor | None = None

    @property
    def used(self) -> Tensor | None:
        """The number of rows that have values, int32 ``[1]``; ``None``: all of them."""
        return None if self.experts is None else self.starts[-1:]

    def parts(self, x: Tensor, by_token: bool) -> Iterator[tuple[int, slice, Tensor]]:
        """Each expert that has rows, the slice of its rows, and these rows of x.

        x is ``[T, K]`` (``by_token``) or ``[R, K]`` in the order of the experts. It reads the
        values, so it cannot be recorded.
        """
        starts = self.starts.tolist()
        if by_token:
            x = x[self.tokens[: starts[-1]].long()]
        for expert in self.active[: int(self.active[-1])].tolist():
            rows = slice(starts[expert], starts[expert + 1])
            yield expert, rows, x[rows]
