"""Parts of decoders that transformers has no class for, in torch, from their formulae, and files
of their tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.gguf_models import STRING
from tests.loaders.conftest import GgufBytes
from tests.models.reference_encoders import State

#: Names of a layer's tensors, and of the others, in GGUF files.
GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{one}_proj": f"attn_{one}" for one in "qkv"},
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
}


def folder_of(config: Mapping[str, Any], state: State, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def gguf_of_experts(
    arch: str,
    facts: Mapping[str, tuple[int, Any]],
    state: State,
    names: Mapping[str, str],
    experts: int,
) -> GgufBytes:
    """A file as llama.cpp's converter writes it: the matrices of a layer's ``experts`` are one
    tensor. ``names``: those of the file, besides ``GGUF_NAMES``."""
    file, theirs = GgufBytes({"general.architecture": (STRING, arch)}), {**GGUF_NAMES, **names}
    for key, value in facts.items():
        file.metadata[f"{arch}.{key}"] = value
    for name, values in state.items():
        stem = name.removesuffix(".weight").removeprefix("model.")
        if ".experts." in stem and ".experts.0." not in stem:
            continue
        if ".experts." in stem:
            own = [name.replace("experts.0", f"experts.{i}") for i in range(experts)]
            values = torch.stack([state[one] for one in own])
            part = stem.rpartition(".")[2].removesuffix("_proj")
            place = f"blk.{stem.split('.')[1]}.ffn_{part}_exps"
        elif stem.startswith("layers."):
            _, layer, part = stem.split(".", 2)
            place = f"blk.{layer}.{theirs[part]}"
        else:
            place = theirs[stem]
        data = np.ascontiguousarray(values.numpy(), "<f4")
        file.tensors[f"{place}.weight"] = (data.shape[::-1], 0, data.tobytes())
    return file


def rotated(x: Tensor, theta: float, width: int | None = None) -> Tensor:
    """Heads ``[T, heads, d]`` whose first ``width`` dimensions (default: all) are rotated, i and
    i + width / 2 together."""
    width = width or x.shape[-1]
    half = width // 2
    angle = torch.arange(len(x)).float()[:, None, None]
    angle = angle * theta ** (-torch.arange(half).float() / half)
    first, second, rest = x.split([half, half, x.shape[-1] - width], -1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal attention of ``[T, heads, d]``, ``[T, heads * d]``; a token sees ``window`` tokens,
    itself included."""
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))
    k, v = (one.repeat_interleave(len(q) // len(k), 0) for one in (k, v))
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    scores = (q @ k.transpose(1, 2) / q.shape[-1] ** 0.5).masked_fill(hidden, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
