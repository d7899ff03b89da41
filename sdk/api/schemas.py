"""JSON Schema (draft 2020-12) of Python types, and values of these types from parsed JSON.

Supported: ``bool``, ``int``, ``float``, ``str``, ``None``, ``Any``, ``object``, ``Literal``,
``Enum``, unions and ``Optional``, ``list``, ``set``, ``frozenset``, ``tuple``, ``Sequence``,
``dict`` and ``Mapping`` with string keys, dataclasses, ``TypedDict``, ``NamedTuple``, pydantic
models (this module never imports pydantic), ``datetime``, ``date``, ``time``, ``UUID``, and
``Annotated[T, "description"]``.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import datetime
import enum
import inspect
import json
import types
import typing
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

Schema = dict[str, Any]

_PLAIN: dict[Any, Schema] = {
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    None: {"type": "null"},
    type(None): {"type": "null"},
    datetime.datetime: {"type": "string", "format": "date-time"},
    datetime.date: {"type": "string", "format": "date"},
    datetime.time: {"type": "string", "format": "time"},
    uuid.UUID: {"type": "string", "format": "uuid"},
}
#: Makes values of these types from the strings that JSON has.
_FROM_TEXT: dict[Any, Callable[[str], Any]] = {
    datetime.datetime: lambda text: datetime.datetime.fromisoformat(_with_offset(text)),
    datetime.date: datetime.date.fromisoformat,
    datetime.time: lambda text: datetime.time.fromisoformat(_with_offset(text)),
    uuid.UUID: uuid.UUID,
}
_LISTS = (list, collections.abc.Sequence, collections.abc.Iterable, collections.abc.Collection)
_SETS = (set, frozenset, collections.abc.Set)
#: Values of which a grammar lists all sets, in one order: 8 have 256.
_MOST_OF_SET = 8
_MAPPINGS = (dict, collections.abc.Mapping, collections.abc.MutableMapping)
_UNIONS = (Union, types.UnionType)
_MARKERS = {getattr(typing, name, None) for name in ("Required", "NotRequired", "ReadOnly")} - {
    None
}
#: A type may nest other types at most this deep.
_MAX_DEPTH = 64


def _with_offset(text: str) -> str:
    """Python 3.10 does not read the ``Z`` of RFC 3339."""
    return text[:-1] + "+00:00" if text[-1:] in "zZ" else text


def schema_of(annotation: Any) -> Schema:
    """The JSON Schema of a Python type. Classes become ``$defs``, so they may contain themselves.

    Fields with a default are not required. Objects of classes have no other properties.

    :raises RequestError: the type, or a part of it, has no schema; the message names it.
    """
    builder = _Builder()
    schema = builder.schema(annotation, _name(annotation), 0)
    return {**schema, "$defs": builder.definitions} if builder.definitions else schema


def is_pydantic(annotation: Any) -> bool:
    """Whether this is a pydantic model. Does not import pydantic."""
    return inspect.isclass(annotation) and hasattr(annotation, "model_json_schema")


def load(annotation: Any, value: Any) -> Any:
    """The value of a type from parsed JSON that is valid for its schema.

    pydantic models validate it themselves. :raises ValueError: it does not fit the type.
    """
    annotation = _unwrapped(annotation)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if is_pydantic(annotation):
        schema = annotation.model_json_schema()
        _check_unique(schema, value, schema)  # pydantic drops what is there twice
        return annotation.model_validate(value)
    if origin in _UNIONS:
        return _load_union(arguments, value)
    if annotation in _FROM_TEXT:
        return _FROM_TEXT[annotation](_expect(value, str))
    if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
        return annotation(value)
    if origin is Literal:
        if not any(value == item and type(value) is type(item) for item in arguments):
            raise ValueError(f"expected one of {list(arguments)}, found {value!r}")
        return value
    if (fields := _fields(annotation)) is not None:
        return _load_object(annotation, fields, _expect(value, dict))
    kind = origin or annotation
    if kind in _LISTS:
        return [load(arguments[0] if arguments else Any, one) for one in _expect(value, list)]
    if kind in _SETS:
        _check_different(_expect(value, list))
        items = [load(arguments[0] if arguments else Any, one) for one in value]
        return frozenset(items) if kind is frozenset else set(items)
    if kind is tuple:
        return _load_tuple(arguments, _expect(value, list))
    if kind in _MAPPINGS:
        item = arguments[1] if arguments else Any
        return {key: load(item, one) for key, one in _expect(value, dict).items()}
    if annotation is float and type(value) is int:
        return float(value)
    if annotation is int and type(value) is float and value.is_integer():
        return int(value)  # JSON Schema: 1.0 is an integer
    if annotation in (bool, int, float, str):
        return _expect(value, annotation)
    if annotation in (None, type(None)) and value is not None:
        raise ValueError(f"expected null, found {value!r}")
    return value


class _Field(typing.NamedTuple):
    name: str
    annotation: Any
    required: bool
    description: str | None


class _Builder:
    """Collects the definitions of classes while it walks through a type."""

    def __init__(self) -> None:
        self.definitions: dict[str, Schema] = {}
        self._names: dict[Any, str] = {}

    def schema(self, annotation: Any, where: str, depth: int) -> Schema:
        if depth > _MAX_DEPTH:
            raise RequestError(f"{where}: types are nested more than {_MAX_DEPTH} deep")
        origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
        if origin is typing.Annotated:
            inner = self.schema(arguments[0], where, depth + 1)
            texts = [item for item in arguments[1:] if isinstance(item, str)]
            return {**inner, "description": texts[0]} if texts else inner
        if origin in _MARKERS:
            return self.schema(arguments[0], where, depth + 1)
        if isinstance(annotation, typing.NewType):
            return self.schema(annotation.__supertype__, where, depth + 1)
        if annotation is Any or annotation is object:
            return {}
        if isinstance(annotation, collections.abc.Hashable) and annotation in _PLAIN:
            return dict(_PLAIN[annotation])
        if origin is Literal:
            return self._choice(arguments, where)
        if origin in _UNIONS:
            return {"anyOf": [self.schema(item, where, depth + 1) for item in arguments]}
        if inspect.isclass(annotation) and issubclass(annotation, enum.Enum):
            return self._choice([item.value for item in annotation], where)
        if is_pydantic(annotation):
            return self._pydantic(annotation, where)
        if (fields := _fields(annotation)) is not None:
            return self._object(annotation, fields, where, depth)
        return self._container(origin or annotation, arguments, annotation, where, depth)

    def _container(
        self, kind: Any, arguments: tuple[Any, ...], annotation: Any, where: str, depth: int
    ) -> Schema:
        if kind is tuple:
            return self._tuple(arguments, where, depth)
        if kind in _LISTS or kind in _SETS:
            array: Schema = {"type": "array"}
            if arguments:
                array["items"] = self.schema(arguments[0], f"{where}[...]", depth + 1)
                if kind in _SETS and _is_short(array["items"], self.definitions):
                    array["uniqueItems"] = True
            return array
        if kind in _MAPPINGS:
            if not arguments:
                return {"type": "object"}
            if arguments[0] is not str:
                raise RequestError(
                    f"{where}: JSON objects have string keys, found {_name(annotation)}; use "
                    "dict[str, ...]"
                )
            item = self.schema(arguments[1], f"{where}[...]", depth + 1)
            return {"type": "object", "additionalProperties": item}
        raise RequestError(
            f"{where}: {_name(annotation)} has no JSON Schema; use bool, int, float, str, None, "
            "Literal, Enum, list, tuple, dict[str, ...], a dataclass, a TypedDict, a NamedTuple or "
            "a pydantic model, or pass a schema as a dict"
        )

    def _tuple(self, arguments: tuple[Any, ...], where: str, depth: int) -> Schema:
        if not arguments:
            return {"type": "array"}
        if len(arguments) == 2 and arguments[1] is Ellipsis:
            return {"type": "array", "items": self.schema(arguments[0], f"{where}[...]", depth + 1)}
        items = [
            self.schema(item, f"{where}[{index}]", depth + 1)
            for index, item in enumerate(arguments)
        ]
        count = len(items)
        return {"type": "array", "prefixItems": items, "minItems": count, "maxItems": count}

    def _choice(self, values: typing.Iterable[Any], where: str) -> Schema:
        choices = [item.value if isinstance(item, enum.Enum) else item for item in values]
        for item in choices:
            if not (item is None or isinstance(item, bool | int | float | str)):
                raise RequestError(
                    f"{where}: expected choices of str, int, float, bool or None, found "
                    f"{safe_repr(item)}"
                )
        return {"enum": choices}

    def _object(self, kind: Any, fields: list[_Field], where: str, depth: int) -> Schema:
        if kind in self._names:
            return {"$ref": f"#/$defs/{self._names[kind]}"}
        name = self._new_name(kind.__name__)
        self._names[kind] = name
        self.definitions[name] = {}  # keeps the order of first use
        properties = {}
        for field in fields:
            found = self.schema(field.annotation, f"{where}.{field.name}", depth + 1)
            if field.description is not None:
                found = {**found, "description": field.description}
            properties[field.name] = found
        self.definitions[name] = {
            "type": "object",
            "properties": properties,
            "required": [field.name for field in fields if field.required],
            "additionalProperties": False,
        }
        return {"$ref": f"#/$defs/{name}"}

    def _pydantic(self, model: Any, where: str) -> Schema:
        if model in self._names:
            return {"$ref": f"#/$defs/{self._names[model]}"}
        try:
            schema: Schema = model.model_json_schema()
        except Exception as error:  # pydantic's own errors have no common base class
            raise RequestError(f"{where}: pydantic found no JSON Schema: {error}") from error
        prefix = self._names[model] = self._new_name(model.__name__)
        own = schema.pop("$defs", {})
        for one in (schema, *own.values()):
            _drop_long_sets(one, own)
        names = {key: self._new_name(key) for key in own if key != prefix}
        names.update({key: prefix for key in own if key == prefix})
        for key, definition in own.items():
            self.definitions[names[key]] = _renamed(definition, names)
        if prefix not in own:
            self.definitions[prefix] = _renamed(schema, names)
        return {"$ref": f"#/$defs/{prefix}"}

    def _new_name(self, wanted: str) -> str:
        name, count = wanted, 1
        taken = {*self.definitions, *self._names.values()}
        while name in taken:
            count += 1
            name = f"{wanted}{count}"
        return name


def _is_short(items: Schema, definitions: Mapping[str, Schema]) -> bool:
    """Whether a grammar can list all sets of these items."""
    reference = items.get("$ref")
    if isinstance(reference, str):
        items = definitions.get(reference.removeprefix("#/$defs/"), {})
    if items.get("type") == "boolean" or "const" in items:
        return True
    return 0 < len(items.get("enum", ())) <= _MOST_OF_SET


def _drop_long_sets(schema: Any, definitions: Mapping[str, Schema]) -> None:
    """Remove ``uniqueItems`` where :func:`load` checks it instead."""
    for one in schema.values() if isinstance(schema, dict) else schema:
        if isinstance(one, dict | list):
            _drop_long_sets(one, definitions)
    if isinstance(schema, dict) and schema.get("uniqueItems") is True:
        items = schema.get("items")
        if not isinstance(items, dict) or not _is_short(items, definitions):
            del schema["uniqueItems"]


def _check_different(items: list[Any]) -> None:
    """:raises ValueError: an item of a set is there twice."""
    seen: set[str] = set()
    for item in items:
        text = json.dumps(item, sort_keys=True)
        if text in seen:
            raise ValueError(
                f"a set has the item {item!r} twice; use a list, or say in the prompt that items "
                "differ"
            )
        seen.add(text)


def _check_unique(schema: Any, value: Any, root: Schema) -> None:
    """:raises ValueError: an array that a schema calls unique has an item twice."""
    if not isinstance(schema, dict):
        return
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        _check_unique(root.get("$defs", {}).get(reference.removeprefix("#/$defs/")), value, root)
    for part in (*schema.get("allOf", ()), *schema.get("anyOf", ()), *schema.get("oneOf", ())):
        _check_unique(part, value, root)
    if isinstance(value, list):
        if schema.get("uniqueItems") is True:
            _check_different(value)
        for index, item in enumerate(value):
            first = schema.get("prefixItems", ())
            _check_unique(first[index] if index < len(first) else schema.get("items"), item, root)
    elif isinstance(value, dict):
        for name, item in value.items():
            found = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            _check_unique(found, item, root)


def _renamed(schema: Any, names: Mapping[str, str]) -> Any:
    """A schema whose references to definitions have new names."""
    if isinstance(schema, list):
        return [_renamed(item, names) for item in schema]
    if not isinstance(schema, dict):
        return schema
    renamed = {key: _renamed(value, names) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/$defs/"):
        key = reference.removeprefix("#/$defs/")
        renamed["$ref"] = f"#/$defs/{names.get(key, key)}"
    return renamed


def _fields(kind: Any) -> list[_Field] | None:
    """The fields of a dataclass, a TypedDict or a NamedTuple; None for other types."""
    if not inspect.isclass(kind) or is_pydantic(kind):
        return None
    described: Any = kind  # type checkers do not know the attributes of these classes
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        return [
            _Field(f.name, hints[f.name], _is_required(f), f.metadata.get("description"))
            for f in dataclasses.fields(kind)
            if f.init
        ]
    if typing.is_typeddict(kind):
        hints = _hints(kind)
        required = described.__required_keys__
        return [_Field(name, hints[name], name in required, None) for name in hints]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        hints = _hints(kind)
        defaults = described._field_defaults
        return [
            _Field(name, hints.get(name, Any), name not in defaults, None)
            for name in described._fields
        ]
    return None


def _is_required(field: dataclasses.Field[Any]) -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def _hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except Exception as error:
        raise RequestError(
            f"{kind.__name__}: its annotations cannot be read: {error}; define the types it names "
            "at module level"
        ) from error


def _unwrapped(annotation: Any) -> Any:
    """Without ``Annotated``, ``Required``, ``NotRequired`` and ``NewType``."""
    while True:
        if typing.get_origin(annotation) in (typing.Annotated, *_MARKERS):
            annotation = typing.get_args(annotation)[0]
        elif isinstance(annotation, typing.NewType):
            annotation = annotation.__supertype__
        else:
            return annotation


def _load_union(arguments: tuple[Any, ...], value: Any) -> Any:
    errors = []
    for item in arguments:
        try:
            return load(item, value)
        except (ValueError, TypeError, KeyError) as error:
            errors.append(f"{_name(item)}: {error}")
    raise ValueError("; ".join(errors))


def _load_object(kind: Any, fields: list[_Field], value: dict[str, Any]) -> Any:
    known = {field.name: field.annotation for field in fields}
    for key in value:
        if key not in known:
            raise ValueError(f"{kind.__name__} has no field {key!r}")
    missing = [field.name for field in fields if field.required and field.name not in value]
    if missing:
        raise ValueError(f"{kind.__name__} lacks {', '.join(missing)}")
    return kind(**{key: load(known[key], item) for key, item in value.items()})


def _load_tuple(arguments: tuple[Any, ...], value: list[Any]) -> tuple[Any, ...]:
    if not arguments:
        return tuple(value)
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return tuple(load(arguments[0], item) for item in value)
    if len(value) != len(arguments):
        raise ValueError(f"expected {len(arguments)} items, found {len(value)}")
    return tuple(load(kind, item) for kind, item in zip(arguments, value, strict=True))


def _expect(value: Any, kind: Any) -> Any:
    if type(value) is not kind:  # bool is not an int here
        raise ValueError(f"expected {kind.__name__}, found {value!r:.80}")
    return value


def _name(annotation: Any) -> str:
    if inspect.isclass(annotation) and not typing.get_args(annotation):
        return annotation.__name__
    return str(annotation).replace("typing.", "")
