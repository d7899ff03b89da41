"""Tokenizers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Protocol

from sdk.api.errors import RequestError
from sdk.kernels.packages import package
from sdk.quant.safe_repr import safe_repr
from sdk.tokenizer import LLMTokenizer


class BaseLlamaTokenizer(ABC):
    """Text to tokens and back."""

    @abstractmethod
    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """The tokens of UTF-8 text."""

    @abstractmethod
    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens."""


class _Loaded(Protocol):
    """A ``Llama``."""

    @property
    def llm(self) -> Any: ...


class LlamaTokenizer(BaseLlamaTokenizer):
    """The tokenizer of a ``Llama``."""

    def __init__(self, llama: _Loaded) -> None:
        self._inner: LLMTokenizer = llama.llm.get_tokenizer()

    @classmethod
    def from_ggml_file(cls, path: str) -> LlamaTokenizer:
        """The tokenizer of a GGUF file; its weights are not read."""
        from sdk.loaders.open import open_checkpoint

        tokenizer = cls.__new__(cls)
        tokenizer._inner = LLMTokenizer(open_checkpoint(path).tokenizer)
        return tokenizer

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """The tokens of UTF-8 text. ``special=False`` reads control tokens as ordinary text."""
        if not isinstance(text, bytes):
            raise RequestError(f"text: expected bytes, found {safe_repr(text)}; use text.encode()")
        decoded = text.decode("utf-8", errors="replace")
        return self._inner.encode(decoded, add_special_tokens=add_bos, parse_special=special)

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens, without control tokens unless ``special``."""
        tokens = list(tokens)
        text = self._inner.decode_bytes(tokens, skip_special_tokens=not special)
        begins = tokens[:1] == [self._inner.bos_token_id]
        return text[1:] if begins and text[:1] == b" " else text

    def encode(self, text: str, add_bos: bool = True, special: bool = True) -> list[int]:
        """:meth:`tokenize` of a string."""
        return self.tokenize(text.encode("utf-8", errors="ignore"), add_bos, special)

    def decode(self, tokens: Sequence[int]) -> str:
        """:meth:`detokenize` as a string; bytes that are not UTF-8 are left out."""
        return self.detokenize(tokens).decode("utf-8", errors="ignore")


class LlamaHFTokenizer(BaseLlamaTokenizer):
    """A tokenizer of transformers, to count and split, or for ``Llama(tokenizer=...)``."""

    def __init__(self, hf_tokenizer: Any) -> None:
        self.hf_tokenizer = hf_tokenizer

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str) -> LlamaHFTokenizer:
        """The tokenizer of a folder or a repository on the hub."""
        transformers = package("transformers", "LlamaHFTokenizer.from_pretrained needs")

        return cls(transformers.AutoTokenizer.from_pretrained(pretrained_model_name_or_path))

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        """The tokens of UTF-8 text. ``special``: with the tokens that begin and end a text."""
        decoded = text.decode("utf-8", errors="ignore")
        found: list[int] = self.hf_tokenizer.encode(decoded, add_special_tokens=special)
        return found

    def detokenize(
        self, tokens: Sequence[int], prev_tokens: Sequence[int] | None = None, special: bool = False
    ) -> bytes:
        """The bytes of tokens after ``prev_tokens``."""
        before = [] if prev_tokens is None else list(prev_tokens)
        known, whole = (
            self.hf_tokenizer.decode(ids, skip_special_tokens=not special).encode(errors="ignore")
            for ids in (before, [*before, *tokens])
        )
        found: bytes = whole[len(known) :] if before else whole
        return found
