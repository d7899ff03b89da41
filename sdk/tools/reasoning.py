"""How models mark their reasoning, the part of an answer that is not for the user."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.tools.building import MessageBuilder
from sdk.tools.stream import Reads, TextStream


class Reasoning(NamedTuple):
    """The marks of one way of reasoning.

    ``opening``, ``closing``: each a list of spellings, the usual one first. Reasoning is at the
    beginning of an answer; many chat templates write its opening mark already in the prompt.
    ``in_template``: texts of which a chat template of such a model has one.
    """

    name: str
    opening: tuple[str, ...]
    closing: tuple[str, ...]
    in_template: tuple[str, ...]

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt ends with an opening mark, so that the answer begins with reasoning."""
        return prompt.rstrip().endswith(self.opening)


#: The first that fits a template is chosen. Harmony's analysis comes first: its format reads the
#: other channels too. Granite's sentences come last: they are ordinary text.
REASONINGS = (
    Reasoning(
        "harmony",
        ("<|channel|>analysis<|message|>",),
        ("<|end|>",),
        ("<|channel|>analysis",),
    ),
    Reasoning("seed", ("<seed:think>",), ("</seed:think>",), ("<seed:think>",)),
    Reasoning("magistral", ("[THINK]",), ("[/THINK]",), ("[THINK]",)),
    Reasoning("kimi", ("◁think▷",), ("◁/think▷",), ("◁think▷", "◁/think▷")),
    Reasoning("channel_thought", ("<|channel>thought",), ("<channel|>",), ("<|channel>thought",)),
    Reasoning("think", ("<think>",), ("</think>",), ("<think>", "</think>")),
    Reasoning("thinking", ("<thinking>",), ("</thinking>",), ("<thinking>",)),
    Reasoning("reasoning", ("<reasoning>",), ("</reasoning>",), ("<reasoning>",)),
    Reasoning(
        "thought_process",
        ("Here is my thought process:", "Here's my thought process:"),
        ("Here is my response:", "Here's my response:"),
        ("Here is my thought process:", "Here's my thought process:"),
    ),
)


def reasoning_named(name: str) -> Reasoning:
    """The reasoning of this name. :raises RequestError: there is none."""
    for one in REASONINGS:
        if one.name == name:
            return one
    names = ", ".join(one.name for one in REASONINGS)
    raise RequestError(f"reasoning: expected one of {names}, found {safe_repr(name)}")


def reasoning_of(template: str | None, special_tokens: Iterable[str] = ()) -> Reasoning | None:
    """How a model reasons, ``None`` if its chat template shows no marks.

    Without a telling template, special tokens that are an opening mark decide.
    """
    for one in REASONINGS:
        if any(mark in (template or "") for mark in one.in_template):
            return one
    tokens = frozenset(special_tokens)
    if "<|channel|>" in tokens and "<|message|>" in tokens:
        return REASONINGS[0]
    return next((one for one in REASONINGS if tokens.intersection(one.opening)), None)


def read_reasoning(
    stream: TextStream, builder: MessageBuilder, reasoning: Reasoning, *, opened: bool
) -> Reads[None]:
    """Reasoning at the beginning of an answer, if there is any.

    A model may repeat the mark that its prompt has. Reasoning that has no end is all reasoning.
    """
    yield from stream.space(builder.content.write)
    mark = yield from stream.accept(*reasoning.opening)
    if mark is None and not opened:
        return
    builder.content.mark()
    builder.reasoning.mark()
    if (yield from stream.until(reasoning.closing, builder.reasoning.write)) is not None:
        builder.reasoning.mark()
