"""What a config says of multi-head latent attention. torch is not imported, as in
:mod:`sdk.models.architecture`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.models.configs.fields import MAX_POSITION, MAX_WIDTH
from sdk.models.configs.latent_spec import LatentSpec

if TYPE_CHECKING:
    from sdk.models.architecture import GgufKeys
    from sdk.models.configs.fields import Fields

#: The keys of a config.
LATENT_KEYS = (
    *("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
    *("rope_interleave", "attention_bias"),
)
#: The same in GGUF metadata.
LATENT_GGUF_KEYS = (
    *("attention.q_lora_rank", "attention.kv_lora_rank"),
    *("attention.key_length_mla", "attention.value_length_mla"),
)
#: The widths that a GGUF file may state, and a config.
_WIDTH = (1, MAX_WIDTH)
#: Whatever the eps of a config, transformers' classes have this one in the norms of the latents.
LATENT_EPS = 1e-6


def latent_of(fields: Fields) -> LatentSpec:
    """The widths in a config of DeepSeek's and of those that have its keys.

    :raises CheckpointError: names the key, what was expected and what was found.
    """
    rank = fields.count("q_lora_rank", MAX_WIDTH) if fields.has("q_lora_rank") else None
    turning = fields.count("qk_rope_head_dim", MAX_WIDTH)
    if turning % 2:
        fields.fail("qk_rope_head_dim", "an even number", turning)
    default = None
    if not fields.has("v_head_dim"):
        heads = fields.count("num_attention_heads", MAX_WIDTH)
        default = fields.count("hidden_size", MAX_WIDTH) // heads
    return LatentSpec(
        query_rank=rank,
        rank=fields.count("kv_lora_rank", MAX_WIDTH),
        still=fields.count("qk_nope_head_dim", MAX_WIDTH),
        turning=turning,
        value=fields.count("v_head_dim", MAX_WIDTH, default=default),
        adjacent_pairs=fields.flag("rope_interleave", default=True),
        chosen=fields.count("index_topk", MAX_POSITION) if fields.has("index_topk") else None,
    )


def latent_scale(fields: Fields, spec: LatentSpec) -> float:
    """What multiplies scores: YaRN's ``mscale_all_dim`` makes it larger."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = type(fields)(fields.mapping(key), f"config: {key}")
    scale = float(spec.query**-0.5)
    kind = rope.text("rope_type", default=rope.text("type", default="default"))
    every = rope.optional_positive("mscale_all_dim")
    if kind == "default" or not every:
        return scale
    factor = rope.positive("factor", default=1.0)
    grown = 1.0 if factor <= 1 else 0.1 * every * math.log(factor) + 1.0
    return scale * grown * grown


def without_share(parameters: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """Parameters of a rotation without the share of a head that rotates: a rule of configs whose
    ``head_dim`` counts the dimensions of a query that do not turn, too."""
    return {key: value for key, value in parameters.items() if key != "partial_rotary_factor"}


def read_latent(config: dict[str, Any], keys: GgufKeys) -> None:
    """Set the widths from GGUF metadata.

    Files of since April 2025 state the key that is kept as ``key_length``, older ones that of a
    head, as files of MiniCPM 3 do.
    """
    turning = keys.integer("rope.dimension_count", _WIDTH)
    key = keys.integer("attention.key_length", _WIDTH, 0)
    value = keys.integer("attention.value_length", _WIDTH, 0)
    key = keys.integer("attention.key_length_mla", _WIDTH, key or None)
    value = value or config["hidden_size"] // config["num_attention_heads"]
    config["v_head_dim"] = keys.integer("attention.value_length_mla", _WIDTH, value)
    config["qk_rope_head_dim"] = turning
    config["qk_nope_head_dim"] = max(key - turning, 0)  # 0 is refused by name
    config["kv_lora_rank"] = keys.integer("attention.kv_lora_rank", _WIDTH)
    rank = keys.integer("attention.q_lora_rank", (0, MAX_WIDTH), 0)
    config["q_lora_rank"] = rank or None
    for name in ("head_dim", "partial_rotary_factor"):
        config.pop(name, None)
    config["num_key_value_heads"] = config["num_attention_heads"]
