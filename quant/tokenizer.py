"""The tokenizer interface, independent of the file it was read from.

A :class:`Tokenizer` turns text into token ids and token ids into text. Three facts about it matter
to the rest of the package:

* **Two kinds of text.** A chat template writes control tokens such as ``<|im_end|>``; a user may
  type the same characters. ``parse_special=True`` turns the characters into the control token,
  ``False`` encodes them as ordinary text. :meth:`Tokenizer.encode_chat` does both: it parses the
  template's control tokens and encodes those inside messages as text.
* **Most decoders work byte by byte.** If ``bytewise`` is true, the text of a list of ids is the
  concatenation of their ``id_to_bytes``, decoded as UTF-8 (invalid bytes become U+FFFD). Streaming
  then costs O(1) per token. Other decoders (WordPiece, ...) look at neighbouring tokens; see
  ``sdk.text.detokenizer``.
* **An id may have no token.** Models pad their vocabulary, so an id >= ``vocab_size`` but below the
  padded size can be sampled; such an id adds no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from sdk.kernels.dataclass import dataclass


class TooManyTokens(Exception):
    """A text has more tokens than the caller allowed; it was not tokenized to its end."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class ImageTexts(NamedTuple):
    """The images of a conversation as text.

    ``placeholder``: what a chat template writes for one image. ``written``: the same with what
    belongs around it, for templates that write no images. ``expanded``: what takes the place of
    each placeholder, in the order of the conversation.
    """

    placeholder: str
    written: str
    expanded: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FimTokens:
    """The fill-in-the-middle (FIM) tokens of a model, and the order of its prompts."""

    prefix: int
    suffix: int
    #: None: the answer follows the prefix (Codestral).
    middle: int | None
    #: Tokens that end the middle.
    ends: frozenset[int]
    #: Whether the model was trained with the suffix before the prefix.
    suffix_first: bool = False
    #: In that order, whether prompts are "PREFIX SUFFIX suffix MIDDLE prefix" (Code Llama) and not
    #: "SUFFIX suffix PREFIX prefix MIDDLE".
    prefix_token_first: bool = False


class Tokenizer(Protocol):
    """Text <-> token ids of one model. Instances are immutable and safe to use from any thread."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary (a model's embedding may have padding rows)."""
        ...

    @property
    def bos_token_id(self) -> int | None:
        """The token that begins a text, if the model has one."""
        ...

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Every token that ends an answer: end of text, end of turn, end of message."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Control tokens, which ``skip_special_tokens`` leaves out of the text."""
        ...

    @property
    def fim_tokens(self) -> FimTokens | None:
        """The fill-in-the-middle tokens, if the model has some."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's default Jinja chat template, if it has one."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Named templates other than the default one (``tool_use``, ``rag``, ...)."""
        ...

    @property
    def token_names(self) -> Mapping[str, str]:
        """Spellings of tokens by role: ``bos_token``, ``eos_token``, ``pad_token``, ..."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """Assumptions made because the file did not say (an unknown pre-tokenizer, ...)."""
        ...

    @property
    def bytewise(self) -> bool:
        """Whether the text of ids is their concatenated :meth:`id_to_bytes` (see the module)."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether :meth:`decode` drops a space that begins a text (``▁Hello`` -> ``Hello``)."""
        ...

    def encode(
        self,
        text: str,
        add_special_tokens: bool = True,
        parse_special: bool = True,
        *,
        stop_after: int | None = None,
    ) -> list[int]:
        """Token ids of ``text``.

        ``add_special_tokens`` adds BOS/EOS where the model expects them (BOS never twice).
        ``parse_special=False`` is for untrusted text: it never yields a control token. Lone
        surrogates are read as U+FFFD.

        :raises TooManyTokens: possibly, if a long text has more than ``stop_after`` tokens; also by
            :meth:`encode_chat`.
        """
        ...

    def shorten(self, ids: Sequence[int], count: int) -> list[int]:
        """The ids of :meth:`encode` without the end of the text, ``count`` at most: special tokens
        that end every text stay."""
        ...

    def encode_pair(
        self, first: str, second: str, *, keep: int | None = None, stop_after: int | None = None
    ) -> tuple[list[int], int | None]:
        """Ids of two plain texts as the model reads a pair, and where the token type becomes 1;
        None: all types are 0.

        ``keep``: with more ids, the longer text loses its end, then both.

        :raises TooManyTokens: as :meth:`encode`, without ``keep``.
        """
        ...

    def encode_continued(self, text: str, *, stop_after: int | None = None) -> list[int]:
        """Token ids of plain text inside a longer text: no control tokens, and no space is put
        before its first word.

        :raises TooManyTokens: as :meth:`encode`.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        ...

    def opening_bytes(self, token_id: int) -> bytes:
        """:meth:`id_to_bytes` of a token that begins a text, without the spaces that the decoder
        drops there."""
        ...

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text: a control token's name, ``b""`` for an unknown id.

        Only meaningful if :attr:`bytewise` is true.
        """
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of a token spelled as in the vocabulary, or None."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """A token's spelling in the vocabulary, or None if the id has no token."""
        ...

    def template_source(self, chosen: str | None, tools: object = None) -> str:
        """The source of a chat template: ``chosen`` itself, or the named one; else the default one,
        or with ``tools`` the one named ``tool_use``.

        :raises TemplateError: the model has none.
        """
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation rendered by the model's chat template.

        ``chat_template`` is a template's source or the name of one of :attr:`chat_templates`.
        ``continue_final_message``: the text ends with the last message, without its end-of-turn
        token and without a generation prompt.

        :raises TemplateError: (``sdk.loaders.templates.chat_template``) bad messages, a missing or
        broken
            template, or one that exceeds its budget of time or output.
        """
        ...

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
        """Token ids of the rendered conversation, safe for untrusted messages.

        Control tokens written by the template are parsed; the same characters inside a message, a
        tool or a keyword argument are encoded as text, and so are placeholders of images. BOS
        appears once. ``image_texts``: of the parts ``{"type": "image"}`` in ``messages``, which are
        an error without it.

        :raises TemplateError: the template writes more or fewer images than there are.
        """
        ...
