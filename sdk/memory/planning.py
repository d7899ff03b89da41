"""What an engine would occupy and run, from the headers of a model's files: nothing is loaded."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from sdk.config import EngineConfig
from sdk.engine.rank.kv_cache import kv_spec
from sdk.errors import CheckpointError, RequestError
from sdk.kernels.ops import Compute
from sdk.kernels.registry import facts_of
from sdk.kernels.scratch import Scratch
from sdk.kernels.sized_graphs import MOST_TOKENS
from sdk.loaders.open import is_remote, open_checkpoint
from sdk.loading.progress import reporting
from sdk.memory.demand import ENGINE_BYTES, ENGINE_WORD_BYTES, Demand
from sdk.memory.fitting import plan_memory
from sdk.memory.machine import available_memory, installed_memory
from sdk.memory.offload import Limits, moved_out
from sdk.memory.plan import MemoryPlan
from sdk.memory.pool import MemoryPool
from sdk.memory.products import products_of
from sdk.memory.sizes import format_bytes
from sdk.models.activation_type import activation_type
from sdk.models.auto import read_config
from sdk.models.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint, TensorEntry
from sdk.quant.online import (
    EMBEDDINGS,
    FLOATS,
    is_embedding_or_head,
    is_router,
    online_quantized,
    online_scheme,
)

#: Of a GPU's free memory, what an engine may take unless told otherwise.
_GPU_SHARE = 0.9
#: So many bytes of a file are in memory as they were read, or so many matrices if that is more: q,
#: k and v, or gate and up, until they are packed together, and blocks for the next ones.
_WINDOW, _READ_MATRICES = 8 * 2**20, 4
#: Quantizing at load has so many float32 copies of a matrix, or of some rows of the head, at once.
_COPIES = 5
#: The largest share of scales in packed weights: a float16 for 32 codes of 4 bits is a ninth.
_SCALES_OF_EXPERTS = 8
_LAYER = re.compile(r"\b(?:layers|blk)\.(\d+)\.")


def open_model(config: EngineConfig) -> Checkpoint:
    """The files of a model, their headers checked; packed at load where ``config`` says so."""
    remote = is_remote(config.model)
    with reporting("download", "B", config.on_progress, bar=remote) as report:
        checkpoint = open_checkpoint(
            config.model,
            filename=config.filename,
            revision=config.revision,
            local_files_only=config.local_files_only,
            download_dir=config.download_dir,
            on_download=report,
        )
    if config.load_format not in ("auto", checkpoint.format):
        checkpoint.close()
        raise CheckpointError(
            f"{checkpoint.path}: expected {config.load_format} (load_format), "
            f"found {checkpoint.format}"
        )
    return online_quantized(checkpoint, config.quantization)


class _NoRanks:
    """A group that carries nothing: a mesh with it only tells how it would cut."""

    def all_reduce(self, x: Any) -> None:
        raise NotImplementedError

    def all_gather(self, x: Any) -> list[Any]:
        raise NotImplementedError


def _check_cut(size: int, model: ModelConfig) -> None:
    """Refuse a number of ranks that the model cannot be dealt to, before any of them starts."""
    mesh = Mesh(0, size, _NoRanks())
    mesh.heads(model.num_heads, model.num_kv_heads)
    mesh.columns(model.intermediate_size)
    if model.experts is not None:
        mesh.columns(model.experts.width)
    mesh.vocabulary(model.vocab_size)


def model_config(config: EngineConfig, checkpoint: Checkpoint) -> ModelConfig:
    return read_config({**checkpoint.config, **(config.hf_overrides or {})})


def activations_of(config: EngineConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The type of those between kernels: float32 on a CPU, whose kernels have no other."""
    device = device_of(config)
    best = facts_of(device).matrix_type(device)
    if best == torch.float32:
        return best
    return activation_type(
        {**checkpoint.config, **(config.hf_overrides or {})},
        best,
        exact=compute_of(config) == "exact",
        stored="float16" if _formats(config, checkpoint)[0] == {"f16"} else "",
        asked="" if config.dtype == "auto" else config.dtype,
    )


def compute_of(config: EngineConfig) -> Compute:
    # dtype="float32" asks for the arithmetic that compute="exact" names
    return "exact" if config.dtype == "float32" else config.compute


def device_of(config: EngineConfig) -> str:
    """``"auto"`` is the CPU. :raises RequestError: where the device asked for cannot be used."""
    if config.device != "cuda":
        return "cpu"
    if not torch.cuda.is_available():
        raise RequestError("device='cuda': torch finds no GPU here; leave device unset for the CPU")
    if config.tensor_parallel_size > 1:
        raise RequestError("device='cuda': tensor_parallel_size must be 1 in this release")
    return "cuda"


def threads_of(config: EngineConfig) -> int:
    return config.num_threads or len(os.sched_getaffinity(0))


