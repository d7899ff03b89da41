"""``StructuredOutputsParams``: which structure an answer must have."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.flags import check_flags
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr

#: Limits, so that one request cannot exhaust the process.
MAX_TEXT = 2**20  # characters of a schema, a pattern, a grammar
MAX_CHOICES = 10_000
_KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")

_FLAGS = ("disable_fallback", "disable_any_whitespace", "disable_additional_properties")


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """Exactly one structure, with vLLM's names.

    ``json``: a JSON schema (a dict, or its text), or a Python type: ``int``, ``list[...]``,
    ``Literal``, an ``Enum``, a dataclass, a ``TypedDict``, a pydantic model and others (see
    :func:`sdk.api.schemas.schema_of`). ``json_object=True``: any JSON object. ``regex``: the
    whole answer matches (Rust's syntax: no look-around, no back-references). ``choice``: one of
    these strings. ``grammar``: in Lark's or in llama.cpp's notation (GBNF). ``structural_tag``:
    free text in which each trigger begins a tagged structure.

    Whitespace in JSON: by default at most one space after ``,`` and ``:``.
    ``disable_any_whitespace=True`` allows none; ``whitespace_pattern`` is a regular expression for
    what may stand wherever JSON allows whitespace. ``disable_additional_properties=True`` allows
    only listed properties in every object of the schema. ``disable_fallback`` has no effect: there
    is one engine, and it rejects what it cannot enforce.

    :raises RequestError: not exactly one structure, or a value of the wrong type.
    """

    json: Any = None
    regex: str | None = None
    choice: Sequence[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(
                f"structured_outputs: expected exactly one of {', '.join(_KINDS)}, found {found}"
            )
        for name in ("regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise _invalid(name, "a non-empty string", value)
        check_flags(**{name: getattr(self, name) for name in _FLAGS})
        if self.json_object is not None and not isinstance(self.json_object, bool):
            raise _invalid("json_object", "True, False or None", self.json_object)
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise RequestError(
                "whitespace_pattern has no effect with disable_any_whitespace=True; pass only one"
            )
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if self.json is not None:
            object.__setattr__(self, "json", _schema(self.json))
        if self.structural_tag is not None:
            tag = _from_text("structural_tag", self.structural_tag)
            object.__setattr__(self, "structural_tag", tag)

    @property
    def kind(self) -> str:
        """The name of the structure that was given."""
        return next(name for name in _KINDS if getattr(self, name) not in (None, False))


def structure_of(name: str, value: Any) -> StructuredOutputsParams | None:
    """The structure in the parameter ``name``: one, or a dict with its fields."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping):
        known = {field.name for field in fields(StructuredOutputsParams)}
        unknown = [key for key in value if key not in known]
        if unknown:
            raise RequestError(
                f"{name}: {safe_repr(unknown[0])} is not a field of StructuredOutputsParams; they "
                f"are {', '.join(sorted(known))}"
            )
        try:
            return StructuredOutputsParams(**value)
        except RequestError as error:
            raise RequestError(
                f"{name}: {str(error).removeprefix('structured_outputs: ')}"
            ) from None
    raise RequestError(
        f"{name}: expected StructuredOutputsParams or a dict of its fields, found "
        f"{safe_repr(value)}"
    )


def _invalid(name: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{name}: expected {expected}, found {safe_repr(value)}")


def _choices(value: Any) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise _invalid("choice", "a list of strings", value)
    if not 0 < len(value) <= MAX_CHOICES:
        raise RequestError(f"choice: expected 1 to {MAX_CHOICES} strings, found {len(value)}")
    for item in value:
        if not isinstance(item, str) or not item:
            raise _invalid("choice", "non-empty strings", item)
    return tuple(dict.fromkeys(str.__str__(item) for item in value))


def _schema(value: Any) -> dict[str, Any]:
    """A schema as a dict that nobody else holds."""
    if isinstance(value, str) or (isinstance(value, Mapping) and not isinstance(value, type)):
        return _from_text("json", value)
    from sdk.api.schemas import schema_of  # with the first Python type

    return schema_of(value)


def _decimal(text: str) -> float:
    """A number with a point or an exponent. :raises ValueError: a double is another number."""
    from decimal import Decimal  # 2 ms, and every start imports this module

    number = float(text)
    if Decimal(text) != Decimal(repr(number)):
        raise ValueError(f"the number {text} is not a double: use fewer digits")
    return number


def _from_text(name: str, value: Any) -> dict[str, Any]:
    """A JSON object from its text, or a copy of one."""
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        if len(text) > MAX_TEXT:
            raise RequestError(f"{name}: expected at most {MAX_TEXT} characters, found {len(text)}")
        found = json.loads(text, parse_float=_decimal if isinstance(value, str) else None)
    except (ValueError, TypeError, RecursionError) as error:
        raise RequestError(f"{name}: it is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise _invalid(name, "a JSON object", found)
    return found
