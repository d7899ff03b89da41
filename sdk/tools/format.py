"""How a family of models writes tool calls.

Every module of ``formats/`` describes one family with a constant ``FORMAT``, a :class:`ToolFormat`.
``format_of`` finds the family of a model by its chat template. Formats are tried by ``order``, the
most specific first, because families borrow each other's marks: Qwen3-Coder and SmolLM3 write
``<tool_call>`` as Hermes does, and most fine-tunes of Llama keep the token ``<|python_tag|>`` in
their vocabulary.
"""

from __future__ import annotations

import difflib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.tools.building import MessageBuilder
from sdk.tools.definitions import Tool
from sdk.tools.stream import Reads, TextStream

if TYPE_CHECKING:
    from sdk.tools.rules import CallRules, Rules

#: Reads the calls after a mark (empty for a call without one).
#:
#: It raises NotACallError for anything else. Then what it read becomes content or, after the name
#: of the call, part of an invalid call.
ReadCalls = Callable[[TextStream, MessageBuilder, str], Reads[None]]
#: The rules of one or several calls of tools: ``(rules, tools, parallel)``.
MakeRules = Callable[["Rules", "tuple[Tool, ...]", bool], "CallRules"]


class ToolFormat(NamedTuple):
    """One family's tool calls.

    ``name``: for messages and for choosing a format by hand.
    ``order``: formats with a lower one are tried earlier.
    ``in_template``: alternatives; a chat template of the family has all texts of one of them.
    ``tokens``: special tokens that only this family has, for models without a telling template.
    ``triggers``: marks that begin calls.
    ``read``, ``rules``: how calls are read, and how a grammar constrains them.
    ``bare``: first characters of calls that begin a line without a mark.
    ``closing``: the mark that ends what a trigger began; an invalid call extends to it.
    ``turn_ends``: marks of the end of the turn, which are not part of the content.
    ``call_id_length``: chat templates of the family want ids of this many letters and digits.
    ``text_arguments``: chat templates of the family join the arguments of earlier calls as JSON
    text; of others they take objects.
    ``channels``: the format marks content and reasoning too, so it reads answers without tools.
    """

    name: str
    order: int
    in_template: tuple[tuple[str, ...], ...]
    triggers: tuple[str, ...]
    read: ReadCalls
    rules: MakeRules
    tokens: tuple[str, ...] = ()
    bare: str = ""
    closing: Mapping[str, str] = MappingProxyType({})
    turn_ends: tuple[str, ...] = ()
    call_id_length: int | None = None
    channels: bool = False
    text_arguments: bool = False

    @property
    def marks(self) -> tuple[str, ...]:
        """Marks that must stay in the text: ``skip_special_tokens`` would remove some of them."""
        return tuple(dict.fromkeys((*self.triggers, *self.closing.values())))


@cache
def all_formats() -> tuple[ToolFormat, ...]:
    """All formats, in the order in which they are tried."""
    package = import_module("sdk.tools.formats")
    names = sorted(module.name for module in pkgutil.iter_modules(package.__path__))
    found = [import_module(f"{package.__name__}.{name}").FORMAT for name in names]
    return tuple(sorted(found, key=lambda one: (one.order, one.name)))


def format_named(name: str) -> ToolFormat:
    """The format of this name. :raises RequestError: there is none."""
    names = {one.name: one for one in all_formats()}
    if name not in names:
        near = difflib.get_close_matches(str(name), names, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"use one of {', '.join(names)}"
        raise RequestError(f"tool format: expected a known name, found {safe_repr(name)}; {hint}")
    return names[name]


def format_of(template: str | None, special_tokens: Iterable[str] = ()) -> ToolFormat | None:
    """The format of a model, ``None`` if it is unknown.

    The chat template decides. The special tokens of the tokenizer are asked only if no format knows
    the template, because fine-tunes keep tokens that they do not use.
    """
    for one in all_formats():
        if any(all(mark in (template or "") for mark in marks) for marks in one.in_template):
            return one
    tokens = frozenset(special_tokens)
    return next((one for one in all_formats() if tokens.intersection(one.tokens)), None)