def available_to(config: EngineConfig) -> int:
    """Bytes that weights, pages and workspace may take where no budget is given."""
    if device_of(config) == "cpu":
        return available_memory()
    free: int = torch.cuda.mem_get_info()[0]
    return int(free * (config.gpu_memory_utilization or _GPU_SHARE))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of a model's weights: as kernels hold them, at the peak of a load, read for a token.

    The others: see :class:`sdk.memory.demand.Demand`.
    """

    weights: int
    loading: int
    read: int
    movable: int = 0
    window: int = 0
    packing: int = 0
    early: int = 0
    layers: tuple[int, ...] = ()


def sizes_of(config: EngineConfig, checkpoint: Checkpoint) -> Sizes:
    model = model_config(config, checkpoint)
    device = device_of(config)
    entries = [replace(each, held=held_bytes(each, device)) for each in checkpoint.entries()]
    early, late = _loading_bytes(config, entries, model)
    matrices = [
        entry for entry in entries if len(entry.shape) > 1 and not is_embedding_or_head(entry.name)
    ]
    layers: tuple[int, ...] = ()
    window = max((_window_bytes(config, entry, model) for entry in matrices), default=0)
    if device != "cpu":
        layers = tuple(_bytes_by_layer(matrices, model))
        window = 2 * max(layers, default=0)
    return Sizes(
        sum(map(_held, entries)),
        max(early, late),
        int(sum(_read_bytes(entry, model) for entry in entries)),
        sum(map(_held, matrices)),
        window,
        2 * max((_one_matrix(entry, model) for entry in matrices), default=0),
        early,
        layers,
    )


def plan_for(
    config: EngineConfig, checkpoint: Checkpoint, sizes: Sizes | None = None
) -> MemoryPlan:
    """The sums alone; ``problem`` says so where they do not fit. ``sizes`` where they are known."""
    model = model_config(config, checkpoint)
    activations = activations_of(config, checkpoint)
    pool = config.memory if isinstance(config.memory, MemoryPool) else None
    budget = _bytes(config.memory) if pool is None else pool.free
    kv_budget = _bytes(config.kv_cache_memory_bytes)
    limit = available_to(config) if budget is None else budget
    demand = _demand(config, model, sizes or sizes_of(config, checkpoint), activations)
    demand = replace(demand, scratch=_scratch(config, model, checkpoint, activations))
    if config.disk_offload or config.cpu_offload:
        demand = moved_out(demand, config, Limits(limit, kv_budget, config.max_model_len))
    made = plan_memory(
        demand,
        budget=budget,
        kv_budget=kv_budget,
        max_model_len=config.max_model_len,
        available=limit,
    )
    if pool is not None:  # the pages of one request are the model's own, others are lent
        own = -(-made.max_model_len // made.page_size)
        made = replace(made, num_pages=min(made.num_pages, own))
    if made.fits and budget is not None and config.device != "cuda":
        made = _within_machine(made, budget)
    return replace(made, config=config)


def _within_machine(made: MemoryPlan, budget: int) -> MemoryPlan:
    """The plan, with its problem where the machine has less than the budget."""
    installed = installed_memory()
    if budget > installed:
        sums = (
            "the budget is larger than this machine:\n"
            f"  budget     {format_bytes(budget):>10}\n"
            f"  machine    {format_bytes(installed):>10}  or its container's limit\n"
            f"  planned    {format_bytes(made.total):>10}"
        )
        return replace(made, problem=sums)
    return made


def _demand(
    config: EngineConfig, model: ModelConfig, sizes: Sizes, activations: torch.dtype
) -> Demand:
    dtype = config.kv_policy or config.kv_cache_dtype
    if dtype == "auto":
        dtype = "float32" if compute_of(config) == "exact" else "float16"
    _check_cut(config.tensor_parallel_size, model)
    # Every rank is a process of this machine: the budget holds the pages of all of them, and with
    # more ranks than heads some heads are kept twice.
    heads = max(model.num_kv_heads, config.tensor_parallel_size)
    page_bytes = kv_spec(model, heads, config.block_size, dtype).page_bytes
    experts = model.experts
    # What a CPU records lies in the memory of its workspace.
    eager = config.enforce_eager or device_of(config) == "cpu"
    return Demand(
        weights=sizes.weights,
        page_bytes=page_bytes,
        page_size=config.block_size,
        kv_dtype=dtype,
        model_context=model.max_position,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        vocab_size=model.vocab_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        experts_per_token=0 if experts is None else experts.per_token,
        expert_width=0 if experts is None else experts.width,
        activation_bytes=activations.itemsize,
        loading=sizes.loading,
        read=sizes.read,
        has_tokenizer=not config.skip_tokenizer_init,
        movable=sizes.movable,
        window=sizes.window,
        packing=sizes.packing,
        early=sizes.early,
        layers=sizes.layers,
        captured_tokens=0 if eager else min(config.max_num_batched_tokens, MOST_TOKENS),
    )


def _scratch(
    config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint, activations: torch.dtype
) -> Scratch | None:
    products = products_of(
        model,
        _formats(config, checkpoint),
        activations,
        exact=compute_of(config) == "exact",
        fixed=config.deterministic,
    )
    device = device_of(config)
    return facts_of(device).scratch_of(products, device)


def _formats(config: EngineConfig, checkpoint: Checkpoint) -> tuple[set[str], set[str]]:
    """Of the matrices of the blocks but for routers, and of embedding and head."""
    formats: tuple[set[str], set[str]] = set(), set()
    for entry in checkpoint.entries():
        if len(entry.shape) > 1 and not is_router(entry.name):
            formats[is_embedding_or_head(entry.name)].add(numerics_of(config, entry))
    return formats


def _bytes(value: int | str | MemoryPool | None) -> int | None:
    assert not isinstance(value, str | MemoryPool)  # EngineConfig has parsed it
    return value


def held_bytes(entry: TensorEntry, device: str) -> int:
    """Of a tensor once it is loaded: packed as the kernels read it where it is a matrix."""
    if entry.held is not None:
        return entry.held
    held: int | None = None
    if len(entry.shape) > 1:
        rows, columns = math.prod(entry.shape[:-1]), entry.shape[-1]
        held = facts_of(device).held_bytes(entry.format.lower(), rows, columns)
    return entry.nbytes if held is None else held


def _held(entry: TensorEntry) -> int:
    assert entry.held is not None  # sizes_of has found it out
    return entry.held


def _loading_bytes(
    config: EngineConfig, entries: Sequence[TensorEntry], model: ModelConfig
) -> tuple[int, int]:
    """The peaks of a load, while embedding and head are packed and after it. A matrix is in memory
    twice while it is packed: embedding and head, the largest, when little else is there, those of
    the blocks beside everything else."""
    ends = [entry for entry in entries if is_embedding_or_head(entry.name)]
    others = [entry for entry in entries if not is_embedding_or_head(entry.name)]
    largest = max((entry.nbytes for entry in others), default=0)
    window = min(sum(entry.nbytes for entry in others), max(_WINDOW, _READ_MATRICES * largest))
    early = sum(_held(entry) + entry.nbytes for entry in ends)
    late = sum(map(_held, entries)) + window
    if config.quantization is not None:
        late += max((_COPIES * 4 * entry.num_elements for entry in others), default=0)
        if online_scheme(config.quantization).head is not None:  # its codes, before they are tiles
            early += sum(map(_held, ends))
    engine = ENGINE_BYTES + ENGINE_WORD_BYTES * model.vocab_size
    return early + engine, late + engine


def _bytes_by_layer(entries: Sequence[TensorEntry], model: ModelConfig) -> list[int]:
    layers = [0] * model.num_layers
    for entry in entries:
        found = _LAYER.search(entry.name)
        if found is not None and int(found[1]) < len(layers):
            layers[int(found[1])] += _held(entry)
    return layers


def _window_bytes(config: EngineConfig, entry: TensorEntry, model: ModelConfig) -> int:
    """What of a matrix that lies on the disk is in memory while a step multiplies with it.

    Of a matrix and the one it is joined with (gate and up) all of it on one thread; on more the
    chunks they are at, a quarter, and the scales. Experts hand back their codes one by one.
    """
    one = _one_matrix(entry, model)
    window = one * (2 if threads_of(config) == 1 else 1)
    if model.experts is not None and _is_expert(entry.name):
        window += 2 * one * model.experts.count // _SCALES_OF_EXPERTS
    return window


def _one_matrix(entry: TensorEntry, model: ModelConfig) -> int:
    """Bytes held of what is packed at once: of experts one."""
    stacked = model.experts is not None and _is_expert(entry.name) and len(entry.shape) > 2
    return _held(entry) // (entry.shape[0] if stacked else 1)


def _is_expert(name: str) -> bool:
    return "_exps." in name or ".experts." in name


def _read_bytes(entry: TensorEntry, model: ModelConfig) -> float:
    """What one token reads of a tensor: of an embedding that is not the head too a row."""
    held = _held(entry)
    embeds = entry.name.removesuffix(".weight").endswith(EMBEDDINGS)
    if embeds and not model.tie_word_embeddings:
        return held / entry.shape[0]
    if model.experts is not None and _is_expert(entry.name):
        return held * model.experts.per_token / model.experts.count
    return held


def numerics_of(config: EngineConfig, entry: TensorEntry) -> str:
    """As a report of the loaded model names them: ``q4_k``, ``gptq-w4g128``."""
    if config.quantization is None or entry.held is None or entry.format not in FLOATS:
        return entry.format.lower()
    scheme = online_scheme(config.quantization)
    spec = scheme.head if is_embedding_or_head(entry.name) else scheme.spec
    return str(spec)
