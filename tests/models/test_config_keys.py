"""Every key of a config that transformers reads is read, refused or known to change nothing.

The oracle is transformers itself: its classes' fields, its code, and its results with each key
changed. A new release with a new key fails here with the key's name.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError

import sdk
from sdk.loaders.folders.hf_folder import complete_config
from sdk.loaders.open import open_checkpoint
from sdk.models.architecture import architectures
from sdk.models.configs.keys import (
    FIXED,
    HARMLESS,
    check_class,
    known_keys,
    read_keys,
    unknown_keys,
)
from sdk.quant.errors import UnsupportedError
from tests.models.conftest import (
    DictCheckpoint,
    Paged,
    checkpoint_of,
    expected_logits,
    prompt,
    tiny,
)
from tests.models.tiny_architectures import ARCHITECTURES, LATENT, V3

#: Models with recurrent layers.
HYBRIDS = (
    *("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h"),
    *("mamba2", "mamba", "falcon_mamba", "jamba", "bamba"),
)

Load = Callable[..., Any]
#: Those that transformers has a class for.
OURS = {
    own.model_type: own
    for own in architectures()
    if own.folders and own.model_type in transformers.CONFIG_MAPPING
}
#: Those that transformers has a causal language model for: not the text parts of vision models,
#: which test_vision_text.py compares.
CAUSAL = [
    name
    for name in OURS
    if OURS[name].config.causal
    and name
    != "kimi_linear"  # its class has other names than files: tests/models/test_kimi_linear.py
    and transformers.CONFIG_MAPPING[name] in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
]
#: Members of a config object that its code reads and that no file sets.
_MEMBERS = {
    "kv_sharing_modes",
    "get_text_config",
    "layer_type",
    "base_model_tp_plan",
    "image_token_id",
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 4}
_V3 = {**_EXPERTS, "n_routed_experts": 4, "n_shared_experts": 1}
_INDEXER = {"index_topk": 40, "index_head_dim": 32, "index_n_heads": 2}
_WINDOWED = {"sliding_window": 8, "num_hidden_layers": 4}
#: What makes the keys of a model have an effect.
BASES: dict[str, dict[str, Any]] = {
    "deepseek_v2": ARCHITECTURES["deepseek_v2"],
    "deepseek_v3": {**V3, **LATENT},
    "deepseek_v32": {**V3, **LATENT, **_INDEXER},
    "glm4_moe_lite": ARCHITECTURES["glm4_moe_lite"],
    "glm_moe_dsa": {**V3, **LATENT, **_INDEXER},
    "youtu": LATENT,
    "minicpm3": ARCHITECTURES["minicpm3"],
    "gemma2": _WINDOWED,
    "gemma3_text": {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "gemma4_text": {
        **_WINDOWED,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "head_dim": 8,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
    },
    "gemma3n_text": {
        **_WINDOWED,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "vocab_size_per_layer_input": 96,
        "intermediate_size": [128] * 4,
        "activation_sparsity_pattern": [0.9, 0.0, 0.0, 0.0],
        "laurel_rank": 24,
    },
    "gpt_oss": {**_WINDOWED, "num_local_experts": 4, "num_experts_per_tok": 2},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 4,
    },
    "qwen2": {"num_hidden_layers": 4},
    "qwen3": {"num_hidden_layers": 4},
    "phi3": {"sliding_window": None},
    "smollm3": {"num_hidden_layers": 4},
    "olmo3": {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "exaone4": {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {**_EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 48},
    "glm4_moe": _V3,
    "dots1": _V3,
    "solar_open": _V3,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "ernie4_5_moe": {**_EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone_moe": {**_EXPERTS, "num_experts": 4, **_WINDOWED},
    "hy_v3": {**_EXPERTS, "num_experts": 4},
    "afmoe": {**_EXPERTS, **_WINDOWED, "num_experts": 4},
    "cohere2_moe": {**_WINDOWED, "num_experts": 4, "num_shared_experts": 1},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "phimoe": {"num_local_experts": 4},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "granitemoeshared": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "flex_olmo": {"num_experts": 4, "num_experts_per_tok": 2},
    "cwm": _WINDOWED,
    "granite_swa": {**_WINDOWED, "layer_rope_theta": [3000.0, 0, 3000.0, 77.0]},
    "granitemoehybrid": {"num_local_experts": 0, "layer_types": ["full_attention"] * 3},
    "ministral": {**_WINDOWED, "layer_types": ["sliding_attention", "full_attention"] * 2},
    "vaultgemma": _WINDOWED,
    **{name: {"rotary_dim": 8} for name in ("gptj", "codegen")},
    "dbrx": {
        "d_model": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 3000.0},
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 3000.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "mimo_v2_flash": {
        **_EXPERTS,
        **_WINDOWED,
        "n_routed_experts": 4,
        "v_head_dim": 8,
        "head_dim": 24,
        "num_key_value_heads": 1,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
        "mlp_layer_types": ["dense", *["sparse"] * 3],
    },
    "mellum": {
        **_EXPERTS,
        **_WINDOWED,
        "num_experts": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "granitemoe_swa": {
        **_WINDOWED,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_rope_theta": [3000.0, 0, 3000.0, 77.0],
    },
    **{name: ARCHITECTURES[name] for name in HYBRIDS},
    "falcon_h1": ARCHITECTURES["falcon_h1-norm-first"],
    "olmo_hybrid": ARCHITECTURES["olmo_hybrid-rotated"],
    "laguna": {
        **_EXPERTS,
        **_WINDOWED,
        "num_experts": 4,
        "shared_expert_intermediate_size": 48,
        "num_attention_heads_per_layer": [4, 6, 4, 6],
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}
#: A value for each key, other than its usual one. All models get all of them.
PROBES: dict[str, Any] = {
    "attention_multiplier": 0.5,
    "embedding_multiplier": 2.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
    "attn_logit_softcapping": 2.0,
    "final_logit_softcapping": 2.0,
    "query_pre_attn_scalar": 3,
    "sliding_window": 5,
    "use_sliding_window": True,
    "max_window_layers": 1,
    "sliding_window_pattern": 3,
    "rope_local_base_freq": 77.0,
    "norm_topk_prob": True,
    "decoder_sparse_step": 2,
    "mlp_only_layers": [1],
    "moe_intermediate_size": 48,
    "hidden_act": "gelu",
    "hidden_activation": "gelu",
    "rms_norm_eps": 0.3,
    "swiglu_limit": 0.5,
    "swiglu_alpha": 3.0,
    "attention_bias": True,
    "mlp_bias": True,
    "original_max_position_embeddings": 16,
    "router_jitter_noise": 0.2,
    "input_jitter_noise": 0.2,
    "lm_head_bias": True,
    "moe_topk": 1,
    "pretraining_tp": 2,
    "num_experts_per_tok": 1,
    "is_decoder": True,
    "use_bias": True,
    "attention_out_bias": True,
    "no_rope_layers": [1, 0, 1, 0],
    "no_rope_layer_interval": 2,
    "clip_qkv": 0.5,
    "shared_intermediate_size": 32,
    "routed_scaling_factor": 3.0,
    "route_scale": 3.0,
    "num_dense_layers": 2,
    "global_attn_every_n_layers": 2,
    "mup_enabled": True,
    "expert_selection_fn": "sigmoid",
    "shared_expert_combination_strategy": "sum",
    "prefix_dense_intermediate_size": 64,
    "router_scaling_factor": 3.0,
    "first_k_dense_replace": 2,
    "n_group": 2,
    "use_qk_norm": True,
    "shared_expert_intermediate_size": 64,
    "n_shared_experts": 2,
    "num_shared_experts": 2,
    "moe_num_shared_experts": 1,
    "moe_layer_start_index": 2,
    "moe_layer_end_index": 1,
    "moe_layer_interval": 2,
    "moe_norm_min": 0.9,
    "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
    "rotary_dim": 8,
    "position_embedding_type": "rope",
    "alibi": True,
    "bias": True,
    "enable_bias": False,
    "multi_query": False,
    "parallel_attn": False,
    "scale_attn_weights": False,
    "scale_attn_by_inverse_layer_idx": True,
    "apply_residual_connection_post_layernorm": True,
    "do_layer_norm_before": False,
    "n_inner": 96,
    "seq_length": 99,
    "expansion_ratio": 3,
}


@pytest.mark.parametrize("model_type", OURS)
def test_every_key_that_transformers_reads_is_accounted_for(model_type: str) -> None:
    kind = transformers.CONFIG_MAPPING[model_type]
    fields = set(kind().to_dict()) | set(kind.attribute_map)
    if kind in transformers.MODEL_MAPPING:
        modeling = sys.modules[transformers.MODEL_MAPPING[kind].__module__]
    else:  # the text part of a vision model, which has no class of its own
        modeling = import_module(kind.__module__.replace("configuration", "modeling"))
    code = inspect.getsource(modeling)
    towers = any("Vision" in name for name in vars(modeling))
    if model_type not in CAUSAL or towers:  # a tower's code reads a config of its own
        texts = [one for name, one in vars(modeling).items() if "Text" in name]
        code = "".join(inspect.getsource(one) for one in texts if inspect.isclass(one))
    read = set(re.findall(r"\bconfig\.([A-Za-z_0-9]+)", code))
    read |= set(re.findall(r"getattr\((?:self\.)?config, \"([A-Za-z_0-9]+)\"", code))
    missing = (fields | read) - known_keys(OURS[model_type]) - _MEMBERS
    assert missing == set(), f"{model_type}: read by transformers {transformers.__version__}"


def test_the_keys_that_masks_and_rotations_read_are_accounted_for() -> None:
    from transformers import masking_utils, modeling_rope_utils

    known = {"get_text_config", "_attn_implementation", "attention_chunk_size"}
    known |= {"original_max_position_embeddings", "default_theta", "validate_rope"}
    known |= {"standardize_rope_params", "json"}
    for module in (masking_utils, modeling_rope_utils):
        code = inspect.getsource(module)
        read = set(re.findall(r"\bconfig\.([A-Za-z_0-9]+)", code))
        read |= set(re.findall(r"getattr\((?:self\.)?config, \"([A-Za-z_0-9]+)\"", code))
        everything = known | set().union(*map(known_keys, OURS.values()))
        assert read - everything == set()


def test_no_key_has_two_places() -> None:
    harmless = frozenset().union(*HARMLESS.values())
    assert sum(map(len, HARMLESS.values())) == len(harmless)
    assert not harmless & FIXED.keys()
    for own in OURS.values():
        assert not read_keys(own) & {*own.config.ignored}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("model_type", [one for one in CAUSAL if one != "kimi_linear"])
def test_a_changed_key_changes_what_it_changes_in_transformers(model_type: str, load: Load) -> None:
    """Or it is refused by name. The base has a window, experts, ... where the model knows them.
    The class of Kimi Linear names tensors otherwise than its files."""
    ids = prompt(24, 5)
    base = BASES.get(model_type, {})
    plain = expected_logits(tiny(model_type, **base), ids)
    refused: list[str] = []
    for key, value in PROBES.items():
        try:
            oracle = tiny(model_type, **{**base, key: value})
        except (ValueError, TypeError, AttributeError, KeyError, StrictDataclassError):
            continue  # transformers rejects it
        expected = expected_logits(oracle, ids)
        try:
            checkpoint = checkpoint_of(oracle)
            checkpoint.config.setdefault(key, value)
            found = Paged(load(checkpoint)).run("a", ids)
        except UnsupportedError as error:
            assert key in str(error)
            refused.append(key)
            continue
        expected = expected_logits(oracle, ids)
        difference = (found - expected).abs().max().item()
        # OLMo Hybrid's logits of 6 are 1.1e-4 from those in float64, as of rounding
        limit = 1e-4 * max(1.0, expected.abs().max().item())
        assert difference <= limit, f"{key}={value}: {difference} from transformers"
        own = OURS[model_type]
        moved = key == "original_max_position_embeddings"  # into rope_parameters, by the class
        if key not in known_keys(own) and not moved:
            assert torch.equal(expected, plain), f"{key} is read by transformers"
    laguna = {"gating", "num_attention_heads_per_layer"}
    assert set(refused) <= {*FIXED, *OURS[model_type].config.fixed, *laguna}


@pytest.mark.parametrize("model_type", ["starcoder2", "llama", "qwen2"])
def test_a_key_that_transformers_does_not_read_says_nothing_about_directions(
    model_type: str, load: Load
) -> None:
    """vLLM reads the other one for some models: it is not clear which model a file holds."""
    checkpoint = checkpoint_of(tiny(model_type))
    key = "use_bidirectional_attention"
    changed = DictCheckpoint({**checkpoint.config, key: True}, checkpoint.tensors)
    with pytest.raises(UnsupportedError, match=rf"{key}: expected .*, found True: its tok"):
        load(changed)
    nested = {"model_type": "llava", "text_config": {**checkpoint.config}, "is_causal": False}
    with pytest.raises(UnsupportedError, match=r"is_causal: expected True, found False"):
        complete_config(nested, "config.json")


def test_a_share_of_rotated_dimensions_is_refused_where_transformers_does_not_read_it() -> None:
    config = {**tiny("llama").config.to_dict(), "partial_rotary_factor": 0.5}
    with pytest.raises(UnsupportedError, match=r"x: partial_rotary_factor: expected 1, found 0.5"):
        complete_config(config, "x")
    config = {**tiny("llama").config.to_dict(), "rope_scaling": {"partial_rotary_factor": 0.25}}
    with pytest.raises(UnsupportedError, match=r"partial_rotary_factor: expected 1, found 0.25"):
        complete_config(config, "x")


@pytest.mark.parametrize("model_type", ["glm", "glm4"])
def test_a_share_of_rotated_dimensions_is_read_where_transformers_reads_it(
    model_type: str, tmp_path: Path, load: Load
) -> None:
    """As the published files state it, outside of the rotation's parameters."""
    oracle = tiny(model_type, partial_rotary_factor=0.5)
    oracle.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    stated = {"partial_rotary_factor": 0.5, "rope_theta": rope["rope_theta"]}
    path.write_text(json.dumps({**config, **stated}))
    found = Paged(load(open_checkpoint(tmp_path))).run("a", prompt(24, 5))
    assert (found - expected_logits(oracle, prompt(24, 5))).abs().max() <= 1e-4


def test_a_key_of_a_newer_class_is_refused_unless_it_has_its_default() -> None:
    config = tiny("llama").config.to_dict()
    defaults = {**config, "new_attention": "plain"}
    check_class(config, defaults, "config.json")
    with pytest.raises(UnsupportedError, match=r"new_attention: expected plain, found other"):
        check_class({**config, "new_attention": "other"}, defaults, "config.json")


def test_keys_that_nothing_reads_are_reported(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "attn_logit_softcapping": 3.0, "made_up": 1}))
    with sdk.LLM(tmp_path, skip_tokenizer_init=True, max_model_len=64) as llm:
        [warning] = llm.load_warnings
        assert warning.endswith("have no effect: attn_logit_softcapping, made_up")
        assert warning.startswith("config.json: ")
    assert unknown_keys({"model_type": "rwkv", "made_up": 1}) == []
