"""Models whose layers with a window have other heads than those that see all tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.models.step3p7.configuration_step3p7 import Step3p7Config
from transformers.models.step3p7.modeling_step3p7 import Step3p7ForConditionalGeneration

from sdk.loaders.open import open_checkpoint
from sdk.models.configs.config import ModelConfig
from sdk.quant.caches import AttentionCache
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import ARRAY, BOOL, F32, I32, STRING, U32, save_gguf
from tests.loaders.conftest import GgufBytes
from tests.models.conftest import TINY, Paged, Ranks, expected_logits, prompt, seeded, tiny
from tests.models.test_layer_geometries import check_answers
from tests.models.tiny_architectures import ARCHITECTURES

Load = Callable[..., Any]
FULL, SLIDES = "full_attention", "sliding_attention"
KINDS = [FULL, SLIDES, SLIDES, SLIDES, FULL]
ROTATIONS = {
    FULL: {"rope_type": "default", "rope_theta": 5000.0, "partial_rotary_factor": 0.5},
    SLIDES: {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 1.0},
}
STEP = {
    **TINY,
    "num_hidden_layers": 5,
    "layer_types": KINDS,
    "num_sliding_attention_heads": 6,
    "sliding_window": 8,
    "mlp_layer_types": ["dense", "sparse", "sparse", "dense", "sparse"],
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "share_expert_dim": 32,
    "moe_router_scaling_factor": 2.5,
    "swiglu_limits": [0.0, None, 0.5, 0.0, 0.7],
    "swiglu_limits_shared": [0.0, 0.4, None, 0.5, 0.0],
    "rope_parameters": ROTATIONS,
}
#: What llama.cpp's converter calls the tensors of a layer.
_NAMES = {
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "self_attn.g_proj.weight": "attn_gate.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.attention_sink_bias": "attn_sinks.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "ffn_gate_inp.weight",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "moe.gate.weight": "ffn_gate_inp.weight",
    "moe.router_bias": "exp_probs_b.bias",
    "moe.gate_proj.weight": "ffn_gate_exps.weight",
    "moe.up_proj.weight": "ffn_up_exps.weight",
    "moe.down_proj.weight": "ffn_down_exps.weight",
    "share_expert.gate_proj.weight": "ffn_gate_shexp.weight",
    "share_expert.up_proj.weight": "ffn_up_shexp.weight",
    "share_expert.down_proj.weight": "ffn_down_shexp.weight",
}
_TOP = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}


class _Step:
    """The auto class of Step-3.7, of which there is none for text alone."""

    @staticmethod
    def from_config(config: Any, attn_implementation: str) -> Any:
        config._attn_implementation = attn_implementation
        config.text_config._attn_implementation = attn_implementation
        return Step3p7ForConditionalGeneration(config)


def oracle_of(name: str) -> Any:
    """A model with random biases of its routers."""
    if name == "step3p5":
        tower = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        sizes = {**tower, "image_size": 28, "patch_size": 14}
        model = seeded(Step3p7Config(text_config=STEP, vision_config=sizes), _Step)
    else:
        model = tiny(
            "mimo_v2_flash", **{**ARCHITECTURES["mimo_v2_flash"], "n_group": 1, "topk_group": 1}
        )
    generator = torch.Generator().manual_seed(1)
    for key, buffer in model.named_buffers():
        if key.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
    return model


def _facts(name: str, config: dict[str, Any]) -> dict[str, tuple[int, Any]]:
    """The metadata that llama.cpp's converter writes."""
    c = config.get("text_config", config)
    slides = [kind == SLIDES for kind in KINDS]
    facts: dict[str, tuple[int, Any]] = {
        "block_count": (U32, 5),
        "context_length": (U32, c["max_position_embeddings"]),
        "embedding_length": (U32, c["hidden_size"]),
        "feed_forward_length": (U32, c["intermediate_size"]),
        "attention.key_length": (U32, c["head_dim"]),
        "attention.value_length": (U32, c.get("v_head_dim", c["head_dim"])),
        "attention.layer_norm_rms_epsilon": (F32, c["rms_norm_eps"]),
        "attention.sliding_window": (U32, c["sliding_window"]),
        "expert_count": (U32, c["n_routed_experts"]),
        "expert_used_count": (U32, c["num_experts_per_tok"]),
        "expert_feed_forward_length": (U32, c["moe_intermediate_size"]),
        "rope.freq_base": (F32, c["rope_parameters"][FULL]["rope_theta"]),
        "rope.freq_base_swa": (F32, c["rope_parameters"][SLIDES]["rope_theta"]),
    }
    if name == "mimo2":
        return facts | {
            "attention.head_count": (U32, c["num_attention_heads"]),
            "attention.head_count_kv": (ARRAY, (I32, [1 + slid for slid in slides])),
            "attention.sliding_window_pattern": (ARRAY, (I32, [int(slid) for slid in slides])),
            "attention.value_scale": (F32, c["attention_value_scale"]),
            "expert_weights_scale": (F32, c["routed_scaling_factor"]),
            "expert_gating_func": (U32, 2),
            "rope.dimension_count": (U32, int(c["head_dim"] * 0.334)),
        }
    return facts | {
        "attention.head_count": (ARRAY, (I32, [6 if slid else 4 for slid in slides])),
        "attention.head_count_kv": (ARRAY, (I32, [2] * 5)),
        "attention.sliding_window_pattern": (ARRAY, (BOOL, slides)),
        "expert_shared_feed_forward_length": (U32, c["share_expert_dim"]),
        "expert_weights_scale": (F32, c["moe_router_scaling_factor"]),
        "expert_weights_norm": (BOOL, True),
        "leading_dense_block_count": (U32, 1),
        "moe_every_n_layers": (U32, 1),
        "swiglu_clamp_exp": (ARRAY, (F32, [x or 0.0 for x in c["swiglu_limits"]])),
        "swiglu_clamp_shexp": (ARRAY, (F32, [x or 0.0 for x in c["swiglu_limits_shared"]])),
    }


