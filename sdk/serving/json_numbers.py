"""Numbers in the bodies of requests: schemas need them as they were written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from sdk.serving.access import Refused

#: Parameters that are schemas, or have some inside.
SCHEMAS = (
    *("response_format", "structured_outputs", "guided_decoding", "guided_json", "tools"),
    *("text", "format", "output_config", "output_format"),
)
#: Decimals with so few digits are the shortest ones of their doubles.
_SHORT = 15


class Rounded(float):
    """A double that is not the number that was written, ``text``."""

    text: str


class Numbers:
    """The numbers with a point or an exponent of one body.

    Where all are exact, nothing is searched: 100 tools have 5,000 values.
    """

    def __init__(self) -> None:
        self._are_exact = True

    def read(self, text: str) -> float:
        """For ``json.loads(parse_float=...)``."""
        number = float(text)
        if len(text) <= _SHORT and "e" not in text and "E" not in text:
            return number
        from decimal import Decimal  # 2 ms, with the first long number

        with suppress(ArithmeticError):  # an exponent of more than 18 digits
            if Decimal(text) == Decimal(repr(number)):
                return number
        self._are_exact = False
        rounded = Rounded(number)
        rounded.text = text
        return rounded

    def check(self, body: Mapping[str, Any]) -> None:
        """:raises Refused: 400: a schema has a number that is not a double. Elsewhere it is
        rounded."""
        if self._are_exact:
            return
        for name in SCHEMAS:
            pending = [body.get(name)]
            while pending:
                one = pending.pop()
                if isinstance(one, list):
                    pending += one
                elif isinstance(one, dict):
                    pending += one.values()
                elif isinstance(one, Rounded):
                    raise Refused(
                        400,
                        f"{name}: expected numbers that a double holds, found {one.text[:40]}: "
                        "use fewer digits",
                        "invalid_value",
                        param=name,
                    )
