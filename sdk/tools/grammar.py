"""Grammars that constrain an answer to tool calls, for llguidance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from sdk.api.errors import RequestError
from sdk.tools.definitions import Tool, tool_choice_of
from sdk.tools.format import ToolFormat
from sdk.tools.reasoning import Reasoning
from sdk.tools.rules import SPACE, TEXT, CallRules, Rules, escape

_NO_TOKENS: Mapping[str, int] = MappingProxyType({})


def grammar_for(
    tools: Iterable[Tool],
    choice: object,
    format: ToolFormat,
    parallel: bool = True,
    *,
    reasoning: Reasoning | None = None,
    prompt_opens_reasoning: bool = False,
    special_tokens: Mapping[str, int] = _NO_TOKENS,
) -> str:
    """A Lark grammar of the answers that ``choice`` allows (see :func:`tool_choice_of`).

    ``"required"`` or a named tool: only calls. ``"auto"``: any text, but what begins as a call must
    be one, and the answer ends after the calls. In both cases ``reasoning`` may come first.

    :param parallel: whether there may be several calls.
    :param special_tokens: the tokenizer's special tokens and their ids. Marks among them must be
        these tokens; other marks are ordinary text.
    :raises RequestError: there are no tools, or the choice is ``"none"`` or unknown.
    """
    tools = tuple(tools)
    chosen = tool_choice_of(choice, tools)
    if chosen.mode == "none":
        raise RequestError(
            "tool_choice: 'none' and answers without tools allow any text, so they have no grammar"
        )
    if chosen.name is not None:
        tools = tuple(tool for tool in tools if tool.name == chosen.name)
    rules = Rules(special_tokens)
    found = format.rules(rules, tools, parallel)
    calls = rules.add("calls", found.calls)
    if chosen.mode == "auto":
        body = _free_text_or(rules, found, calls)
    elif found.trigger:
        body = f"{SPACE} {rules.mark(found.trigger)} {calls}"
    else:
        body = f"{SPACE} {calls}"
    return rules.grammar(_reasoning(rules, reasoning, prompt_opens_reasoning) + body)


def _free_text_or(rules: Rules, found: CallRules, calls: str) -> str:
    if found.otherwise is not None:
        return f"({found.otherwise} | {calls})"
    if found.trigger:
        return f"({TEXT} | {rules.text_until(found.trigger)} {calls})"
    plain = rules.add("plain", rf"/([^\s{escape(found.first)}](?s:.*))?/")
    return f"{SPACE} ({plain} | {calls})"


def _reasoning(rules: Rules, reasoning: Reasoning | None, opened: bool) -> str:
    if reasoning is None:
        return ""
    thoughts = rules.text_until(reasoning.closing[0])
    if opened:
        return f"{thoughts} "
    return f"({SPACE} {rules.mark(reasoning.opening[0])} {thoughts})? "