def _file(name: str, folder: Path) -> GgufBytes:
    """A saved model as llama.cpp's converter writes it."""
    facts = _facts(name, json.loads((folder / "config.json").read_text()))
    file = GgufBytes({"general.architecture": (STRING, name)})
    file.metadata |= {f"{name}.{key}": value for key, value in facts.items()}
    experts: dict[str, list[torch.Tensor]] = {}
    for key, tensor in sorted(load_file(folder / "model.safetensors").items()):
        if key.startswith(("vision", "vit")):
            continue
        layer, _, own = key.removeprefix("model.layers.").partition(".")
        if own.startswith("mlp.experts."):
            part = own.split(".")[3].removesuffix("_proj")
            experts.setdefault(f"blk.{layer}.ffn_{part}_exps.weight", []).append(tensor)
            continue
        theirs = _TOP.get(key) or f"blk.{layer}.{_NAMES[own]}"
        offset = 1.0 if name == "step35" and key.endswith("norm.weight") else 0.0
        _add(file, theirs, tensor + offset)
    for theirs, each in experts.items():
        _add(file, theirs, torch.stack(each))
    return file


def _add(file: GgufBytes, name: str, tensor: torch.Tensor) -> None:
    data = np.ascontiguousarray(tensor.float().numpy(), "<f4")
    file.tensors[name] = (data.shape[::-1], 0, data.tobytes())


def _check(load: Load, path: Path, oracle: Any) -> None:
    checkpoint, ids = open_checkpoint(path), prompt(41, 1)
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert not [one for one in checkpoint.unused() if not one.startswith("vi")]


@pytest.mark.parametrize(("name", "theirs"), [("mimo_v2_flash", "mimo2"), ("step3p5", "step35")])
def test_folders_and_files_have_the_logits_of_transformers(
    name: str, theirs: str, tmp_path: Path, load: Load
) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    _check(load, tmp_path, oracle)
    _check(load, save_gguf(tmp_path / "m.gguf", _file(theirs, tmp_path)), oracle)


