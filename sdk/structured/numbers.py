"""Numbers of a JSON schema, in terms that llguidance enforces exactly.

llguidance reads every number as a double, and its reader of decimals is right only up to 15 digits
(of 3,000 random doubles 406 became another one). Its ranges ignore that a bound is exclusive where
both bounds have the same integer part, and integers at -2^63 end the process. So bounds become
inclusive ones of at most 15 digits, or integers that a double holds, always towards the inside of
the range; a value that cannot be told apart from its neighbours is refused by name.
"""

from __future__ import annotations

import decimal
import fractions
import math
from typing import Any, NamedTuple, NoReturn

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.structured.document import Document, Schema, also

Fraction = fractions.Fraction
#: Significant digits that are read exactly: below 2^53, times or through a power of ten up to 22.
_DIGITS, _SMALLEST = 15, 22
#: Decimals that are read exactly. The smallest step is 1e-22.
_FLOOR, _CEILING = (
    decimal.Context(prec=_DIGITS, Emin=_DIGITS - 1 - _SMALLEST, rounding=rounding)
    for rounding in (decimal.ROUND_FLOOR, decimal.ROUND_CEILING)
)
#: The integers of the library have 64 bits. It negates them, so that -2^63 is out of reach, and a
#: double next to 2^63 is 1,024 away.
_LAST, _LARGEST = 2**63 - 1, 2**63 - 1024
#: From here on a range without another bound would leave the 64 bits.
_FAR = 10**17
#: The largest ``multipleOf``, without factors of ten: an automaton of 99,991 states takes 0.9 s.
_MAX_MULTIPLE = 10_000
#: The library's numerators of ``multipleOf``, and their products, have 32 bits.
_NUMERATORS = 2**32
_BOUNDS = ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum")


def rewrite_numbers(schema: Schema, document: Document) -> None:
    """Bounds, multiples and listed numbers of one schema."""
    for values in ([schema["const"]] if "const" in schema else None, schema.get("enum")):
        if isinstance(values, list):
            for value in values:
                _check_listed(value)
    if "const" in schema:
        schema["const"] = _plain(schema["const"])
    if isinstance(schema.get("enum"), list):
        schema["enum"] = [_plain(value) for value in schema["enum"]]
    if any(name in schema for name in (*_BOUNDS, "multipleOf")):
        _rewrite_range(schema, document)


def exact(value: Any) -> Fraction:
    """A number as its decimal spelling says."""
    return Fraction(value) if isinstance(value, int) else Fraction(repr(value))


def check_multiples(schemas: list[Schema]) -> None:
    """Refuse multiples that the library would combine beyond its 32 bits.

    ``schemas``: those that may hold for one value.
    """
    found = {exact(one["multipleOf"]) for one in schemas if _is_number(one.get("multipleOf"))}
    power = 10 ** max((_places(number) for number in found), default=0)
    numbers = [int(number * power) for number in found]
    if len(numbers) > 1 and math.lcm(*numbers) * max(numbers) >= _NUMERATORS:
        names = ", ".join(sorted(str(float(number)) for number in found))
        raise RequestError(
            f"json: multipleOf {names} are not supported together: their common multiple is too "
            "large; use one of them"
        )


def _places(number: Fraction) -> int:
    """Digits after the point of a decimal number."""
    places = 0
    while (number * 10**places).denominator > 1:
        places += 1
    return places


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(schema: Schema, name: str) -> Fraction | None:
    """The value of a keyword."""
    value = schema.get(name)
    if value is None:
        return None
    if not _is_number(value) or not math.isfinite(value):
        raise RequestError(f"json: {name}: expected a number, found {safe_repr(value)}")
    return exact(value)


