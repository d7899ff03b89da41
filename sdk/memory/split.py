"""How a model divides over stages and cards.

Stages run layers so that all take as long. A plan counts the bytes of all ranks together. They have
equal parts of a layer only if heads, features and vocabulary can be cut evenly, and stages differ
in their layers. So the plan may take as much as fits if every card had the largest part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from sdk.api.config import EngineConfig
from sdk.api.sizes import format_bytes
from sdk.kernels.lazy_torch import torch
from sdk.memory.demand import WeightBytes
from sdk.memory.plan import MemoryPlan
from sdk.memory.weights import costs
from sdk.models.configs.config import ModelConfig
from sdk.models.parallel import Mesh, split_layers
from sdk.quant.checkpoint import Checkpoint

#: What planning, sampling and answers cost the last stage, in bytes that could be read meanwhile:
#: 0.3 ms a step with 8 requests, at 10 GB/s.
HOST_BYTES = 3 * 2**20


def stage_layers(
    config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig
) -> tuple[range, ...]:
    """The layers of each stage, divided so that all stages take equally long; empty if there
    is only one stage.

    :raises AlignmentError: there are fewer layers than stages.
    """
    if config.pipeline_parallel_size == 1:
        return ()
    layers, head = costs(config, checkpoint, model)
    return split_layers(layers, config.pipeline_parallel_size, head + HOST_BYTES)


class NoRanks:
    """A process group without ranks, for a mesh that only computes how to split the model."""

    def all_reduce(self, x: object) -> None:
        raise NotImplementedError

    def all_gather(self, x: object) -> list[torch.Tensor]:
        raise NotImplementedError


def largest_part(
    config: EngineConfig, model: ModelConfig, weights: WeightBytes, stages: Sequence[range]
) -> float:
    """The share of weights and KV pages that the GPU with most of them has, in (0, 1].

    ``stages``: the layers of each stage; empty: there is one.
    """
    ranks = config.tensor_parallel_size
    of_rank = max(_of_rank(Mesh(rank, ranks, NoRanks()), model) for rank in range(ranks))
    return of_rank * max((_of_stage(layers, model, weights) for layers in stages), default=1.0)


def _of_rank(mesh: Mesh, model: ModelConfig) -> float:
    heads = mesh.heads(model.num_heads, model.num_kv_heads)
    widths = [model.intermediate_size]
    if model.experts is not None:
        widths += [model.experts.width, model.experts.shared_width]
    return max(
        heads.count / model.num_heads,
        heads.kv_count / max(model.num_kv_heads, mesh.size),
        mesh.vocabulary(model.vocab_size)[1] / model.vocab_size,
        *(mesh.columns(width)[1] / width for width in widths if width),
    )


def _of_stage(layers: range, model: ModelConfig, weights: WeightBytes) -> float:
    own = sum(weights.layers[layer] for layer in layers)
    if 0 in layers or model.num_layers - 1 in layers:  # with the embedding or the head
        own += weights.total - sum(weights.layers)
    return max(own / weights.total, len(layers) / model.num_layers)


def within_cards(made: MemoryPlan, part: float, cards: int) -> MemoryPlan:
    """The plan, with a problem if one of the first ``cards`` GPUs has less than its ``part``."""
    smallest = min(int(torch.cuda.get_device_properties(at).total_memory) for at in range(cards))
    needed = int(made.total * part)
    if needed <= smallest:
        return made
    breakdown = (
        f"a rank needs more memory than the smallest of {cards} GPUs has:\n"
        f"  planned    {format_bytes(made.total):>10}  on all of them\n"
        f"  of a rank  {format_bytes(needed):>10}  at most\n"
        f"  GPU        {format_bytes(smallest):>10}"
    )
    return replace(made, problem=breakdown)
