"""Prompts, and ours for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr

PromptType = Any


class _PromptOptions(TypedDict, total=False):
    cache_salt: str
    multi_modal_data: Any
    multi_modal_uuids: Any
    mm_processor_kwargs: dict[str, Any] | None
    media_io_kwargs: dict[str, Any] | None


class _TokensOptions(_PromptOptions, total=False):
    prompt: str
    token_type_ids: list[int]
    prompt_token_offsets: Any


class TextPrompt(_PromptOptions):
    """A prompt as text. ``multi_modal_data`` may have images; audio and video are rejected."""

    prompt: str


class TokensPrompt(_TokensOptions):
    """A prompt as token ids, perhaps with its text."""

    prompt_token_ids: list[int]


#: What may stand in a dict without a meaning here.
_OFFSETS = ("prompt_token_offsets",)


def our_prompt(prompt: Any) -> tuple[Any, str | None]:
    """A prompt as ``sdk.LLM`` takes it, and the text that came with token ids."""
    if not isinstance(prompt, Mapping):
        return prompt, None
    given = {k: v for k, v in prompt.items() if v is not None and k not in _OFFSETS}
    text = None
    if "prompt_token_ids" in given or "prompt_embeds" in given:
        text = given.pop("prompt", None)
    return given, text


def check_absent(**given: Any) -> None:
    """:raises RequestError: an argument that cannot be honored was given."""
    for name, value in given.items():
        if value not in (None, [], {}):
            raise RequestError(f"{name}={safe_repr(value)} is not supported: leave it out")
