"""The kinds of layers that released models have, in small, for the sweep.

The defaults of transformers' classes often have one kind alone (``lfm2``: attention, where every
released model has convolutions), and a small copy loses those that come late. Here is, by
``model_type``, what makes a small config have every kind of the released ones: layer patterns,
windows shorter than the prompt of 41 tokens, dense first layers, groups of experts, shared experts,
other norms. Several dicts are several released kinds of one type: all of them must agree.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

_SLIDING, _FULL = "sliding_attention", "full_attention"
#: Groups of experts, as of the large ones.
_GROUPS: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2}
_MTP: dict[str, Any] = {"num_nextn_predict_layers": 1}
_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
_THREE_TO_ONE = [_SLIDING, _SLIDING, _SLIDING, _FULL]
_TWO_ROTATIONS = {
    _FULL: {
        "rope_type": "yarn",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "original_max_position_embeddings": 32,
        "partial_rotary_factor": 0.5,
    },
    _SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}

_LINEAR = "linear_attention"
_MAMBA: dict[str, Any] = {"mamba_n_heads": 8, "mamba_d_state": 16}
#: transformers clamps time steps of prompts alone: see models/architectures/nemotron_h.py.
_NEMOTRON: dict[str, Any] = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 16,
    "time_step_min": 1e-9,
    "moe_shared_expert_intermediate_size": 32,
}

RELEASED: MappingProxyType[str, tuple[dict[str, Any], ...]] = MappingProxyType(
    {
        "gemma3n_text": (
            {
                "num_hidden_layers": 8,
                "layer_types": [*_THREE_TO_ONE, *_THREE_TO_ONE],
                "num_kv_shared_layers": 4,
                "sliding_window": 16,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": 96,
                "laurel_rank": 24,
                "activation_sparsity_pattern": [0.95, 0.95, *[0.0] * 6],
            },
        ),
        "afmoe": ({"mup_enabled": True, "route_scale": 2.0, "layer_types": _THREE_TO_ONE},),
        "axk1": (_GROUPS,),
        "bamba": ({"attn_layer_indices": [1]},),
        "beam": ({**_GROUPS, "num_experts": 8, "num_hidden_layers": 6, "layer_types": None},),
        "bloom": ({},),
        "cohere": ({}, {"use_qk_norm": True}),
        "cohere2_moe": (
            {
                "first_k_dense_replace": 1,
                "num_shared_experts": 1,
                "expert_selection_fn": "sigmoid",
                "num_hidden_layers": 5,
            },
        ),
        "cwm": ({"layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING]},),
        "dbrx": (
            {
                "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 3000.0},
                "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
                "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            },
        ),
        "deepseek_v2": (
            {"q_lora_rank": None},  # Lite
            {**_GROUPS, "topk_method": "group_limited_greedy"},
        ),
        "deepseek_v3": (
            {**_GROUPS, **_MTP},
            {
                **_GROUPS,
                "attention_bias": True,
                "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
            },
        ),
        "deepseek_v32": (_GROUPS,),
        "dots1": ({"n_shared_experts": 2},),
        "ernie4_5_moe": ({"moe_num_shared_experts": 2, "tie_word_embeddings": True},),
        "exaone_moe": ({"num_shared_experts": 1, "layer_types": _THREE_TO_ONE},),
        "falcon": (
            {"multi_query": True, "parallel_attn": True},
            {"new_decoder_architecture": True, "num_kv_heads": 2},
            {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        ),
        "glm4_moe_lite": ({"n_shared_experts": 2, "mlp_layer_types": ["dense", *["sparse"] * 3]},),
        "glm4_moe": ({"use_qk_norm": True, **_MTP}, {"attention_bias": True}),
        "glm_moe_dsa": ({"indexer_types": ["full", "shared", "full", "shared"]},),
        "gpt_bigcode": ({}, {"multi_query": False}),
        "gpt_neo": ({"attention_types": [[["global", "local"], 2]], "window_size": 9},),
        "gpt_neox": ({}, {"use_parallel_residual": False}),
        "xglm": ({"ffn_dim": 96}, {"ffn_dim": 96, "scale_embedding": False}),
        "granitemoe": ({"embedding_multiplier": 3.0, "residual_multiplier": 0.5},),
        "granitemoeshared": ({"shared_intermediate_size": 32},),
        "granitemoe_swa": ({"shared_intermediate_size": 32, "layer_types": _THREE_TO_ONE},),
        "falcon_h1": (
            {
                **_MAMBA,
                "mamba_d_ssm": 128,
                "ssm_multipliers": [0.4, 0.3, 0.2, 0.5, 0.4],
                "mlp_multipliers": [0.9, 0.4],
                "key_multiplier": 0.4,
                "attention_out_multiplier": 0.9,
                "ssm_out_multiplier": 0.3,
                "embedding_multiplier": 5.7,
                "lm_head_multiplier": 0.2,
            },
        ),
        "granitemoehybrid": (
            {**_MAMBA, "layer_types": [*["mamba"] * 3, "attention"]},
            {**_MAMBA, "layer_types": [*["mamba"] * 3, "attention"], "num_local_experts": 0},
            {"layer_types": ["attention"] * 4, "num_local_experts": 0},
        ),
        "hunyuan_v1_moe": ({"num_experts": 4, "moe_topk": 2},),
        "hy_v3": ({"num_shared_experts": 1},),
        "kimi_linear": (
            {"num_experts_per_tok": 2, "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR]},
        ),
        "laguna": (
            {
                "layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING],
                "num_attention_heads_per_layer": [4, 6, 6, 6],
                "rope_parameters": _TWO_ROTATIONS,
                "gating": "per-head",
            },
        ),
        "llama4_text": ({"num_experts_per_tok": 1, "attention_chunk_size": 24},),
        "jamba": (
            {"attn_layer_period": 4, "attn_layer_offset": 2, "mamba_d_state": 16},
            {"attn_layer_period": 4, "attn_layer_offset": 2, "num_experts": 1},
        ),
        "lfm2": ({"layer_types": ["conv", "conv", _FULL, "conv"]},),
        "lfm2_moe": ({"layer_types": ["conv", "conv", _FULL, "conv"]},),
        "mamba2": ({"num_heads": 8, "head_dim": 16, "n_groups": 1, "state_size": 16},),
        "mimo_v2_flash": (
            {
                "layer_types": [_FULL, _SLIDING, _SLIDING, _FULL],
                "mlp_layer_types": ["dense", *["sparse"] * 3],
                "head_dim": 24,
                "v_head_dim": 16,
            },
        ),
        "mellum": ({"layer_types": _THREE_TO_ONE}, {}),
        "minimax_m3_vl_text": (
            {"layer_types": [_FULL, *["minimax_m3_sparse"] * 3], "index_block_size": 8},
        ),
        "ministral": ({"layer_types": [_FULL, _SLIDING, _SLIDING, _SLIDING]},),
        "ministral3": (
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1000000.0,
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                    "llama_4_scaling_beta": 0.1,
                }
            },
        ),
        "mpt": ({"attn_config": {"alibi": True}},),
        "opt": ({}, {"do_layer_norm_before": False, "word_embed_proj_dim": 32}),
        "phi": ({}, {"qk_layernorm": True}),
        "phimoe": ({"router_jitter_noise": 0.01, "attention_bias": True, "lm_head_bias": True},),
        "qwen2_moe": (
            {},
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "max_window_layers": 2,
                "mlp_only_layers": [1],
            },
        ),
        "nemotron_h": (
            {**_NEMOTRON, "layers_block_type": [_LINEAR, "mlp", _FULL, "mlp"]},
            {**_NEMOTRON, "layers_block_type": [_LINEAR, "moe", _FULL, "moe"]},
            {
                **_NEMOTRON,
                "layers_block_type": [_LINEAR, "moe", _FULL, "moe"],
                "moe_latent_size": 48,
            },
        ),
        "qwen3_5_text": ({"linear_num_value_heads": 4, "linear_num_key_heads": 2},),
        "qwen3_5_moe_text": ({"linear_num_value_heads": 4, "linear_num_key_heads": 2},),
        "stablelm": (
            {"use_qkv_bias": True, "partial_rotary_factor": 0.25},
            {"qk_layernorm": True, "use_parallel_residual": True},
        ),
        "starcoder2": ({"tie_word_embeddings": True},),
    }
)
