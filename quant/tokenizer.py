"""What the engine asks of a tokenizer, whichever file it was read from.

A :class:`Tokenizer` turns text into token ids and token ids into text. Three facts about it matter
to the rest of the package:

* **Two kinds of text.** A chat template writes control tokens such as ``<|im_end|>``; a user may
  type the same characters. ``parse_special`` decides which it is: ``True`` turns the characters
  into the control token, ``False`` encodes them as ordinary text. :meth:`Tokenizer.encode_chat`
  does both at once: the template's control tokens are real, those inside the messages are text.
* **Most decoders work byte by byte.** When ``bytewise`` is true, the text of a list of ids is the
  UTF-8 decoding (invalid bytes become U+FFFD) of the joined ``id_to_bytes`` of each. Streaming then
  costs O(1) per token. Other decoders (WordPiece, ...) look at neighbours; see
  ``sdk.text.detokenizer``.
* **An id may have no token.** Models pad their vocabulary, so an id from 0 to the model's padded
  size can be sampled although it is >= ``vocab_size``; such an id adds no text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TooManyTokens(Exception):
    """A text has more tokens than its reader can take; it was not read to its end."""

    def __init__(self, at_least: int) -> None:
        super().__init__(f"at least {at_least} tokens")
        self.at_least = at_least


class Tokenizer(Protocol):
    """Text <-> token ids of one model. Instances are immutable and safe to use from any thread."""

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary (a model's embedding may be padded beyond it)."""
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
        """Control tokens: what ``skip_special_tokens`` leaves out of the text."""
        ...

    @property
    def chat_template(self) -> str | None:
        """The model's default Jinja chat template, if it has one."""
        ...

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Named templates besides the default one (``tool_use``, ``rag``, ...)."""
        ...

    @property
    def token_names(self) -> Mapping[str, str]:
        """How tokens with a role are spelled: ``bos_token``, ``eos_token``, ``pad_token``, ..."""
        ...

    @property
    def warnings(self) -> tuple[str, ...]:
        """What was assumed because the file did not say (an unknown pre-tokenizer, ...)."""
        ...

    @property
    def bytewise(self) -> bool:
        """Whether the text of ids is the joined :meth:`id_to_bytes` of each (see the module)."""
        ...

    @property
    def strips_leading_space(self) -> bool:
        """Whether :meth:`decode` drops one space at the very start (``▁Hello`` -> ``Hello``)."""
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

        A long text with more than ``stop_after`` tokens may end in :class:`TooManyTokens` as soon
        as that is known; so may a conversation.

        ``add_special_tokens`` adds BOS/EOS where the model wants them (BOS never twice).
        ``parse_special=False`` is for text from outside: it never yields a control token. Lone
        surrogates are read as U+FFFD.
        """
        ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        ...

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to a text, a control token its name; ``b""`` for an unknown id.

        Only meaningful where :attr:`bytewise` holds.
        """
        ...

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        ...

    def id_to_token(self, token_id: int) -> str | None:
        """How the vocabulary spells a token, or None for an id without one."""
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """The conversation as the model was trained to read it.

        ``chat_template`` is a template's source or the name of one of :attr:`chat_templates`.
        Raises ``TemplateError`` (``sdk.loaders.chat_template``) for bad messages, a missing or
        broken template, and one that exceeds its budget of time or output.
        """
        ...

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        stop_after: int | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """Token ids of the rendered conversation, safe for text from outside.

        Control tokens written by the template are parsed; the same characters inside a message, a
        tool or a keyword argument are encoded as text. BOS is there once.
        """
        ...
