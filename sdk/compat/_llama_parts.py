"""The small classes of llama-cpp-python: grammars, callbacks, tokenizers, states and caches."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from sdk.errors import RequestError
from sdk.quant.safe_repr import safe_repr
from sdk.structured.gbnf import is_gbnf
from sdk.structured.params import StructuredOutputsParams
from sdk.tokenizer import LLMTokenizer

Ids = NDArray[np.intc]
Scores = NDArray[np.single]
LogitsProcessor = Callable[[Ids, Scores], Scores]
StoppingCriteria = Callable[[Ids, Scores], bool]


class LlamaGrammar:
    """A grammar in GBNF, or the schema of JSON answers."""

    def __init__(self, *args: Any, _grammar: str, **kwargs: Any) -> None:
        self._grammar = _grammar
        self._schema: dict[str, Any] | None = None

    @classmethod
    def from_string(cls, grammar: str, verbose: bool = True) -> LlamaGrammar:
        """A grammar in GBNF. It is read when a request uses it."""
        return cls(_grammar=grammar)

    @classmethod
    def from_file(cls, file: str | Path, verbose: bool = True) -> LlamaGrammar:
        """:meth:`from_string` with the text of a file."""
        return cls.from_string(Path(file).read_text(encoding="utf-8"), verbose)

    @classmethod
    def from_json_schema(cls, json_schema: str, verbose: bool = True) -> LlamaGrammar:
        """Answers that follow a JSON schema. :raises RequestError: the text is not a schema."""
        grammar = cls(_grammar=json_schema)
        grammar._schema = StructuredOutputsParams(json=json_schema).json
        return grammar

    @property
    def structure(self) -> StructuredOutputsParams:
        """The grammar as ``SamplingParams`` take it."""
        if self._schema is not None:
            return StructuredOutputsParams(json=self._schema)
        if not is_gbnf(self._grammar):  # would be read as Lark's notation
            raise RequestError(
                f"grammar: expected rules in GBNF (name ::= ...), found {safe_repr(self._grammar)}"
            )
        return StructuredOutputsParams(grammar=self._grammar)


class LogitsProcessorList(list[LogitsProcessor]):
    """Functions ``(input_ids, scores) -> scores``, applied one after the other."""

    def __call__(self, input_ids: Ids, scores: Scores) -> Scores:
        for processor in self:
            scores = processor(input_ids, scores)
        return scores


class StoppingCriteriaList(list[StoppingCriteria]):
    """Functions ``(input_ids, logits) -> bool``; a request stops when one returns True."""

    def __call__(self, input_ids: Ids, logits: Scores) -> bool:
        return any(criterion(input_ids, logits) for criterion in self)


class MinTokensLogitsProcessor:
    """Forbids ``token_eos`` before ``min_tokens`` tokens. Make one for each request."""

    def __init__(self, min_tokens: int, token_eos: int) -> None:
        self.min_tokens = min_tokens
        self.token_eos = token_eos
        self.prompt_tokens: int | None = None

    def __call__(self, input_ids: Ids, scores: Scores) -> Scores:
        if self.prompt_tokens is None:
            self.prompt_tokens = len(input_ids)
        if len(input_ids) - self.prompt_tokens < self.min_tokens:
            scores[self.token_eos] = -np.inf
        return scores


class LlamaDraftModel:
    """The base of drafters; only :class:`LlamaPromptLookupDecoding` is supported."""


class LlamaPromptLookupDecoding(LlamaDraftModel):
    """Drafts from earlier text: ``speculative_config="ngram"``. Answers are the same without it."""

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.max_ngram_size = max_ngram_size
        self.num_pred_tokens = num_pred_tokens


class LlamaRAMCache:
    """Accepted by ``Llama.set_cache``. The prefix cache is always on; ``LLM`` bounds its memory."""

    def __init__(self, capacity_bytes: int = 2 << 30) -> None:
        self.capacity_bytes = capacity_bytes


LlamaCache = LlamaRAMCache


@dataclass(frozen=True, slots=True)
class LlamaState:
    """The tokens of a ``Llama`` with their keys and values (``Llama.save_state``).

    ``snapshot`` is an :class:`sdk.Snapshot`, or None if the tokens fill no page.
    """

    input_ids: Ids
    n_tokens: int
    seed: int
    snapshot: Any


class _Loaded(Protocol):
    """A ``Llama``."""

    @property
    def llm(self) -> Any: ...


class LlamaTokenizer:
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


def token_ids(name: str, tokens: object) -> list[int]:
    """Token ids of a list or an array."""
    try:
        return [operator.index(token) for token in tokens]  # type: ignore[attr-defined]
    except TypeError as error:
        raise RequestError(
            f"{name}: expected a list of token ids, found {safe_repr(tokens)}"
        ) from error


def metadata_of(path: Path) -> dict[str, str]:
    """The numbers and texts of a GGUF file's header; empty for other files."""
    from sdk.loaders.gguf_reader import read_gguf

    if path.suffix != ".gguf":
        return {}
    kinds = (bool, int, float, str)
    found = {k: v for k, v in read_gguf(path).metadata.items() if isinstance(v, kinds)}
    return {k: str(v).lower() if isinstance(v, bool) else str(v) for k, v in found.items()}
