"""How much one caller may use, and what is reported about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one caller; ``None``: unlimited.

    ``requests_per_minute``, ``tokens_per_minute``: of the requests admitted in any 60 seconds.
    ``concurrent``: requests that run or wait at one time. ``tokens_per_day``: from midnight to
    midnight UTC. Tokens are those of prompts and answers together.

    :raises RequestError: a limit is not a whole number of at least 1.
    """

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent: int | None = None
    tokens_per_day: int | None = None

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            whole = isinstance(value, int) and not isinstance(value, bool)
            if value is not None and not (whole and 1 <= value < 2**53):
                raise RequestError(
                    f"{name}: expected a whole number of at least 1, found {safe_repr(value)}"
                )

    @classmethod
    def from_mapping(cls, values: Mapping[str, object]) -> Limits:
        """Read limits from a file. :raises RequestError: naming what is unknown or wrong."""
        known = {field.name for field in fields(cls)}
        for name in values:
            if name not in known:
                raise RequestError(
                    f"limits: {safe_repr(name)} is unknown; known are {', '.join(sorted(known))}"
                )
        return cls(**values)  # type: ignore[arg-type]

    def given(self) -> dict[str, int]:
        """The limits that are not ``None``."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def or_else(self, default: Limits) -> Limits:
        """These limits; where there is none, that of ``default``."""
        return Limits(**{**default.given(), **self.given()})


#: The limits of callers without any.
UNLIMITED = Limits()


def format_duration(seconds: float) -> str:
    """``0.25`` -> ``"250ms"``, ``361`` -> ``"6m1s"``: as in OpenAI's ``x-ratelimit-reset-...``."""
    if seconds < 1:
        return f"{max(0, round(seconds * 1000))}ms"
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    if hours:
        return f"{hours}h{minutes}m{left}s"
    return f"{minutes}m{left}s" if minutes else f"{left}s"
