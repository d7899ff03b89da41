"""Turns prompts and conversations into token ids, and checks their limits."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from sdk.api.errors import EngineClosedError, RequestError
from sdk.api.lora import KnownAdapter
from sdk.api.params import SamplingParams
from sdk.kernels.dataclass import dataclass
from sdk.quant.once import Once
from sdk.quant.safe_repr import is_value_error, safe_message, safe_repr
from sdk.quant.tokenizer import Tokenizer, TooManyTokens
from sdk.requests.prompt_kinds import (
    ChatOptions,
    Embeds,
    Message,
    Turns,
    check_params,
    check_salt,
    embeds_salt,
    fim_prompt,
    fim_tokens_of,
    read_embeds,
    tool_format_of,
)
from sdk.sampling.healing import Healing, TokenPrefixes

#: Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps ``cache_salt``,
#: ``negative_prompt`` or ``negative_prompt_token_ids`` (for a ``guidance_scale``), and with a
#: ``prompt`` also ``suffix`` and ``suffix_first`` (fill-in-the-middle). Or with ``prompt_embeds``.
PromptLike = str | Sequence[int] | Mapping[str, Any]

#: Limits below which prompts are tokenized in the caller's thread, even in an event loop: a few ms.
SHORT_TEXT = 4096  # characters
SHORT_CONTEXT = 1024  # tokens
#: The most prompts or conversations in one call.
MAX_PROMPTS = 2**20

_PROMPTS = ("prompt", "prompt_token_ids", "prompt_embeds")
_INFILL = ("suffix", "suffix_first")
_NEGATIVE = ("negative_prompt", "negative_prompt_token_ids")
_BYTES = (str, bytes, bytearray, memoryview)  # sequences too, but not of prompts or token ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """One checked prompt: all ids are in the vocabulary, and the context can hold them.

    ``embeds``: embeddings of its tokens, whose ids are then all 0.
    """

    token_ids: tuple[int, ...]
    text: str | None = None
    cache_salt: str | None = None
    negative_token_ids: tuple[int, ...] | None = None
    #: Tokens that end this prompt's answer, in addition to those of the parameters.
    stop_token_ids: frozenset[int] = frozenset()
    #: How the answer must begin if tokens were taken from the end of the prompt.
    healing: Healing | None = None
    embeds: Embeds | None = None
    #: The adapter that runs it.
    adapter: KnownAdapter | None = None
    #: Tokens at the beginning that are not pooled.
    skip: int = 0
    #: Of two texts, which models with token types tell apart: the first token of the second one.
    second_text: int | None = None


@contextmanager
def as_request_error(what: str) -> Iterator[None]:
    """Turn errors about a value, of a caller's object or the tokenizer, into RequestErrors.

    Other exceptions are raised unchanged: they may come from a signal handler, such as a host's
    time limit, that ran in between. The tokenizers library raises plain ``Exception``; its panics
    are no ``Exception``, but they too concern only this prompt.
    """
    try:
        yield
    except (RequestError, EngineClosedError):
        raise
    except BaseException as error:
        kind = type(error)
        if is_value_error(error) or kind is Exception or kind.__name__ == "PanicException":
            raise RequestError(f"{what}: cannot be read: {safe_message(error)}") from error
        raise


def _is_small(value: object) -> bool:
    """Whether plain data has at most ``SHORT_TEXT`` characters and values; reads no more."""
    left, waiting = SHORT_TEXT, [value]
    while waiting and left >= 0:
        item = waiting.pop()
        left -= 1
        if type(item) is str:
            left -= len(item)
        elif type(item) is dict:
            left -= len(item)
            waiting.extend(item.values() if left >= 0 else ())
        elif type(item) is list or type(item) is tuple:
            left -= len(item)
            if left >= 0 and item and type(item[0]) is not int:  # not token ids
                waiting.extend(item)
        elif item is not None and not isinstance(item, int | float):
            return False
    return left >= 0


def is_conversation(value: object) -> bool:
    """Whether ``value`` is a list of chat messages."""
    with as_request_error("prompt"):
        return _are_dicts(value) and any("role" in item for item in cast("Sequence[Any]", value))


def _are_dicts(value: object) -> bool:
    return (
        isinstance(value, Sequence)
        and not isinstance(value, _BYTES)
        and len(value) > 0
        and all(isinstance(item, Mapping) for item in value)
    )


def as_list(prompts: PromptLike | Sequence[PromptLike]) -> list[PromptLike]:
    """One or more prompts as a list; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    with as_request_error("prompt"):
        if not isinstance(prompts, Sequence) or isinstance(prompts, _BYTES):
            raise RequestError(
                "prompt: expected text, token ids, a dict or a list of them, found "
                f"{safe_repr(prompts)}"
            )
        if len(prompts) and _is_id(prompts[0]):
            return [cast("Sequence[int]", prompts)]
        return _bounded(prompts)


