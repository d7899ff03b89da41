"""``structural_tag``: free text with structures between tags, in Lark's notation.

Both forms of vLLM and xgrammar are read: the older one, ``structures`` and ``triggers``, and the
newer one, a ``format`` that is made of others.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.structured.limits import check_pattern

Schema = dict[str, Any]
#: Formats inside one another.
_MOST_DEPTH = 32
_MOST_TIMES = 2000
_TOKEN = re.compile(r"(<[^<>\s]+>|\[[A-Z_/]+\])")
_FREE = ("any_text", "triggered_tags")


def lark_of_tag(
    tag: Mapping[str, Any],
    schema_text: Callable[[Schema], str],
    pattern: Callable[[str], str],
    is_special: Callable[[str], bool],
) -> str:
    """``schema_text``: the JSON of a schema as the library takes it. ``pattern``: a pattern as a
    regular expression of the library. ``is_special``: whether a text is a control token.

    :raises RequestError: a part is invalid or not supported; the message names it.
    """
    writer = _Writer(schema_text, pattern, is_special)
    if "format" in tag:
        return writer.grammar(tag["format"])
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not isinstance(triggers, list) or not structures:
        _refuse(
            "{'structures': [{'begin': ..., 'schema': ..., 'end': ...}], 'triggers': [...]}, or "
            "{'format': {...}}",
            tag,
        )
    return writer.grammar({"type": "triggered_tags", "triggers": triggers, "tags": structures})


def _refuse(expected: str, found: object, where: str = "") -> NoReturn:
    raise RequestError(f"structural_tag: {where}expected {expected}, found {safe_repr(found)}")


class _Writer:
    def __init__(
        self,
        schema_text: Callable[[Schema], str],
        pattern: Callable[[str], str],
        is_special: Callable[[str], bool],
    ) -> None:
        self._schema_text = schema_text
        self._pattern = pattern
        self._is_special = is_special
        self._lines = ["TEXT: /(?s:.*)/"]
        self._count = 0
        self._depth = 0

    def grammar(self, format: Any) -> str:
        start = self._written(format, ())
        return "\n".join([f"start: {start}", *self._lines])

    def _rule(self, name: str, body: str) -> str:
        self._count += 1
        name, _, options = name.partition("[")
        unique = f"{name}_{self._count}"
        self._lines.append(f"{unique}[{options}: {body}" if options else f"{unique}: {body}")
        return unique

    def _written(self, format: Any, ends: tuple[str, ...]) -> str:
        """A format and then one of the texts that end it, if there are some."""
        kind = format.get("type") if isinstance(format, Mapping) else None
        write = getattr(self, f"_{kind}", None) if isinstance(kind, str) else None
        if kind not in _KINDS or write is None:
            _refuse(f"a format of the type {', '.join(_KINDS)}", format)
        self._depth += 1
        if self._depth > _MOST_DEPTH:
            raise RequestError(f"structural_tag: formats are nested more than {_MOST_DEPTH} deep")
        found: str = write(format, ends)
        self._depth -= 1
        return found

    def _ended(self, body: str, ends: tuple[str, ...]) -> str:
        return f"{body} {self._any_of(map(self._text, ends))}" if ends else body

    @staticmethod
    def _any_of(options: Any) -> str:
        options = list(options)
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _text(self, text: str) -> str:
        """A text; control tokens in it are tokens."""
        parts: list[str] = []
        for part in filter(None, _TOKEN.split(text)):
            special = self._is_special(part) and part.startswith("<")
            if special or not parts or parts[-1][0] != '"':
                parts.append(part if special else json.dumps(part))
            else:
                parts[-1] = json.dumps(json.loads(parts[-1]) + part)
        return " ".join(parts) or '""'

    # Formats, each with the texts that end it.

    def _const_string(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        return self._ended(self._text(_string(format, "value")), ends)

    def _json_schema(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        schema = format.get("json_schema", format.get("schema"))
        if format.get("style", "json") != "json" or format.get("any_order"):
            name = "any_order" if format.get("any_order") else "style"
            _refuse("json_schema with the style 'json' in the schema's order", format[name])
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            _refuse("a schema", schema, "json_schema: ")
        return self._ended(self._rule("json", f"%json {self._schema_text(schema)}"), ends)

    def _regex(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        pattern = _string(format, "pattern")
        check_pattern("structural_tag", pattern)
        return self._ended(self._rule("regex", self._pattern(pattern)), ends)

    def _any_text(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        for name in ("max_tokens", "max_chars"):
            if format.get(name) is not None:
                _refuse(f"any_text without {name}", format[name])
        return self._free(_strings(format, "excludes", []), ends)

    def _free(self, excludes: list[str], ends: tuple[str, ...]) -> str:
        """Text without some words, up to an end."""
        text = "TEXT"
        if excludes:
            words = "|".join(map(_escaped, excludes))
            text = f"(TEXT & ~/(?s:.*)({words})(?s:.*)/)"
        special = [one for one in ends if self._is_special(one) and one.startswith("<")]
        plain = [one for one in ends if one not in special]
        options = [f"{self._rule('FREE', text)} {self._text(one)}" for one in special]
        if plain:
            body = f"{text} {self._any_of(map(json.dumps, plain))}"
            options.append(self._rule("until[lazy]", body))
        return self._any_of(options) if options else self._rule("FREE", text)

    def _sequence(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        *first, last = _list(format, "elements")
        parts = [self._written(self._bounded(one), ()) for one in first]
        return " ".join([*parts, self._written(last, ends)])

    def _bounded(self, format: Any) -> Any:
        """A format that something follows."""
        if isinstance(format, Mapping) and format.get("type") in (*_FREE, "sequence", "or"):
            inner = [format] if format["type"] in _FREE else format.get("elements", [])
            for one in inner if isinstance(inner, list) else []:
                if isinstance(one, Mapping) and one.get("type") in _FREE:
                    _refuse(
                        f"{one['type']} at the end, or as the content of a tag, which says where "
                        "it ends",
                        format,
                    )
                if one is not format:
                    self._bounded(one)
        return format

    def _or(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        return self._any_of(self._written(one, ends) for one in _list(format, "elements"))

    def _repeated(self, format: Mapping[str, Any], ends: tuple[str, ...], times: str) -> str:
        inner = self._written(self._bounded(format.get("content")), ())
        return self._ended(f"({inner}){times}", ends)

    def _optional(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        return self._repeated(format, ends, "?")

    def _star(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        return self._repeated(format, ends, "*")

    def _plus(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        return self._repeated(format, ends, "+")

    def _repeat(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        least, most = format.get("min"), format.get("max")
        if type(least) is not int or type(most) is not int:
            _refuse("min and max as numbers", format)
        if not 0 <= least <= _MOST_TIMES or not (most == -1 or most >= least):
            _refuse(f"min from 0 to {_MOST_TIMES}, and max from min on or -1", format)
        if most > _MOST_TIMES:
            _refuse(f"max up to {_MOST_TIMES}, or -1 for no limit", most)
        return self._repeated(format, ends, f"{{{least},{'' if most == -1 else most}}}")

    def _tag(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        return self._ended(f"{self._text(self._begin(format))} {self._after_begin(format)}", ends)

    @staticmethod
    def _begin(tag: Mapping[str, Any]) -> str:
        return _mark(tag.get("begin"), "begin")

    def _after_begin(self, tag: Mapping[str, Any]) -> str:
        """The content of a tag and its end."""
        given = tag.get("end", "")
        listed = given if isinstance(given, list) and given else [given]
        ends = tuple(filter(None, (_mark(one, "end") for one in listed)))
        content = tag.get("content")
        if content is None:  # the older form
            content = {"type": "json_schema", "json_schema": tag.get("schema", {})}
        elif not ends:
            self._bounded(content)
        return self._written(content, ends)

    def _triggered_tags(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        triggers, tags = _strings(format, "triggers"), _list(format, "tags")
        heads: dict[str, str] = {}
        names = []
        for tag in tags:
            if not isinstance(tag, Mapping):
                _refuse("a tag", tag)
            begin = self._begin(tag)
            found = [one for one in triggers if begin.startswith(one)]
            if not found:
                _refuse(f"a trigger that {begin!r} begins with", triggers)
            trigger = max(found, key=len)
            rest = self._text(begin.removeprefix(trigger))
            names.append((trigger, self._rule("tag", f"{rest} {self._after_begin(tag)}"), begin))
            heads.setdefault(trigger, "")
        excludes = _strings(format, "excludes", [])
        for trigger in heads:
            if self._is_special(trigger) and trigger.startswith("<"):
                heads[trigger] = f"{self._free(excludes, ())} {trigger}"
            else:
                heads[trigger] = self._free(excludes, (trigger,))
        later = self._any_of(f"{heads[trigger]} {rule}" for trigger, rule, _ in names)
        first = self._any_of(f"{self._text(trigger)} {rule}" for trigger, rule, _ in names)
        least, once = bool(format.get("at_least_one")), bool(format.get("stop_after_first"))
        if least and once:
            return self._ended(first, ends)
        rest = self._free(excludes, ends)
        if once:  # with a tag, it ends there
            return f"({self._ended(later, ends)} | {rest})"
        return f"{first} ({later})* {rest}" if least else f"({later})* {rest}"

    def _tags_with_separator(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        tags = self._any_of(self._written(one, ()) for one in _list(format, "tags"))
        separator = self._text(_string(format, "separator"))
        body = tags if format.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        body = body if format.get("at_least_one") else f"({body})?"
        return self._ended(body, ends)

    def _token(self, format: Mapping[str, Any], ends: tuple[str, ...]) -> str:
        token = format.get("token")
        if type(token) is int:
            return self._ended(f"<[{token}]>", ends)
        if not isinstance(token, str) or not self._is_special(token) or token[:1] != "<":
            _refuse("a control token of the model, or a token id", token, "token: ")
        return self._ended(token, ends)


_KINDS = (
    *("const_string", "json_schema", "regex", "any_text", "sequence", "or", "optional", "star"),
    *("plus", "repeat", "tag", "triggered_tags", "tags_with_separator", "token"),
)


def _escaped(text: str) -> str:
    escaped = re.sub(r"[\\.+*?()|\[\]{}^$/&~#-]", r"\\\g<0>", text)
    return escaped.replace("\n", r"\n")


def _string(format: Mapping[str, Any], name: str) -> str:
    value = format.get(name)
    if not isinstance(value, str):
        _refuse("a string", value, f"{name}: ")
    return value


def _strings(format: Mapping[str, Any], name: str, default: list[str] | None = None) -> list[str]:
    found = format.get(name, default)
    if not isinstance(found, list) or not all(isinstance(one, str) and one for one in found):
        _refuse("a list of strings", found, f"{name}: ")
    return found


def _list(format: Mapping[str, Any], name: str) -> list[Any]:
    found = format.get(name)
    if not isinstance(found, list) or not found:
        _refuse("a list of formats", found, f"{name}: ")
    return found


def _mark(given: Any, name: str) -> str:
    """The text of a begin or an end, which may be a token."""
    if isinstance(given, Mapping) and given.get("type") == "token":
        given = given.get("token")
    if not isinstance(given, str):
        _refuse("a string", given, f"{name}: ")
    return given
