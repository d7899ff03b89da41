"""OpenELM: a Llama with norms of queries and keys, whose layers grow in heads and width.

Mehta et al., "OpenELM" (2024), arXiv 2404.14619; the code beside its weights, which is not run, and
llama.cpp's openelm.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerCaches,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.quant.caches import AttentionCache

_HEADS, _KV_HEADS = "num_attention_heads_per_layer", "num_key_value_heads_per_layer"
_WIDTHS = "intermediate_size_per_layer"


def _derived(config: dict[str, Any]) -> None:
    """The sizes of each layer, from the lists of a folder."""
    lists = {_HEADS: "num_query_heads", _KV_HEADS: "num_kv_heads"}
    for ours, theirs in lists.items():
        if ours not in config:
            config[ours] = config.get(theirs)
    factors, hidden = config.get("ffn_multipliers"), config.get("hidden_size")
    if _WIDTHS not in config and isinstance(factors, list) and isinstance(hidden, int):
        fields = Fields({**{str(i): one for i, one in enumerate(factors)}, **config})
        step = fields.count("ffn_dim_divisor", MAX_WIDTH, default=256)
        wide = [fields.positive(str(i)) * hidden for i in range(len(factors))]
        config[_WIDTHS] = [_divisible(one, step) for one in wide]
    for most, each in (
        ("num_attention_heads", _HEADS),
        ("num_key_value_heads", _KV_HEADS),
        ("intermediate_size", _WIDTHS),
    ):
        found = config.get(each)
        if isinstance(found, list) and found and all(type(one) is int for one in found):
            config[most] = max(found)


def _divisible(width: float, step: int) -> int:
    """The next multiple, up if down would lose a tenth."""
    found = max(step, int(width + step / 2) // step * step)
    return found + step if found < 0.9 * width else found


def _caches(fields: Fields, windows: Sequence[int | None]) -> LayerCaches:
    width = fields.count("head_dim", 4096)
    each = _numbers(fields, _KV_HEADS, len(windows))
    return [AttentionCache(kv_heads, width, width) for kv_heads in each]


def _widths(fields: Fields, layers: int) -> list[int]:
    return _numbers(fields, _WIDTHS, layers)


def _numbers(fields: Fields, key: str, layers: int) -> list[int]:
    found = fields.values.get(key)
    if not isinstance(found, (list, tuple)) or len(found) != layers:
        fields.fail(key, f"a list of {layers} numbers", found)
    each = Fields({str(i): one for i, one in enumerate(found)}, f"config: {key}")
    return [each.count(str(i), MAX_WIDTH) for i in range(layers)]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["tie_word_embeddings"] = True


ARCHITECTURE = Architecture(
    "openelm",
    layer=LayerRules(qk_norm="head"),
    config=ConfigRules(
        keys=(
            *(_HEADS, _KV_HEADS, _WIDTHS, "num_query_heads", "num_kv_heads"),
            *("ffn_multipliers", "ffn_dim_divisor"),
        ),
        ignored=("num_gqa_groups", "qkv_multipliers", "rope_max_length"),
        defaults={"tie_word_embeddings": True, "hidden_act": "silu"},
        fixed={
            "activation_fn_name": "swish",
            "ffn_with_glu": True,
            "normalization_layer_name": "rms_norm",
            "normalize_qk_projections": True,
            "share_input_output_layers": True,
        },
        norm_eps=1e-6,
        names={
            "hidden_size": "model_dim",
            "num_hidden_layers": "num_transformer_layers",
            "max_position_embeddings": "max_context_length",
            "rope_theta": "rope_freq_constant",
        },
        derived=_derived,
        biases=lambda fields: Biases(),
        caches=_caches,
        widths=_widths,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.layers",
            "model.embed_tokens": "transformer.token_embeddings",
            "model.norm": "transformer.norm",
            "self_attn.qkv_proj": "attn.qkv_proj",
            "self_attn.o_proj": "attn.out_proj",
            "self_attn": "attn",
            "mlp.gate_up_proj": "ffn.proj_1",
            "mlp.down_proj": "ffn.proj_2",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
        },
    ),
    more_gguf=(GgufRules("openelm", read=_read_gguf),),
)