def _rewrite_range(schema: Schema, document: Document) -> None:
    for kind in ("Minimum", "Maximum"):  # draft 4: whether the other bound is exclusive
        flag, name = schema.get(f"exclusive{kind}"), kind.lower()
        if isinstance(flag, bool):
            del schema[f"exclusive{kind}"]
            if flag and name in schema:
                schema[f"exclusive{kind}"] = schema.pop(name)
    found = {name: _number(schema, name) for name in _BOUNDS}
    given = {name: schema.pop(name) for name in _BOUNDS if name in schema}
    types = schema.get("type")
    named = {types} if isinstance(types, str) else set(types or ())
    whole = "integer" in named and "number" not in named
    step = _multiple(schema, whole)
    unit = step or (Fraction(1) if whole else None)
    low = _end(found["minimum"], found["exclusiveMinimum"], unit, 1)
    high = _end(found["maximum"], found["exclusiveMaximum"], unit, -1)
    spelled = " and ".join(f"{name} {safe_repr(value)}" for name, value in given.items())
    bounds = _spelled(low, high, whole, spelled)
    if bounds is None:
        also(schema, {"type": ["null", "boolean", "string", "array", "object"]})
        return
    if step and not whole and low and high and high.value - low.value < 2 * step:
        # The library divides doubles to see whether a range has a multiple.
        del schema["multipleOf"]
        values = sorted({low.value, high.value})
        bounds = {"enum": [int(x) if x.denominator == 1 else float(x) for x in values]}
        for value in bounds["enum"]:
            _check_number(value)
        others = {"type": ["null", "boolean", "string", "array", "object"]}
        also(schema, bounds if named == {"number"} else {"anyOf": [bounds, others]})
        return
    if step and not whole:
        bounds = _spelled(_beyond(low, step, 1), _beyond(high, step, -1), whole, spelled) or bounds
    schema.update(bounds)


def _beyond(end: _End | None, step: Fraction, sign: int) -> _End | None:
    """A bound of multiples of ``step``, half a step further out if it has fewer digits than they
    have: the library writes 0.5 as 0.50 among multiples of 0.25, but not where a range ends."""
    if end is None or end.value.denominator == 1 or _digits(end.value) >= _digits(step):
        return end
    return _End(end.value - sign * step / 2)


def _digits(value: Fraction) -> int:
    """After the decimal point, of a number that has a finite number of them."""
    return max(-int(decimal.Decimal(str(float(value))).normalize().as_tuple().exponent), 0)


class _End(NamedTuple):
    """A bound of a range."""

    value: Fraction
    excluded: bool = False


def _end(
    inclusive: Fraction | None,
    exclusive: Fraction | None,
    step: Fraction | None,
    sign: int,
) -> _End | None:
    """The innermost of two bounds; ``sign``: 1 for a lower one, -1 for an upper one. Where there is
    a step, it is a multiple of it."""
    both = ((inclusive, False), (exclusive, True))
    ends = [(sign * value, excluded) for value, excluded in both if value is not None]
    if not ends:
        return None
    value, excluded = max(ends)
    if step is None:
        return _End(sign * value, excluded)
    first = math.ceil(value / step)
    first += excluded and first * step == value
    return _End(sign * first * step)


def _spelled(low: _End | None, high: _End | None, whole: bool, given: str) -> Schema | None:
    """``minimum`` and ``maximum`` for the library; ``None``: no number is between them."""
    if low is not None and high is not None:
        equal = low.value == high.value and (low.excluded or high.excluded)
        if low.value > high.value or equal:
            return None
    if low is not None and high is None and low.value >= _FAR:
        high = _End(Fraction(_LAST))
    if high is not None and low is None and high.value <= -_FAR:
        low = _End(Fraction(-_LAST))
    write = _whole_bound if whole else _decimal_bound
    bounds: Schema = {}
    if low is not None:
        bounds |= write(low, 1)
    if high is not None:
        bounds |= write(high, -1)
    if low is not None and high is not None and not _has_room(bounds):
        raise RequestError(
            f"json: {given} are not supported: expected room for a number of at most {_DIGITS} "
            "digits between them, or for an integer of 64 bits that a double holds"
        )
    return bounds


def _has_room(bounds: Schema) -> bool:
    least, most = (exact(value) for value in bounds.values())
    return least < most or (least == most and bounds.keys() == {"minimum", "maximum"})


