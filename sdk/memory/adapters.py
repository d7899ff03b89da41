"""The room that a memory plan sets aside for low-rank adapters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.config import EngineConfig
from sdk.memory.resolve import compute_of
from sdk.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

#: Factors begin at multiples of this.
_ALIGN = 64
#: Bytes of a value while an adapter is read: float32.
_READ = 4


def adapter_bytes(config: EngineConfig, model: ModelConfig, activations: torch.dtype) -> int:
    """Bytes of all adapters together: ``lora_memory``, or enough for ``max_loras`` adapters of
    ``max_lora_rank`` on every linear layer of the blocks, one of which is being read.
    """
    if not config.enable_lora:
        return 0
    if config.lora_memory is not None:
        assert isinstance(config.lora_memory, int)  # EngineConfig has parsed it
        return config.lora_memory
    rank, ranks = config.max_lora_rank, config.tensor_parallel_size
    if config.lora_dtype == "int8":
        held = _bytes(model, rank, ranks, 1, scales=True)
    else:
        held = _bytes(model, rank, ranks, 4 if compute_of(config) == "exact" else 2)
    return config.adapter_slots * held + _bytes(model, rank, 1, _READ)


def _bytes(model: ModelConfig, rank: int, ranks: int, size: int, *, scales: bool = False) -> int:
    """Of an adapter on all ranks together, with values of ``size`` bytes and perhaps a float32
    scale for each rank. Ranks share one of each matrix's factors."""
    hidden = model.hidden_size
    queries, keys = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    columns = [queries, keys, keys]  # split by outputs: every rank has the whole factor A
    rows = [queries]  # split by inputs: every rank has the whole factor B
    width, experts = model.intermediate_size, model.experts
    if experts is not None:  # only what every token uses has adapters
        width = max(experts.shared_width, 0 if all(experts.layers) else width)
    if width:
        columns += [width] * 2
        rows += [width]
    values = sum(rank * (ranks * hidden + out) for out in columns)
    values += sum(rank * (width + ranks * hidden) for width in rows)
    layer = size * values
    if scales:
        layer += 4 * ranks * rank * (len(columns) + len(rows))
    parts = 3 if scales else 2
    return model.num_layers * (layer + _ALIGN * ranks * parts * (len(columns) + len(rows)))


def adapter_options(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Any]:
    """Options of an engine for these adapters and no others, of any rank.

    A value takes up to 2 bytes, and 4 more while it is read; a file has at least 2 for each. The
    sizes of adapters on the hub are not known: they get the room of rank 64.
    """
    options: dict[str, Any] = {"enable_lora": True, "max_loras": len(paths), "max_lora_rank": 4096}
    sizes = [_file_size(Path(path)) for path in paths]
    if None in sizes:
        return {**options, "max_lora_rank": 64}
    return {**options, "lora_memory": 4 * sum(size or 0 for size in sizes) + 2**20}


def _file_size(path: Path) -> int | None:
    files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
    return sum(file.stat().st_size for file in files) if files else None
