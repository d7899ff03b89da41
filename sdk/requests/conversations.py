"""Conversations: the options of their chat template, and their turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from sdk.api.errors import RequestError
from sdk.api.flags import check_flags
from sdk.api.near_misses import unknown_keyword
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr
from sdk.quant.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sdk.tools import Tool, ToolFormat

Message = Mapping[str, Any]

#: Variables that every chat template gets; ``chat_template_kwargs`` adds others.
_TEMPLATE_ARGUMENTS = frozenset(
    {"messages", "tools", "chat_template", "add_generation_prompt", "continue_final_message"}
)
ONLY_ONE = (
    "add_generation_prompt and continue_final_message cannot both be True: the first opens a new "
    "turn, the second continues the last message; pass only one of them"
)
#: Roles whose messages stay when the oldest turns of a conversation are dropped.
_STAYS = ("system", "developer")


def check_salt(salt: object) -> None:
    """:raises RequestError: a ``cache_salt`` is not a text, or empty."""
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"cache_salt: expected a non-empty string, found {safe_repr(salt)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a conversation is rendered; the keyword arguments of ``LLM.chat``.

    ``cache_salt``: its prefix is shared only with prompts of the same salt.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    tools: Sequence[Tool] | None = None
    tool_choice: str | Mapping[str, Any] = "auto"
    parallel_tool_calls: bool = True
    tool_format: str | None = None
    chat_template_kwargs: Mapping[str, Any] | None = None
    cache_salt: str | None = None

    @classmethod
    def of(cls, method: str, given: Mapping[str, Any]) -> ChatOptions:
        """The options among a method's keywords. :raises TypeError: a keyword is unknown.

        :raises RequestError: a value has the wrong type.
        """
        known = sorted(field.name for field in fields(cls))
        for name in given:
            if name not in known:
                raise unknown_keyword(method, name, given[name], known)
        if (tools := given.get("tools")) is not None:
            from sdk.tools import tools_of  # with the first tools

            given = {**given, "tools": tools_of(tools)}
        options = cls(**given)
        options._check()
        if options.continue_final_message and given.get("add_generation_prompt"):
            raise RequestError(ONLY_ONE)
        return options

    def _check(self) -> None:
        template, variables = self.chat_template, self.chat_template_kwargs
        check_flags(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            parallel_tool_calls=self.parallel_tool_calls,
        )
        if template is not None and not isinstance(template, str):
            raise RequestError(
                "chat_template: expected the source or the name of a template, found "
                f"{safe_repr(template)}"
            )
        check_salt(self.cache_salt)
        if self.tools or self.tool_choice != "auto" or self.tool_format is not None:
            from sdk.tools import format_named, tool_choice_of

            tool_choice_of(self.tool_choice, self.tools or ())
        if self.tool_format is not None:
            format_named(self.tool_format)
        if variables is None:
            return
        if not isinstance(variables, Mapping) or not all(isinstance(k, str) for k in variables):
            raise RequestError(
                "chat_template_kwargs: expected a dict with names as keys, found "
                f"{safe_repr(variables)}"
            )
        reserved = sorted(_TEMPLATE_ARGUMENTS & variables.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs: {', '.join(reserved)} cannot be set here; pass it as a "
                "separate argument"
            )


def special_tokens_of(tokenizer: Tokenizer) -> dict[str, int]:
    """The spellings and ids of a model's control tokens."""
    named = {
        tokenizer.id_to_token(token) or "": token
        for token in sorted(tokenizer.special_ids | tokenizer.eos_token_ids)
    }
    return {name: token for name, token in named.items() if name}


def tool_format_of(options: ChatOptions, template: str | None, tokenizer: Tokenizer) -> ToolFormat:
    """How tool calls are written: as the options, the chat template or the control tokens say, or
    else as Hermes does."""
    from sdk.tools import format_named, format_of

    if options.tool_format is not None:
        return format_named(options.tool_format)
    return format_of(template, special_tokens_of(tokenizer)) or format_named("hermes")


class Turns:
    """A conversation cut into turns: a user's messages with their answer.

    System messages belong to no turn. The last turn is never dropped.
    """

    def __init__(self, messages: Sequence[Message]) -> None:
        self._messages = messages
        self._turns: list[int | None] = []  # the turn of each message; None: never dropped
        turn, before = 0, None
        for message in messages:
            role = message["role"]
            if role in _STAYS:
                self._turns.append(None)
                continue
            if role == "user" and before not in (None, "user"):
                turn += 1
            self._turns.append(turn)
            before = role
        #: The number of turns that can be dropped.
        self.droppable = turn

    def without(self, count: int) -> list[Message]:
        """The conversation without its ``count`` oldest turns."""
        pairs = zip(self._messages, self._turns, strict=True)
        return [message for message, turn in pairs if turn is None or turn >= count]