def _whole_bound(end: _End, sign: int) -> Schema:
    """The innermost integer that a double holds."""
    name = "minimum" if sign > 0 else "maximum"
    value = int(end.value)
    if sign < 0 and value >= _LAST:
        return {name: _LAST}  # becomes 2^63 as a double, and this number again in 64 bits
    if sign * value > _LARGEST:
        return {name: sign * 2**63}  # nothing is inside: the other bound is nearer to zero
    value = max(min(value, _LARGEST), -_LARGEST)
    found = int(float(value))
    if sign * (found - value) < 0:
        found = int(math.nextafter(found, sign * math.inf))
    return {name: found}


def _decimal_bound(end: _End, sign: int) -> Schema:
    """The innermost decimal that is read exactly.

    It stays exclusive where that is enforced: where the library may forget it, and write the
    integer itself, it is the next decimal.
    """
    name = "minimum" if sign > 0 else "maximum"
    limit = Fraction(_LARGEST)
    if sign * end.value > limit:
        return {name: sign * 2**63}
    value = max(min(end.value, limit), -limit)
    context = _CEILING if sign > 0 else _FLOOR
    found = context.divide(decimal.Decimal(value.numerator), decimal.Decimal(value.denominator))
    if end.excluded and Fraction(found) == end.value:
        if value.denominator == 1 and sign * value >= 0:
            found = context.next_plus(found) if sign > 0 else context.next_minus(found)
        else:
            name = f"exclusive{name.capitalize()}"
    return {name: int(found) if found == found.to_integral_value() else float(found)}


def _multiple(schema: Schema, whole: bool) -> Fraction | None:
    """The step of a range. It is spelled so that the library finds the right one."""
    step = _number(schema, "multipleOf")
    if step is None:
        return None
    given = schema["multipleOf"]
    if step <= 0:
        raise RequestError(f"json: multipleOf: expected a number above 0, found {safe_repr(given)}")
    if whole:
        step = Fraction(step.numerator)  # integers that are multiples of it
    places = _places(step)
    number = digits = int(step * 10**places)
    while number % 10 == 0:
        number //= 10
    if number > _MAX_MULTIPLE or digits >= _NUMERATORS:
        raise RequestError(
            f"json: multipleOf {safe_repr(given)} is not supported: expected at most "
            f"{_MAX_MULTIPLE}, times a power of ten, and at most {_NUMERATORS - 1} without a point"
        )
    spelled = int(step) if step.denominator == 1 else _decimal_step(float(step), digits, places)
    if spelled is None:
        raise RequestError(
            f"json: multipleOf {safe_repr(given)} is not supported: expected a number with fewer "
            "digits"
        )
    schema["multipleOf"] = spelled
    return step


def _decimal_step(step: float, digits: int, places: int) -> float | None:
    """A double that the library, which multiplies it by ten until it is whole, takes for ``digits``
    divided by 10^``places``: 0.07 times ten times ten is not 7."""
    down = up = step
    for _ in range(8):
        for near in (down, up):
            value, count = near, 0
            while not value.is_integer() and count <= places:
                value, count = value * 10.0, count + 1
            number = decimal.Decimal(repr(near)).as_tuple()
            mantissa = int("".join(map(str, number.digits)))
            readable = mantissa < 2**53 and -int(number.exponent) <= _SMALLEST
            if readable and value == digits and count == places:
                return near
        down, up = math.nextafter(down, 0.0), math.nextafter(up, math.inf)
    return None


def _check_listed(value: Any) -> None:
    """Numbers in ``const`` and ``enum``, also inside arrays and objects."""
    pending = [value]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        elif isinstance(one, dict):
            pending += one.values()
        elif isinstance(one, int | float) and not isinstance(one, bool):
            _check_number(one)


def _check_number(value: int | float) -> None:
    if not math.isfinite(value) or abs(value) > _LARGEST:
        _refuse_listed(value)
    if isinstance(value, int) and int(float(value)) == value:
        return
    number = decimal.Decimal(repr(value))
    if _FLOOR.plus(number) != number:
        _refuse_listed(value)


def _refuse_listed(value: int | float) -> NoReturn:
    raise RequestError(
        f"json: the value {safe_repr(value)} in const or enum is not supported: expected at most "
        f"{_DIGITS} digits, or an integer that a double holds, between -2^63 and 2^63; use a "
        "string for an id"
    )


def _plain(value: Any) -> Any:
    """Values without points in whole numbers, which are equal and are written without them."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value
