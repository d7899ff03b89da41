"""Chat formats as objects: what makes a prompt from messages, and what answers a chat.

The formats by name are ``Llama(chat_format=...)``; another one is a template, ``chat_template=``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from sdk.compat.llama_cpp._chat import ChatFormat
from sdk.compat.llama_cpp._vision import (
    Gemma4ChatHandler,
    Llava15ChatHandler,
    Llava16ChatHandler,
    MTMDChatHandler,
    Qwen25VLChatHandler,
)
from sdk.compat.llama_cpp.llama import Llama, StoppingCriteriaList
from sdk.loaders.templates.chat_template import ChatTemplate


class LlamaChatCompletionHandler(Protocol):
    """``Llama(chat_handler=...)``: answers a chat with the arguments of
    ``Llama.create_chat_completion``."""

    def __call__(self, *, llama: Llama, messages: Any, **arguments: Any) -> Any:
        """A completion as a dict, or with ``stream=True`` an iterator of its chunks."""


@dataclass
class ChatFormatterResponse:
    """A prompt. ``added_special``: it begins with BOS already."""

    prompt: str
    stop: str | list[str] | None = None
    stopping_criteria: StoppingCriteriaList | None = None
    added_special: bool = False


class ChatFormatter(Protocol):
    """Makes a prompt from messages."""

    def __call__(self, *, messages: Any, **arguments: Any) -> ChatFormatterResponse:
        """The prompt of ``messages``."""


class Jinja2ChatFormatter:
    """A formatter from a chat template, with the texts of BOS and EOS that it prints."""

    def __init__(
        self,
        template: str,
        eos_token: str,
        bos_token: str,
        add_generation_prompt: bool = True,
        stop_token_ids: list[int] | None = None,
    ) -> None:
        self.template = template
        self.eos_token = eos_token
        self.bos_token = bos_token
        self.add_generation_prompt = add_generation_prompt
        self.stop_token_ids = None if stop_token_ids is None else set(stop_token_ids)
        self._compiled = ChatTemplate(template)

    def __call__(
        self,
        *,
        messages: Any,
        functions: list[Any] | None = None,
        function_call: Any = None,
        tools: list[Any] | None = None,
        tool_choice: Any = None,
        **kwargs: Any,
    ) -> ChatFormatterResponse:
        """The prompt of ``messages``."""
        others = {"functions": functions, "function_call": function_call}
        prompt = self._compiled.render(
            messages,
            tools=tools,
            add_generation_prompt=self.add_generation_prompt,
            special_tokens={"bos_token": self.bos_token, "eos_token": self.eos_token},
            **{name: value for name, value in others.items() if value is not None},
        )
        ends = self._ends
        criteria = None if ends is None else StoppingCriteriaList([ends])
        return ChatFormatterResponse(prompt, [self.eos_token], criteria, added_special=True)

    @property
    def _ends(self) -> Any:
        stops = self.stop_token_ids
        return None if stops is None else lambda ids, logits: int(ids[-1]) in stops

    def to_chat_handler(self) -> LlamaChatCompletionHandler:
        """``Llama(chat_handler=...)`` that answers with this template."""
        tokens = {"bos_token": self.bos_token, "eos_token": self.eos_token}
        texts = {name: _literal(text) for name, text in tokens.items()}
        names = "".join(f"{{% set {name} = {text} %}}" for name, text in texts.items())
        form = ChatFormat(
            names + self.template,
            (self.eos_token,),
            self.add_generation_prompt,
            tuple(self.stop_token_ids or ()),
        )

        def handler(*, llama: Llama, messages: Any, **arguments: Any) -> Any:
            return llama.answer_chat({"messages": messages, **arguments}, form)

        return handler


def _literal(text: str) -> str:
    """Text in Jinja's notation."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


_INSTEAD = "nothing is registered for a process; pass chat_handler= or chat_template= to Llama"


def __getattr__(name: str) -> NoReturn:
    """:raises ImportError: the module has no such name; the message says what to use."""
    if name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "regist" in name.lower():
        raise ImportError(f"{__name__} has no {name}: {_INSTEAD}")
    if name.endswith("ChatHandler"):
        raise ImportError(
            f"{__name__} has no {name}: use MTMDChatHandler, which follows the template of the "
            "model's file, if docs/models.md lists the family"
        )
    raise ImportError(
        f"{__name__} has no {name}: use Jinja2ChatFormatter, or Llama(chat_format=...)"
    )


__all__ = [
    "ChatFormatter",
    "ChatFormatterResponse",
    "Gemma4ChatHandler",
    "Jinja2ChatFormatter",
    "LlamaChatCompletionHandler",
    "Llava15ChatHandler",
    "Llava16ChatHandler",
    "MTMDChatHandler",
    "Qwen25VLChatHandler",
]
