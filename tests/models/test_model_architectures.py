"""Every architecture against transformers: logits in float32, to 1e-4, however the work is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.conftest import Paged, checkpoint_of, expected_logits, prompt, tiny

EXPERTS = {"num_experts_per_tok": 3, "moe_intermediate_size": 48}
GRANITE = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.4,
    "logits_scaling": 2.0,
}
#: Experts as DeepSeek V3 has them: in groups, with shared ones, after a dense layer.
V3 = {
    **EXPERTS,
    "n_routed_experts": 6,
    "n_shared_experts": 2,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "first_k_dense_replace": 1,
}
#: Delta nets with two heads of values for each of keys, and attention.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
    "head_dim": 16,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 0.02,  # results of a head may be near 0, and its norm enlarges their rounding
}
DELTA_EXPERTS = {
    **DELTA,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
#: Mamba-2 with two groups, of four heads each.
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 12,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
FALCON_H1 = {**MAMBA, "mamba_d_ssm": 128, "mamba_expand": 2}
#: transformers clamps time steps of prompts, and not those of single tokens: see nemotron_h.py.
NEMOTRON = {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "n_groups": 2,
    "ssm_state_size": 12,
    "chunk_size": 16,
    "time_step_min": 1e-9,
    "use_bias": True,
    "mlp_bias": True,
}
#: Two kinds of layers, twice.
GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 96,
    "final_logit_softcapping": 5.0,
}
MIMO = ["full_attention", *["sliding_attention"] * 3]
#: Widths of latent attention, no two of them alike. Classes compute ``head_dim`` from them.
LATENT = {
    "q_lora_rank": 40,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "num_key_value_heads": 4,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 3000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 32,
}
#: Layers with a window and without, two that read the keys of earlier ones, sparse and dense MLPs.
GEMMA3N: dict[str, Any] = {
    "num_hidden_layers": 5,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention"),
        *("sliding_attention", "full_attention"),
    ],
    "sliding_window": 9,
    "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 96,
    "intermediate_size": [128, 128, 96, 128, 128],
    "activation_sparsity_pattern": [0.95, 0.8, 0.0, 0.0, 0.0],
    "laurel_rank": 24,
    "final_logit_softcapping": 20.0,
}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "deepseek_v2": {**V3, **LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
    "deepseek_v2-lite": {
        **V3,
        **LATENT,
        "q_lora_rank": None,
        "topk_method": "greedy",
        "norm_topk_prob": False,
        "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
    },
    "deepseek_v3": {
        **V3,
        **LATENT,
        "attention_bias": True,
        "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "deepseek_v3-halves": {**V3, **LATENT, "rope_interleave": False},
    "glm4_moe_lite": {**V3, **LATENT, "mlp_layer_types": ["dense", "sparse", "dense"]},
    "youtu": LATENT,
    "minicpm3": {**LATENT, "scale_emb": 3, "scale_depth": 1.4, "dim_model_base": 32},
    "minicpm3-plain": {**LATENT, "q_lora_rank": None, "scale_depth": None, "attention_bias": True},
    "llama": {},
    "llama-biased-tied": {
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "mistral": {"sliding_window": 12},
    "qwen2": {},
    "qwen2-sliding": {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": {"head_dim": 24},
    "gemma2": {"sliding_window": 10, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 20, "num_hidden_layers": 7},
    "gemma4_text": GEMMA4,
    "gemma4_text-e": {
        **GEMMA4,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
        "num_key_value_heads": 1,
    },
    "gemma4_text-experts": {
        **GEMMA4,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 6,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    "gemma3n_text": GEMMA3N,
    "gemma4_unified_text": {key: value for key, value in GEMMA4.items() if "per_layer" not in key},
    "llama4_text": {
        "num_hidden_layers": 5,
        "no_rope_layer_interval": 3,
        "attention_chunk_size": 24,
        "floor_scale": 16,
        "attn_scale": 0.5,
        "num_local_experts": 4,
        "moe_layers": [1, 3],
        "intermediate_size": 48,
        "intermediate_size_mlp": 128,
    },
    "mimo_v2_flash": {
        "num_hidden_layers": 5,
        "layer_types": [*MIMO, "full_attention"],
        "head_dim": 24,
        "v_head_dim": 16,
        "num_key_value_heads": 1,
        "sliding_window": 8,
        "n_routed_experts": 6,
        "n_group": 3,
        "topk_group": 2,
        "routed_scaling_factor": 2.5,
        **EXPERTS,
    },
    "phi3": {"sliding_window": None},
    "phi3-sliding": {"sliding_window": 11},
    "olmo2": {},
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2, "sliding_window": 14},
    "qwen3_moe": {
        "num_experts": 9,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    },
    "qwen3_moe-whole-softmax": {"num_experts": 3, "num_experts_per_tok": 1, "head_dim": 24},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 3, "sliding_window": 8},
    "gemma": {},
    "smollm3": {"num_hidden_layers": 5},
    "smollm3-sliding": {
        "no_rope_layers": [0, 1, 0],
        "use_sliding_window": True,
        "sliding_window": 9,
    },
    "olmo3": {"sliding_window": 8, "num_hidden_layers": 5},
    "exaone4": {"sliding_window": 8, "num_hidden_layers": 5},
    "exaone4-full": {"sliding_window": None, "layer_types": ["full_attention"] * 3},
    "glm": {"head_dim": 24},
    "glm4": {"head_dim": 24},
    "ernie4_5": {"use_bias": True},
    "seed_oss": {"attention_out_bias": True},
    "olmoe": {"num_experts": 7, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
        "mlp_only_layers": [1],
    },
    "qwen2_moe-normalized-sliding": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": 9,
        "max_window_layers": 3,
    },
    "glm4_moe": {
        **V3,
        "attention_bias": True,
        "use_qk_norm": True,
        "head_dim": 24,
    },
    "glm4_moe-air": {**V3, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
    "dots1": {**V3, "sliding_window": 9, "max_window_layers": 2},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 3, "rotary_dim": 8},
    "ernie4_5_moe": {
        "moe_num_experts": 6,
        "moe_k": 3,
        "moe_intermediate_size": 48,
        "use_bias": True,
        "moe_layer_interval": 2,
        "num_hidden_layers": 4,
    },
    "exaone_moe": {
        **EXPERTS,
        "num_experts": 6,
        "num_shared_experts": 2,
        "n_group": 3,
        "topk_group": 2,
        "sliding_window": 8,
        "num_hidden_layers": 5,
    },
    "solar_open": {**V3, "first_k_dense_replace": 0},
    "hy_v3": {**EXPERTS, "num_experts": 6, "num_shared_experts": 2},
    "afmoe": {
        **EXPERTS,
        "num_experts": 6,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "route_scale": 2.5,
        "mup_enabled": True,
        "sliding_window": 8,
        "num_hidden_layers": 5,
    },
    "cohere2_moe": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "prefix_dense_intermediate_size": 96,
        "expert_selection_fn": "sigmoid",
        "logit_scale": 0.5,
        "sliding_window": 8,
        "num_hidden_layers": 6,
    },
    "cohere2_moe-softmax-sum": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "num_shared_experts": 1,
        "shared_expert_combination_strategy": "sum",
        "logit_scale": 0.5,
        "sliding_window": 8,
    },
    "hunyuan_v1_moe": {
        "num_experts": 6,
        "moe_topk": [3, 3, 3],
        "rope_parameters": {
            "rope_type": "dynamic",
            "factor": 1.0,
            "alpha": 50.0,
            "rope_theta": 3000.0,
        },
    },
    "phimoe": {"num_local_experts": 5, "attention_bias": True, "lm_head_bias": True},
    "phimoe-long": {
        "num_local_experts": 5,
        "router_jitter_noise": 0.2,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 3000.0,
            "short_factor": [1.0 + i / 8 for i in range(8)],
            "long_factor": [2.0 + i / 4 for i in range(8)],
            "short_mscale": 1.25,
            "long_mscale": 1.25,
            "original_max_position_embeddings": 256,
        },
        "sliding_window": 20,
    },
    "flex_olmo": {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True},
    "granite": GRANITE,
    "granitemoe": {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3},
    "granitemoeshared": {
        **GRANITE,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
    },
    "ministral": {"sliding_window": 9},
    "ministral-mixed": {
        "sliding_window": 9,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    # the scale of queries begins to differ from 1 at position 16
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 3000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.4,
        },
    },
    "internlm3": {"qkv_bias": True, "bias": True},
    "iquestcoder": {"head_dim": 24},
    "cwm": {"sliding_window": 9, "num_hidden_layers": 5},
    "helium": {"attention_bias": True},
    "vaultgemma": {"sliding_window": 10, "query_pre_attn_scalar": 20},
    "hunyuan_v1_dense": {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "dynamic",
            "factor": 1.0,
            "alpha": 50.0,
            "rope_theta": 3000.0,
        },
    },
    "hunyuan_v1_dense-plain": {"head_dim": 24},
    "granitemoehybrid": {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 3,
        "shared_intermediate_size": 128,
        "position_embedding_type": "rope",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.3,
        "residual_multiplier": 0.4,
        "logits_scaling": 2.0,
    },
    "granitemoehybrid-unrotated": {
        "num_local_experts": 0,
        "layer_types": ["full_attention"] * 3,
        "attention_multiplier": 0.3,
    },
    "granite_swa": {
        "sliding_window": 9,
        "num_hidden_layers": 5,
        "layer_rope_theta": [3000, 0, 3000, 77.0, 0],
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
    },
    "cohere": {"logit_scale": 0.5},
    "cohere-norms": {"logit_scale": 0.5, "use_qk_norm": True},
    "olmo": {"clip_qkv": 1.5},
    "nemotron": {"attention_bias": True, "mlp_bias": True},
    "arcee": {"mlp_bias": True},
    "apertus": {},
    "stablelm": {"use_qkv_bias": True, "partial_rotary_factor": 0.5},
    "stablelm-parallel": {
        "use_parallel_residual": True,
        "partial_rotary_factor": 0.5,
        "qk_layernorm": True,
    },
    "phi": {"partial_rotary_factor": 0.5},
    "phi-tied": {"tie_word_embeddings": True},
    "jais2": {},
    "bitnet": {},
    "starcoder2": {"sliding_window": 9},
    "starcoder2-unbiased": {"use_bias": False, "tie_word_embeddings": False},
    "cohere2": {"logit_scale": 0.5, "sliding_window": 8, "num_hidden_layers": 5},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_bigcode-heads": {"multi_query": False, "n_inner": 96},
    "gpt_neox": {"use_parallel_residual": True},
    "gpt_neox-sequential": {"use_parallel_residual": False, "attention_bias": False},
    "falcon": {},
    "falcon-grouped": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "falcon-one-norm": {
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
    },
    "falcon-alibi": {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    "mpt": {"max_seq_len": 256},
    "mpt-six-heads": {"max_seq_len": 256, "num_attention_heads": 6, "hidden_size": 96},
    "bloom": {},
    "bloom-twelve-heads": {"num_attention_heads": 12, "hidden_size": 96},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "opt-350m": {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False},
    "opt-narrow": {"ffn_dim": 96, "word_embed_proj_dim": 32, "tie_word_embeddings": False},
    "dbrx": {
        "d_model": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 3000.0},
        "ffn_config": {
            "ffn_hidden_size": 48,
            "moe_num_experts": 6,
            "moe_top_k": 3,
        },
    },
    "gptj": {"rotary_dim": 8},
    "gpt_neo": {
        "num_hidden_layers": 5,
        "window_size": 9,
        "attention_types": [[["global", "local"], 2], [["local"], 1]],
    },
    "xglm": {"ffn_dim": 96},
    "xglm-unscaled": {"ffn_dim": 96, "scale_embedding": False, "tie_word_embeddings": False},
    "openai_gpt": {"afn": "gelu"},
    "openai_gpt-silu": {"afn": "silu"},
    "codegen": {"rotary_dim": 8},
    "codegen-eight-heads": {"n_head": 8, "rotary_dim": 4, "n_inner": 96},
    "gptj-wide": {"rotary_dim": 16, "n_inner": 96},
    "exaone": {},
    "hyperclovax": {**GRANITE, "logits_scaling": 0.5},
    "mellum": {
        **EXPERTS,
        "num_experts": 6,
        "num_hidden_layers": 4,
        "sliding_window": 9,
        "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
        "mlp_layer_types": ["sparse", "dense", "sparse", "sparse"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 3000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
        },
    },
    "laguna": {
        **EXPERTS,
        "num_experts": 6,
        "shared_expert_intermediate_size": 80,
        "moe_routed_scaling_factor": 2.5,
        "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
        "num_hidden_layers": 5,
        "sliding_window": 9,
        "layer_types": ["full_attention", *["sliding_attention"] * 3, "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 3000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "partial_rotary_factor": 0.5,
            },
            "sliding_attention": {
                "rope_type": "default",
                "rope_theta": 777.0,
                "partial_rotary_factor": 1.0,
            },
        },
    },
    "laguna-elements": {
        **EXPERTS,
        "num_experts": 4,
        "shared_expert_intermediate_size": 32,
        "gating": "per-element",
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention", "conv"],
        "block_multiple_of": 32,
        "conv_L_cache": 4,
    },
    "lfm2-biased": {
        "layer_types": ["conv", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
        "conv_bias": True,
        "tie_word_embeddings": False,
    },
    "lfm2_moe": {
        **EXPERTS,
        "layer_types": ["conv", "full_attention", "conv"],
        "num_experts": 6,
        "num_dense_layers": 1,
        "routed_scaling_factor": 1.5,
    },
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA_EXPERTS,
    "qwen3_next": {**DELTA_EXPERTS, "mlp_only_layers": [1], "norm_topk_prob": True},
    "granitemoehybrid-experts": {
        **GRANITE,
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 5,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 48,
    },
    "granitemoehybrid-dense": {
        **GRANITE,
        **MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "time_step_limit": (0.05, 0.9),
    },
    "bamba": {
        **MAMBA,
        "num_hidden_layers": 4,
        "attn_layer_indices": [1, 3],
        "mamba_conv_bias": False,
        "mamba_proj_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "rms_norm_eps": 0.02,
    },
    "nemotron_h": {
        **NEMOTRON,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "nemotron_h-latent": {
        **NEMOTRON,
        **EXPERTS,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "n_routed_experts": 6,
        "moe_shared_expert_intermediate_size": 32,
        "moe_latent_size": 40,
        "routed_scaling_factor": 1.5,
        "n_group": 3,
        "topk_group": 2,
    },
    "mamba2": {
        "num_heads": 8,
        "head_dim": 16,
        "n_groups": 4,
        "state_size": 12,
        "chunk_size": 16,
        "use_bias": True,
    },
    "mamba": {"state_size": 12, "use_bias": True, "time_step_rank": 6},
    "mamba-narrow": {"intermediate_size": 96, "use_conv_bias": False, "conv_kernel": 3},
    "falcon_mamba": {"state_size": 12, "mixer_rms_eps": 0.02},
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 3,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "mamba_d_state": 12,
        "mamba_dt_rank": 6,
        "rms_norm_eps": 0.02,
    },
    "jamba-dense": {
        "num_experts": 1,
        "num_experts_per_tok": 1,
        "attn_layer_period": 2,
        "attn_layer_offset": 0,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "rms_norm_eps": 0.02,
    },
    "olmo_hybrid": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "rope_parameters": None,
        "rms_norm_eps": 0.02,
    },
    "olmo_hybrid-rotated": {
        "num_hidden_layers": 4,
        "linear_conv_kernel_dim": 3,
        "linear_allow_neg_eigval": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0},
        "rms_norm_eps": 0.02,
    },
    "falcon_h1": {
        **FALCON_H1,
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": False,
        "ssm_multipliers": [0.7, 1.3, 0.6, 1.5, 0.8],
        "mlp_multipliers": [0.8, 1.2],
        "attention_in_multiplier": 1.1,
        "attention_out_multiplier": 0.9,
        "key_multiplier": 0.8,
        "ssm_in_multiplier": 1.2,
        "ssm_out_multiplier": 0.7,
        "embedding_multiplier": 2.0,
        "lm_head_multiplier": 0.6,
    },
    "falcon_h1-norm-first": {**FALCON_H1, "mamba_rms_norm": True, "projectors_bias": True},
    "falcon_h1-gate-alone": {**FALCON_H1, "mamba_proj_bias": True, "mlp_bias": True},
    "granitemoe_swa": {
        **GRANITE,
        "num_local_experts": 6,
        "num_experts_per_tok": 3,
        "shared_intermediate_size": 48,
        "sliding_window": 9,
        "num_hidden_layers": 5,
        "layer_rope_theta": [3000, 0, 3000, 77.0, 0],
    },
}
LENGTH = 75


@pytest.fixture(params=list(ARCHITECTURES))
def oracle(request: pytest.FixtureRequest) -> Any:
    return tiny(request.param.split("-")[0], **ARCHITECTURES[request.param])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert 0.5 < expected.std() < 20, "the reference logits must be O(1) for 1e-4 to mean something"
    assert (found - expected).abs().max() <= 1e-4


@pytest.mark.quick_cases(6)
def test_logits_match_transformers_however_the_work_is_cut(
    oracle: Any, load: Callable[..., Any]
) -> None:
    """One prefill; chunks that end inside pages; token by token; ragged batches: bitwise."""
    checkpoint = checkpoint_of(oracle)
    model = load(checkpoint)
    assert checkpoint.unused() == []
    ids = {name: prompt(n, n) for name, n in {"a": LENGTH, "b": 40, "c": 21}.items()}
    whole = {name: Paged(model).run(name, tokens) for name, tokens in ids.items()}
    for name, tokens in ids.items():
        assert_close(whole[name], expected_logits(oracle, tokens))

    for splits in ([5, 37, 38, 64], [16, 32], [70, 71, 72, 73, 74]):
        assert torch.equal(Paged(model).run("a", ids["a"], splits), whole["a"])
    assert torch.equal(Paged(model).run("c", ids["c"], range(1, 21)), whole["c"])

    batch = Paged(model)
    steps = [{"a": 30}, {"a": 1, "b": 33}, {"c": 20, "a": 13, "b": 1}, {"b": 6, "c": 1, "a": 31}]
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ids}
    for step in steps:
        at = {name: batch.done.get(name, 0) for name in step}
        part = batch.step({name: ids[name][at[name] : at[name] + n] for name, n in step.items()})
        for name, logits in part.items():
            found[name].append(logits)
    for name, parts in found.items():
        assert torch.equal(torch.cat(parts), whole[name])
