"""A service level objective: the times that a good answer keeps."""

from __future__ import annotations

import math
from dataclasses import fields

from sdk.api.errors import RequestError
from sdk.kernels.dataclass import dataclass

#: Another name of a field: the mean time between the tokens of an answer is its TPOT.
_ALIASES = {"itl": "tpot"}


@dataclass(frozen=True, slots=True)
class SLO:
    """The most seconds that an answer may take; ``None``: no limit.

    ``ttft``: from its arrival to its first token. ``tpot``: between two tokens, on average after
    the first (in vLLM's benchmarks ``tpot`` as well). ``e2e``: from its arrival to its end.

    :raises RequestError: a limit is not a number above 0, or there is none.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if value is not None and not (number and value > 0 and math.isfinite(value)):
                raise RequestError(
                    f"SLO: {field.name}: expected seconds above 0, found {value!r:.80}"
                )
        if self.ttft is None and self.tpot is None and self.e2e is None:
            raise RequestError("SLO: expected at least one of ttft, tpot and e2e (seconds)")

    @classmethod
    def parse(cls, text: str) -> SLO:
        """Read ``"ttft=0.5,tpot=0.05,e2e=10"``; ``itl`` is another name of ``tpot``.

        :raises RequestError: the text is something else; the message names the part.
        """
        found: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            name = _ALIASES.get(name, name)
            try:
                seconds = float(value)
            except ValueError:
                seconds = math.nan
            if name not in ("ttft", "tpot", "e2e") or name in found or math.isnan(seconds):
                raise RequestError(
                    f"SLO: expected parts like ttft=0.5, tpot=0.05 (or itl) and e2e=10, in "
                    f"seconds, each at most once; found {part.strip()!r:.80}"
                )
            found[name] = seconds
        return cls(**found)

    def __str__(self) -> str:
        limits = ((field.name, getattr(self, field.name)) for field in fields(self))
        return ",".join(f"{name}={value:g}" for name, value in limits if value is not None)

    def is_met(self, ttft: float | None, tpot: float | None, e2e: float) -> bool:
        """Whether an answer with these times is good. ``None``: it has none, as an answer of one
        token has no ``tpot``."""
        return (
            (self.ttft is None or ttft is None or ttft <= self.ttft)
            and (self.tpot is None or tpot is None or tpot <= self.tpot)
            and (self.e2e is None or e2e <= self.e2e)
        )
