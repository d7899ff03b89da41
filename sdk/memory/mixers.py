"""What the mixers of a model hold in a step besides rows of the hidden size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import architecture
from sdk.quant.caches import AttentionCache

if TYPE_CHECKING:
    from sdk.models.configs.config import ModelConfig


def mixer_width(model: ModelConfig) -> int:
    """Numbers of a token, of all ranks together; 0 for layers with an attention of one size and an
    MLP, whose tensors are about as wide as the hidden rows and the MLP that the plan counts.

    Counted from the memory of recorded steps of Qwen3.5-0.8B, LFM2-1.2B, Gemma 4 E2B, Granite 4
    tiny and DeepSeek V2 Lite, which have 15,800 to 41,700 numbers of these for a token.
    """
    width = _layer_inputs(model) + _narrower_mlps(model)
    if model.recurrent is not None:
        width += model.recurrent.step_width
    if model.latent is not None:
        return width + _latent(model)
    sizes = _sizes(model)
    if model.recurrent is not None:
        return width + max((_projected(model, *size) for size in sizes), default=0)
    if len(sizes) < 2:
        return width
    return width + sum(_projected(model, *one) + 2 * model.num_heads * one[1] for one in sizes)


def _sizes(model: ModelConfig) -> set[tuple[int, int]]:
    """Heads of keys, and features of a head, where layers attend."""
    caches = (one for one in model.caches if isinstance(one, AttentionCache))
    return {(cache.kv_heads, cache.key_dim) for cache in caches}


def _projected(model: ModelConfig, kv_heads: int, head_dim: int) -> int:
    """Queries, keys and values of one projection, with gates that lie beside the queries."""
    own = architecture(model.model_type)
    gate = None if own is None else own.layer.output_gate
    gated = gate is not None and gate.with_queries
    return (model.num_heads * (1 + gated) + 2 * kv_heads) * head_dim


def _latent(model: ModelConfig) -> int:
    """The projection; queries in the space of latents and what attention returns; values."""
    latent, heads = model.latent, model.num_heads
    assert latent is not None
    projected = (latent.query_rank or 0) + heads * latent.query + latent.key
    return projected + heads * (latent.key + latent.rank + latent.value)


def _layer_inputs(model: ModelConfig) -> int:
    """Embeddings for all layers, and their projection from the token's; one layer's gate."""
    return (2 * model.num_layers + 3) * model.layer_inputs


def _narrower_mlps(model: ModelConfig) -> int:
    """The products of MLPs that are narrower than the widest one."""
    return sum({*model.layer_widths} - {model.intermediate_size})
