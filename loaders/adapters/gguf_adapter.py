"""A LoRA adapter as llama.cpp's ``convert_lora_to_gguf.py`` writes it.

``general.type`` is ``adapter``, ``adapter.type`` is ``lora``, and ``adapter.lora.alpha`` divided by
the rank is the scale (without one it is 1). A matrix ``blk.0.attn_q.weight`` has ``….lora_a``
``[r, in]`` and ``….lora_b`` ``[out, r]``; for ``token_embd.weight`` they are ``[vocab, r]`` and
``[hidden, r]``. Rows of q and k are interleaved where those of the model's GGUF files are, see
:mod:`sdk.loaders.gguf_files.checkpoint`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.loaders.adapters.adapter_file import (
    AdapterFile,
    MatrixShape,
    StoredMatrix,
    check_shapes,
    low_rank,
)
from sdk.loaders.gguf_files.header import GgufTensor
from sdk.loaders.gguf_files.names import gguf_name
from sdk.loaders.gguf_files.reader import GgufFile, read_gguf
from sdk.loaders.model_shapes import interleaved_heads
from sdk.models.architecture import GgufRules, architecture, gguf_rules
from sdk.quant.adapter import LowRank
from sdk.quant.errors import CheckpointError, UnsupportedError

_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_FACTOR = re.compile(r"(.+)\.lora_([ab])")
_EMBEDDING = "model.embed_tokens"


def open_gguf_adapter(
    path: Path,
    config: Mapping[str, Any],
    matrices: Mapping[str, tuple[int, int]],
    scale: float = 1.0,
) -> AdapterFile:
    """Open an adapter in a GGUF file for the model with this ``config`` and these ``matrices``.

    :raises CheckpointError: it is damaged, no adapter, or does not fit the model.
    :raises UnsupportedError: it holds something that is not supported.
    """
    file = read_gguf(path)
    try:
        rules = _rules(file, config)
        alpha = _alpha(file)
        names = {gguf_name(rules, name): name for name in matrices}
        found: dict[str, StoredMatrix] = {}
        for theirs, (a, b) in _pairs(file).items():
            name = names.get(theirs)
            if name is None:
                raise CheckpointError(
                    f"{path}: {theirs[:200]!r}: the model has no such matrix that an adapter can "
                    "change; the adapter was made for another model"
                )
            heads = _interleaved_heads(rules, name, config)
            found[name] = _matrix(file, name, (a, b), (alpha, scale), heads, matrices[name])
        if not found:
            raise CheckpointError(f"{path}: expected tensors of an adapter, found none")
    except BaseException:
        file.close()
        raise
    return AdapterFile(path, found, (path,), file.close)


def _rules(file: GgufFile, config: Mapping[str, Any]) -> GgufRules:
    metadata, path = file.metadata, file.path
    if metadata.get("general.type") != "adapter":
        raise CheckpointError(
            f"{path}: expected a LoRA adapter (general.type 'adapter'), found "
            f"{str(metadata.get('general.type'))[:80]!r}"
        )
    if metadata.get("adapter.type") != "lora":
        raise UnsupportedError(
            f"{path}: expected adapter.type 'lora', found "
            f"{str(metadata.get('adapter.type'))[:80]!r}"
        )
    if any(key.startswith("adapter.alora.") for key in metadata):
        raise UnsupportedError(
            f"{path}: an activated LoRA (aLoRA), which applies only after certain tokens, is not "
            "supported"
        )
    known = architecture(config.get("model_type"))
    if known is None or not gguf_rules(known):
        raise UnsupportedError(
            f"{path}: GGUF files of the model {config.get('model_type')!r} are not supported; use "
            "the adapter as a folder of PEFT"
        )
    name = metadata.get("general.architecture")
    rules = next((own for own in gguf_rules(known) if own.name == name), None)
    if rules is None:
        names = (own.name for own in gguf_rules(known))
        raise CheckpointError(
            f"{path}: the adapter is for a model of the architecture {str(name)[:80]!r}, this one "
            f"is {' or '.join(repr(own) for own in dict.fromkeys(names))}"
        )
    return rules


def _alpha(file: GgufFile) -> float:
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise CheckpointError(
            f"{file.path}: adapter.lora.alpha is {str(alpha)[:80]}, expected a number"
        )
    return float(alpha)


def _pairs(file: GgufFile) -> dict[str, tuple[GgufTensor, GgufTensor]]:
    """The factors A and B of each matrix, by the model's name of it in GGUF files."""
    found: dict[str, dict[str, GgufTensor]] = {}
    for name, tensor in file.tensors.items():
        match = _FACTOR.fullmatch(name)
        if match is None or len(tensor.shape) != 2:
            raise CheckpointError(
                f"{file.path}: tensor {name!r}: expected NAME.lora_a or NAME.lora_b with two "
                f"dimensions, found {list(tensor.shape)}"
            )
        if tensor.type.name not in _TYPES:
            raise UnsupportedError(
                f"{file.path}: tensor {name!r}: expected one of {', '.join(_TYPES)}, found "
                f"{tensor.type.name}"
            )
        found.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in found.items():
        if len(pair) < 2:
            raise CheckpointError(f"{file.path}: {name}: expected both lora_a and lora_b")
    return {name: (pair["a"], pair["b"]) for name, pair in found.items()}


def _interleaved_heads(rules: GgufRules, name: str, config: Mapping[str, Any]) -> int | None:
    """The number of heads of q or k if their rows are interleaved in GGUF files."""
    if not rules.interleaved_qk or not name.endswith(("q_proj", "k_proj")):
        return None
    return interleaved_heads(config, name)


def _matrix(
    file: GgufFile,
    name: str,
    pair: tuple[GgufTensor, GgufTensor],
    factors: tuple[float, float],
    heads: int | None,
    expected: tuple[int, int],
) -> StoredMatrix:
    a, b = pair
    rows = name == _EMBEDDING
    rank, inputs = a.shape[1 if rows else 0], (b.shape[0] if rows else a.shape[1])
    outputs = a.shape[0] if rows else b.shape[0]
    shape = MatrixShape(rank, inputs, outputs)
    check_shapes(f"{file.path}: {name}", shape, b.shape[1], expected)
    alpha, own = factors
    scale = own * alpha / rank if alpha else own
    return StoredMatrix(shape, partial(_read, file, (a, b), scale, heads, rows))


def _read(
    file: GgufFile,
    pair: tuple[GgufTensor, GgufTensor],
    scale: float,
    heads: int | None,
    rows: bool,
) -> LowRank:
    a, b = (_tensor(file, one) for one in pair)
    if rows:
        a, b = b.T, a
    elif heads is not None:
        b = b.view(heads, b.shape[0] // heads // 2, 2, -1).swapaxes(1, 2).reshape(b.shape)
    return low_rank(a, b, scale, f"{file.path}: {pair[0].name}")


def _tensor(file: GgufFile, stored: GgufTensor) -> Tensor:
    data = torch.from_numpy(file.data(stored.name).reshape(-1))
    return data.view(getattr(torch, _TYPES[stored.type.name])).view(stored.shape)
