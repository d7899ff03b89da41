"""Definitions of tools: from Python functions, and in the form of OpenAI's APIs."""

from __future__ import annotations

import enum
import functools
import inspect
import itertools
import math
import re
import typing
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Union

from sdk.api.errors import RequestError
from sdk.api.schemas import schema_of
from sdk.quant.safe_repr import is_value_error, safe_message, safe_repr
from sdk.tools.docstrings import read_docstring

#: OpenAI's rule for names.
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_NAME_RULE = "1 to 64 letters, digits, underscores or hyphens"
#: OpenAI's limit.
MAX_TOOLS = 128

ToolLike = Union["Tool", Callable[..., Any], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a model may call.

    ``parameters`` is the JSON Schema of its arguments, an object. ``function`` is what
    :func:`~sdk.tools.loop.run_tools` calls; ``None`` if somebody else runs the calls.
    """

    name: str
    description: str
    parameters: Mapping[str, Any]
    function: Callable[..., Any] | None = field(default=None, compare=False)
    #: The definition as the caller wrote it: templates see its other keys and their order.
    written: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)

    def as_dict(self) -> dict[str, Any]:
        """The definition in the form of OpenAI's chat API, which chat templates take."""
        if self.written is not None:
            function = self.written["function"]
            own = {} if function.get("parameters") else {"parameters": dict(self.parameters)}
            return {**self.written, "function": {**function, **own}}
        function = {
            "name": self.name,
            "description": self.description,
            "parameters": dict(self.parameters),
        }
        return {"type": "function", "function": function}


class ToolChoice(NamedTuple):
    """Whether the model must call. ``name``: the only tool it may call."""

    mode: Literal["auto", "required", "none"]
    name: str | None = None


def tools_of(given: Iterable[ToolLike] | None) -> tuple[Tool, ...]:
    """Tools from functions, dicts of OpenAI's APIs, and :class:`Tool` objects.

    :raises RequestError: one cannot be a tool, or two have the same name.
    """
    if given is None:
        return ()
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        raise RequestError(
            f"tools: expected a list of functions, dicts or Tool objects, found {safe_repr(given)}"
        )
    try:
        listed = list(itertools.islice(given, MAX_TOOLS + 1))
    except Exception as error:
        if not is_value_error(error):
            raise
        raise RequestError(f"tools: cannot be read: {safe_message(error)}") from error
    if len(listed) > MAX_TOOLS:
        raise RequestError(f"tools: expected at most {MAX_TOOLS}, found more")
    tools: dict[str, Tool] = {}
    for index, one in enumerate(listed):
        tool = _tool(one, f"tools[{index}]")
        if tool.name in tools:
            raise RequestError(f"tools[{index}]: the name {tool.name!r} is used twice; rename one")
        tools[tool.name] = tool
    return tuple(tools.values())


def tool_choice_of(choice: object, tools: Iterable[Tool]) -> ToolChoice:
    """``None`` (auto), ``"auto"``, ``"required"``, ``"none"``, the name of a tool, or OpenAI's
    ``{"type": "function", "function": {"name": ...}}``, also with the name at the top.

    Without tools the choice is ``"none"``.

    :raises RequestError: it is none of these, there is no such tool, or there are no tools.
    """
    names = [tool.name for tool in tools]
    mode: Any = "auto"
    name: Any = None
    if isinstance(choice, ToolChoice):
        mode, name = choice
    elif isinstance(choice, Mapping):
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if choice.get("type") != "function" or name is None:
            raise _unknown_choice(choice, names)
    elif choice in ("auto", "required", "none"):
        mode = choice
    elif choice is not None:
        name = choice
    if name is not None:
        if name not in names:
            raise _unknown_choice(choice, names)
        return ToolChoice("required", name)
    if mode == "required" and not names:
        raise RequestError("tool_choice: 'required' needs tools, found none; pass tools")
    return ToolChoice(mode if names else "none")


def _unknown_choice(choice: object, names: list[str]) -> RequestError:
    return RequestError(
        "tool_choice: expected 'auto', 'required', 'none', or the name of a tool "
        f"({', '.join(names) or 'there are none'}), found {safe_repr(choice)}"
    )


def _tool(given: ToolLike, where: str) -> Tool:
    if isinstance(given, Tool):
        _checked_name(given.name, where)
        return given
    if isinstance(given, Mapping):
        return _from_dict(given, where)
    if callable(given):
        return tool_from_function(given)
    raise RequestError(f"{where}: expected a function, a dict or a Tool, found {safe_repr(given)}")


def _from_dict(given: Mapping[str, Any], where: str) -> Tool:
    """Of the chat API (``function`` holds the definition) or of the Responses API (flat)."""
    if given.get("type") != "function":
        raise RequestError(
            f"{where}: expected {{'type': 'function', ...}}, found type "
            f"{safe_repr(given.get('type'))}; only functions are supported"
        )
    definition = given
    if "function" in given:
        definition, where = given["function"], f"{where}.function"
    if not isinstance(definition, Mapping):
        raise RequestError(f"{where}: expected a dict, found {safe_repr(definition)}")
    name = _checked_name(definition.get("name"), where)
    description = definition.get("description")
    if not isinstance(description, str | None):
        raise RequestError(
            f"{where}.description: expected a string, found {safe_repr(description)}"
        )
    parameters = definition.get("parameters")
    if parameters is None or parameters == []:  # an empty object, as PHP writes it
        parameters = {"type": "object", "properties": {}}
    _check_parameters(parameters, f"{where}.parameters")
    if definition is given:
        own = {key: value for key, value in given.items() if key != "type"}
        given = {"type": "function", "function": own}
    return Tool(name, description or "", parameters, written=given)


def _checked_name(name: object, where: str) -> str:
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise RequestError(f"{where}.name: expected {_NAME_RULE}, found {safe_repr(name)}")
    return name


def _check_parameters(schema: object, where: str) -> None:
    if not isinstance(schema, Mapping):
        raise RequestError(f"{where}: expected a JSON Schema as a dict, found {safe_repr(schema)}")
    if schema.get("type", "object") != "object":
        raise RequestError(
            f"{where}.type: expected 'object', found {safe_repr(schema['type'])}; a tool's "
            "arguments are an object"
        )
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise RequestError(f"{where}.properties: expected a dict, found {safe_repr(properties)}")
    for name, one in properties.items():
        if not isinstance(name, str) or not isinstance(one, Mapping | bool):
            raise RequestError(
                f"{where}.properties: expected names and JSON Schemas, found "
                f"{safe_repr(name)}: {safe_repr(one)}"
            )
    required = schema.get("required", [])
    if not isinstance(required, list | tuple) or not all(isinstance(one, str) for one in required):
        raise RequestError(
            f"{where}.required: expected a list of names, found {safe_repr(required)}"
        )
    unknown = [name for name in required if name not in properties]
    if unknown:
        raise RequestError(
            f"{where}.required: {unknown[0]!r} is not among the properties; add it or leave it out"
        )


def tool_from_function(function: Callable[..., Any], name: str | None = None) -> Tool:
    """A tool from a function's signature and docstring.

    Coroutine functions, methods and ``functools.partial`` objects (without what they bind) work
    too. Every parameter needs a type; its description is that of ``Annotated[T, "description"]`` or
    of the docstring (Google's, NumPy's or reST style). A parameter with a default is not required.

    :raises RequestError: a parameter has no type, no JSON Schema, or cannot be passed by name.
    """
    signature, types, described = _described(function)
    name = name or str(getattr(described, "__name__", ""))
    if _NAME.fullmatch(name) is None:
        raise RequestError(
            f"tools: expected a function whose name has {_NAME_RULE}, found {safe_repr(name)}; "
            "use tool_from_function(function, name=...)"
        )
    docstring = read_docstring(inspect.getdoc(described))
    parameters = _free_parameters(name, function, signature)
    for parameter in parameters:
        if parameter.name not in types:
            raise RequestError(
                f"{name}: the parameter {parameter.name!r} has no type; annotate it, such as "
                f"{parameter.name}: str"
            )
    # All parameters in one type, so that classes of the same name get different definitions.
    make: Any = typing.TypedDict  # type checkers want a literal name
    together = make(name, {one.name: types[one.name] for one in parameters})
    definitions = schema_of(together)["$defs"]
    schema = definitions.pop(name)
    schema["required"] = [one.name for one in parameters if one.default is one.empty]
    for parameter in parameters:
        _describe(schema["properties"][parameter.name], parameter, docstring.parameters)
    if definitions:
        schema["$defs"] = definitions
    return Tool(name, docstring.summary, schema, function)


def argument_types(function: Callable[..., Any]) -> dict[str, Any]:
    """The types of a function's parameters, by name."""
    return _described(function)[1]


def _described(
    function: Callable[..., Any],
) -> tuple[inspect.Signature, dict[str, Any], Callable[..., Any]]:
    """The signature and the types of a function, and what has its name and docstring."""
    inner = function
    while isinstance(inner, functools.partial):
        inner = inner.func
    annotated: Any = inner
    if inspect.isclass(inner):
        annotated = inner.__init__
    elif not inspect.isroutine(inner):
        annotated = type(inner).__call__
    try:
        types = typing.get_type_hints(annotated, include_extras=True)
        return inspect.signature(function), types, inner
    except Exception as error:  # annotations are the caller's expressions
        raise RequestError(
            f"tools: the signature of {safe_repr(function)} cannot be read: {safe_message(error)}; "
            "define the types it names at module level"
        ) from error


def _free_parameters(
    name: str, function: Callable[..., Any], signature: inspect.Signature
) -> list[inspect.Parameter]:
    """The parameters that a call gives, all by name."""
    bound = set(function.keywords) if isinstance(function, functools.partial) else set()
    found = []
    for one in signature.parameters.values():
        if one.kind in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
            stars = "*" if one.kind is one.VAR_POSITIONAL else "**"
            raise RequestError(
                f"{name}: the parameter '{stars}{one.name}' has no fixed names; list the parameters"
            )
        if one.kind is one.POSITIONAL_ONLY:
            raise RequestError(
                f"{name}: the parameter {one.name!r} is positional-only, but a model gives "
                "arguments by name; remove the '/'"
            )
        if one.name not in bound:
            found.append(one)
    return found


def _describe(
    schema: dict[str, Any], parameter: inspect.Parameter, descriptions: Mapping[str, str]
) -> None:
    """Add a parameter's description and default to its schema."""
    if "description" not in schema and parameter.name in descriptions:
        schema["description"] = descriptions[parameter.name]
    default = parameter.default
    default = default.value if isinstance(default, enum.Enum) else default
    if isinstance(default, str | int) or (isinstance(default, float) and math.isfinite(default)):
        schema["default"] = default
