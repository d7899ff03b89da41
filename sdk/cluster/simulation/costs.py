"""How long a step takes, from what it runs: read from a file that a measurement wrote."""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError

#: SmolLM2-135M-Instruct in Q4_1 on one thread (docs/cluster/simulation.md).
DEFAULT_COSTS = Path(__file__).with_name("smollm2_135m.json")
_SECONDS = ("prompt_step", "per_token", "per_pair", "per_key")
_LIMITS = ("page_size", "num_pages", "max_num_seqs", "max_num_batched_tokens", "max_model_len")


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step, and the limits of the engine that was measured.

    A step of ``rows`` decoding requests whose contexts have ``keys`` tokens in all, and of
    ``tokens`` of prompts that read ``pairs`` keys, takes
    ``decode(rows) + per_key * keys + per_token * tokens + per_pair * pairs``; without decoding
    requests ``prompt_step`` takes the place of ``decode(rows)``.
    """

    #: Rows and seconds of steps that decode, by rows; between them lines.
    decode: tuple[tuple[int, float], ...]
    prompt_step: float
    per_token: float
    per_pair: float
    per_key: float
    page_size: int
    num_pages: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    #: What was measured, for the reader.
    source: str = ""

    def seconds(self, rows: int, keys: int, tokens: int, pairs: float) -> float:
        """See the class."""
        first = self.of_rows(rows) + self.per_key * keys if rows else self.prompt_step
        return first + self.per_token * tokens + self.per_pair * pairs

    def of_rows(self, rows: int) -> float:
        """A step with this many decoding requests and short contexts."""
        curve = self.decode
        place = bisect_left(curve, (rows, 0.0))
        if place < len(curve) and curve[place][0] == rows:
            return curve[place][1]
        place = min(max(place, 1), len(curve) - 1)
        (low, before), (high, after) = curve[place - 1], curve[place]
        return max(before + (after - before) * (rows - low) / (high - low), min(before, after) / 2)

    def write(self, path: str | Path) -> None:
        """Write them as JSON."""
        Path(path).write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: str | Path) -> StepCosts:
        """Read them. :raises RequestError: the file is something else. :raises OSError: no file."""
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
        except ValueError as error:
            raise RequestError(f"{path}: expected JSON with step costs, found {error}") from None
        try:
            return cls._checked(found)
        except ValueError as error:
            raise RequestError(f"{path}: {error}") from None

    @classmethod
    def _checked(cls, found: Any) -> StepCosts:
        """:raises ValueError: what is wrong."""
        needed = ("decode", *_SECONDS, *_LIMITS)
        if not isinstance(found, dict) or not set(needed) <= set(found):
            lacks = [name for name in needed if not isinstance(found, dict) or name not in found]
            raise ValueError(
                f"expected step costs, as `embedlm simulate --measure` writes them; {lacks[0]!r} "
                "is missing"
            )
        values: dict[str, Any] = {"source": str(found.get("source", ""))}
        for name in _SECONDS:
            values[name] = _number(name, found[name])
        for name in _LIMITS:
            value = found[name]
            if not isinstance(value, int) or not 1 <= value <= 2**40:
                raise ValueError(f"{name}: expected an integer from 1 on, found {value!r:.40}")
            values[name] = value
        curve = found["decode"]
        pairs = isinstance(curve, list) and len(curve) > 1
        if not pairs or not all(isinstance(one, list) and len(one) == 2 for one in curve):
            raise ValueError(f"decode: expected pairs of rows and seconds, found {curve!r:.40}")
        values["decode"] = tuple(
            (int(_number("decode", a)), _number("decode", b)) for a, b in curve
        )
        rows = [row for row, _ in values["decode"]]
        if rows != sorted(set(rows)) or rows[0] < 1:
            raise ValueError(f"decode: expected rows that grow, from 1 on, found {rows}")
        return cls(**values)


def _number(name: str, value: Any) -> float:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value < math.inf:
        raise ValueError(f"{name}: expected seconds of at least 0, found {value!r:.40}")
    return float(value)