def as_items(prompts: Any) -> Iterable[Any]:
    """Prompts and conversations one after the other; a single one is a list of one."""
    if is_conversation(prompts):
        return [prompts]
    if isinstance(prompts, Iterable) and not isinstance(prompts, Sequence | Mapping):
        return prompts
    return as_list(prompts)


def as_conversations(messages: Any) -> list[Sequence[Message]]:
    """One or more conversations as a list. :raises RequestError: ``messages`` are neither."""
    with as_request_error("messages"):
        if _are_dicts(messages):
            return [messages]
        several = isinstance(messages, Sequence) and not isinstance(messages, _BYTES)
        if not several or not all(map(_are_dicts, messages)):
            hint = ""
            if isinstance(messages, str):
                hint = (
                    f"; one message is chat([{{'role': 'user', 'content': {safe_repr(messages)}}}])"
                    ", and generate(...) continues a text"
                )
            elif isinstance(messages, Mapping):
                hint = "; put a single message into a list: chat([message])"
            raise RequestError(
                "messages: expected a list of {'role': ..., 'content': ...} or a list of such "
                f"lists, found {safe_repr(messages)}{hint}"
            )
        return _bounded(messages)


def _is_message(found: object) -> RequestError:
    return RequestError(
        "prompt: expected text, token ids or a dict with one of them, found messages of a "
        f"conversation, {safe_repr(found)}; pass conversations to chat()"
    )


def _bounded(items: Sequence[Any]) -> list[Any]:
    if len(items) > MAX_PROMPTS:
        raise RequestError(
            f"prompts: expected at most {MAX_PROMPTS} in one call, found {len(items)}"
        )
    return list(itertools.islice(items, MAX_PROMPTS))


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def with_salt(prompt: PromptLike, salt: str | None) -> PromptLike:
    """The prompt, whose prefix is shared only with prompts of the same salt."""
    if salt is None:
        return prompt
    if isinstance(prompt, Mapping):
        return {**prompt, "cache_salt": salt}
    return {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt, "cache_salt": salt}


