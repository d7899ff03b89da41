"""Turns prompts and conversations into token ids, and checks their limits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

from sdk.api.errors import EngineClosedError, RequestError
from sdk.api.lora import KnownAdapter
from sdk.api.params import SamplingParams
from sdk.kernels.dataclass import dataclass
from sdk.models.vision.image import ImageInput, PromptImage
from sdk.quant.once import Once
from sdk.quant.safe_repr import is_value_error, safe_message, safe_repr
from sdk.quant.tokenizer import Tokenizer, TooManyTokens
from sdk.requests.prompts.images import ImageReader, described, images_of, shortened
from sdk.requests.prompts.kinds import (
    SHORT_CONTEXT,
    ChatOptions,
    Embeds,
    Message,
    Turns,
    check_params,
    check_salt,
    embeds_salt,
    fim_prompt,
    fim_tokens_of,
    is_small,
    read_embeds,
    tool_format_of,
)
from sdk.requests.prompts.limits import PromptLimits, is_id
from sdk.sampling.healing import Healing, TokenPrefixes

#: Text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps ``cache_salt``,
#: ``negative_prompt`` or ``negative_prompt_token_ids`` (for a ``guidance_scale``), and with a
#: ``prompt`` also ``suffix`` and ``suffix_first`` (fill-in-the-middle). Or with ``prompt_embeds``.
PromptLike = str | Sequence[int] | Mapping[str, Any]

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
    images: tuple[PromptImage, ...] = ()


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
        if len(prompts) and is_id(prompts[0]):
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
        images: ImageReader | None = None,
    ) -> None:
        """``hidden_size``: of the model, if it accepts embeddings. ``images``: None if it reads
        text only."""
        self.tokenizer = tokenizer
        self._hidden_size = hidden_size
        self._limits = PromptLimits(vocab_size, max_model_len)
        self.images = images
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
        if isinstance(prompts, str) and self.max_model_len <= SHORT_CONTEXT:
            return True
        return is_small(prompts)

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
            found = self._read(prompt, params, room)
            if self.images is not None and not found.images and found.embeds is None:
                self.images.placed(found.token_ids, ())  # no placeholders without an image
            return self._healed(found, params)

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
        if self.images is not None and self.images.token_id in prompt.token_ids[-count:]:
            return prompt
        return replace(prompt, token_ids=prompt.token_ids[:-count], healing=healing)

    def _sorted(self) -> TokenPrefixes:
        return TokenPrefixes(self.need_tokenizer("token_healing"), self._limits.vocab_size)

    def _read_dict(self, prompt: Mapping[str, Any], params: SamplingParams, room: int) -> Prompt:
        given = [key for key in _PROMPTS if key in prompt]
        negatives = [key for key in _NEGATIVE if key in prompt]
        known = {*_PROMPTS, "cache_salt", *_NEGATIVE}
        if self.images is not None and given in (["prompt"], ["prompt_token_ids"]):
            known.add("multi_modal_data")
        unknown = set(prompt) - known - set(_INFILL if "prompt" in given else ())
        if not given and "role" in prompt:
            raise _is_message(prompt)
        if self.images is None and prompt.get("multi_modal_data"):
            raise RequestError("multi_modal_data: expected none: this model reads no images")
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
        text = prompt["prompt"] if given[0] == "prompt" else None
        data = prompt.get("multi_modal_data")
        if self.images is not None and data is not None:
            inputs = self.images.of_data(data)
            if self.images.dual:
                placed = self.images.alone(prompt[given[0]], inputs)
                return Prompt((self.images.token_id,), text, salt, images=placed)
            ids = self._ids_of_images(self.images, given[0], prompt[given[0]], inputs, params, room)
            placed = self.images.placed(ids, inputs)
            return Prompt(ids, text, salt, negative, images=placed)
        return Prompt(self._ids(given[0], prompt[given[0]], params, room), text, salt, negative)

    def _ids_of_images(
        self,
        images: ImageReader,
        key: str,
        value: Any,
        inputs: Sequence[ImageInput],
        params: SamplingParams,
        room: int,
    ) -> tuple[int, ...]:
        """:meth:`_ids` of a prompt with images. Truncation never takes one or a part of it."""
        tokenizer = self.need_tokenizer("an image")
        self._limits.check_images(inputs, room)
        if key == "prompt" and isinstance(value, str):
            text, adds = images.in_text(tokenizer, str.__str__(value), inputs)
            limit = None if params.truncate_prompt_tokens else self.max_model_len - room
            try:
                ids = tokenizer.encode(text, adds, stop_after=limit)
            except TooManyTokens as error:
                raise self._limits.too_long(error.at_least, room, "at least ", inputs) from None
        else:
            ids = images.in_ids(tokenizer, self._ids(key, value, SamplingParams(), room), inputs)
        keep = self._limits.kept(params, room)
        if inputs and keep is not None and keep < len(ids):
            raise RequestError(
                f"truncate_prompt_tokens: would cut a prompt with images from {len(ids)} to {keep} "
                "tokens; shorten it yourself, or send fewer images"
            )
        if keep is not None and keep < len(ids):
            ids = ids[-keep:] if room else [*self._beginning(ids, keep)]
        return self._limits.checked(ids, room, inputs)

    def _read_embeds(self, value: Any, params: SamplingParams, room: int) -> Embeds:
        if self._hidden_size is None:
            raise RequestError(
                "prompt_embeds: this LLM was loaded without room for them; load it with "
                "enable_prompt_embeds=True"
            )
        embeds = read_embeds(value, self._hidden_size)
        keep = self._limits.kept(params, room)
        if keep is not None:
            embeds = embeds[-keep:]
        if len(embeds) > self.max_model_len - room:
            raise self._limits.too_long(len(embeds), room)
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
        keep = self._limits.kept(params, room)
        limit = self.max_model_len if keep is None else None
        try:
            prefix = tokenizer.encode(prompt["prompt"], False, False, stop_after=limit)
            suffix = tokenizer.encode_continued(prompt["suffix"], stop_after=limit)
        except TooManyTokens as error:
            raise self._limits.too_long(error.at_least, room, "at least ") from None
        ids = self._limits.checked(fim_prompt(tokenizer, prefix, suffix, order, keep), room)
        text = tokenizer.decode(ids, skip_special_tokens=False)
        return Prompt(ids, text, stop_token_ids=ends)

    def read_chat(
        self, messages: Sequence[Message], params: SamplingParams, options: ChatOptions
    ) -> Prompt:
        """Render with the model's template; control tokens inside messages are ordinary text."""
        tokenizer = self.need_tokenizer("chat")
        with as_request_error("messages"):
            inputs: tuple[ImageInput, ...] = ()
            if self.images is not None:
                messages, inputs = self.images.of_conversation(messages)
            messages = self._with_tools(messages, options)
            keep = self._limits.kept(params, 1)
            limit = self.max_model_len - 1
            if keep is not None:
                limit = keep = min(keep, limit)
            try:
                if keep is None:
                    self._limits.check_images(inputs, 1)
                ids = self._encode_chat(tokenizer, messages, inputs, options, limit)
            except TooManyTokens as error:
                if keep is None:
                    raise self._limits.too_long(error.at_least, 1, "at least ", inputs) from None
                ids, inputs = self._newest_turns(tokenizer, messages, inputs, options, keep)
            checked = self._limits.checked(ids, 1, inputs)
            placed = () if self.images is None else self.images.placed(checked, inputs)
            text = tokenizer.decode(shortened(checked, placed), skip_special_tokens=False)
            prompt = Prompt(checked, text, options.cache_salt, images=placed)
            return self._healed(prompt, params) if options.continue_final_message else prompt

    def template_of(self, options: ChatOptions) -> str | None:
        """The source of a conversation's chat template, if the model has one."""
        from sdk.loaders.templates.chat_template import (
            TemplateError,  # loaded with the first conversation
        )

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
        tokenizer, limit = self.need_tokenizer("a pair of texts"), self.max_model_len
        params = SamplingParams(truncate_prompt_tokens=truncate)
        keep = self._limits.kept(params, 0)
        with as_request_error("prompt"):
            try:
                ids, start = tokenizer.encode_pair(first, second, keep=keep, stop_after=limit)
            except TooManyTokens as error:
                raise self._limits.too_long(error.at_least, 0, "at least ") from None
            return Prompt(self._limits.checked(ids, 0), first + second, second_text=start)

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
        return self._limits.max_model_len

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
        images: Sequence[ImageInput],
        options: ChatOptions,
        limit: int,
    ) -> list[int]:
        """:raises TooManyTokens: the conversation has more than ``limit`` tokens."""
        from sdk.loaders.templates.chat_template import (
            TemplateError,  # loaded with the first conversation
        )

        more: dict[str, Any] = {}
        if self.images is not None and images:
            more["image_texts"] = self.images.texts(tokenizer, images)
        try:
            ids = tokenizer.encode_chat(
                messages,
                stop_after=limit,
                add_generation_prompt=options.add_generation_prompt,
                continue_final_message=options.continue_final_message,
                chat_template=options.chat_template or self._chat_template,
                tools=self._rendered_tools(options),
                **more,
                **(options.chat_template_kwargs or {}),
            )
        except TemplateError as error:
            raise RequestError(str(error)) from error
        if len(ids) > limit:
            raise TooManyTokens(len(ids))
        return ids

    def _newest_turns(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        images: Sequence[ImageInput],
        options: ChatOptions,
        keep: int,
    ) -> tuple[list[int], tuple[ImageInput, ...]]:
        """The conversation in ``keep`` tokens; drops as few of its oldest turns as possible, with
        their images."""
        turns = Turns(messages)

        def encoded(kept: list[int]) -> tuple[list[int], tuple[ImageInput, ...]]:
            inputs = images_of(images, messages, kept)
            newest = [messages[index] for index in kept]
            return self._encode_chat(tokenizer, newest, inputs, options, keep), inputs

        try:
            return turns.newest(encoded)
        except TooManyTokens as error:
            left = images_of(images, messages, turns.without(turns.droppable))
            raise RequestError(
                f"messages: the last turn and the system messages alone have {error}"
                f"{', ' + described(left) if left else ''}, but only {keep} of the context's "
                f"{self.max_model_len} are available; shorten them, lower max_tokens, or raise "
                "max_model_len"
            ) from None

    def _ids(self, key: str, value: Any, params: SamplingParams, room: int) -> tuple[int, ...]:
        """Checked and truncated token ids; ``value`` is a text unless ``key`` names ids."""
        if key.endswith("_token_ids"):
            if not isinstance(value, Sequence) or isinstance(value, _BYTES):
                raise RequestError(f"{key}: expected a list of integers, found {safe_repr(value)}")
        elif not isinstance(value, str):
            raise RequestError(f"{key}: expected a string, found {type(value).__name__}")
        else:
            value = self._encode(str.__str__(value), params, room)
        keep = self._limits.kept(params, room)
        if keep is not None and keep < len(value):
            value = value[-keep:] if room else self._beginning(value, keep)
        return self._limits.checked(value, room)

    def _beginning(self, ids: Sequence[int], keep: int) -> Sequence[int]:
        """The first ids of a text that is not continued, and the special tokens that end texts."""
        return ids[:keep] if self.tokenizer is None else self.tokenizer.shorten(ids, keep)

    def _encode(self, text: str, params: SamplingParams, room: int) -> list[int]:
        """The ids of a text. Without truncation, tokenizing stops where the context ends."""
        tokenizer = self.need_tokenizer("a text prompt")
        if params.truncate_prompt_tokens is not None:
            return tokenizer.encode(text)
        try:
            return tokenizer.encode(text, stop_after=self.max_model_len - room)
        except TooManyTokens as error:
            raise self._limits.too_long(error.at_least, room, "at least ") from None
