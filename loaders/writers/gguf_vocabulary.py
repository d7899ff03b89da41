"""The tokenizer of a folder as GGUF metadata: vocabulary, merges, pre-tokenizer name, template.

``tokenizer.json`` says how text is split into words by regular expressions; a GGUF file names a
known split instead, so the name is looked up in the table that readers use
(:mod:`sdk.loaders.tokenizer.pretokenizers`). A split without a name cannot be written: a file with
another one would silently be a worse model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.json_file import TOKENIZER_DIGITS, read_json
from sdk.loaders.tokenizer.json_parts import MAX_TOKENIZER_BYTES
from sdk.loaders.tokenizer.pretokenizers import PRE_TOKENIZERS
from sdk.loaders.tokenizer.sentencepiece import sentencepiece_metadata
from sdk.loaders.tokenizer.vocab import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.tokenizer import Tokenizer

_PREFIX = "tokenizer.ggml."
#: The pattern that ``ByteLevel`` splits by with ``use_regex``.
_BYTE_LEVEL = PRE_TOKENIZERS["gpt-2"].patterns[0]


def vocabulary_metadata(folder: Path, tokenizer: Tokenizer, vocab_size: int) -> dict[str, Any]:
    """Everything under ``tokenizer.``; padded with unused tokens to ``vocab_size``.

    :raises CheckpointError: the folder has no tokenizer, or a damaged one.
    :raises UnsupportedError: a tokenizer that GGUF files cannot express.
    """
    path = folder_file(folder, "tokenizer.json")
    if path is None:
        raise CheckpointError(f"{folder}: no tokenizer.json in the folder; a GGUF file needs one")
    whole = read_json(path, MAX_TOKENIZER_BYTES, max_digits=TOKENIZER_DIGITS)
    model = whole.get("model")
    if not isinstance(model, Mapping) or model.get("type") != "BPE":
        raise UnsupportedError(f"{path}: expected a BPE tokenizer, found {str(model)[:40]!r}")
    merges = [_merge(item) for item in model["merges"]]
    tokens, kinds = _tokens(whole, model["vocab"], vocab_size)
    if model.get("byte_fallback"):
        found = _sentencepiece(folder, tokens, kinds, merges)
        found[f"{_PREFIX}add_space_prefix"] = _adds_space(whole)
    else:
        found = {
            f"{_PREFIX}model": "gpt2",
            f"{_PREFIX}pre": _split_name(whole, bool(model.get("ignore_merges")), path),
            f"{_PREFIX}merges": [f"{left} {right}" for left, right in merges],
        }
    found[f"{_PREFIX}tokens"] = tokens
    found[f"{_PREFIX}token_type"] = np.array(kinds, np.int32)
    return found | _facts(folder, tokenizer)


def _merge(item: Any) -> tuple[str, str]:
    left, right = item.split(" ") if isinstance(item, str) else item
    return left, right


def _tokens(
    whole: Mapping[str, Any], vocab: Mapping[str, int], size: int
) -> tuple[list[str], list[int]]:
    """Spellings and types by id."""
    tokens = [f"[PAD{i}]" for i in range(size)]
    kinds = [UNUSED] * size
    for text, index in vocab.items():
        if index < size:
            tokens[index], kinds[index] = text, NORMAL
    unknown = whole["model"].get("unk_token")
    for added in whole.get("added_tokens", ()):
        index, text = added["id"], added["content"]
        if index < size:
            tokens[index] = text
            kinds[index] = CONTROL if added.get("special") else USER_DEFINED
            if text == unknown:
                kinds[index] = UNKNOWN
    return tokens, kinds


def _split_name(whole: Mapping[str, Any], ignore_merges: bool, path: Path) -> str:
    patterns = _patterns(whole.get("pre_tokenizer"))
    for name, known in PRE_TOKENIZERS.items():
        if known.patterns == patterns and known.ignore_merges == ignore_merges:
            return name
    raise UnsupportedError(
        f"{path}: expected a pre-tokenizer that GGUF files have a name for, found {patterns}"
    )


def _patterns(step: Any) -> tuple[str, ...]:
    """The regular expressions that a pre-tokenizer applies, in order."""
    if not isinstance(step, Mapping):
        return ()
    kind = step.get("type")
    if kind == "Sequence":
        return tuple(p for part in step["pretokenizers"] for p in _patterns(part))
    if kind == "Split":
        pattern = step["pattern"]
        return (pattern.get("Regex") or pattern.get("String") or "",)
    if kind == "Digits":
        return (r"\p{N}",) if step.get("individual_digits") else (r"\p{N}+",)
    if kind == "ByteLevel":
        return (_BYTE_LEVEL,) if step.get("use_regex", True) else ()
    return (str(kind),)


def _sentencepiece(
    folder: Path, tokens: list[str], kinds: list[int], merges: list[tuple[str, str]]
) -> dict[str, Any]:
    """A SentencePiece BPE merges pieces by descending score, which gives the order of merges."""
    for i, text in enumerate(tokens):
        if kinds[i] == NORMAL and len(text) == 6 and text[:3] == "<0x" and text[5] == ">":
            kinds[i] = BYTE
    found: dict[str, Any] = {f"{_PREFIX}model": "llama", f"{_PREFIX}pre": "default"}
    if (folder / "tokenizer.model").is_file():
        own = sentencepiece_metadata(folder / "tokenizer.model")
        if own is not None and len(own.get(f"{_PREFIX}scores", ())) == len(tokens):
            found[f"{_PREFIX}scores"] = np.asarray(own[f"{_PREFIX}scores"], np.float32)
            return found
    rank: dict[str, int] = {}
    for i, (left, right) in enumerate(merges):
        rank.setdefault(left + right, i)
    last = len(merges)
    scores = [-float(rank.get(text, last)) for text in tokens]
    found[f"{_PREFIX}scores"] = np.array(scores, np.float32)
    return found


def _adds_space(whole: Mapping[str, Any]) -> bool:
    """Whether a space is put in front of a text before it is split."""
    steps = [whole.get("normalizer") or {}, whole.get("pre_tokenizer") or {}]
    steps += [part for step in steps for part in step.get("normalizers", ())]
    spaced = any(step.get("type") == "Prepend" for step in steps)
    return spaced or any(
        step.get("type") == "Metaspace" and step.get("prepend_scheme", "always") != "never"
        for step in steps
    )


def _facts(folder: Path, tokenizer: Tokenizer) -> dict[str, Any]:
    """Special ids, whether a text begins with the BOS token, and the template."""
    file = folder_file(folder, "tokenizer_config.json")
    config = (
        {} if file is None else read_json(file, MAX_TOKENIZER_BYTES, max_digits=TOKENIZER_DIGITS)
    )
    found: dict[str, Any] = {}
    for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        spelled = config.get(f"{ours}_token")
        text = spelled.get("content") if isinstance(spelled, Mapping) else spelled
        index = tokenizer.token_to_id(text) if isinstance(text, str) else None
        if index is not None:
            found[f"{_PREFIX}{theirs}_token_id"] = index
    eos = found.get(f"{_PREFIX}eos_token_id")
    others = sorted(tokenizer.eos_token_ids - {eos})
    if others:  # llama.cpp knows one more end of a turn by its own key
        found[f"{_PREFIX}eot_token_id" if eos is not None else f"{_PREFIX}eos_token_id"] = others[0]
    first = tokenizer.encode("a")[:1]
    bos = found.get(f"{_PREFIX}bos_token_id")
    found[f"{_PREFIX}add_bos_token"] = bool(first) and first[0] == bos
    if tokenizer.chat_template is not None:
        found["tokenizer.chat_template"] = tokenizer.chat_template
    return found
