"""The base of all tokenizers: decoding by bytes, chat templates, and the guard for user text.

**The guard.** ``encode_chat`` must turn the template's ``<|im_end|>`` into a control token and the
user's ``<|im_end|>`` into ordinary text, although the template has mixed both into one string.
Before rendering, a *breaker* is inserted into every control token spelled in a message: one
private-use character found nowhere else. The broken spelling is not recognised in the rendered
text, and the breaker is removed from ordinary text before it is encoded. Messages without such
spellings (nearly all) are not changed, so their ids are those of the plain rendering. Whatever a
template does with a message (strip, split, slice, join), a breaker stays in its place.
"""

from __future__ import annotations

import json
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from sdk.kernels.dataclass import dataclass
from sdk.quant.once import Once
from sdk.quant.safe_repr import safe_repr
from sdk.quant.tokenizer import FimTokens, ImageTexts

if TYPE_CHECKING:  # jinja2 is imported with the first conversation
    from sdk.loaders.templates.chat_template import ChatTemplate, ControlTextGuard

_MAX_TEMPLATES = 8  # compiled ones kept per tokenizer: the model's and a few of callers


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """The contents of a tokenizer's files other than the vocabulary."""

    bos_token_id: int | None = None
    eos_token_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()
    chat_template: str | None = None
    chat_templates: Mapping[str, str] = field(default_factory=dict)
    # Passed to templates as bos_token, eos_token, unk_token, pad_token.
    names: Mapping[str, str] = field(default_factory=dict)
    fim: FimTokens | None = None
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Frame:
    """The special tokens around a text, and ``between`` two of them.

    A model with token types (BERT) tells two texts apart by them: those after the first ``own``
    tokens in between have ``second_type``, the others 0.
    """

    first: tuple[int, ...] = ()
    last: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    own: int | None = None
    second_type: int = 0