@pytest.mark.parametrize("name", ["mimo_v2_flash", "step3p5"])
def test_folders_have_the_keys_of_their_publishers(name: str, tmp_path: Path, load: Load) -> None:
    oracle = oracle_of(name)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    if name == "step3p5":
        config = {**config["text_config"], "architectures": ["Step3p5ForCausalLM"]}
        for key in ("per_layer_config", "mlp_layer_types", "num_sliding_attention_heads"):
            config.pop(key)
        ours = ("num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
        names = ("num_attention_groups", "moe_num_experts", "moe_top_k")
        config |= {new: config.pop(old) for old, new in zip(ours, names, strict=True)}
        config |= {
            "attention_other_setting": {"num_attention_heads": 6, "num_attention_groups": 2},
            "moe_layers_enum": "1,2,4",
            "rope_theta": [5000.0, 300.0, 300.0, 300.0, 5000.0, 300.0],
            "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0, 0.5, 1.0],
            "layer_types": [*KINDS, SLIDES],
            "swiglu_limits": [*config["swiglu_limits"], 0.0],
            "num_nextn_predict_layers": 1,
        }
    else:
        config |= {"hybrid_layer_pattern": [0, 1, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1, 1]}
        config |= {"swa_num_key_value_heads": 2, "swa_head_dim": 24, "sliding_window_size": 7}
        config |= {"rope_theta": 5e6, "swa_rope_theta": 1e4, "partial_rotary_factor": 0.334}
        for key in ("layer_types", "mlp_layer_types", "sliding_window"):
            config.pop(key)
    config.pop("rope_parameters")
    (tmp_path / "config.json").write_text(json.dumps(config))
    _check(load, tmp_path, oracle)


def test_blocks_after_the_last_layer_may_be_counted(tmp_path: Path, load: Load) -> None:
    """As llama.cpp's converter does for multi-token prediction."""
    oracle = oracle_of("mimo_v2_flash")
    oracle.save_pretrained(tmp_path)
    file = _file("mimo2", tmp_path)
    file.metadata |= {"mimo2.block_count": (U32, 6), "mimo2.nextn_predict_layers": (U32, 1)}
    file.metadata["mimo2.attention.head_count_kv"] = (ARRAY, (I32, [1, 2, 2, 2, 1, 2]))
    file.metadata["mimo2.attention.sliding_window_pattern"] = (ARRAY, (I32, [0, 1, 1, 1, 0, 1]))
    _check(load, save_gguf(tmp_path / "m.gguf", file), oracle)


def test_a_layer_keeps_its_own_heads_and_narrow_values() -> None:
    config = ModelConfig.from_dict(oracle_of("mimo_v2_flash").config.to_dict())
    whole, window = AttentionCache(1, 24, 16), AttentionCache(2, 24, 16, 8)
    assert config.caches == (whole, window, window, window, whole)
    step = ModelConfig.from_dict(oracle_of("step3p5").config.to_dict())
    assert step.layer_heads == (4, 6, 6, 6, 4)
    assert step.mlp_limits == (None, 0.4, None, 0.5, None)
    assert step.like_layer(2, experts=True).expert_limits == (0.5,)


@pytest.mark.parametrize("name", ["mimo_v2_flash", "step3p5"])
@pytest.mark.parametrize("redundant", [None, 1])
def test_ranks_have_parts_of_layers_or_whole_experts(
    name: str, redundant: int | None, tmp_path: Path, load: Load
) -> None:
    oracle, ids = oracle_of(name), prompt(41, 1)
    oracle.save_pretrained(tmp_path)

    def run(mesh: Any) -> torch.Tensor:
        own = replace(mesh, redundant_experts=redundant)
        return Paged(load(open_checkpoint(tmp_path), mesh=own), kv_heads=1).run("a", ids, [7])

    for logits in Ranks(2).run(run):
        assert (logits - expected_logits(oracle, ids)).abs().max() <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mimo_v2_flash", "step3p5"])
def test_answers_are_the_same_however_requests_run(name: str, tmp_path: Path) -> None:
    oracle_of(name).save_pretrained(tmp_path)
    check_answers(tmp_path)


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("mimo_v2_flash", {"swa_head_dim": 8}, "swa_head_dim: expected head_dim 24, found 8"),
        ("mimo_v2_flash", {"add_full_attention_sink_bias": True}, "add_full_attention_sink_bias:"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 3}, "a divisor of 4 heads in each layer"),
        ("mimo_v2_flash", {"v_head_dim": 25}, r"v_head_dim: expected an integer in 1\.\.24"),
        ("step3p5", {"per_layer_config": {"9": {}}}, "per_layer_config: expected num_attention_h"),
        ("step3p5", {"swiglu_limits": [0.2] * 5}, "swiglu_limits: expected numbers of at least"),
        ("step3p5", {"swiglu_limits": [7.0]}, "swiglu_limits: expected a list of 5 numbers"),
        (
            "step3p5",
            {"num_key_value_heads_per_layer": [2], "num_attention_heads_per_layer": [4] * 5},
            "num_key_value_heads_per_layer: expected a list of 5 numbers",
        ),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    name: str, changed: dict[str, Any], message: str
) -> None:
    config = oracle_of(name).config.to_dict()
    config = {**config.get("text_config", config), **changed}
    with pytest.raises(CheckpointError, match=message):
        ModelConfig.from_dict(config)


def test_files_whose_layers_of_one_kind_differ_are_refused(tmp_path: Path) -> None:
    oracle_of("mimo_v2_flash").save_pretrained(tmp_path)
    file = _file("mimo2", tmp_path)
    file.metadata["mimo2.attention.head_count_kv"] = (ARRAY, (I32, [1, 2, 1, 2, 1]))
    with pytest.raises(CheckpointError, match=r"head_count_kv is .* one number for all sliding"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_joined_projections_of_several_ranks_are_refused(tmp_path: Path, load: Load) -> None:
    oracle_of("mimo_v2_flash").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    path = "model.layers.0.self_attn"
    parts = [tensors.pop(f"{path}.{part}_proj.weight") for part in "qkv"]
    save_file({**tensors, f"{path}.qkv_proj.weight": torch.cat(parts)}, tmp_path / "m.safetensors")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match="expected q_proj, k_proj and v_proj, found them jo"):
        load(open_checkpoint(tmp_path))
