"""Where the time of a recorded program goes: ``native/operator_times.hpp``."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.cpu.library import Count, OpKind, WeightView
from sdk.kernels.dataclass import dataclass

#: Bytes per number of each element type of native/abi.hpp, for those below one byte too.
_ELEMENT_BYTES = {
    **dict.fromkeys((0, 1), 2.0),
    2: 4.0,
    **dict.fromkeys((3, 4, 5, 6, 9), 1.0),
    **dict.fromkeys((7, 8, 12), 0.5),
    11: 0.25,
    13: 0.75,
}


def weight_bytes(w: WeightView) -> float:
    """Bytes of codes and scales that a product of any number of rows reads."""
    rows = 16 * w.row_blocks
    if w.dense:
        values = rows * w.k * _ELEMENT_BYTES[w.scale_type]
        return float(values + (4 * rows / w.scale_blocks * w.groups if w.scale else 0))
    groups = supers = 0.0
    for part, kind in ((w.scale, w.scale_type), (w.minus, w.minus_type), (w.zeros, w.zeros_type)):
        groups += _ELEMENT_BYTES[kind] if part else 0
    for part, kind in ((w.super_scale, w.super_type), (w.super_minus, 0)):
        supers += _ELEMENT_BYTES[kind] if part else 0
    codes = w.row_blocks * w.k_blocks * 64 * w.bits
    return float(codes + rows * (w.groups * groups + w.supers * supers))


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """An operator and the seconds of all threads together that it took.

    ``rows``: its row-wise part, which for a product quantizes activations; ``tiles``: the rest.
    ``over``: what it runs over. ``weight``: of a product; with ``parts`` above 1 that of the first
    expert or head, of which a row is multiplied by ``per``.
    """

    kind: OpKind
    over: Count
    weight: WeightView | None
    rows: float
    tiles: float
    parts: int = 1
    per: int = 1


@dataclass(frozen=True, slots=True)
class ProgramTimes:
    """The operators in the order in which they run; ``seconds`` of wall time for all ``runs``."""

    operators: Sequence[OperatorTime]
    seconds: float
    runs: int
