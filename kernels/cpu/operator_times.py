"""Where the time of a recorded program goes: ``native/operator_times.hpp``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sdk.kernels.cpu.library import Count, OpKind, WeightView


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """An operator and the seconds of all threads together that it took.

    ``rows``: its row-wise part, which for a product quantizes activations; ``tiles``: the rest.
    ``over``: what it runs over. ``weight``: of a product.
    """

    kind: OpKind
    over: Count
    weight: WeightView | None
    rows: float
    tiles: float


@dataclass(frozen=True, slots=True)
class ProgramTimes:
    """The operators in the order in which they run; ``seconds`` of wall time for all ``runs``."""

    operators: Sequence[OperatorTime]
    seconds: float
    runs: int
