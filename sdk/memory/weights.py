"""The bytes of a model's weights and adapters, from the headers of its files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.config import EngineConfig
from sdk.kernels.cpu import available
from sdk.kernels.registry import facts_of
from sdk.kernels.weights.layouts import BLOCK_TYPES
from sdk.kernels.weights.stored_rows import STORED_COLUMNS
from sdk.memory import resolve
from sdk.memory.demand import ENGINE_BYTES, ENGINE_WORD_BYTES, WeightBytes
from sdk.memory.expert_memory import ExpertBytes
from sdk.memory.resolve import compute_of, model_config
from sdk.models.configs.config import ModelConfig
from sdk.quant.checkpoint import VISION_ROOT, Checkpoint, TensorEntry
from sdk.quant.online import (
    EMBEDDINGS,
    FLOATS,
    LAYER_TABLES,
    is_embedding_or_head,
    online_scheme,
    stays_float,
)

if TYPE_CHECKING:
    import torch

#: While loading, this many bytes of the file are in memory unpacked, or this many matrices if that
#: is more: q, k and v, or gate and up, until they are packed together, and the next ones.
_READ_BYTES, _READ_MATRICES = 8 * 2**20, 4
#: Without native kernels online quantization holds this many float32 copies of a matrix.
_COPIES = 5
#: With them, as many matrices as codes that are not in tiles: three that are kept
#: (quant/online.py), and gate and up joined.
_CODES = 5
#: The largest share of scales in packed weights: a float16 for 32 codes of 4 bits is a ninth.
_SCALES_OF_EXPERTS = 8
_LAYER = re.compile(r"\b(?:layers|blk)\.(\d+)\.")
#: The same at the beginning, or what is beside the layers.
_AFTER = re.compile(r"^(?:(?:model\.)?mtp\.|(?:(?:\w+\.){0,2}layers|blk)\.(\d+)\.)")
#: The projection of an expert back to the hidden size.
_NARROWS = re.compile(r"down|\bw2\b|output_linear")
#: The matrix with the keys' and the values' part of all heads of latent attention.
_BOTH_OF_HEADS = re.compile(r"\b(?:kv_b_proj|attn_kv_b)\b")

#: The matrices with the key heads of a layer, alone or beside its queries.
_KEYS = re.compile(r"\b(?:layers|blk)\.(\d+)\.(?:self_attn\.|attn_)(?:(qkv)|[kv])(?:_proj)?\.")


def weight_bytes(
    config: EngineConfig,
    checkpoint: Checkpoint,
    model: ModelConfig | None = None,
    only: Callable[[str], bool] | None = None,
) -> WeightBytes:
    """The bytes of the weights of ``checkpoint`` in an engine with ``config``.

    ``model``: its sizes, unless its config says them. ``only``: whether a tensor is loaded
    (default: all but those of layers after the model's last one).
    """
    model = model or model_config(config, checkpoint)
    device = resolve.device_of(config)
    loaded = only or partial(_is_of_layers, model.num_layers)
    once = [
        replace(each, held=held_bytes(each, device, model.layer_rows))
        for each in checkpoint.entries()
        if loaded(each.name)
    ]
    once = [_of_heads(each, model) for each in once]
    entries = [_with_copies(each, config, model) for each in once]
    early, late = _loading_bytes(config, entries, model)
    matrices = [
        entry for entry in entries if len(entry.shape) > 1 and not is_embedding_or_head(entry.name)
    ]
    layers: tuple[int, ...] = ()
    window = max((_window_bytes(config, entry, model) for entry in matrices), default=0)
    if device != "cpu":
        layers = tuple(_bytes_by_layer(matrices, model))
        window = 2 * max(layers, default=0)
    return WeightBytes(
        total=sum(map(_held, entries)),
        loading=max(early, late),
        read=int(sum(_read_bytes(entry, model) for entry in once)),
        movable=sum(map(_held, matrices)),
        window=window,
        packing=2 * max((_one_matrix(entry, model) for entry in matrices), default=0),
        early=early,
        layers=layers,
        moving=_moving_bytes(config, entries, model),
        experts=_expert_bytes(entries, model),
    )


def _is_of_layers(layers: int, name: str) -> bool:
    """Whether a tensor is not of the encoder of images, and not of multi-token prediction, which
    comes after the ``layers``."""
    if name.startswith(VISION_ROOT):
        return False
    found = _AFTER.search(name)
    return found is None or (found[1] is not None and int(found[1]) < layers)


def costs(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> tuple[list[float], float]:
    """How long a step of some requests takes, in bytes that could be read meanwhile: of each layer,
    and of embedding and head together.

    With 8 requests a number is multiplied in the time in which a byte is read: 80 ps at 100
    billion multiplications per second, and 100 ps at 10 GB/s.
    """
    device = resolve.device_of(config)
    entries = [replace(each, held=held_bytes(each, device)) for each in checkpoint.entries()]
    layers, ends = [0.0] * model.num_layers, 0.0
    for entry in entries:
        found = _LAYER.search(entry.name)
        cost = _read_bytes(entry, model) * (1 + entry.num_elements / max(_held(entry), 1))
        if found is not None and int(found[1]) < len(layers):
            layers[int(found[1])] += cost
        elif is_embedding_or_head(entry.name):
            ends += cost
    return layers, ends


def end_bytes(config: EngineConfig, checkpoint: Checkpoint) -> int:
    """The bytes of embedding and head."""
    device = resolve.device_of(config)
    ends = [each for each in checkpoint.entries() if is_embedding_or_head(each.name)]
    return sum(held_bytes(each, device) for each in ends)


def held_bytes(entry: TensorEntry, device: str, layer_rows: int = 0) -> int:
    """Bytes of a tensor once it is loaded; a matrix is packed as the kernels read it.
    ``layer_rows``: see :class:`sdk.models.configs.config.ModelConfig`; such a table is in
    memory."""
    if entry.held is not None:
        return entry.held
    if device == "cpu" and not layer_rows and stays_in_file(entry):
        return 0
    held: int | None = None
    if len(entry.shape) > 1:
        rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
        held = facts_of(device).held_bytes(entry.format.lower(), rows, columns)
    return entry.nbytes if held is None else held


def _of_heads(entry: TensorEntry, model: ModelConfig) -> TensorEntry:
    """The entry with its part that is transposed as float16: see models/mixers/latent_heads.py."""
    spec = model.latent
    floats = entry.format in FLOATS and _held(entry) == entry.nbytes  # else quantized online
    if spec is None or floats or not _BOTH_OF_HEADS.search(entry.name):
        return entry
    values = _held(entry) * spec.value // (spec.still + spec.value)
    return replace(entry, held=values + 2 * model.num_heads * spec.still * spec.rank)


def stays_in_file(entry: TensorEntry) -> bool:
    """Whether a CPU reads rows of a table from its file instead of holding it in memory."""
    by_row = entry.name.removesuffix(".weight").endswith(LAYER_TABLES)
    kinds = (*FLOATS, *(name.upper() for name in BLOCK_TYPES))
    return by_row and entry.shape[-1] % STORED_COLUMNS == 0 and entry.format.upper() in kinds


def _with_copies(entry: TensorEntry, config: EngineConfig, model: ModelConfig) -> TensorEntry:
    """The entry with its share of the redundant experts, whichever of them are copied, and with key
    heads as often as there are ranks that have them."""
    if (found := _KEYS.search(entry.name)) is not None and model.latent is None:
        return _with_copied_heads(entry, config, model, int(found[1]), joined=found[2] is not None)
    if not config.num_redundant_experts or model.experts is None or not _is_expert(entry.name):
        return entry
    slots = model.experts.count + config.num_redundant_experts
    return replace(entry, held=-(-_held(entry) * slots // model.experts.count))


def _with_copied_heads(
    entry: TensorEntry, config: EngineConfig, model: ModelConfig, layer: int, *, joined: bool
) -> TensorEntry:
    """``joined``: the tensor has queries, too."""
    if layer >= model.num_layers or not model.blocks_of(layer).attention:
        return entry
    cache, ranks = model.attention_of(layer), config.tensor_parallel_size
    copies = ranks // cache.kv_heads
    if copies <= 1:
        return entry
    rows, keys = entry.shape[0], cache.kv_heads * (cache.key_dim + cache.value_dim)
    share = min(keys / rows, 1.0) if joined else 1.0
    return replace(entry, held=_held(entry) + int(_held(entry) * share * (copies - 1)))


def _moving_bytes(config: EngineConfig, entries: Sequence[TensorEntry], model: ModelConfig) -> int:
    """The experts of a layer, of all ranks together, if they can move."""
    if config.redundant_experts is None or model.experts is None:
        return 0
    experts = sum(_held(entry) for entry in entries if _is_expert(entry.name))
    return experts // max(sum(model.experts.layers), 1)


def _expert_bytes(entries: Sequence[TensorEntry], model: ModelConfig) -> ExpertBytes | None:
    """The experts of all layers, which are packed as two matrices each."""
    if model.experts is None:
        return None
    parts: dict[tuple[str, bool], int] = {}
    for entry in entries:
        found = _LAYER.search(entry.name)
        if found is not None and _is_expert(entry.name) and len(entry.shape) > 1:
            part = found[1], _NARROWS.search(entry.name) is not None
            parts[part] = parts.get(part, 0) + _held(entry)
    matrices: dict[int, int] = {}
    for nbytes in parts.values():
        size = nbytes // model.experts.count
        matrices[size] = matrices.get(size, 0) + model.experts.count
    if not matrices:
        return None
    read = sum(parts.values()) * model.experts.per_token // model.experts.count
    return ExpertBytes(matrices, sum(matrices) * model.experts.count, read)


def _held(entry: TensorEntry) -> int:
    assert entry.held is not None  # set by weight_bytes
    return entry.held


def _loading_bytes(
    config: EngineConfig, entries: Sequence[TensorEntry], model: ModelConfig
) -> tuple[int, int]:
    """The peaks of a load: while embedding and head are packed, and afterwards.

    A matrix is in memory twice while it is packed, unless it is read in pieces. Embedding and head,
    the largest, are packed first, when little else is in memory. The matrices of the blocks come on
    top of everything else.
    """
    on_cpu = resolve.device_of(config) == "cpu"
    rounds = config.quantization is not None and available("cpu") is None
    in_pieces = on_cpu and rounds
    ends = [entry for entry in entries if is_embedding_or_head(entry.name)]
    others = [entry for entry in entries if _held(entry) and not is_embedding_or_head(entry.name)]
    largest = max((_read_of(entry, in_pieces) for entry in others), default=0)
    window = min(sum(entry.nbytes for entry in others), max(_READ_BYTES, _READ_MATRICES * largest))
    early = sum(_held(entry) + _read_of(entry, on_cpu) for entry in ends)
    late = sum(map(_held, entries)) + window
    if config.quantization is not None:
        if rounds:
            late += _CODES * max(map(_held, others), default=0)
        else:
            late += max((_COPIES * 4 * entry.num_elements for entry in others), default=0)
        if online_scheme(config.quantization).head is not None:  # its codes before they are tiled
            early += sum(map(_held, ends))
    engine = ENGINE_BYTES + ENGINE_WORD_BYTES * model.vocab_size
    return early + engine, late + engine


def _read_of(entry: TensorEntry, in_pieces: bool) -> int:
    """Bytes of a tensor's part of the file that are in memory at a time."""
    return entry.read if in_pieces and entry.read is not None else entry.nbytes


def _bytes_by_layer(entries: Sequence[TensorEntry], model: ModelConfig) -> list[int]:
    layers = [0] * model.num_layers
    for entry in entries:
        found = _LAYER.search(entry.name)
        if found is not None and int(found[1]) < len(layers):
            layers[int(found[1])] += _held(entry)
    return layers


def _window_bytes(config: EngineConfig, entry: TensorEntry, model: ModelConfig) -> int:
    """Bytes in memory while a step multiplies with a matrix that is on disk.

    One thread holds the whole matrix and the one it is joined with (gate and up). Several threads
    hold the parts they work on, a quarter, and the scales. Experts are released one by one.
    """
    one = _one_matrix(entry, model)
    window = one * (2 if resolve.threads_of(config) == 1 else 1)
    if model.experts is not None and _is_expert(entry.name):
        window += 2 * one * model.experts.count // _SCALES_OF_EXPERTS
    return window


def _one_matrix(entry: TensorEntry, model: ModelConfig) -> int:
    """Bytes of the unit of packing: a matrix, or one expert."""
    stacked = model.experts is not None and _is_expert(entry.name) and len(entry.shape) > 2
    return _held(entry) // (entry.shape[0] if stacked else 1)


def _is_expert(name: str) -> bool:
    return "_exps." in name or ".experts." in name


def _read_bytes(entry: TensorEntry, model: ModelConfig) -> float:
    """Bytes that one token reads of a tensor: one row of an embedding that is not also the head."""
    held = _held(entry)
    embeds = entry.name.removesuffix(".weight").endswith(EMBEDDINGS)
    if embeds and not model.tie_word_embeddings:
        return held / entry.shape[0]
    if model.experts is not None and _is_expert(entry.name):
        return held * model.experts.per_token / model.experts.count
    return held


def numerics_of(entry: TensorEntry) -> str:
    """The format, named as in the report of a loaded model: ``q4_k``, ``gptq-w4g128``."""
    return entry.packed or entry.format.lower()


def matrix_formats(config: EngineConfig, checkpoint: Checkpoint) -> tuple[set[str], set[str]]:
    """Formats of the matrices of the blocks that do not stay floats, and of embedding and head."""
    formats: tuple[set[str], set[str]] = set(), set()
    for entry in checkpoint.entries():
        if len(entry.shape) > 1 and not stays_float(entry.name):
            formats[is_embedding_or_head(entry.name)].add(numerics_of(entry))
    return formats


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
    try:
        files = [path] if path.is_file() else [*path.glob("*.safetensors"), *path.glob("*.gguf")]
        return sum(file.stat().st_size for file in files) if files else None
    except OSError:  # opening the adapter says why
        return None
