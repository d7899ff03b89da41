"""The rows of `bench gpu` in the order they are measured, and their findings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Row:
    """One row: ``function`` in this folder's ``module`` yields findings, within ``seconds``, or
    more if there is time.

    A row that takes longer is ended with its process; the others run in a new one. ``rehearsed``:
    whether it has kernels that no earlier row has. ``usual``: whether it is measured though no rows
    are named; others need a compiler or a scheduler of their own, which takes long.
    """

    name: str
    module: str
    function: str
    seconds: int
    rehearsed: bool = True
    usual: bool = True


@dataclass(frozen=True, slots=True)
class Finding:
    """``value`` times the baseline ``against``, or a share of it if ``unit`` is ``%``.

    ``floor`` and ``goal`` are values to reach, or with ``least`` to stay below. ``numbers`` are the
    measurements behind it. A finding without a value has the reason in ``note``.
    """

    what: str
    against: str
    value: float | None
    unit: str = "x"
    floor: float | None = None
    goal: float | None = None
    least: bool = False
    note: str = ""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def key(self) -> str:
        """The name of its prediction."""
        return f"{self.what}|{self.against}"

    @property
    def verdict(self) -> str:
        """``goal``, ``floor`` or ``below``; empty without a target or a measurement."""
        if self.value is None or self.floor is None or self.goal is None:
            return ""
        sign = -1.0 if self.least else 1.0
        if sign * self.value >= sign * self.goal:
            return "goal"
        return "floor" if sign * self.value >= sign * self.floor else "below"


#: Always measured, and first: shares are relative to its results.
LIMITS = Row("limits", "limits", "measure_limits", 40, rehearsed=False)
#: In the order of what they tell. Rows of optional backends belong behind ``pdl``.
ROWS = (
    LIMITS,
    Row("w4", "products", "measure_w4", 30),
    Row("attention", "attention", "measure_decode", 20),
    Row("one-stream", "engine", "measure_small", 20),
    Row("8b-w4", "engine", "measure_8b_w4", 20),
    Row("requests", "engine", "measure_requests", 60),
    Row("large", "products", "measure_large", 15),
    Row("fp8", "products", "measure_fp8", 20),
    Row("8b-bf16", "engine", "measure_8b_bf16", 20),
    Row("formats", "products", "measure_formats", 25),
    Row("prefill", "attention", "measure_prefill", 10),
    Row("few-heads", "attention", "measure_few_heads", 10),
    Row("idle", "engine", "measure_idle", 15, rehearsed=False),
    Row("pdl", "engine", "measure_dependent_launch", 20),
    Row("grouped", "libraries", "measure_grouped", 12),
    Row("cudnn", "libraries", "measure_cudnn", 10),
    Row("humming", "libraries", "measure_humming", 20),
    Row("step", "engine", "measure_step", 15, rehearsed=False),
    Row("generate", "engine", "measure_generate", 25, rehearsed=False),
    Row("generate-batch", "engine", "measure_generate_batch", 75, rehearsed=False, usual=False),
    Row("flex", "attention", "measure_flex", 15, usual=False),
)
BY_NAME = {row.name: row for row in ROWS}


def missing(row: Row, why: str) -> Finding:
    """The finding for a row that produced none."""
    return Finding(row.name, "", None, note=why)


def share(
    what: str,
    against: str,
    value: float,
    target: tuple[float, float] | None = None,
    **numbers: float,
) -> Finding:
    """A share, in percent, of the baseline ``against``; ``target``: floor and goal."""
    floor, goal = target or (None, None)
    return Finding(what, against, value * 100, "%", floor, goal, numbers=numbers)


def ratio(
    what: str,
    against: str,
    value: float,
    target: tuple[float, float] | None = None,
    **numbers: float,
) -> Finding:
    """How many times as fast as ``against``; ``target``: floor and goal."""
    floor, goal = target or (None, None)
    return Finding(what, against, value, "x", floor, goal, numbers=numbers)


def without(findings: Iterator[Finding], what: str, against: str) -> Iterator[Finding]:
    """``findings`` with one baseline; if that cannot run here, a finding that says why."""
    try:
        yield from findings
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        yield Finding(what, against, None, note=f"{type(error).__name__}: {text}"[:120])
