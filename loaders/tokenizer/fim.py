"""The fill-in-the-middle tokens of a model, by the keys of a GGUF file or by their spellings.

Most files do not name them: llama.cpp too finds them by their spelling in the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sdk.loaders.tokenizer.metadata import Metadata
from sdk.quant.tokenizer import FimTokens


class _Family(NamedTuple):
    prefix: str
    suffix: str
    middle: str | None
    suffix_first: bool = False
    prefix_token_first: bool = False


_FAMILIES = (
    _Family("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    _Family("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    _Family("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    _Family("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    _Family("<|fim_begin|>", "<|fim_hole|>", "<|fim_end|>"),
    _Family("▁<PRE>", "▁<SUF>", "▁<MID>", prefix_token_first=True),  # Code Llama
    _Family("<PRE>", "<SUF>", "<MID>", prefix_token_first=True),
    _Family("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    _Family("<|prefix|>", "<|suffix|>", "<|middle|>"),  # Falcon
    _Family("<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", suffix_first=True),  # Seed-Coder
    _Family("[PREFIX]", "[SUFFIX]", None, suffix_first=True),  # Codestral
)
#: Other tokens of these models' training files. They separate files, so they end a middle.
_SEPARATORS = (
    "<|fim_pad|>",
    "<fim_pad>",
    "<fim-pad>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<file_sep>",
    "<|repo_name|>",
    "<repo_name>",
    "<|cursor|>",
    "▁<EOT>",
    "<EOT>",
    "<|endoftext|>",
)


def fim_tokens(
    token_to_id: Callable[[str], int | None], named: tuple[int, int, int] | None = None
) -> FimTokens | None:
    """The model's fill-in-the-middle tokens. ``named``: those that its file names, if it does."""
    for family in _FAMILIES:
        prefix, suffix = token_to_id(family.prefix), token_to_id(family.suffix)
        middle = None if family.middle is None else token_to_id(family.middle)
        if prefix is None or suffix is None or (family.middle is not None and middle is None):
            continue
        if named is not None and named[:2] != (prefix, suffix):
            continue
        ids = (prefix, suffix, middle)
        return FimTokens(*ids, _ends(token_to_id, ids), *family[3:])
    if named is not None:
        return FimTokens(*named, _ends(token_to_id, named))
    return None


def named_fim_tokens(meta: Metadata, count: int) -> tuple[int, int, int] | None:
    """Prefix, suffix and middle as a GGUF file names them; the second names are deprecated."""
    found = []
    for names in (("fim_pre", "prefix"), ("fim_suf", "suffix"), ("fim_mid", "middle")):
        ids = [meta.token_id(f"tokenizer.ggml.{name}_token_id", count) for name in names]
        found.append(next((token_id for token_id in ids if token_id is not None), None))
    prefix, suffix, middle = found
    if prefix is None or suffix is None or middle is None:
        return None
    return prefix, suffix, middle


def _ends(
    token_to_id: Callable[[str], int | None], ids: tuple[int, int, int | None]
) -> frozenset[int]:
    others = map(token_to_id, _SEPARATORS)
    return frozenset(token_id for token_id in (*ids, *others) if token_id is not None)
