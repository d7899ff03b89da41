"""From what users write to token ids: prompts, chats, limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from sdk.errors import EngineClosedError, RequestError
from sdk.params import SamplingParams
from sdk.quant.tokenizer import Tokenizer

Message = Mapping[str, Any]
#: Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps ``cache_salt`` and
#: ``negative_prompt`` or ``negative_prompt_token_ids`` (for a ``guidance_scale``).
PromptLike = str | Sequence[int] | Mapping[str, Any]

_NEGATIVE = ("negative_prompt", "negative_prompt_token_ids")

#: What a chat template is always given; ``chat_template_kwargs`` holds everything else.
_TEMPLATE_ARGUMENTS = frozenset({"messages", "tools", "chat_template", "add_generation_prompt"})


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt, checked: every id lies in the vocabulary and the context holds them all."""

    token_ids: tuple[int, ...]
    text: str | None = None
    cache_salt: str | None = None
    negative_token_ids: tuple[int, ...] | None = None


def is_conversation(value: object) -> bool:
    """Whether ``value`` is a list of chat messages."""
    return (
        isinstance(value, Sequence)
        and not isinstance(value, str | bytes)
        and len(value) > 0
        and all(isinstance(item, Mapping) and "role" in item for item in value)
    )


def as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One prompt or several as a list; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Sequence) or isinstance(prompts, bytes):
        raise RequestError(
            f"prompt: expected text, token ids, a dict or a list of them, found {prompts!r:.80}"
        )
    if len(prompts) and all(_is_id(item) for item in prompts):
        return [cast("Sequence[int]", prompts)]
    return list(cast("Sequence[PromptLike]", prompts))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


class PromptReader:
    """Turns prompts into :class:`Prompt` for one model. ``tokenizer`` may be missing."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._chat_template = chat_template
        self._closed = False

    def close(self) -> None:
        """Let go of the tokenizer (15 MB for 50,000 tokens)."""
        self.tokenizer = None
        self._closed = True

    def _need_tokenizer(self, what: str) -> Tokenizer:
        if self._closed:
            raise EngineClosedError("this LLM was closed")
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer and this LLM has none (skip_tokenizer_init, or the "
                "checkpoint holds none): pass {'prompt_token_ids': [...]}, or tokenizer=FOLDER"
            )
        return self.tokenizer

    def read(self, prompt: PromptLike, params: SamplingParams, *, room: int = 1) -> Prompt:
        """:raises RequestError: naming what is wrong. ``room`` tokens of context must be left."""
        salt: str | None = None
        negative: tuple[int, ...] | None = None
        text: str | None = None
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            given = [key for key in ("prompt", "prompt_token_ids") if key in prompt]
            against = [key for key in _NEGATIVE if key in prompt]
            unknown = set(prompt) - {"prompt", "prompt_token_ids", "cache_salt", *_NEGATIVE}
            if len(given) != 1 or len(against) > 1 or unknown:
                raise RequestError(
                    "prompt: expected a dict with either 'prompt' or 'prompt_token_ids' (and "
                    "perhaps 'cache_salt' and 'negative_prompt' or 'negative_prompt_token_ids'), "
                    f"found the keys {sorted(map(str, prompt))}"
                )
            if against:
                negative = self._negative(against[0], prompt[against[0]], params, room)
            salt = prompt.get("cache_salt")
            if salt is not None and (not isinstance(salt, str) or not salt):
                raise RequestError(f"cache_salt: expected a non-empty string, found {salt!r}")
            ids = prompt[given[0]]
            if given[0] == "prompt":
                if not isinstance(ids, str):
                    raise RequestError(f"prompt: expected a string, found {type(ids).__name__}")
                text = ids
        elif isinstance(prompt, str):
            text = prompt
        if text is not None:
            ids = self._need_tokenizer("a text prompt").encode(text)
        return Prompt(self._checked(ids, params, room), text, salt, negative)

    def _negative(self, key: str, ids: Any, params: SamplingParams, room: int) -> tuple[int, ...]:
        """The token ids of a negative prompt, given as the prompt dict's ``key``."""
        if params.guidance_scale == 1.0:
            raise RequestError(f"{key} has no effect without a guidance_scale other than 1")
        if key == "negative_prompt":
            if not isinstance(ids, str):
                raise RequestError(f"{key}: expected a string, found {type(ids).__name__}")
            ids = self._need_tokenizer("a text prompt").encode(ids)
        try:
            return self._checked(ids, params, room)
        except RequestError as error:
            raise RequestError(f"{key}: {error}") from None

    def read_chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Prompt:
        """Render with the model's template; control tokens inside messages stay text."""
        tokenizer = self._need_tokenizer("chat")
        variables = {} if chat_template_kwargs is None else chat_template_kwargs
        if not isinstance(variables, Mapping) or not all(isinstance(k, str) for k in variables):
            raise RequestError(
                f"chat_template_kwargs: expected a dict with names as keys, found {variables!r:.80}"
            )
        reserved = sorted(_TEMPLATE_ARGUMENTS & variables.keys())
        if reserved:
            raise RequestError(
                f"chat_template_kwargs: {', '.join(reserved)} cannot be set in it; pass it as an "
                "argument of its own"
            )
        ids = tokenizer.encode_chat(
            messages,
            add_generation_prompt=add_generation_prompt,
            chat_template=chat_template or self._chat_template,
            tools=tools,
            **variables,
        )
        checked = self._checked(ids, params, 1)
        return Prompt(checked, tokenizer.decode(checked, skip_special_tokens=False))

    def _checked(self, ids: Any, params: SamplingParams, room: int) -> tuple[int, ...]:
        if not isinstance(ids, Sequence) or not all(_is_id(item) for item in ids):
            raise RequestError(f"prompt_token_ids: expected a list of integers, found {ids!r:.80}")
        if not ids:
            raise RequestError("prompt: it is empty (no tokens); pass at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            raise RequestError(
                f"prompt_token_ids: expected ids in 0..{self._vocab_size - 1}, "
                f"found {low if low < 0 else high}"
            )
        limit = self._max_model_len - room
        cut = params.truncate_prompt_tokens
        if cut is not None:
            keep = limit if cut == -1 else cut
            ids = ids[-keep:]
        if len(ids) > limit:
            left = f" and {room} must be left for the answer" if room else ""
            raise RequestError(
                f"prompt: {len(ids)} tokens, but the context holds {self._max_model_len}{left}; "
                "shorten it, raise max_model_len, or set truncate_prompt_tokens=-1 to keep its end"
            )
        return tuple(ids)


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One conversation or several, as several. :raises RequestError: it is neither."""
    if is_conversation(messages):
        return [messages]
    if not isinstance(messages, Sequence) or not all(map(is_conversation, messages)):
        raise RequestError(
            "messages: expected a list of {'role': ..., 'content': ...} or a list of such "
            f"lists, found {messages!r:.80}"
        )
    return list(messages)
