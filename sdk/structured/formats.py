"""``format`` of JSON Schema in terms of patterns and of the formats that llguidance has."""

from __future__ import annotations

from typing import Any

from sdk.structured.document import Document, Schema, also

#: ``format`` as RFC 3339 has it, exact to the day: llguidance's patterns allow February 30, the
#: year 0 and leap seconds, which Python's datetime does not.
_YEAR = r"(?:[1-9][0-9]{3}|0[1-9][0-9]{2}|00[1-9][0-9]|000[1-9])"
_DAY = (
    r"(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    r"|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_LEAP = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = rf"(?:{_YEAR}-{_DAY}|{_LEAP}-02-29)"
_TIME = (
    r"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]{1,6})?"
    r"(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
)
#: Up to four labels without two hyphens in a row: those are internationalized names with rules that
#: no pattern has.
_LABEL = r"[A-Za-z0-9]{1,15}(?:-[A-Za-z0-9]{1,15}){0,2}"
_HOST = rf"{_LABEL}(?:\.{_LABEL}){{0,3}}"
_POINTER = r"(?:/(?:[^~/]|~[01])*)*"
#: Patterns that ECMA-262 and Python read alike: groups in groups, look-around and named groups are
#: left out.
_ATOM = (
    r"(?:[A-Za-z0-9 _,:;=<>!@#%&~'/-]|\.|\\[dDwWsSnrtfv.^$*+?()\[\]{}|/\\]"
    r"|\[\^?(?:a-z|A-Z|0-9|[A-Za-z0-9_ .,:;]|\\[dDwWsS])+\])"
)
_TIMES = r"(?:(?:[*+?]|\{[0-9]{1,2},?\})\??)?"
_GROUP = rf"\((?:\?:)?(?:{_ATOM}{_TIMES})*(?:\|(?:{_ATOM}{_TIMES})*)*\)"
_TERM = rf"(?:{_ATOM}|{_GROUP}){_TIMES}"
_REGEX = rf"\^?(?:{_TERM})*(?:\|(?:{_TERM})*)*\$?"
_NAME = r"[A-Za-z0-9_]+(?:\.[A-Za-z0-9_]+)*(?:\*|:[1-9][0-9]{0,2})?"
_URI_TEMPLATE = (
    r"(?:[A-Za-z0-9._~:/?#@!$&()*+,;=-]|%[0-9A-Fa-f]{2}"
    rf"|\{{[+#./;?&]?{_NAME}(?:,{_NAME}){{0,3}}\}})*"
)
_PATTERNS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "hostname": _HOST,
    "idn-hostname": _HOST,
    "json-pointer": _POINTER,
    "relative-json-pointer": rf"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
    "regex": _REGEX,
    "uri-template": _URI_TEMPLATE,
}
#: Formats with the same values as another one, or fewer.
_SAME = {
    "idn-email": "email",
    "iri": "uri",
    "uri-reference": "uri",
    "iri-reference": "uri",
    "url": "uri",
}
#: Formats that llguidance enforces.
_ENFORCED = ("duration", "email", "ipv4", "ipv6", "uuid", "uri")
#: Formats of OpenAPI that are ranges.
_NUMBERS = {"int32": (-(2**31), 2**31 - 1)}


def is_format(name: Any) -> bool:
    """Whether a format restricts values. Any other name is an annotation."""
    every = (*_ENFORCED, *_SAME, *_PATTERNS, *_NUMBERS)
    return isinstance(name, str) and name in every


def rewrite_format(schema: Schema, _: Document) -> None:
    name = schema.get("format")
    if not isinstance(name, str) or name in _ENFORCED:
        return
    del schema["format"]
    if name in _SAME:
        schema["format"] = _SAME[name]
    elif name in _PATTERNS:
        _require(schema, {"type": "string", "pattern": f"^(?:{_PATTERNS[name]})$"})
    elif name in _NUMBERS and schema.get("type") in ("integer", "number"):
        low, high = _NUMBERS[name]
        also(schema, {"minimum": low, "maximum": high})
    # Any other name is an annotation: the specification does not define it.


def _require(schema: Schema, pattern: Schema) -> None:
    """Add a pattern for strings to a schema, whose other types stay as they are."""
    if schema.get("type") == "string" and "pattern" not in schema:
        schema.update(pattern)
        return
    others = ["null", "boolean", "number", "array", "object"]
    also(schema, {"anyOf": [{"type": others}, pattern]})
