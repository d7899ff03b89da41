"""The tokenizer that ``LLM.get_tokenizer()`` returns, with the calls of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, overload

from sdk.api.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.quant.tokenizer import Tokenizer
from sdk.requests.prompts.kinds import ONLY_ONE


class Encoding(dict[str, Any]):
    """``input_ids`` and ``attention_mask`` of one or more texts; also as attributes."""

    @property
    def input_ids(self) -> Any:
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:
        return self["attention_mask"]


class LLMTokenizer:
    """A model's tokenizer with the names and defaults of transformers' tokenizers.

    Ids are plain lists without padding. Two things are safer than in transformers:
    ``parse_special=False`` reads control tokens in a text as ordinary text, and
    ``apply_chat_template`` does that for the contents of messages.
    """

    def __init__(self, inner: Tokenizer) -> None:
        self._inner = inner

    @property
    def inner(self) -> Tokenizer:
        """The tokenizer with this library's own interface."""
        return self._inner

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def vocab_size(self) -> int:
        """The number of tokens, including added and special ones; ``len()`` is the same."""
        return self._inner.vocab_size

    def __len__(self) -> int:
        return self._inner.vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._inner.bos_token_id

    @property
    def eos_token_id(self) -> int | None:
        """The token that the files name; :attr:`eos_token_ids` are all that end an answer."""
        named = self._named("eos_token")
        return min(self._inner.eos_token_ids, default=None) if named is None else named

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._inner.eos_token_ids

    @property
    def pad_token_id(self) -> int | None:
        return self._named("pad_token")

    @property
    def unk_token_id(self) -> int | None:
        return self._named("unk_token")

    @property
    def bos_token(self) -> str | None:
        return self._spelled(self.bos_token_id)

    @property
    def eos_token(self) -> str | None:
        return self._spelled(self.eos_token_id)

    @property
    def pad_token(self) -> str | None:
        return self._spelled(self.pad_token_id)

    @property
    def unk_token(self) -> str | None:
        return self._spelled(self.unk_token_id)

    @property
    def all_special_ids(self) -> list[int]:
        """The control tokens, which ``skip_special_tokens`` leaves out."""
        return sorted(self._inner.special_ids)

    @property
    def chat_template(self) -> str | None:
        """The source of the model's own chat template."""
        return self._inner.chat_template

    def _named(self, role: str) -> int | None:
        name = self._inner.token_names.get(role)
        return None if name is None else self._inner.token_to_id(name)

    def _spelled(self, token_id: int | None) -> str | None:
        return None if token_id is None else self._inner.id_to_token(token_id)

    # ---- text to ids -----------------------------------------------------------------------------

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        truncation: bool = False,
        max_length: int | None = None,
    ) -> Encoding:
        """The ids of one or more texts; with ``truncation`` the first ``max_length`` of each.

        :raises RequestError: ``truncation`` without a valid ``max_length``.
        """
        if truncation and (not isinstance(max_length, int) or max_length < 1):
            raise RequestError(
                "max_length: expected a number of tokens to truncate to, "
                f"found {safe_repr(max_length)}"
            )
        one = isinstance(text, str)
        texts = [text] if isinstance(text, str) else text
        rows = [self.encode(item, add_special_tokens=add_special_tokens) for item in texts]
        if truncation:
            rows = [row[:max_length] for row in rows]
        masks = [[1] * len(row) for row in rows]
        return Encoding(
            input_ids=rows[0] if one else rows, attention_mask=masks[0] if one else masks
        )

    def encode(
        self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The ids of a text. ``parse_special=False`` reads control tokens in it as ordinary text.

        :raises RequestError: ``text`` is not a string.
        """
        if not isinstance(text, str):
            raise RequestError(f"text: expected a string, found {safe_repr(text)}")
        return self._inner.encode(text, add_special_tokens, parse_special)

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text as written in the vocabulary, without BOS and EOS."""
        return [str(self._spelled(i)) for i in self.encode(text, add_special_tokens=False)]

    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[True] = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]: ...
    @overload
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: Literal[False],
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str: ...
    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        tokenize: bool = True,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int] | str:
        """The ids of a conversation; its text with ``tokenize=False``.

        :raises RequestError: invalid messages, or a model without a chat template.
        """
        from sdk.loaders.templates.chat_template import (
            TemplateError,  # loaded with the first conversation
        )

        if add_generation_prompt and continue_final_message:
            raise RequestError(f"apply_chat_template: {ONLY_ONE}")
        apply = self._inner.encode_chat if tokenize else self._inner.apply_chat_template
        try:
            return apply(
                conversation,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                chat_template=chat_template,
                **variables,
            )
        except TemplateError as error:
            raise RequestError(f"apply_chat_template: {error}") from error

    # ---- ids to text -----------------------------------------------------------------------------

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of one or more ids."""
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._inner.decode(ids, skip_special_tokens)

    def decode_bytes(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> bytes:
        """The bytes of ids, which may begin or end in the middle of a character.

        The space that some tokenizers put before a text stays, unlike in :meth:`decode`.
        """
        ids, inner = list(token_ids), self._inner
        if not inner.bytewise:
            return inner.decode(ids, skip_special_tokens).encode()
        hidden = inner.special_ids if skip_special_tokens else frozenset()
        return b"".join(inner.id_to_bytes(token) for token in ids if token not in hidden)

    def batch_decode(
        self, sequences: Iterable[Iterable[int]], skip_special_tokens: bool = False
    ) -> list[str]:
        """:meth:`decode` of each sequence."""
        return [self.decode(ids, skip_special_tokens) for ids in sequences]

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Iterable[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Iterable[int]) -> str | list[str | None] | None:
        """Tokens as written in the vocabulary; None for an id without a token."""
        if isinstance(ids, int):
            return self._spelled(ids)
        return [self._spelled(item) for item in ids]

    @overload
    def convert_tokens_to_ids(self, tokens: str) -> int | None: ...  # type: ignore[overload-overlap]
    @overload
    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]: ...
    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> int | list[int | None] | None:
        """The reverse; an unknown token gives UNK's id, or None if the model has no UNK."""
        if isinstance(tokens, str):
            found = self._inner.token_to_id(tokens)
            return self.unk_token_id if found is None else found
        return [self.convert_tokens_to_ids(token) for token in tokens]
