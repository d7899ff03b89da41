"""Values of a caller's in messages: short, quick, and never an exception of their own."""

from __future__ import annotations

from typing import Any

import pytest

from sdk import RequestError, SamplingParams
from sdk.api.config import EngineConfig
from sdk.quant.safe_repr import safe_message, safe_repr


class Hostile:
    """Raises from everything that a conversion may call."""

    def _raise(self, *args: Any) -> Any:
        raise ZeroDivisionError("mine")

    __index__ = __float__ = __int__ = __iter__ = __len__ = __repr__ = __str__ = _raise
    __eq__ = __lt__ = __gt__ = __le__ = __ge__ = __contains__ = __bool__ = _raise
    __hash__ = None  # type: ignore[assignment]


HUGE = 10**5000
CYCLE: list[Any] = []
CYCLE.append(CYCLE)
VALUES = {
    "huge": HUGE,
    "negative": -HUGE,
    "hostile": Hostile(),
    "inside": [{"a": Hostile()}, HUGE],
    "cycle": CYCLE,
    "long range": range(10**12),
    "longer range": range(HUGE),
    "text": "a" * 10**6,
    "bytes": b"a" * 10**6,
    "list": [0] * 10**5,
}


@pytest.mark.parametrize("name", VALUES)
def test_any_value_can_be_shown(name: str) -> None:
    assert 0 < len(safe_repr(VALUES[name])) <= 80


@pytest.mark.parametrize("value", [5, 1.5, "it's", None, True, [1, 2], {"a": (1,)}, b"x", -(2**64)])
def test_a_plain_value_is_shown_as_its_repr(value: object) -> None:
    assert safe_repr(value) == repr(value)


def test_what_is_wrong_inside_a_value_is_said_in_its_place() -> None:
    assert safe_repr([1, Hostile(), HUGE]) == (
        "[1, <Hostile whose repr raises ZeroDivisionError>, <an integer of 16610 bits>]"
    )


def test_an_exception_whose_message_cannot_be_printed_is_described() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise ValueError

    assert safe_message(Silent()) == "Silent: (its message cannot be printed)"


@pytest.mark.parametrize("name", VALUES)
def test_no_value_of_a_sampling_parameter_raises_anything_but_a_request_error(name: str) -> None:
    for field in SamplingParams.__dataclass_fields__:
        try:
            SamplingParams(**{field: VALUES[name]})
        except RequestError as error:
            assert field in str(error) and len(str(error)) < 300


@pytest.mark.parametrize("name", VALUES)
def test_no_value_of_an_option_raises_anything_but_a_request_error(name: str) -> None:
    for field in set(EngineConfig.__dataclass_fields__) - {"model"}:
        try:
            EngineConfig(model="m", **{field: VALUES[name]})
        except RequestError as error:
            assert len(str(error)) < 500, field


def test_keys_of_a_logit_bias_from_json_may_be_of_any_length() -> None:
    assert SamplingParams.from_optional(logit_bias={"7": 1}).logit_bias == {7: 1.0}
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_optional(logit_bias={"7" * 5000: 1})
