"""Service level objectives: what makes a request good."""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass

from sdk.bench.serve.percentiles import percentile
from sdk.bench.serve.record import Record

#: Objective -> what it bounds.
OBJECTIVES = {
    "ttft": "the time to the first token",
    "itl": "the 95th percentile of the times between two pieces of text",
    "tpot": "the mean time per token after the first one",
    "e2e": "the time to the end of the answer",
}
#: The share of a request's gaps that an ``itl`` objective bounds. The longest one would make every
#: answer of hundreds of tokens bad for one step that another program delayed.
ITL_PERCENT = 95


@dataclass(frozen=True, slots=True)
class Slo:
    """Upper bounds in seconds; ``None``: no bound. A request is good if it keeps all of them."""

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def broken_by(self, record: Record) -> list[str]:
        """The objectives that a finished request did not keep; ``["error"]`` if it failed."""
        if record.error is not None:
            return ["error"]
        found = {
            "ttft": record.ttft,
            "itl": percentile(sorted(record.gaps), ITL_PERCENT) if record.gaps else 0.0,
            "tpot": record.tpot or 0.0,
            "e2e": record.e2e,
        }
        limits = ((name, getattr(self, name)) for name in OBJECTIVES)
        return [name for name, limit in limits if limit is not None and found[name] > limit]

    def __str__(self) -> str:
        limits = ((name, getattr(self, name)) for name in OBJECTIVES)
        return ",".join(f"{name}={limit:g}" for name, limit in limits if limit is not None)


def parse_slo(text: str) -> Slo:
    """``"ttft=0.5,itl=50ms"``: seconds, or milliseconds with ``ms``, each objective once."""
    found: dict[str, float] = {}
    for piece in text.split(","):
        name, _, value = piece.partition("=")
        number = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)(ms|s)?", value)
        if name not in OBJECTIVES or name in found or number is None or float(number[1]) == 0:
            raise argparse.ArgumentTypeError(
                f"expected seconds or milliseconds for some of {', '.join(OBJECTIVES)}, such as "
                f"ttft=0.5,itl=50ms; found {piece!r}"
            )
        found[name] = float(number[1]) / (1000 if number[2] == "ms" else 1)
    return Slo(**found)
