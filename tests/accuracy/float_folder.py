"""A GGUF file's values in a folder as transformers has it: what folders are quantized from."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint


def write_float_folder(file: Path, out: Path) -> None:
    """Weights and config of ``file`` in float16, without a tokenizer, into a new folder ``out``."""
    with contextlib.closing(open_checkpoint(file)) as checkpoint:
        asked = RewrittenCheckpoint(checkpoint, lambda name, weight: weight)
        with contextlib.closing(Ops(num_threads=1)) as ops:
            build_model(asked, Mesh(), ops, max_model_len=512)
        matrices, plain = asked.pulled
        tensors = {f"{name}.weight": checkpoint.weight(name).dequantize() for name in matrices}
        tensors |= {name: checkpoint.tensor(name) for name in plain}
        config = {**checkpoint.config, "dtype": "float16"}
    part = out.with_name(out.name + ".part")
    part.mkdir(parents=True, exist_ok=True)
    halves = {name: tensor.to(torch.float16).contiguous() for name, tensor in tensors.items()}
    save_file(halves, part / "model.safetensors", metadata={"format": "pt"})
    (part / "config.json").write_text(json.dumps(config, default=str))
    part.rename(out)
