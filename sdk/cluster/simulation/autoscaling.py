"""How many replicas there should be: a simple policy that follows one number."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal

from sdk.api.errors import RequestError

#: Fewer replicas only if the number is below this share of its target: otherwise a replica would
#: stop and start in turn.
_SHRINK_BELOW = 0.5


@dataclass(frozen=True, slots=True)
class Autoscaling:
    """Keeps a number near its ``target``: with ``by="queue"`` the requests for each replica that
    wait for their first token, with ``by="ttft"`` the 90th percentile of the seconds to the first
    token since the last look. It looks every ``every`` seconds.

    :raises RequestError: a value is out of range.
    """

    least: int
    most: int
    by: Literal["queue", "ttft"] = "queue"
    target: float = 4.0
    every: float = 10.0

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise RequestError(
                f"autoscale: expected 1 <= least <= most replicas, found {self.least} and "
                f"{self.most}"
            )
        if self.by not in ("queue", "ttft"):
            raise RequestError(f"autoscale: by: expected queue or ttft, found {self.by!r:.40}")
        for name in ("target", "every"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise RequestError(f"autoscale: {name}: expected a number above 0, found {value}")

    @classmethod
    def parse(cls, text: str) -> Autoscaling:
        """Read ``"least=2,most=8,by=queue,target=4,every=10"``; ``least`` and ``most`` are needed.

        :raises RequestError: it is something else.
        """
        convert = {"least": int, "most": int, "by": str, "target": float, "every": float}
        values: dict[str, object] = {}
        for part in text.split(","):
            name, _, value = (piece.strip() for piece in part.partition("="))
            try:
                values[name] = convert[name](value)
            except (KeyError, ValueError):
                names = ", ".join(one.name for one in fields(cls))
                raise RequestError(
                    f"autoscale: expected parts like least=2, of {names}; found "
                    f"{part.strip()!r:.40}"
                ) from None
        if not {"least", "most"} <= set(values):
            raise RequestError(f"autoscale: expected least and most, found {text!r:.60}")
        return cls(**values)  # type: ignore[arg-type]

    def wanted(self, replicas: int, value: float) -> int:
        """How many replicas there should be instead of ``replicas``."""
        share = value / self.target
        wanted = replicas
        if share > 1:
            wanted = math.ceil(replicas * min(share, 2.0))  # at most twice as many at once
        elif share < _SHRINK_BELOW:
            wanted = replicas - 1
        return min(max(wanted, self.least), self.most)
