"""Properties of a tokenizer.json that matter for encoding long texts (see ``portions.py``)."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from sdk.kernels.dataclass import dataclass
from sdk.loaders.tokenizer.byte_level import BYTE_TABLE
from sdk.loaders.tokenizer.json_parts import part_state
from sdk.loaders.tokenizer.portions import fewest_tokens
from sdk.loaders.tokenizer.pretokenizers import PRE_TOKENIZERS
from sdk.loaders.tokenizer.spm import SPACE

_KNOWN = frozenset(
    pattern for pre in PRE_TOKENIZERS.values() if not pre.joins_words for pattern in pre.patterns
)
_BYTE_TOKENS = frozenset(f"<0x{byte:02X}>" for byte in range(256))
#: Steps that never drop a character.
_KEEPING = ("ByteLevel", "Split", "Digits", "Metaspace")
_NORMALIZERS = ("NFC", "Prepend", "Replace")


@dataclass(frozen=True, slots=True)
class BackendTraits:
    """``divisible``: a text may be cut into portions. ``spellings``: of all tokens, if they give a
    lower bound on the number of tokens of a text; else empty."""

    divisible: bool
    spellings: Collection[str]
    _bytes: bool
    _normalizer: Any

    @classmethod
    def of(cls, backend: Any) -> BackendTraits:
        """The traits of a ``tokenizers.Tokenizer``. If in doubt, texts are not cut or bounded."""
        normalizers = _steps(backend.normalizer, "normalizers")
        steps = _steps(backend.pre_tokenizer, "pretokenizers")
        added = list(backend.get_added_tokens_decoder().values())
        plain = _is_plain_bpe(backend.model)
        in_bytes = any(step["type"] == "ByteLevel" for step in steps)
        divisible = (
            plain
            and in_bytes
            and all(step["type"] == "NFC" for step in normalizers)
            and all(map(_cuts_at_words, steps))
            and not any(map(_reaches_over_a_cut, added))
        )
        traits = cls(divisible, (), in_bytes, backend.normalizer)
        whole = in_bytes or (plain and backend.model.byte_fallback)
        if not plain or not whole or not _keeps_text(normalizers, steps, added):
            return traits
        vocabulary = backend.get_vocab(with_added_tokens=False)
        if not in_bytes and not vocabulary.keys() >= _BYTE_TOKENS:
            return traits
        return replace(
            traits, spellings=[*vocabulary, *(traits.spelled(token.content) for token in added)]
        )

    def fewest_tokens(self, text: str) -> int:
        """The smallest number of tokens that a text can have."""
        if not self.spellings:
            return 0
        return fewest_tokens(self.spelled(text), self.spellings, complete=not self._bytes)

    def spelled(self, text: str) -> str:
        """``text`` in the alphabet of ``spellings``."""
        if self._normalizer is not None:
            text = self._normalizer.normalize_str(text)
        if self._bytes:
            return text.encode("utf-8").decode("latin-1").translate(BYTE_TABLE)
        return text.replace(" ", SPACE)


def _keeps_text(normalizers: Any, steps: Any, added: Any) -> bool:
    """Whether no character is dropped after normalization, and spaces are bytes or ▁."""
    spaces = any(step["type"] in ("ByteLevel", "Metaspace") for step in steps) or any(
        step["type"] == "Replace" and step["pattern"] == {"String": " "} for step in normalizers
    )
    return (
        spaces
        and all(step["type"] in _NORMALIZERS for step in normalizers)
        and all(step["type"] in _KEEPING and step.get("behavior") != "Removed" for step in steps)
        and all(step.get("replacement", SPACE) == SPACE for step in steps)
        and not any(token.lstrip or token.rstrip for token in added)
    )


def _steps(component: Any, parts: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if component is None:
        return []
    state = part_state(component)
    steps: list[dict[str, Any]] = state[parts] if state.get("type") == "Sequence" else [state]
    return steps


def _is_plain_bpe(model: Any) -> bool:
    return (
        type(model).__name__ == "BPE"
        and not model.dropout
        and not model.continuing_subword_prefix
        and not model.end_of_word_suffix
    )


def _cuts_at_words(step: dict[str, Any]) -> bool:
    """Whether a step is known to separate words where ``portions`` cuts."""
    if step["type"] == "Split":
        known = step["pattern"].get("Regex") in _KNOWN
        return known and step["behavior"] == "Isolated" and not step["invert"]
    if step["type"] == "ByteLevel":
        return not step["add_prefix_space"]
    return bool(step["type"] == "Digits")


def _reaches_over_a_cut(token: Any) -> bool:
    """Whether an added token could span a cut, or strip text beyond one."""
    text = token.content
    if re.search(r"[^\W_] [^\W\d_]|\S\n[^\W\d_]", text) is not None:
        return True
    return bool(token.rstrip and text[-1:].isalnum()) or bool(token.lstrip and text[:1].isalpha())
