"""Llama 4, the text part: windows that begin at multiples of their size, one expert for each token.

Every fourth layer sees all tokens and does not rotate; its queries grow with the logarithm of their
position. Queries and keys of the others have a norm without a weight, after the rotation. The
score of the chosen expert, a sigmoid, multiplies what the expert reads. Meta (2025); transformers'
modeling_llama4.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.kernels.operators.head_norms import QueryScale
from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.fields import MAX_POSITION, Fields

_CHUNK, _EVERY = 8192, 4
#: llama.cpp takes a model of this many experts for the one without norms of heads.
_WITHOUT_NORMS = 128


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    rotated = fields.values.get("no_rope_layers")
    if rotated is None:
        every = fields.count("no_rope_layer_interval", MAX_POSITION, default=_EVERY)
        return [(layer + 1) % every == 0 for layer in range(len(windows))]
    known = isinstance(rotated, (list, tuple)) and len(rotated) >= len(windows)
    if not known or not {*rotated} <= {0, 1}:
        fields.fail("no_rope_layers", f"0 or 1 for each of {len(windows)} layers", rotated)
    return [not turns for turns in rotated[: len(windows)]]


def _query_scale(fields: Fields) -> QueryScale | None:
    if not fields.flag("attn_temperature_tuning", default=True):
        return None
    beta = fields.positive("attn_scale", default=0.1)
    return QueryScale(beta, fields.count("floor_scale", MAX_POSITION, default=_CHUNK), shift=1)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """llama.cpp fixes the sizes of windows and of the scale; a window of 0 says that there are
    neither windows nor layers that do not rotate."""
    layers = config["num_hidden_layers"]
    step = keys.integer("interleave_moe_layer_step", (0, layers), 1)
    config["moe_layers"] = [i for i in range(layers) if step and (i + 1) % step == 0]
    config["intermediate_size_mlp"] = keys.integer("feed_forward_length", (1, 1 << 22))
    config["use_qk_norm"] = keys.expert_count != _WITHOUT_NORMS
    whole = keys.integer("attention.sliding_window", (0, 1 << 31), _CHUNK) == 0
    turns = [whole or (i + 1) % _EVERY != 0 for i in range(layers)]
    config["no_rope_layers"] = [int(one) for one in turns]
    config["sliding_window"] = None
    config["attention_chunk_size"] = _CHUNK
    kinds = ["chunked_attention" if one and not whole else "full_attention" for one in turns]
    config["layer_types"] = kinds


ARCHITECTURE = Architecture(
    "llama4_text",
    aliases=("llama4",),
    layer=LayerRules(
        qk_norm="unweighted",
        norm_after_rotation=True,
        unrotated_plain=True,
        adjacent_pairs=True,
        route=RouteRule(gate="sigmoid", normalized=False),
        route_inputs=True,
    ),
    config=ConfigRules(
        keys=(
            *("attention_bias", "layer_types", "attention_chunk_size", "no_rope_layers"),
            *("no_rope_layer_interval", "attn_temperature_tuning", "floor_scale", "attn_scale"),
            *("use_qk_norm", "intermediate_size_mlp", "moe_layers", "interleave_moe_layer_step"),
            *("num_local_experts", "num_experts_per_tok"),
        ),
        # of the tower and of what its outputs replace
        ignored=("boi_token_index", "eoi_token_index", "image_token_index", "for_llm_compressor"),
        fixed={"num_experts_per_tok": 1},
        defaults={"rope_theta": 5e5, "attention_chunk_size": _CHUNK, "num_experts_per_tok": 1},
        expert_width="intermediate_size",
        dense_width="intermediate_size_mlp",
        shared_experts=1,
        unrotated=_unrotated,
        query_scale=_query_scale,
    ),
    tensors=TensorRules(
        experts_transposed="always",
        names={
            "mlp.shared_experts": "feed_forward.shared_expert",
            "mlp.gate": "feed_forward.router",
            "mlp": "feed_forward",
        },
    ),
    more_gguf=(
        GgufRules(
            "llama4",
            read=_read_gguf,
            expert_gating=2,
            keys=("interleave_moe_layer_step",),
        ),
    ),
)
