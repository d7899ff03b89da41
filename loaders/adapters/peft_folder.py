"""A LoRA adapter as PEFT saves it: ``adapter_config.json`` and ``adapter_model.safetensors``.

Names begin with ``base_model.model.``; then come the path of a module and one of

- ``lora_A.weight`` ``[r, in]`` and ``lora_B.weight`` ``[out, r]``;
- ``lora_embedding_A`` ``[r, vocab]`` and ``lora_embedding_B`` ``[hidden, r]``;
- ``bias``, or ``base_layer.bias`` of a module that has an adapter (with ``bias``);
- ``base_layer.weight``: PEFT saves the model's own embedding and head again if they have adapters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.loaders.adapters.adapter_file import (
    AdapterFile,
    MatrixShape,
    StoredMatrix,
    check_shapes,
    low_rank,
)
from sdk.loaders.adapters.peft_config import PeftConfig, read_peft_config
from sdk.loaders.folders.expert_names import spelled_as_ours
from sdk.loaders.folders.folder_file import folder_file, weight_file
from sdk.loaders.folders.safetensors_reader import SafetensorsFiles, StoredTensor
from sdk.loaders.folders.tensor_names import TensorNames
from sdk.loaders.other_kinds import ADAPTER_CONFIG
from sdk.loaders.qkv_rows import stored_rows
from sdk.models.architecture import architecture
from sdk.quant.adapter import LowRank
from sdk.quant.errors import CheckpointError, UnsupportedError

WEIGHTS = "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
#: Beginnings of paths in other classes of transformers -> those of a causal language model.
_ROOTS = (
    ("model.language_model.", "model."),
    ("model.text_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head", "lm_head"),
    ("layers.", "model.layers."),
    ("embed_tokens", "model.embed_tokens"),
)
_FLOATS = ("F16", "BF16", "F32", "F64")
_KINDS = {
    ".lora_A.weight": "a",
    ".lora_B.weight": "b",
    ".lora_embedding_A": "rows_a",
    ".lora_embedding_B": "rows_b",
    ".base_layer.bias": "bias",
    ".bias": "bias",
    ".base_layer.weight": "own",
}
_REASONS = {
    ".lora_magnitude_vector": "DoRA is not supported; merge the adapter into its model",
    ".lora_B.bias": "biases of the factors B (lora_bias) are not supported",
    ".token_adapter.": "trainable_token_indices are not supported",
}
_WHOLE = (
    "the file replaces a whole matrix of the model (modules_to_save, or a vocabulary of another "
    "size), which is not supported; merge the adapter into its model"
)
#: The modules of which PEFT saves the model's own weights beside the factors.
_ENDS = ("model.embed_tokens", "lm_head")


class _Module(NamedTuple):
    """The tensors of one module, by kind, and its name in the file without ``base_model.model.``"""

    name: str
    tensors: dict[str, StoredTensor]


def open_peft_folder(
    folder: Path,
    config: Mapping[str, Any],
    model: Mapping[str, tuple[int, int]],
    scale: float = 1.0,
) -> AdapterFile:
    """Open a folder; its headers are read and checked.

    ``config``: the model's. ``model``: the shapes of its matrices. ``scale`` multiplies the update.

    :raises CheckpointError: it is damaged, or does not fit the model.
    :raises UnsupportedError: it holds something that is not supported; names it.
    """
    described = folder_file(folder, ADAPTER_CONFIG)
    if described is None:
        raise CheckpointError(
            f"{folder}: expected a LoRA adapter of PEFT, with {ADAPTER_CONFIG} and {WEIGHTS}; "
            f"found no {ADAPTER_CONFIG}"
        )
    settings = read_peft_config(described)
    if not (folder / WEIGHTS).is_file():
        if (folder / PICKLE).is_file():
            raise UnsupportedError(
                f"{folder}: found only {PICKLE}, a pickle. Reading it can run any code, so it is "
                "not opened. If you trust it, load the adapter with peft and save it again: "
                "save_pretrained writes safetensors"
            )
        raise CheckpointError(f"{folder}: {WEIGHTS} is missing")
    weights = weight_file(folder, WEIGHTS)
    files = SafetensorsFiles([weights])
    try:
        modules = _modules(files.tensors, weights, renamer(config))
        matrices = {
            path: _in_our_order(
                _matrix(files, path, module, settings, model.get(path), scale),
                stored_rows(config, path),
            )
            for path, module in modules.items()
        }
        found = {path: one for path, one in matrices.items() if one is not None}
        if not found:
            raise CheckpointError(f"{weights}: expected tensors of an adapter, found none")
    except BaseException:
        files.close()
        raise
    return AdapterFile(folder, found, (described, weights), files.close)


def renamer(config: Mapping[str, Any]) -> Callable[[str], str]:
    """From a module's path in transformers' model to ours."""
    own = architecture(config.get("model_type"))
    if own is None or not own.tensors.names:
        return canonical
    return TensorNames(own.tensors.names).ours


def _in_our_order(stored: StoredMatrix | None, rows: Tensor | None) -> StoredMatrix | None:
    """``rows``: for each output of ours that of the file; ``None``: they are the same."""
    if stored is None or rows is None:
        return stored

    def read() -> LowRank:
        a, b, bias = stored.read()
        return LowRank(a, b[rows], None if bias is None else bias[rows])

    return StoredMatrix(stored.shape, read)


def _modules(
    tensors: Mapping[str, StoredTensor], source: Path, ours: Callable[[str], str]
) -> dict[str, _Module]:
    modules: dict[str, _Module] = {}
    for name, stored in tensors.items():
        ending = next((ending for ending in _KINDS if name.endswith(ending)), None)
        reason = next((why for part, why in _REASONS.items() if part in name), None)
        if reason is None and ending is None and name.endswith(".weight") and "lora_" not in name:
            reason = _WHOLE
        if reason is not None and name.startswith(PREFIX):
            raise UnsupportedError(f"{source}: tensor {name[:200]!r}: {reason}")
        if not name.startswith(PREFIX) or ending is None:
            raise CheckpointError(
                f"{source}: tensor {name[:200]!r}: expected {PREFIX}PATH.lora_A.weight and others "
                "that PEFT saves for LoRA"
            )
        own = name[len(PREFIX) : -len(ending)]
        path = ours(own)
        module = modules.setdefault(path, _Module(own, {}))
        if module.name != own or _KINDS[ending] in module.tensors:
            raise CheckpointError(f"{source}: {path} is in it twice: {own}, {module.name}")
        if stored.dtype not in _FLOATS:
            raise UnsupportedError(
                f"{source}: tensor {name!r}: expected one of {', '.join(_FLOATS)}, "
                f"found {stored.dtype}"
            )
        module.tensors[_KINDS[ending]] = stored
    return modules


def canonical(module: str) -> str:
    """A module's path as in a causal language model: ``model.layers.0.…``, ``lm_head``."""
    for theirs, ours in _ROOTS:
        if module.startswith(theirs):
            return spelled_as_ours(ours + module[len(theirs) :])
    return spelled_as_ours(module)


