"""Identifies the model that keys and values belong to; cheap enough to compute at every load."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sdk.api.errors import CheckpointError
from sdk.models.configs.config import ModelConfig
from sdk.models.rope import inverse_frequencies

_BLOCK = 4096
#: Blocks read from all files together: 1.2 ms for a file that was just loaded.
_BLOCKS = 256
_PART = re.compile(r"-\d{5}-of-(\d{5})\.gguf$")


class ModelKey(NamedTuple):
    """A model's file name, for messages, and its digest: equal for equal models."""

    name: str
    digest: str


def model_key(
    path: Path,
    config: ModelConfig,
    max_model_len: int,
    *,
    quantization: str | None,
    overrides: Mapping[str, Any],
) -> ModelKey:
    """The key of a model as it is loaded with these options.

    It is a hash of the sizes of the weight files, of blocks of 4 KiB spread over them (including
    the first, with the beginning of the header), of ``config.json``, the online quantization, the
    config overrides, and the rotary frequencies, which may depend on ``max_model_len``. Different
    training, quantization or architecture changes nearly every block and so the key. Edits
    between the blocks are not noticed: the key distinguishes models, it does not authenticate
    them. File names and folders do not count. Weights without a file get a unique key.

    :raises CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        if path.exists():
            _hash_files(path, digest)
        else:
            digest.update(os.urandom(16))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    options = {"quantization": quantization, "overrides": dict(overrides)}
    digest.update(json.dumps(options, sort_keys=True, default=str).encode())
    for rope in config.ropes:
        frequencies, factor = inverse_frequencies(rope, max_model_len)
        digest.update(frequencies.numpy().tobytes() + repr(factor).encode())
    return ModelKey(path.name, digest.hexdigest()[:32])


def key_of_fork(key: ModelKey, config: ModelConfig, length: int, own_length: int) -> ModelKey:
    """The key of an engine with the weights of another one, whose ``key`` and ``length`` are given.

    No file is read: it may have changed since. Keys differ where rotary frequencies depend on the
    longest request.
    """
    for rope in config.ropes:
        old, new = (inverse_frequencies(rope, each) for each in (length, own_length))
        if old[1] != new[1] or old[0].tolist() != new[0].tolist():
            digest = hashlib.sha256(f"{key.digest} {own_length}".encode())
            return ModelKey(key.name, digest.hexdigest()[:32])
    return key


def files_key(path: Path) -> str:
    """The part of :func:`model_key` that depends on the files alone, not on options.

    :raises CheckpointError: a file cannot be read.
    """
    digest = hashlib.sha256()
    try:
        _hash_files(path, digest)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    return digest.hexdigest()[:32]


def _hash_files(path: Path, digest: hashlib._Hash) -> None:
    files = weight_files(path)
    count = max(_BLOCKS // max(len(files), 1), 2)
    for file in files:
        size = file.stat().st_size
        digest.update(b"%d;" % size)
        with file.open("rb", buffering=0) as data:
            for index in range(count):
                data.seek(index * max(size - _BLOCK, 0) // (count - 1))
                digest.update(data.read(_BLOCK))
    settings = path / "config.json"
    if settings.is_file():
        digest.update(settings.read_bytes())


def weight_files(path: Path) -> list[Path]:
    """The files of a model that hold its weights."""
    if path.is_dir():
        return sorted(path.glob("*.safetensors"))
    part = _PART.search(path.name)
    if part is None:
        return [path]
    return sorted(path.parent.glob(f"{path.name[: part.start()]}-*-of-{part[1]}.gguf"))