class TextTokenizer(ABC):
    """Base of the tokenizers; see ``sdk.quant.tokenizer.Tokenizer`` for the interface."""

    bytewise = True
    strips_leading_space = False

    def __init__(self, facts: TokenizerFacts) -> None:
        self._facts = facts
        self._templates: dict[str, ChatTemplate] = {}
        self._guard = Once["ControlTextGuard"]()
        self._compiling = threading.Lock()

    @property
    def bos_token_id(self) -> int | None:
        return self._facts.bos_token_id

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._facts.eos_token_ids

    @property
    def special_ids(self) -> frozenset[int]:
        return self._facts.special_ids

    @property
    def fim_tokens(self) -> FimTokens | None:
        return self._facts.fim

    @property
    def chat_template(self) -> str | None:
        return self._facts.chat_template

    @property
    def chat_templates(self) -> Mapping[str, str]:
        return self._facts.chat_templates

    @property
    def token_names(self) -> Mapping[str, str]:
        return self._facts.names

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._facts.warnings

    @property
    @abstractmethod
    def vocab_size(self) -> int: ...

    @abstractmethod
    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        *,
        stop_after: int | None = None,
    ) -> list[int]: ...

    @property
    def frame(self) -> Frame:
        """What :meth:`encode` puts around a text."""
        return Frame()

    def shorten(self, ids: Sequence[int], count: int) -> list[int]:
        last = self.frame.last
        if len(ids) <= count:
            return list(ids)
        if not last or count <= len(last) or tuple(ids[-len(last) :]) != last:
            return list(ids[:count])
        return [*ids[: count - len(last)], *last]

    def encode_pair(
        self, first: str, second: str, *, keep: int | None = None, stop_after: int | None = None
    ) -> tuple[list[int], int | None]:
        limit = None if keep is not None else stop_after
        left = self.encode(first, False, False, stop_after=limit)
        right = self.encode(second, False, False, stop_after=limit)
        frame = self.frame
        if keep is not None:
            room = max(0, keep - len(frame.first) - len(frame.between) - len(frame.last))
            count, other = _fitting(len(left), len(right), room)
            left, right = left[:count], right[:other]
        own = len(frame.between) if frame.own is None else frame.own
        ids = [*frame.first, *left, *frame.between, *right, *frame.last]
        second_at = len(frame.first) + len(left) + own
        return ids, second_at if frame.second_type else None

    @abstractmethod
    def encode_continued(self, text: str, *, stop_after: int | None = None) -> list[int]: ...

    @abstractmethod
    def id_to_bytes(self, token_id: int) -> bytes: ...

    def opening_bytes(self, token_id: int) -> bytes:
        data = self.id_to_bytes(token_id)
        return data.removeprefix(b" ") if self.strips_leading_space else data

    @abstractmethod
    def token_to_id(self, token: str) -> int | None: ...

    @abstractmethod
    def id_to_token(self, token_id: int) -> str | None: ...

    @abstractmethod
    def _encode_rendered(self, text: str, breaker: str | None, stop_after: int | None) -> list[int]:
        """Ids of a rendered conversation; ``breaker`` marks spellings in ordinary text."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        skipped = self._facts.special_ids if skip_special_tokens else frozenset()
        shown = [token_id for token_id in ids if token_id not in skipped]
        parts = [self.id_to_bytes(token_id) for token_id in shown]
        if self.strips_leading_space:
            first = next((index for index, part in enumerate(parts) if part), None)
            if first is not None:
                parts[first] = self.opening_bytes(shown[first])
        return b"".join(parts).decode("utf-8", "replace")

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        image: str | None = None,
        **kwargs: Any,
    ) -> str:
        return self._compiled(self.template_source(chat_template, tools)).render(
            messages,
            image=image,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            special_tokens=self._facts.names,
            **kwargs,
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        stop_after: int | None = None,
        image_texts: ImageTexts | None = None,
        **kwargs: Any,
    ) -> list[int]:
        from sdk.loaders.templates.chat_template import check_conversation

        check_conversation(messages, tools, kwargs, images=image_texts is not None)
        guard = self._guard(self._made_guard)
        if image_texts is not None:  # also where the placeholder is not a control token
            guard = guard.with_spelling(image_texts.placeholder)
        outside: dict[str, Any] = {"messages": messages, "tools": tools, **kwargs}
        breaker = guard.choose_breaker(outside, self.template_source(chat_template, tools))
        if breaker is not None:
            outside = guard.break_up(outside, breaker)
        text = self.apply_chat_template(
            outside.pop("messages"),
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=outside.pop("tools"),
            chat_template=chat_template,
            image=None if image_texts is None else image_texts.written,
            **outside,
        )
        if breaker is not None:  # the template may write ASCII JSON
            text = text.replace(json.dumps(breaker)[1:-1], breaker)
        if image_texts is not None:
            text = _with_images(text, image_texts)
        return self._encode_rendered(text, breaker, stop_after)

    def _made_guard(self) -> ControlTextGuard:
        from sdk.loaders.templates.chat_template import ControlTextGuard

        spellings = map(self.id_to_token, sorted(self.special_ids))
        return ControlTextGuard(text for text in spellings if text)

    def _compiled(self, source: str) -> ChatTemplate:
        from sdk.loaders.templates.chat_template import ChatTemplate

        template = self._templates.get(source)
        if template is None:
            with self._compiling:  # the first requests come at one time
                template = self._templates.get(source)
                if template is None:
                    template = ChatTemplate(source)
                    if len(self._templates) >= _MAX_TEMPLATES:
                        self._templates.clear()
                    self._templates[source] = template
        return template

    def template_source(self, chosen: str | None, tools: object = None) -> str:
        """The source of the template to use: the caller's, a named one, or the default one."""
        from sdk.loaders.templates.chat_template import TemplateError

        named = self._facts.chat_templates
        if chosen is not None:
            if chosen not in named and "{" not in chosen:  # every conversation would be this text
                names = ", ".join(sorted(named)) or "no named ones"
                raise TemplateError(
                    f"chat_template: expected the source of a template or the name of one of the "
                    f"model's ({names}), found {safe_repr(chosen)}; of a file pass its text"
                )
            return named.get(chosen, chosen)
        if tools and "tool_use" in named:
            return named["tool_use"]
        if self._facts.chat_template is None:
            raise TemplateError(
                "the model has no chat template; pass chat_template= or a plain prompt"
            )
        return self._facts.chat_template


def _with_images(text: str, images: ImageTexts) -> str:
    """A rendered conversation with the images in the place of their placeholders.

    :raises TemplateError: there are more or fewer places than images.
    """
    from sdk.loaders.templates.chat_template import TemplateError

    pieces = text.split(images.placeholder)
    if len(pieces) - 1 != len(images.expanded):
        raise TemplateError(
            f"messages: the chat template writes {len(pieces) - 1} places for "
            f"{len(images.expanded)} images; put images into messages of users"
        )
    return "".join(map("".join, zip(pieces, (*images.expanded, ""), strict=True)))


def _fitting(first: int, second: int, room: int) -> tuple[int, int]:
    """Lengths of two texts in ``room`` tokens; the longer one is cut, as the library's
    ``longest_first`` does."""
    if first + second <= room:
        return first, second
    shorter = min(first, second)
    longer = max(shorter, room - shorter)
    if shorter + longer > room:
        shorter = room // 2
        longer = room - shorter
    return (shorter, longer) if first <= second else (longer, shorter)


def well_formed(text: str) -> str:
    """``text`` without lone surrogates: pairs become their character, others U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
