"""A vocabulary for random files, which have none: some engines do not open a file without."""

from __future__ import annotations

import shutil
from itertools import islice, product
from pathlib import Path
from string import ascii_letters
from typing import Any

import numpy as np

from sdk.api.errors import RequestError
from sdk.api.sizes import format_bytes
from sdk.loaders.gguf_files.reader import GgufFile, read_gguf
from sdk.loaders.tokenizer.byte_level import BYTE_OF
from sdk.loaders.tokenizer.vocab import CONTROL, NORMAL
from sdk.loaders.writers.gguf_file import GgufEntry, write_gguf
from sdk.loaders.writers.parts import PartTensor

_PREFIX = "tokenizer.ggml."


def with_vocabulary(path: Path) -> Path:
    """A copy of the GGUF file ``path`` beside it, with a byte-level vocabulary; ``path`` if it has
    one. The copy is made once, again if ``path`` has changed, and takes as much of the disk. Its
    matrices are the same bytes.

    :raises RequestError: there is too little room for it.
    """
    source = read_gguf(path)
    try:
        if f"{_PREFIX}tokens" in source.metadata:
            return path
        copy = path.with_name(f"{path.stem}.vocabulary.gguf")
        if not copy.is_file() or copy.stat().st_mtime_ns < path.stat().st_mtime_ns:
            _check_room(path)
            write_gguf(copy, _metadata(source), _tensors(source, path))
        return copy
    finally:
        source.close()


def _check_room(path: Path) -> None:
    needed, free = path.stat().st_size + (64 << 20), shutil.disk_usage(path.parent).free
    if free < needed:
        raise RequestError(
            f"{path.name}: expected {format_bytes(needed)} of free space in {path.parent} for a "
            f"copy with a vocabulary, found {format_bytes(free)}; set XDG_CACHE_HOME to a folder "
            "on another disk, or leave out the engines that need one (openvino, mistral.rs)"
        )


def _metadata(source: GgufFile) -> dict[str, Any]:
    kept = {key: one for key, one in source.metadata.items() if not key.startswith("tokenizer.")}
    size = next(one for key, one in kept.items() if key.endswith(".vocab_size"))
    return {**kept, **vocabulary(size)}


def vocabulary(size: int) -> dict[str, Any]:
    """Metadata of a byte-level vocabulary of ``size`` tokens: the bytes, words of two and of three
    letters, which are merged from shorter ones, and control tokens."""
    tokens, merges = list(BYTE_OF), []
    pairs = ["".join(two) for two in product(ascii_letters, repeat=2)]
    longer = [(two, one) for two in pairs for one in ascii_letters]
    words = [*((two[0], two[1]) for two in pairs), *longer]
    for left, right in islice(words, max(0, size - len(tokens) - 2)):
        tokens.append(left + right)
        merges.append(f"{left} {right}")
    kinds = [NORMAL] * len(tokens)
    while len(tokens) < size:
        tokens.append(f"<|control {len(tokens)}|>")
        kinds.append(CONTROL)
    return {
        f"{_PREFIX}model": "gpt2",
        f"{_PREFIX}pre": "llama-bpe",
        f"{_PREFIX}tokens": tokens,
        f"{_PREFIX}token_type": np.array(kinds, np.int32),
        f"{_PREFIX}merges": merges,
        f"{_PREFIX}bos_token_id": size - 2,
        f"{_PREFIX}eos_token_id": size - 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}",
    }


def _tensors(source: GgufFile, path: Path) -> list[GgufEntry]:
    found = []
    for one in source.tensors.values():
        kind, end = one.type.name, one.start + one.nbytes
        part = PartTensor(one.name, kind, one.shape, path, one.start, end)
        found.append(GgufEntry(one.name, one.shape, kind, (part,)))
    return found