def _matrix(
    files: SafetensorsFiles,
    path: str,
    module: _Module,
    settings: PeftConfig,
    expected: tuple[int, int] | None,
    factor: float,
) -> StoredMatrix | None:
    """The update of one module. ``None``: the file holds only the model's own weights of it."""
    tensors, source = module.tensors, f"{settings.source.rpartition('/')[0]}: {module.name}"
    own = tensors.get("own")
    if own is not None and (path not in _ENDS or (expected and own.shape != expected)):
        found, wanted = list(own.shape), list(expected or ())
        raise UnsupportedError(
            f"{source}: the file replaces this matrix of the model (expected shape {wanted}, found "
            f"{found}), which is not supported; merge the adapter into its model"
        )
    bias = tensors.get("bias")
    if bias is not None and settings.bias == "none":
        raise CheckpointError(f"{source}: a bias, but the config says bias='none'")
    if bias is not None and factor != 1.0:
        raise UnsupportedError(f"{source}: an adapter with biases cannot be scaled by {factor}")
    rows = "rows_a" in tensors or "rows_b" in tensors
    pair = ("rows_a", "rows_b") if rows else ("a", "b")
    missing = [kind for kind in pair if kind not in tensors]
    if len(missing) == 2:
        return None if bias is None else _only_bias(files, source, bias, expected)
    if missing or (rows and ("a" in tensors or "b" in tensors)):
        raise CheckpointError(f"{source}: expected both factors, A and B, of one kind")
    a, b = (tensors[kind] for kind in pair)
    if len(a.shape) != 2 or len(b.shape) != 2:
        raise CheckpointError(
            f"{source}: expected factors of two dimensions, found {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    outputs, inputs = (a.shape[1], b.shape[0]) if rows else (b.shape[0], a.shape[1])
    rank = a.shape[0]
    shape = MatrixShape(rank, inputs, outputs, bias is not None)
    check_shapes(source, shape, b.shape[1], expected)
    if bias is not None and bias.shape != (outputs,):
        raise CheckpointError(f"{source}: bias: expected [{outputs}], found {list(bias.shape)}")
    scale = factor * settings.scale(module.name, rank)
    names = a.name, b.name, None if bias is None else bias.name
    read = partial(_read_rows if rows else _read, files, names, scale, source)
    return StoredMatrix(shape, read)


def _only_bias(
    files: SafetensorsFiles, source: str, bias: StoredTensor, expected: tuple[int, int] | None
) -> StoredMatrix:
    """A bias of a module without factors (``bias="all"``), next to factors that are zero."""
    if expected is None or bias.shape != expected[:1]:
        raise CheckpointError(
            f"{source}: bias: expected that of a matrix of the model, {list(expected or ())}, "
            f"found {list(bias.shape)}"
        )
    outputs, inputs = expected

    def read() -> LowRank:
        found = files.tensor(bias.name).to(torch.float32)
        return LowRank(torch.zeros(1, inputs), torch.zeros(outputs, 1), found)

    return StoredMatrix(MatrixShape(1, inputs, outputs, True), read)


_Names = tuple[str, str, str | None]


def _read(files: SafetensorsFiles, names: _Names, scale: float, source: str) -> LowRank:
    found = low_rank(files.tensor(names[0]), files.tensor(names[1]), scale, source)
    if names[2] is None:
        return found
    bias = files.tensor(names[2]).to(torch.float32)
    if not bool(torch.isfinite(bias).all()):
        raise CheckpointError(f"{source}: bias has values that are not finite")
    return found._replace(bias=bias)


def _read_rows(files: SafetensorsFiles, names: _Names, scale: float, source: str) -> LowRank:
    """Of the embedding: its factors are those of the transposed matrix."""
    a, b = files.tensor(names[0]), files.tensor(names[1])
    return low_rank(b.T, a.T, scale, source)
