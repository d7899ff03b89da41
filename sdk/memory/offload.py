"""Offloaded weights: how many bytes a plan offloads.

Embedding and head always stay in the device's memory. On a CPU matrices stay, in the order in which
a model is loaded, while they fit. On a GPU whole layers are offloaded, the last ones first.
"""

from __future__ import annotations

from dataclasses import replace

from sdk.api.config import EngineConfig
from sdk.kernels.dataclass import dataclass
from sdk.memory.demand import Demand, graph_bytes, scratch_bytes, workspace_bytes

#: ``"auto"`` makes room for a request of this many tokens, unless ``max_model_len`` is given.
_CONTEXT = 4096


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The limits of a plan, in bytes and tokens."""

    budget: int
    kv_budget: int | None
    max_model_len: int | None


def with_offload(demand: Demand, config: EngineConfig, limits: MemoryLimits) -> Demand:
    """The demand without the weights that ``config`` offloads."""
    asked = config.disk_offload or config.cpu_offload
    if asked == 0:
        return demand
    assert not isinstance(asked, str) or asked == "auto"  # EngineConfig has parsed it
    nbytes = _excess_bytes(demand, limits) if isinstance(asked, str) else asked
    weights, count = demand.weights, 0
    nbytes = min(nbytes, weights.movable)
    if nbytes == 0:
        return demand
    if weights.layers:
        count, nbytes = _whole_layers(weights.layers, nbytes)
    late = max(weights.loading - nbytes + weights.packing, weights.early)
    kept = replace(weights, total=weights.total - nbytes, loading=late)
    return replace(demand, weights=kept, offloaded=nbytes, layers_away=count)


def _whole_layers(layers: tuple[int, ...], nbytes: int) -> tuple[int, int]:
    """The smallest number of layers at the end with at least ``nbytes``, and their bytes."""
    count = total = 0
    while total < nbytes and count < len(layers):
        count += 1
        total += layers[-count]
    return count, total


def _excess_bytes(demand: Demand, limits: MemoryLimits) -> int:
    """Bytes that must be offloaded so that a request of full length fits."""
    context = limits.max_model_len or min(demand.model.max_position, _CONTEXT)
    pages = -(-context // demand.page_size) * demand.page_bytes
    tokens = min(demand.max_num_batched_tokens, demand.max_num_seqs * context)
    scratch = workspace_bytes(demand, demand.max_num_seqs, tokens)
    scratch += graph_bytes(demand, demand.max_num_seqs, tokens)
    scratch += scratch_bytes(demand, demand.max_num_seqs, tokens, context)
    serving = demand.weights.total + scratch + max(pages, limits.kv_budget or 0)
    over = max(serving, demand.weights.loading) + demand.tokenizer - limits.budget
    return over + max(demand.weights.window, demand.weights.packing) if over > 0 else 0
