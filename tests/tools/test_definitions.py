"""Definitions of tools, from functions and from dicts; the choice of a tool."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from typing import Annotated, Any, Literal

import jsonschema
import pytest

from sdk.api.errors import RequestError
from sdk.tools import Tool, ToolChoice, tool_choice_of, tool_from_function, tools_of
from tests.tools.outputs import TOOLS, WEATHER


class Unit(enum.Enum):
    CELSIUS = "celsius"
    FAHRENHEIT = "fahrenheit"


@dataclasses.dataclass
class Place:
    name: str
    height: float = 0.0


def other_place() -> type:
    @dataclasses.dataclass
    class Place:
        zip: int

    return Place


OtherPlace: Any = other_place()


def get_weather(
    city: Annotated[str, "The name of the city."],
    unit: Unit = Unit.CELSIUS,
    days: int | None = 1,
) -> str:
    """Get the weather of a city.

    The forecast is for
    the next days.

    Args:
        city: Not used, because the annotation says it.
        unit (Unit): How temperatures
            are given.
        days: How many days.

    Returns:
        A text: with a colon.
    """
    return f"{city} {unit} {days}"


def test_a_function_is_a_tool() -> None:
    (tool,) = tools_of([get_weather])
    assert (tool.name, tool.function) == ("get_weather", get_weather)
    assert tool.description == ("Get the weather of a city.\n\nThe forecast is for the next days.")
    assert tool.as_dict() == {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Get the weather of a city.\n\nThe forecast is for the next days.",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "The name of the city."},
                    "unit": {
                        "enum": ["celsius", "fahrenheit"],
                        "description": "How temperatures are given.",
                        "default": "celsius",
                    },
                    "days": {
                        "anyOf": [{"type": "integer"}, {"type": "null"}],
                        "description": "How many days.",
                        "default": 1,
                    },
                },
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
    json.dumps(tool.as_dict())
    jsonschema.Draft202012Validator.check_schema(dict(tool.parameters))


def numpy_style(a: int, b: int, text: str) -> None:
    """
    Add numbers.

    Parameters
    ----------
    a, b : int
        The numbers.
    text : str, optional
        A text,
        with two lines.

    Returns
    -------
    None
        Nothing.
    """


def rest_style(a: int, b: int) -> None:
    """Add numbers.

    :param a: The first
        number.
    :param int b: The second number.
    :returns: nothing: at all.
    """


def no_docstring(a: int) -> None:
    pass


@pytest.mark.parametrize(
    ("function", "summary", "descriptions"),
    [
        (
            numpy_style,
            "Add numbers.",
            {"a": "The numbers.", "b": "The numbers.", "text": "A text, with two lines."},
        ),
        (rest_style, "Add numbers.", {"a": "The first number.", "b": "The second number."}),
        (no_docstring, "", {"a": None}),
    ],
)
def test_docstrings_describe_parameters(
    function: Any, summary: str, descriptions: dict[str, str | None]
) -> None:
    tool = tool_from_function(function)
    properties = tool.parameters["properties"]
    found = {name: schema.get("description") for name, schema in properties.items()}
    assert (tool.description, found) == (summary, descriptions)


async def fetch(url: str) -> bytes:
    """Fetch a page."""
    return url.encode()


class Shop:
    def buy(self, item: str, count: int = 1) -> None:
        """Buy an item."""

    def __call__(self, item: str) -> None:
        """Use the shop."""


def test_coroutines_methods_and_partial_objects_are_tools() -> None:
    shop = Shop()
    tools = tools_of([fetch, shop.buy, functools.partial(get_weather, unit=Unit.CELSIUS)])
    assert [tool.name for tool in tools] == ["fetch", "buy", "get_weather"]
    assert [tool.description.partition("\n")[0] for tool in tools] == [
        "Fetch a page.",
        "Buy an item.",
        "Get the weather of a city.",
    ]
    assert [list(tool.parameters["properties"]) for tool in tools] == [
        ["url"],
        ["item", "count"],
        ["city", "days"],
    ]
    positional = tool_from_function(functools.partial(get_weather, "Paris"))
    assert list(positional.parameters["properties"]) == ["unit", "days"]


def test_objects_and_classes_can_be_called() -> None:
    tool = tool_from_function(Shop(), name="shop")
    assert list(tool.parameters["properties"]) == ["item"]
    assert list(tool_from_function(Place).parameters["properties"]) == ["name", "height"]


def test_classes_of_the_same_name_have_different_definitions() -> None:
    def go(start: Place, end: OtherPlace) -> None: ...

    go.__annotations__ = {"start": Place, "end": OtherPlace}
    parameters = tool_from_function(go).parameters
    valid = {"start": {"name": "a"}, "end": {"zip": 3}}
    jsonschema.validate(valid, parameters)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"start": {"zip": 3}, "end": {"zip": 3}}, parameters)


def test_a_function_without_parameters_is_a_tool() -> None:
    def now() -> str:
        """The time."""
        return ""

    assert tool_from_function(now).parameters["properties"] == {}


def unannotated(city) -> None:  # type: ignore[no-untyped-def]
    pass


def positional_only(city: str, /) -> None:
    pass


def starred(*cities: str) -> None:
    pass


def double_starred(city: str, **others: str) -> None:
    pass


def no_schema(number: complex) -> None:
    pass


def unknown_type(number: Missing) -> None:  # type: ignore[name-defined]  # noqa: F821
    pass


def too_long(a: int) -> None:
    pass


too_long.__name__ = "x" * 65


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            unannotated,
            "unannotated: the parameter 'city' has no type; annotate it, such as city: str",
        ),
        (positional_only, "positional_only: the parameter 'city' is positional-only"),
        (starred, r"starred: the parameter '\*cities' has no fixed names"),
        (double_starred, r"double_starred: the parameter '\*\*others' has no fixed names"),
        (no_schema, "no_schema.number: complex has no JSON Schema"),
        (unknown_type, "unknown_type.*cannot be read: NameError: name 'Missing' is not defined"),
        (too_long, "expected a function whose name has 1 to 64 letters"),
        (lambda: 3, "expected a function whose name has .* found '<lambda>'"),
        (Shop.buy, "buy: the parameter 'self' has no type"),
        (Shop(), "expected a function whose name has .* found ''"),
        (3, r"tools\[0\]: expected a function, a dict or a Tool, found 3"),
    ],
)
def test_what_cannot_be_a_tool_is_rejected(function: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tools_of([function])


CHAT = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}


def test_dicts_of_both_apis_are_tools() -> None:
    (chat,) = tools_of([CHAT])
    (flat,) = tools_of([{"type": "function", "strict": True, **CHAT["function"]}])  # type: ignore[dict-item]
    assert chat == flat and chat.function is None
    assert chat.as_dict() == CHAT
    (bare,) = tools_of([{"type": "function", "function": {"name": "now"}}])
    assert bare.parameters == {"type": "object", "properties": {}}
    assert tools_of(None) == ()
    assert tools_of([WEATHER]) == (WEATHER,)


def changed(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        ({"type": "web_search"}, r"tools\[0\]: .*found type 'web_search'; only functions are supp"),
        ({"name": "f"}, r"tools\[0\]: expected \{'type': 'function', ...\}, found type None"),
        ({"type": "function", "function": 3}, r"tools\[0\].function: expected a dict, found 3"),
        ({"type": "function"}, r"tools\[0\].name: expected 1 to 64 letters.*found None"),
        (changed(name="get weather"), r"tools\[0\].function.name: expected .*found 'get weather'"),
        (changed(name=""), "function.name: expected"),
        (changed(description=3), "function.description: expected a string, found 3"),
        (changed(parameters=[1]), r"parameters: expected a JSON Schema as a dict, found \[1\]"),
        (
            changed(parameters={"type": "array"}),
            "parameters.type: expected 'object', found 'array'",
        ),
        (
            changed(parameters={"properties": []}),
            r"parameters.properties: expected a dict, found \[\]",
        ),
        (
            changed(parameters={"properties": {"a": 3}}),
            "expected names and JSON Schemas, found 'a': 3",
        ),
        (changed(parameters={"required": "a"}), "parameters.required: expected a list of names"),
        (changed(parameters={"required": ["a"]}), "parameters.required: 'a' is not among the prop"),
        (Tool("a b", "", {}), r"tools\[0\].name: expected"),
    ],
)
def test_a_fault_of_a_dict_is_named(tool: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tools_of([tool])


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (CHAT, "tools: expected a list of functions, dicts or Tool objects, found {"),
        ("get_weather", "tools: expected a list"),
        (3, "tools: expected a list"),
        ([CHAT, get_weather], r"tools\[1\]: the name 'get_weather' is used twice"),
        ([changed(name=f"f{index}") for index in range(129)], "tools: expected at most 128"),
    ],
)
def test_a_list_of_tools_is_checked(tools: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        tools_of(tools)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (None, ToolChoice("auto")),
        ("auto", ToolChoice("auto")),
        ("required", ToolChoice("required")),
        ("none", ToolChoice("none")),
        ("get_time", ToolChoice("required", "get_time")),
        (ToolChoice("required"), ToolChoice("required")),
        (ToolChoice("auto"), ToolChoice("auto")),
        (ToolChoice("required", "now"), ToolChoice("required", "now")),
        ({"type": "function", "function": {"name": "now"}}, ToolChoice("required", "now")),
        ({"type": "function", "name": "now"}, ToolChoice("required", "now")),
    ],
)
def test_a_choice_is_understood(choice: Any, expected: ToolChoice) -> None:
    assert tool_choice_of(choice, TOOLS) == expected


def test_without_tools_there_is_no_choice() -> None:
    assert tool_choice_of(None, ()) == tool_choice_of("auto", ()) == ToolChoice("none")
    with pytest.raises(RequestError, match="'required' needs tools, found none"):
        tool_choice_of("required", ())


@pytest.mark.parametrize(
    "choice",
    [
        "get_height",
        3,
        {"type": "function"},
        {"type": "function", "function": {"name": "get_height"}},
        {"type": "allowed_tools"},
        {"function": {"name": "now"}},
    ],
)
def test_an_unknown_choice_is_rejected(choice: Any) -> None:
    with pytest.raises(RequestError, match=r"tool_choice: .*\(get_weather, get_time, now\), found"):
        tool_choice_of(choice, TOOLS)


def defaults(a: float = 1.5, b: float = float("inf"), c: list[int] | None = None) -> None:
    pass


def test_defaults_that_json_has_are_in_the_schema() -> None:
    properties = tool_from_function(defaults).parameters["properties"]
    assert {name: schema.get("default") for name, schema in properties.items()} == {
        "a": 1.5,
        "b": None,
        "c": None,
    }


def literal(kind: Literal["a", "b"]) -> None:
    pass


def test_choices_of_a_literal_are_in_the_schema() -> None:
    assert tool_from_function(literal).parameters["properties"]["kind"] == {"enum": ["a", "b"]}


def test_a_definition_is_shown_as_it_was_written() -> None:
    function = {"strict": True, "name": "f", "parameters": {"type": "object"}, "description": "d"}
    [tool] = tools_of([{"function": function, "type": "function"}])
    assert json.dumps(tool.as_dict()) == json.dumps({"function": function, "type": "function"})
    [flat] = tools_of([{"type": "function", **function}])  # of the Responses API
    assert json.dumps(flat.as_dict()) == json.dumps({"type": "function", "function": function})
    [short] = tools_of([{"type": "function", "function": {"name": "f"}}])
    shown = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    assert short.as_dict()["function"] == shown
