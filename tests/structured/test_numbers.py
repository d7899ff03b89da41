"""Numbers are exact: what is accepted fits the schema in decimals, and bounds can be reached."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from sdk.api.errors import RequestError
from sdk.structured.library import Matcher
from tests.structured.byte_matcher import accepts, matcher_of, texts

FAR = 2**63


def fits(schema: dict[str, Any], number: Fraction) -> bool:
    """JSON Schema in exact arithmetic; doubles are the decimals that they are spelled as."""
    exact = {
        key: Fraction(repr(value)) if isinstance(value, float) else Fraction(value)
        for key, value in schema.items()
        if key != "type"
    }
    return (
        (schema["type"] == "number" or number.denominator == 1)
        and number >= exact.get("minimum", number)
        and number <= exact.get("maximum", number)
        and number > exact.get("exclusiveMinimum", number - 1)
        and number < exact.get("exclusiveMaximum", number + 1)
        and ("multipleOf" not in exact or (number / exact["multipleOf"]).denominator == 1)
    )


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.4}, ["0.4", "0.001"], ["0", "0.0", "-0", "0.41"]),
        ({"minimum": -0.4, "exclusiveMaximum": 0}, ["-0.4", "-0.01"], ["0", "-0", "-0.0"]),
        (
            {"exclusiveMinimum": 5, "exclusiveMaximum": 5.5},
            ["5.1", "5.49", "5.4999"],
            ["5", "5.0", "5.5"],
        ),
        ({"exclusiveMaximum": 100}, ["99.9", "99.9999999999999999", "-1"], ["100", "100.0"]),
        ({"minimum": 0.3, "maximum": 0.3, "multipleOf": 0.1}, ["0.3"], ["0.2", "0.4"]),
        ({"multipleOf": 0.07}, ["0.07", "-0.14", "7"], ["0.08", "0.7000000000000001"]),
        ({"minimum": 5, "exclusiveMinimum": True}, ["5.1"], ["5", "5.0"]),
        ({"maximum": 1.7976931348623157e308}, ["1", "-1"], ["1e309"]),
    ],
    ids=str,
)
def test_bounds_of_decimals(schema: dict[str, Any], yes: list[str], no: list[str]) -> None:
    matcher = matcher_of(json={"type": "number", **schema})
    assert [text for text in yes if not accepts(matcher, text)] == []
    assert [text for text in no if accepts(matcher, text)] == []


@pytest.mark.parametrize(
    ("schema", "yes", "no"),
    [
        ({"minimum": 1 - FAR}, [0, 1023 - FAR + 1], [-FAR, -(10**19)]),
        ({"minimum": -FAR, "maximum": FAR - 1}, [FAR - 1, 1024 - FAR], [FAR, 10**19]),
        ({"minimum": 0, "exclusiveMaximum": 10**18}, [10**18 - 128], [10**18]),
        ({"exclusiveMinimum": 2**53}, [2**53 + 2], [2**53]),
        ({"exclusiveMaximum": 2**53}, [2**53 - 1], [2**53]),
        ({"minimum": 0, "maximum": 2**64 - 1}, [FAR - 1], [2**64]),
        ({"const": 2**53}, [2**53], [2**53 + 1]),
        ({"enum": [2**62, 7.0]}, [2**62, 7], [2**62 + 1]),
        ({"multipleOf": 0.5, "minimum": 0.7}, [1, 2], [0]),
        ({"allOf": [{"multipleOf": 6}, {"multipleOf": 4}]}, [12, -24], [6, 4]),
    ],
    ids=str,
)
def test_bounds_of_integers(schema: dict[str, Any], yes: list[int], no: list[int]) -> None:
    matcher = matcher_of(json={"type": "integer", **schema})
    assert [one for one in yes if not accepts(matcher, str(one))] == []
    assert [one for one in no if accepts(matcher, str(one))] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"const": 2**53 + 1}, "the value 9007199254740993 in const or enum is not supported"),
        ({"const": -FAR}, "use a string for an id"),
        ({"enum": [1, [{"a": 10**30}]]}, "the value 1000000000000000000000000000000"),
        ({"enum": [0.30000000000000004]}, "expected at most 15 digits"),
        ({"type": "integer", "minimum": FAR}, "expected room for a number"),
        ({"type": "integer", "maximum": -FAR}, "expected room for a number"),
        ({"type": "integer", "minimum": 2**53 + 1, "maximum": 2**53 + 1}, "expected room"),
        ({"type": "number", "minimum": 1e30}, "expected room for a number"),
        ({"type": "number", "minimum": "3"}, "minimum: expected a number, found '3'"),
        ({"type": "number", "multipleOf": -3}, "multipleOf: expected a number above 0, found -3"),
        ({"type": "number", "multipleOf": 0}, "multipleOf: expected a number above 0, found 0"),
        ({"type": "number", "multipleOf": 10007}, "multipleOf 10007 is not supported"),
        ({"type": "number", "multipleOf": 10**10}, "multipleOf 10000000000 is not supported"),
        ({"type": "number", "multipleOf": 5e-324}, "expected a number with fewer digits"),
        ({"allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}, "not supported together"),
        ({"type": "string", "minLength": -1}, "minLength: expected a whole number from 0 on"),
        ({"type": "string", "minLength": 10**9}, "minLength 1000000000 is not supported"),
        ({"type": "array", "minContains": 10**9, "contains": {}}, "minContains 1000000000 is not"),
        ({"type": "array", "maxItems": True}, "maxItems: expected a whole number from 0 on"),
        ({"type": "number", "maximum": math.inf}, "maximum"),
        ('{"type": "number", "maximum": NaN}', "maximum"),
        ('{"type": "number", "maximum": 1e999}', "the number 1e999 is not a double"),
        ('{"type": "number", "minimum": 0.10000000000000000001}', "0.10000000000000000001"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_numbers_that_cannot_be_exact_are_refused_by_name(schema: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        matcher_of(json=schema)


_BOUND = st.one_of(
    st.integers(-12, 12),
    st.decimals(-3, 3, places=2).map(float),
    st.sampled_from([0.1, -0.1, 1e-9, 0.5, 99, 100, -1.0]),
)
_SCHEMAS = st.fixed_dictionaries(
    {"type": st.sampled_from(["number", "integer"])},
    optional={
        "minimum": _BOUND,
        "maximum": _BOUND,
        "exclusiveMinimum": _BOUND,
        "exclusiveMaximum": _BOUND,
        "multipleOf": st.sampled_from([1, 2, 3, 0.5, 0.1, 0.25, 0.07, 10]),
    },
)


@settings(max_examples=40, deadline=None)
@given(_SCHEMAS)
@example({"type": "number", "minimum": 0, "multipleOf": 0.25, "exclusiveMaximum": 0.51})
def test_all_short_answers_fit_and_all_that_fit_are_answers(schema: dict[str, Any]) -> None:
    """All texts of four characters, and every number with two digits after the point."""
    near = [Fraction(n, 100) for n in range(-300, 301, 1 if schema["type"] == "number" else 100)]
    expected = [number for number in near if fits(schema, number)]
    try:
        matcher = matcher_of(json=schema)
    except RequestError:
        assert not expected
        return
    except Exception as error:
        assert "Unsatisfiable" in str(error) and not expected, error
        return
    found = list(texts(matcher, 4, b"-0123456789.eE+"))
    assert [text for text in found if not fits(schema, Fraction(text))] == []
    # The library spells multiples with as many digits as the step has, and bounded numbers below 0
    # without zeros at their end: -0.5 is then no answer among multiples of 0.25.
    padded = [n for n in expected if n < 0 and (n * 10).denominator == 1 and n.denominator > 1]
    known = padded if schema.get("multipleOf") in (0.25, 0.07) else []
    missing = [number for number in expected if not _accepted(matcher, number)]
    assert [number for number in missing if number not in known] == []


def _accepted(matcher: Matcher, number: Fraction) -> bool:
    """In one of its spellings: 0.1 is refused for 0.10 where a bound is 0.11."""
    if number.denominator == 1:
        return accepts(matcher, str(int(number)))
    return any(accepts(matcher, repr(float(number)) + zeros) for zeros in ("", "0", "00"))