class PromptReader:
    """Turns prompts into :class:`Prompt` for one model, which may have no tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        chat_template: str | None = None,
        hidden_size: int | None = None,
    ) -> None:
        """``hidden_size``: of the model, if it accepts embeddings."""
        self.tokenizer = tokenizer
        self._hidden_size = hidden_size
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._chat_template = chat_template
        self._prefixes = Once[TokenPrefixes]()
        self._closed = False

    def close(self) -> None:
        """Drop the tokenizer (15 MB for 50,000 tokens)."""
        self.tokenizer = None
        self._prefixes = Once[TokenPrefixes]()
        self._closed = True

    def need_tokenizer(self, what: str) -> Tokenizer:
        """:raises RequestError: there is none; the message names ``what`` needs it."""
        if self._closed:
            raise EngineClosedError("this LLM was closed")
        if self.tokenizer is None:
            raise RequestError(
                f"{what} needs a tokenizer, and this LLM has none (skip_tokenizer_init, or the "
                "checkpoint has none): pass {'prompt_token_ids': [...]}, or load with "
                "tokenizer=FOLDER"
            )
        return self.tokenizer

    def is_short(self, prompts: object, params: object) -> bool:
        """Whether tokenizing this takes at most a few milliseconds.

        Tokenizing stops where the context ends, so with a short context any text is short. The
        first prompt with ``token_healing`` sorts the vocabulary: 0.2 s for 49,152 tokens.
        """
        if not self._prefixes.made:
            given = params if isinstance(params, list | tuple) else [params]
            if any(isinstance(one, SamplingParams) and one.token_healing for one in given):
                return False
        if isinstance(prompts, str) and self._max_model_len <= SHORT_CONTEXT:
            return True
        return _is_small(prompts)

    def read_one(
        self, method: str, prompt: Any, params: SamplingParams, template: Mapping[str, Any]
    ) -> Prompt:
        """One prompt or conversation. ``template``: the chat keywords given to ``method``."""
        options = ChatOptions.of(method, template)
        if is_conversation(prompt):
            return self.read_chat(prompt, params, options)
        if template:
            raise TypeError(f"{method}(): {', '.join(template)} apply only to a conversation")
        items = as_list(prompt)
        if len(items) != 1:
            raise RequestError(f"{method}: expected one prompt, found {len(items)}")
        return self.read(items[0], params)

    def read(self, prompt: PromptLike, params: SamplingParams, *, room: int = 1) -> Prompt:
        """One prompt; at least ``room`` tokens of the context must stay free.

        :raises RequestError: the prompt is invalid or too long.
        """
        with as_request_error("prompt"):
            return self._healed(self._read(prompt, params, room), params)

    def _read(self, prompt: PromptLike, params: SamplingParams, room: int) -> Prompt:
        if isinstance(prompt, Mapping):
            return self._read_dict(prompt, params, room)
        if isinstance(prompt, str):
            return Prompt(self._ids("prompt", prompt, params, room), prompt)
        if is_conversation(prompt):
            raise _is_message(prompt)
        return Prompt(self._ids("prompt_token_ids", prompt, params, room))

    def _healed(self, prompt: Prompt, params: SamplingParams) -> Prompt:
        """The prompt without its last tokens, if the answer may replace them."""
        if not params.token_healing:
            return prompt
        tokenizer = self.need_tokenizer("token_healing")
        if not tokenizer.bytewise:
            raise RequestError(
                "token_healing: expected a tokenizer that decodes byte by byte; this model's "
                "decoder looks at neighbouring tokens. Leave token_healing out"
            )
        found = self._prefixes(self._sorted).heal(prompt.token_ids)
        if found is None:
            return prompt
        count, healing = found
        return replace(prompt, token_ids=prompt.token_ids[:-count], healing=healing)

    def _sorted(self) -> TokenPrefixes:
        return TokenPrefixes(self.need_tokenizer("token_healing"), self._vocab_size)

    def _read_dict(self, prompt: Mapping[str, Any], params: SamplingParams, room: int) -> Prompt:
        given = [key for key in _PROMPTS if key in prompt]
        negatives = [key for key in _NEGATIVE if key in prompt]
        known = {*_PROMPTS, "cache_salt", *_NEGATIVE}
        unknown = set(prompt) - known - set(_INFILL if "prompt" in given else ())
        if not given and "role" in prompt:
            raise _is_message(prompt)
        if len(given) != 1 or len(negatives) > 1 or unknown:
            raise RequestError(
                "prompt: expected a dict with either 'prompt' or 'prompt_token_ids' (or "
                "'prompt_embeds'; optionally 'cache_salt' and 'negative_prompt' or "
                "'negative_prompt_token_ids'; with 'prompt' also 'suffix' and 'suffix_first'), "
                f"found the keys {safe_repr(list(prompt))}"
            )
        negative: tuple[int, ...] | None = None
        if negatives:
            if params.guidance_scale == 1.0:
                raise RequestError(
                    f"{negatives[0]} has no effect without a guidance_scale other than 1"
                )
            try:
                negative = self._ids(negatives[0], prompt[negatives[0]], params, room)
            except RequestError as error:
                raise RequestError(f"{negatives[0]}: {error}") from None
        salt = prompt.get("cache_salt")
        check_salt(salt)
        if any(key in prompt for key in _INFILL):
            infill = self._read_infill(prompt, params, room)
            return replace(infill, cache_salt=salt, negative_token_ids=negative)
        if given[0] == "prompt_embeds":
            check_params(params, negative is not None)
            embeds = self._read_embeds(prompt["prompt_embeds"], params, room)
            ids = (0,) * len(embeds)
            return Prompt(ids, None, embeds_salt(embeds, salt), negative, embeds=embeds)
        ids = self._ids(given[0], prompt[given[0]], params, room)
        text = prompt["prompt"] if given[0] == "prompt" else None
        return Prompt(ids, text, salt, negative)

    def _read_embeds(self, value: Any, params: SamplingParams, room: int) -> Embeds:
        if self._hidden_size is None:
            raise RequestError(
                "prompt_embeds: this LLM was loaded without room for them; load it with "
                "enable_prompt_embeds=True"
            )
        embeds = read_embeds(value, self._hidden_size)
        keep = self._kept(params, room)
        if keep is not None:
            embeds = embeds[-keep:]
        if len(embeds) > self._max_model_len - room:
            raise self._too_long(len(embeds), room)
        return embeds

    def _read_infill(self, prompt: Mapping[str, Any], params: SamplingParams, room: int) -> Prompt:
        """A prefix and a suffix with the model's fill-in-the-middle tokens."""
        tokenizer = self.need_tokenizer("a suffix")
        order = prompt.get("suffix_first")
        if order is not None and not isinstance(order, bool):
            raise RequestError(f"suffix_first: expected True or False, found {safe_repr(order)}")
        for key in ("prompt", "suffix"):
            if not isinstance(prompt.get(key), str):
                found = safe_repr(prompt.get(key))
                raise RequestError(
                    f"{key}: expected a string for fill-in-the-middle, found {found}"
                )
        ends = fim_tokens_of(tokenizer, order).ends
        keep = self._kept(params, room)
        limit = self._max_model_len if keep is None else None
        try:
            prefix = tokenizer.encode(prompt["prompt"], False, False, stop_after=limit)
            suffix = tokenizer.encode_continued(prompt["suffix"], stop_after=limit)
        except TooManyTokens as error:
            raise self._too_long(error.at_least, room, "at least ") from None
        ids = self._checked(fim_prompt(tokenizer, prefix, suffix, order, keep), room)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return Prompt(ids, text, stop_token_ids=ends)

    def read_chat(
        self, messages: Sequence[Message], params: SamplingParams, options: ChatOptions
    ) -> Prompt:
        """Render with the model's template; control tokens inside messages are ordinary text."""
        tokenizer = self.need_tokenizer("chat")
        with as_request_error("messages"):
            messages = self._with_tools(messages, options)
            keep = self._kept(params, 1)
            limit = self._max_model_len - 1
            if keep is not None:
                limit = keep = min(keep, limit)
            try:
                ids = self._encode_chat(tokenizer, messages, options, limit)
            except TooManyTokens as error:
                if keep is None:
                    raise self._too_long(error.at_least, 1, "at least ") from None
                ids = self._newest_turns(tokenizer, messages, options, keep)
            checked = self._checked(ids, 1)
            text = tokenizer.decode(checked, skip_special_tokens=False)
            prompt = Prompt(checked, text, options.cache_salt)
            return self._healed(prompt, params) if options.continue_final_message else prompt

    def template_of(self, options: ChatOptions) -> str | None:
        """The source of a conversation's chat template, if the model has one."""
        from sdk.loaders.chat_template import TemplateError  # loaded with the first conversation

        try:
            return self.need_tokenizer("chat").template_source(
                options.chat_template or self._chat_template, options.tools
            )
        except TemplateError:
            return None

    def _rendered_tools(self, options: ChatOptions) -> list[dict[str, Any]] | None:
        """The tools for a chat template that has a place for them."""
        if not options.tools:
            return None
        from sdk.tools import reads_tools  # with the first tools

        if not reads_tools(self.template_of(options) or ""):
            return None
        return [tool.as_dict() for tool in options.tools]

    def _with_tools(self, messages: Sequence[Message], options: ChatOptions) -> Sequence[Message]:
        """The messages with tools and earlier calls as the chat template takes them."""
        called = any(isinstance(one, Mapping) and one.get("tool_calls") for one in messages)
        if not called and not options.tools:
            return messages
        from sdk.tools import for_template  # with the first tools

        template = self.template_of(options)
        format = tool_format_of(options, template, self.need_tokenizer("tools"))
        return for_template(messages, options.tools or (), format, template or "")

    def read_texts(self, first: str, second: str, truncate: int | None = None) -> Prompt:
        """Two texts as the model reads a pair. ``truncate``: ``truncate_prompt_tokens``; the longer
        one loses its end."""
        tokenizer, limit = self.need_tokenizer("a pair of texts"), self._max_model_len
        params = SamplingParams(truncate_prompt_tokens=truncate)
        keep = self._kept(params, 0)
        with as_request_error("prompt"):
            try:
                ids, start = tokenizer.encode_pair(first, second, keep=keep, stop_after=limit)
            except TooManyTokens as error:
                raise self._too_long(error.at_least, 0, "at least ") from None
            return Prompt(self._checked(ids, 0), first + second, second_text=start)

    def tokens_before(self, text: str) -> int:
        """The tokens of a text that others follow, with those that begin every text."""
        tokenizer = self.need_tokenizer("a text prompt")
        ids, ends = tokenizer.encode(text), tokenizer.encode("")
        shared = 0
        while shared < min(len(ids), len(ends)) and ids[-1 - shared] == ends[-1 - shared]:
            shared += 1
        return len(ids) - shared

    @property
    def max_model_len(self) -> int:
        """The longest context."""
        return self._max_model_len

    def token_of_class(self, spelling: str) -> int:
        """The token of a class. :raises RequestError: the vocabulary has no such token."""
        tokenizer = self.need_tokenizer("classifier_from_token")
        found = tokenizer.token_to_id(spelling)
        if found is None:
            ids = tokenizer.encode_continued(spelling)
            found = ids[0] if len(ids) == 1 else None
        if found is None:
            raise RequestError(
                f"classifier_from_token: expected tokens of the vocabulary, found "
                f"{safe_repr(spelling)}, which is several tokens or none"
            )
        return found

    def _encode_chat(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        options: ChatOptions,
        limit: int,
    ) -> list[int]:
        """:raises TooManyTokens: the conversation has more than ``limit`` tokens."""
        from sdk.loaders.chat_template import TemplateError  # loaded with the first conversation

        try:
            ids = tokenizer.encode_chat(
                messages,
                stop_after=limit,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                chat_template=options.chat_template or self._chat_template,
                tools=self._rendered_tools(options),
                **(options.chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise RequestError(str(error)) from error
        if len(ids) > limit:
            raise TooManyTokens(len(ids))
        return ids

    def _newest_turns(
        self, tokenizer: Tokenizer, messages: Sequence[Message], options: ChatOptions, keep: int
    ) -> list[int]:
        """The conversation in ``keep`` tokens; drops as few of its oldest turns as possible.

        A bisection finds it: 10 renderings for 1,000 turns.
        """
        turns = Turns(messages)
        low, high = 0, turns.droppable  # low does not fit
        try:
            best = self._encode_chat(tokenizer, turns.without(high), options, keep)
        except TooManyTokens as error:
            raise RequestError(
                f"messages: the last turn and the system messages alone have {error}, but only "
                f"{keep} of the context's {self._max_model_len} are available; shorten them, lower "
                "max_tokens, or raise max_model_len"
            ) from None
        while high - low > 1:
            middle = (low + high) // 2
            try:
                best = self._encode_chat(tokenizer, turns.without(middle), options, keep)
                high = middle
            except TooManyTokens:
                low = middle
        return best

    def _ids(self, key: str, value: Any, params: SamplingParams, room: int) -> tuple[int, ...]:
        """Checked and truncated token ids; ``value`` is a text unless ``key`` names ids."""
        if key.endswith("_token_ids"):
            if not isinstance(value, Sequence) or isinstance(value, _BYTES):
                raise RequestError(f"{key}: expected a list of integers, found {safe_repr(value)}")
        elif not isinstance(value, str):
            raise RequestError(f"{key}: expected a string, found {type(value).__name__}")
        else:
            value = self._encode(str.__str__(value), params, room)
        keep = self._kept(params, room)
        if keep is not None and keep < len(value):
            value = value[-keep:] if room else self._beginning(value, keep)
        return self._checked(value, room)

    def _beginning(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """The first ids of a text that is not continued, and the special tokens that end texts."""
        return ids[:keep] if self.tokenizer is None else self.tokenizer.shorten(ids, keep)

    def _encode(self, text: str, params: SamplingParams, room: int) -> list[int]:
        """The ids of a text. Without truncation, tokenizing stops where the context ends."""
        tokenizer = self.need_tokenizer("a text prompt")
        if params.truncate_prompt_tokens is not None:
            return tokenizer.encode(text)
        try:
            return tokenizer.encode(text, stop_after=self._max_model_len - room)
        except TooManyTokens as error:
            raise self._too_long(error.at_least, room, "at least ") from None

    def _kept(self, params: SamplingParams, room: int) -> int | None:
        """The tokens that ``truncate_prompt_tokens`` keeps of a prompt; None: it is not set."""
        cut = params.truncate_prompt_tokens
        if cut != -1 or room == 0:
            return self._max_model_len if cut == -1 else cut
        answer = params.max_tokens
        if answer is None or answer >= self._max_model_len:
            answer = self._max_model_len // 4
        return max(1, self._max_model_len - answer)

    def _checked(self, ids: Sequence[Any], room: int) -> tuple[int, ...]:
        count, limit = len(ids), self._max_model_len - room
        if count > limit:
            raise self._too_long(count, room)
        items = list(itertools.islice(ids, limit))
        if not all(map(_is_id, items)):
            raise RequestError(
                f"prompt_token_ids: expected a list of integers, found {safe_repr(ids)}"
            )
        if not items:
            raise RequestError("prompt: it is empty (no tokens); pass at least one token")
        plain = tuple(map(operator.index, items))  # plain integers, not subclasses
        low, high = min(plain), max(plain)
        if low < 0 or high >= self._vocab_size:
            raise RequestError(
                f"prompt_token_ids: expected ids in 0..{self._vocab_size - 1}, "
                f"found {safe_repr(low if low < 0 else high)}"
            )
        return plain

    def _too_long(self, count: int, room: int, about: str = "") -> RequestError:
        left = f" and {room} must be left for the answer" if room else ""
        kept = "end" if room else "beginning"
        return RequestError(
            f"prompt: {about}{count} tokens, but the context holds {self._max_model_len}{left}; "
            f"shorten it, raise max_model_len, or set truncate_prompt_tokens=-1 to keep its {kept}"
        )
