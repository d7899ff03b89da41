"""JSON Schema of Python types, and values of these types from JSON."""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import typing
import uuid
from typing import Annotated, Any, Literal, NamedTuple, TypedDict

import jsonschema
import pydantic
import pytest

from sdk.api.errors import RequestError
from sdk.api.schemas import load, schema_of


class Color(enum.Enum):
    RED = "red"
    BLUE = 2


@dataclasses.dataclass
class Item:
    name: str
    price: float
    count: int = 1
    tags: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Node:
    value: int
    children: list[Node]
    parent: Node | None = None


class Movie(TypedDict):
    title: str
    year: int | None


class Point(NamedTuple):
    x: float
    y: float = 0.0


class Line(pydantic.BaseModel):
    text: Annotated[str, pydantic.Field(min_length=1)]
    color: Color


class Invoice(pydantic.BaseModel):
    number: int
    lines: list[Line]
    sibling: Invoice | None = None


VALUES: list[tuple[Any, Any, Any]] = [
    (int, 3, 3),
    (int, 3.0, 3),
    (float, 3, 3.0),
    (str, "a", "a"),
    (bool, True, True),
    (None, None, None),
    (Any, {"a": [1]}, {"a": [1]}),
    (Literal["a", 1, None], 1, 1),
    (Color, "red", Color.RED),
    (Color, 2, Color.BLUE),
    (int | None, None, None),
    (int | str, "x", "x"),
    (list[int], [1, 2], [1, 2]),
    (set[int], [1, 2], {1, 2}),
    (frozenset[str], ["a"], frozenset({"a"})),
    (tuple[int, str], [1, "a"], (1, "a")),
    (tuple[int, ...], [1, 2], (1, 2)),
    (dict[str, int], {"a": 1}, {"a": 1}),
    (Annotated[int, "a number"], 3, 3),
    (typing.NewType("Id", int), 3, 3),
    (datetime.date, "2026-02-03", datetime.date(2026, 2, 3)),
    (
        datetime.datetime,
        "2026-02-03T04:05:06Z",
        datetime.datetime(2026, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc),
    ),
    (
        uuid.UUID,
        "12345678-1234-5678-1234-567812345678",
        uuid.UUID(int=0x12345678123456781234567812345678),
    ),
    (Item, {"name": "n", "price": 1}, Item("n", 1.0)),
    (Item, {"name": "n", "price": 1.5, "count": 2, "tags": ["t"]}, Item("n", 1.5, 2, ["t"])),
    (Node, {"value": 1, "children": [{"value": 2, "children": []}]}, Node(1, [Node(2, [])])),
    (Movie, {"title": "t", "year": None}, {"title": "t", "year": None}),
    (Point, {"x": 1}, Point(1.0)),
    (list[Item], [{"name": "n", "price": 1}], [Item("n", 1.0)]),
    (
        Invoice,
        {"number": 1, "lines": [{"text": "t", "color": "red"}]},
        Invoice(number=1, lines=[Line(text="t", color=Color.RED)]),
    ),
    (list[Line | int], [3, {"text": "t", "color": 2}], [3, Line(text="t", color=Color.BLUE)]),
]


@pytest.mark.parametrize(("kind", "value", "expected"), VALUES, ids=lambda x: str(x)[:40])
def test_a_value_fits_the_schema_and_becomes_its_type(kind: Any, value: Any, expected: Any) -> None:
    jsonschema.Draft202012Validator(schema_of(kind)).validate(value)
    made = load(kind, json.loads(json.dumps(value)))
    assert made == expected
    assert type(made) is type(expected)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, "3"),
        (int, True),
        (bool, 1),
        (Color, "green"),
        (Literal["a", 1], True),
        (tuple[int, str], [1]),
        (tuple[int, str], [1, "a", 2]),
        (Item, {"name": "n"}),
        (Item, {"name": "n", "price": 1, "color": 2}),
        (Node, {"value": 1, "children": [{"value": "2", "children": []}]}),
        (Movie, {"title": "t"}),
        (Invoice, {"number": 1, "lines": [{"text": "", "color": "red"}]}),
        (dict[str, int], {"a": "b"}),
        (None, 0),
    ],
    ids=str,
)
def test_a_wrong_value_is_rejected_by_both(kind: Any, value: Any) -> None:
    assert not jsonschema.Draft202012Validator(schema_of(kind)).is_valid(value)
    with pytest.raises(ValueError):
        load(kind, value)


def test_descriptions_are_kept() -> None:
    schema = schema_of(dict[str, Annotated[int, "how many"]])
    assert schema["additionalProperties"] == {"type": "integer", "description": "how many"}


def test_classes_of_the_same_name_do_not_meet() -> None:
    def make(annotation: Any) -> Any:
        return dataclasses.make_dataclass("Same", [("a", annotation)])

    schema = schema_of(tuple[make(int), make(str)])  # type: ignore[misc]
    jsonschema.validate([{"a": 1}, {"a": "x"}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate([{"a": "x"}, {"a": "x"}], schema)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (complex, "complex has no JSON Schema"),
        (dict[int, str], "string keys"),
        (list[bytes], "bytes has no JSON Schema"),
        (dataclasses.make_dataclass("Bad", [("f", "Nowhere")]), "cannot be read"),
        (Literal[b"a"], "expected choices of str"),
    ],
    ids=str,
)
def test_a_type_without_a_schema_is_named(kind: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        schema_of(kind)
