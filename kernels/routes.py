"""Which rows of a step belong to which expert of a mixture of experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Routes:
    """The experts of a step's T tokens, k per token, which gives R = T * k rows sorted by expert.

    ``weights`` is float32 ``[T, k]``, everything else int32. ``places [T, k]``: the row of a
    token's j-th expert. ``tokens [R]`` and ``owners [R]``: the token and the expert of each row.
    Expert e has the rows ``starts[e] : starts[e + 1]``, with ``starts [E + 1]``. ``active [E + 1]``
    lists the experts that have rows; its last element is their number.
    """

    weights: Tensor
    places: Tensor
    tokens: Tensor
    owners: Tensor
    starts: Tensor
    active: Tensor

    def parts(self, x: Tensor, by_token: bool) -> Iterator[tuple[int, slice, Tensor]]:
        """Each expert that has rows, the slice of its rows, and these rows of x.

        x is ``[T, K]`` (``by_token``) or ``[R, K]`` in the order of the experts. It reads the
        values, so it cannot be recorded.
        """
        if by_token:
            x = x[self.tokens.long()]
        starts = self.starts.tolist()
        for expert in self.active[: int(self.active[-1])].tolist():
            rows = slice(starts[expert], starts[expert + 1])
            yield expert, rows, x[rows]
