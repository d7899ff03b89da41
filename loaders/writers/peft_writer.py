"""Writes a LoRA adapter with random factors as PEFT would: for tests and benchmarks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from sdk.loaders.adapters.peft_folder import PREFIX, WEIGHTS
from sdk.loaders.other_kinds import ADAPTER_CONFIG

#: The linear layers of a block, some of them in files that join others.
ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "gate_up_proj", "down_proj")


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
