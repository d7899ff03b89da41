"""Writes a LoRA adapter with random factors as PEFT would: for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from sdk.loaders.adapters.peft_folder import PREFIX, WEIGHTS
from sdk.loaders.folders.tensor_names import TensorNames
from sdk.loaders.model_shapes import expected_shape
from sdk.loaders.open import open_checkpoint
from sdk.loaders.other_kinds import ADAPTER_CONFIG
from sdk.models.architecture import architecture
from sdk.quant.errors import CheckpointError

#: The linear layers of a block, some of them in files that join others.
ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "gate_up_proj", "down_proj")


def random_adapter_for(
    model: str | Path,
    folder: Path,
    rank: int,
    *,
    seed: int = 0,
    scale: float = 0.1,
    targets: Sequence[str] = LINEAR,
) -> Path:
    """Write an adapter for the ``targets`` of every block of a model.

    :raises CheckpointError: the model cannot be read, or has none of them.
    """
    checkpoint = open_checkpoint(model)
    try:
        config = checkpoint.config
        own = architecture(config.get("model_type"))
        theirs = TensorNames({} if own is None else own.tensors.names).theirs
        matrices = {}
        for layer in range(int(config["num_hidden_layers"])):
            for name in targets:
                part = "self_attn" if name in ATTENTION else "mlp"
                path = f"model.layers.{layer}.{part}.{name}"
                shape = expected_shape(config, path) if checkpoint.has(path) else None
                if shape is not None and len(shape) == 2:
                    matrices[theirs(path)] = (shape[0], shape[1])
    finally:
        checkpoint.close()
    if not matrices:
        raise CheckpointError(f"{model}: has none of the matrices {', '.join(targets)[:200]}")
    return write_random_adapter(folder, matrices, rank, seed=seed, scale=scale)


def write_random_adapter(
    folder: Path,
    matrices: Mapping[str, tuple[int, int]],
    rank: int,
    *,
    seed: int = 0,
    scale: float = 0.1,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write an adapter for the ``matrices`` of a model, by path and shape ``(out, in)``.

    ``scale``: how large an update is, next to a matrix with entries of variance ``1 / in``.
    """
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, (outputs, inputs) in matrices.items():
        a = torch.randn(rank, inputs, generator=generator) / inputs**0.5
        b = torch.randn(outputs, rank, generator=generator) * (scale / rank**0.5)
        tensors[f"{PREFIX}{path}.lora_A.weight"] = a.to(dtype)
        tensors[f"{PREFIX}{path}.lora_B.weight"] = b.to(dtype)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    targets = sorted({path.rpartition(".")[2] for path in matrices})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(config), encoding="utf-8")
    return folder
