"""Gemma 4, the text part of all sizes: layers with and without a window differ in their heads.

Every sixth layer sees all tokens with heads of 512, of which a quarter turns; the others have a
window and heads of 256. Values have a norm without a weight, and scores no scale. Some sizes have
layers that read the keys of earlier ones, values that are the keys, embeddings for each layer,
or experts beside the MLP. "Gemma 4" (Google, 2026); transformers' modeling_gemma4.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from sdk.models.architecture import (
    NORMS_AROUND,
    Architecture,
    ConfigRules,
    ExpertsBeside,
    GgufKeys,
    GgufRules,
    LayerCaches,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.gemma2 import GGUF_TENSORS
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.configs.sliding import all_but_every
from sdk.quant.caches import AttentionCache

_MAX_HEAD = 4096


def _caches(fields: Fields, windows: Sequence[int | None]) -> LayerCaches:
    """transformers writes what differs as ``per_layer_config``; the first files have a key for the
    layers that see all tokens."""
    head_dim = fields.count("head_dim", _MAX_HEAD, default=256)
    heads = fields.count("num_attention_heads", MAX_WIDTH)
    kv_heads = fields.count("num_key_value_heads", MAX_WIDTH, default=heads)
    whole = {"head_dim": fields.count("global_head_dim", _MAX_HEAD, default=512)}
    if fields.flag("attention_k_eq_v", default=False) and fields.has("num_global_key_value_heads"):
        whole["num_key_value_heads"] = fields.count("num_global_key_value_heads", MAX_WIDTH)
    stated = fields.values.get("per_layer_config")
    by_layer = None if stated is None else _by_layer(fields, stated)
    own = []
    for layer, window in enumerate(windows):
        differs = Fields(whole if window is None else {}, "config")
        if by_layer is not None:
            differs = Fields(by_layer.get(str(layer), {}), f"config: per_layer_config: {layer}")
        dim = differs.count("head_dim", _MAX_HEAD, default=head_dim)
        count = differs.count("num_key_value_heads", MAX_WIDTH, default=kv_heads)
        own.append(AttentionCache(count, dim, dim, window))
    return shared_with_earlier(fields, own)


def _by_layer(fields: Fields, stated: Any) -> dict[str, Any]:
    known = {"head_dim", "num_key_value_heads"}
    if not isinstance(stated, dict) or not all(
        isinstance(one, dict) and one.keys() <= known for one in stated.values()
    ):
        fields.fail("per_layer_config", "head_dim and num_key_value_heads of layers", stated)
    return {str(layer): one for layer, one in stated.items()}


def shared_with_earlier(fields: Fields, own: Sequence[AttentionCache]) -> LayerCaches:
    """The last ``num_kv_shared_layers`` layers read the keys and values of the last one before them
    that has a window as they have, or none. Also of Gemma 3n."""
    count = fields.values.get("num_kv_shared_layers", 0)
    first = len(own) - count if type(count) is int else 0
    before = {one.window is None: layer for layer, one in enumerate(own[: max(first, 0)])}
    if not 0 < first <= len(own) or any((one.window is None) not in before for one in own):
        expected = "a number of layers after which each kind of layer comes once"
        fields.fail("num_kv_shared_layers", expected, count)
    return [one if i < first else before[one.window is None] for i, one in enumerate(own)]


def _keys_as_values(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    same = fields.flag("attention_k_eq_v", default=False)
    return [same and window is None for window in windows]


def _widths(fields: Fields, layers: int) -> list[int]:
    """Layers without keys of their own have MLPs of twice the width, in some sizes."""
    each = fields.values.get("intermediate_size_per_layer")
    if each is not None:
        counts = Fields({str(i): one for i, one in enumerate(each)}, "config: intermediate_size")
        return [counts.count(str(i), MAX_WIDTH) for i in range(layers)]
    width = fields.count("intermediate_size", MAX_WIDTH)
    shared = fields.values.get("num_kv_shared_layers", 0)
    double = fields.flag("use_double_wide_mlp", default=False)
    return [2 * width if double and i >= layers - shared else width for i in range(layers)]


def _has_experts(fields: Fields) -> bool:
    return fields.flag("enable_moe_block", default=False)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """The sizes of a file are those of layers that see all tokens; a file has ``_swa`` for others.

    Its factors of frequencies are 1 for the pairs that turn, 1e30 for the others.
    """
    layers, window, width = (
        config["num_hidden_layers"],
        config["sliding_window"],
        config["head_dim"],
    )
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    kinds = keys.layer_types(layers, window=window, period=6)
    local = keys.integer("attention.key_length_swa", (1, _MAX_HEAD))
    if keys.integer("attention.value_length_swa", (1, _MAX_HEAD), local) != local:
        raise keys.fail("attention.value_length_swa", "another", f"key_length_swa {local}")
    heads = config["num_key_value_heads_per_layer"]
    config["layer_types"] = kinds
    config["per_layer_config"] = {
        str(i): {
            "head_dim": width if kind == "full_attention" else local,
            "num_key_value_heads": heads[i],
        }
        for i, kind in enumerate(kinds)
    }
    config["head_dim"] = local
    config["num_kv_shared_layers"] = keys.integer("attention.shared_kv_layers", (0, layers), 0)
    config["enable_moe_block"] = keys.expert_count > 0
    full = next((i for i, kind in enumerate(kinds) if kind == "full_attention"), 0)
    config["attention_k_eq_v"] = kinds[full] == "full_attention" and not (
        keys.has_tensor(f"blk.{full}.attn_v.weight")
        or keys.has_tensor(f"blk.{full}.attn_qkv.weight")
    )
    inputs = keys.integer("embedding_length_per_layer_input", (0, 1 << 16), 0)
    config["hidden_size_per_layer_input"] = inputs
    # of the tokens of an image, as the folders of these sizes say
    config["use_bidirectional_attention"] = None if inputs else "vision"
    turning = keys.integer("rope.dimension_count_swa", (2, local), local)
    config["rope_parameters"] = {
        "full_attention": {
            **_proportional(config.pop("rope_scaling"), keys),
            "rope_theta": config["rope_theta"],
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
            "partial_rotary_factor": turning / local,
        },
    }


def _proportional(scaling: dict[str, Any] | None, keys: GgufKeys) -> dict[str, Any]:
    """The scaling of a file as transformers has it."""
    if scaling is None:
        return {"rope_type": "default"}
    factors = scaling.get("factors", [])
    turning = sum(factor == 1.0 for factor in factors)
    still = sum(factor > 1e29 for factor in factors)
    if not turning or factors != sorted(factors) or turning + still != len(factors):
        raise keys.fail("rope.scaling.type", scaling["rope_type"], "factors of 1, then of 1e30")
    return {"rope_type": "proportional", "partial_rotary_factor": turning / len(factors)}


ARCHITECTURE = Architecture(
    "gemma4_text",
    aliases=("gemma4", "gemma4_unified_text", "gemma4_unified"),
    layer=LayerRules(
        norms=NORMS_AROUND,
        qk_norm="head",
        v_norm=True,
        scaled=True,
        experts_beside=ExpertsBeside(
            before="pre_feedforward_layernorm_2",
            after="post_feedforward_layernorm_2",
            after_mlp="post_feedforward_layernorm_1",
        ),
    ),
    config=ConfigRules(
        keys=(
            *("attention_bias", "hidden_activation", "layer_types", "sliding_window"),
            *("final_logit_softcapping", "use_bidirectional_attention", "per_layer_config"),
            *("global_head_dim", "num_global_key_value_heads", "attention_k_eq_v"),
            *("num_kv_shared_layers", "use_double_wide_mlp", "hidden_size_per_layer_input"),
            *("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size"),
            *("vocab_size_per_layer_input", "intermediate_size_per_layer"),
            "num_key_value_heads_per_layer",
        ),
        # of the towers and of what their outputs replace
        ignored=(
            *("image_token_id", "video_token_id", "audio_token_id", "boi_token_id"),
            *("eoi_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index"),
            "vision_soft_tokens_per_image",
        ),
        defaults={
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        sliding=all_but_every(6),
        embedding_scale=math.sqrt,
        attention_scale=1.0,
        caches=_caches,
        keys_as_values=_keys_as_values,
        widths=_widths,
        expert_width="moe_intermediate_size",
        has_experts=_has_experts,
        layer_inputs="hidden_size_per_layer_input",
    ),
    tensors=TensorRules(
        names={
            "mlp.experts": "experts",
            "mlp.gate.scale": "router.scale",
            "mlp.gate.per_expert_scale": "router.per_expert_scale",
            "mlp.gate": "router.proj",
        }
    ),
    more_gguf=(
        GgufRules(
            "gemma4",
            tensors={
                **GGUF_TENSORS,
                "post_feedforward_layernorm_1": "post_ffw_norm_1",
                "post_feedforward_layernorm_2": "post_ffw_norm_2",
                "pre_feedforward_layernorm_2": "pre_ffw_norm_2",
                "mlp.gate.scale": "ffn_gate_inp.scale",
                "mlp.gate.per_expert_scale": "ffn_down_exps.scale",
                "per_layer_input_gate": "inp_gate",
                "per_layer_projection": "proj",
                "post_per_layer_input_norm": "post_norm",
                "layer_scalar": "layer_output_scale",
            },
            read=_read_gguf,
            keys=(
                *("final_logit_softcapping", "attention.sliding_window_pattern"),
                *("attention.key_length_swa", "attention.value_length_swa", "rope.freq_base_swa"),
                *("rope.dimension_count_swa", "attention.shared_kv_layers"),
                "embedding_length_per_layer_input",
            ),
        ),
    ),
    wide_range=True,  # trained in bfloat16
)
