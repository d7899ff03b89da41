"""Models with recurrent layers: their GGUF files, what their layers keep, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.loaders.open import open_checkpoint
from sdk.models.auto import read_config
from sdk.models.parallel import Mesh
from sdk.quant.caches import AttentionCache, StateCache
from sdk.quant.errors import AlignmentError, CheckpointError, UnsupportedError
from tests.gguf_hybrids import ARRAY, BOOL, F32, I32, U32, Facts, flags, hybrid_gguf, layers
from tests.gguf_models import save_gguf
from tests.models.conftest import (
    DictCheckpoint,
    Paged,
    Ranks,
    checkpoint_of,
    expected_logits,
    prompt,
    tiny,
)
from tests.models.tiny_architectures import ARCHITECTURES

Load = Callable[..., Any]


def short(c: Any) -> Facts:
    return {
        "shortconv.l_cache": (U32, c.conv_L_cache),
        "feed_forward_length": (U32, c.intermediate_size),
        "attention.head_count_kv": layers(c.layer_types, c.num_key_value_heads, "full_attention"),
        "rope.freq_base": (F32, c.rope_parameters["rope_theta"]),
    }


def delta(c: Any) -> Facts:
    return {
        "ssm.conv_kernel": (U32, c.linear_conv_kernel_dim),
        "ssm.state_size": (U32, c.linear_key_head_dim),
        "ssm.group_count": (U32, c.linear_num_key_heads),
        "ssm.time_step_rank": (U32, c.linear_num_value_heads),
        "ssm.inner_size": (U32, c.linear_num_value_heads * c.linear_value_head_dim),
        "attention.recurrent_layers": flags(c.layer_types, "linear_attention"),
        "attention.head_count_kv": (U32, c.num_key_value_heads),
        "feed_forward_length": (U32, 128),
        "rope.dimension_count": (U32, 8),
        "rope.freq_base": (F32, c.rope_parameters["rope_theta"]),
    }


def experts(c: Any) -> Facts:
    return {
        "expert_count": (U32, c.num_experts),
        "expert_used_count": (U32, c.num_experts_per_tok),
        "expert_feed_forward_length": (U32, c.moe_intermediate_size),
    }


def with_shared(c: Any) -> Facts:
    width = c.shared_expert_intermediate_size
    return {**delta(c), **experts(c), "expert_shared_feed_forward_length": (U32, width)}


def mamba(c: Any) -> Facts:
    return {
        "ssm.conv_kernel": (U32, 4),
        "ssm.state_size": (U32, 12),
        "ssm.group_count": (U32, getattr(c, "mamba_n_groups", None) or c.n_groups),
        "ssm.inner_size": (U32, 128),
        "ssm.time_step_rank": (U32, 8),
    }


def granite(c: Any) -> Facts:
    return {
        **mamba(c),
        "feed_forward_length": (U32, c.intermediate_size),
        "attention.head_count_kv": layers(c.layer_types, c.num_key_value_heads, "full_attention"),
        "rope.freq_base": (F32, 10000.0),
        "rope.scaling.finetuned": (BOOL, c.position_embedding_type == "rope"),
        "attention.scale": (F32, c.attention_multiplier),
        "embedding_scale": (F32, c.embedding_multiplier),
        "residual_scale": (F32, c.residual_multiplier),
        "logit_scale": (F32, c.logits_scaling),
        "expert_count": (U32, c.num_local_experts),
        "expert_used_count": (U32, c.num_experts_per_tok),
        "expert_shared_feed_forward_length": (U32, c.shared_intermediate_size),
    }


def nemotron(c: Any) -> Facts:
    kinds = c.layer_types
    block, width = ("moe", c.moe_intermediate_size) if "moe" in kinds else ("mlp", 128)
    facts = {
        **mamba(c),
        "feed_forward_length": layers(kinds, width, block),
        "attention.head_count_kv": layers(kinds, c.num_key_value_heads, "full_attention"),
        "rope.scaling.finetuned": (BOOL, False),
    }
    if block == "mlp":
        return facts
    return {
        **facts,
        "expert_count": (U32, c.n_routed_experts),
        "expert_used_count": (U32, c.num_experts_per_tok),
        "expert_feed_forward_length": (U32, width),
        "expert_shared_feed_forward_length": (U32, c.moe_shared_expert_intermediate_size),
        "expert_shared_count": (U32, 1),
        "expert_weights_norm": (BOOL, True),
        "expert_weights_scale": (F32, c.routed_scaling_factor),
        "expert_group_count": (U32, c.n_group),
        "expert_group_used_count": (U32, c.topk_group),
        "moe_latent_size": (U32, c.moe_latent_size),
    }


def falcon(c: Any) -> Facts:
    return {
        **mamba(c),
        "feed_forward_length": (U32, c.intermediate_size),
        "attention.head_count_kv": (U32, c.num_key_value_heads),
        "rope.freq_base": (F32, 10000.0),
    }


def alone(c: Any) -> Facts:
    return {**mamba(c), "feed_forward_length": (U32, 0), "attention.head_count": (U32, 0)}


def first(c: Any) -> Facts:
    return {
        "ssm.conv_kernel": (U32, c.conv_kernel),
        "ssm.state_size": (U32, c.state_size),
        "ssm.inner_size": (U32, c.intermediate_size),
        "ssm.time_step_rank": (U32, c.time_step_rank),
        "ssm.dt_b_c_rms": (BOOL, c.model_type == "falcon_mamba"),
        "feed_forward_length": (U32, 0),
        "attention.head_count": (U32, 0),
    }


def jamba(c: Any) -> Facts:
    kinds = c.layer_types
    return {
        "ssm.conv_kernel": (U32, c.mamba_d_conv),
        "ssm.state_size": (U32, c.mamba_d_state),
        "ssm.inner_size": (U32, c.mamba_expand * c.hidden_size),
        "ssm.time_step_rank": (U32, c.mamba_dt_rank),
        "feed_forward_length": (U32, c.intermediate_size),
        "attention.head_count_kv": layers(kinds, c.num_key_value_heads, "full_attention"),
        "expert_count": (U32, c.num_experts),
        "expert_used_count": (U32, c.num_experts_per_tok),
    }


def short_experts(c: Any) -> Facts:
    dense = {"leading_dense_block_count": (U32, c.num_dense_layers), "expert_gating_func": (U32, 2)}
    return {**short(c), **experts(c), **dense}


#: The name in the file, what makes the model other than in tiny_architectures.py, and the
#: metadata.
FILES: dict[str, tuple[str, dict[str, Any], Callable[[Any], Facts]]] = {
    "lfm2": ("lfm2", {"block_auto_adjust_ff_dim": False}, short),
    "lfm2_moe": ("lfm2moe", {"routed_scaling_factor": 1.0}, short_experts),
    "qwen3_5_text": ("qwen35", {}, delta),
    "qwen3_5_moe_text": ("qwen35moe", {}, with_shared),
    "qwen3_next": ("qwen3next", {"mlp_only_layers": []}, with_shared),
    "granitemoehybrid-experts": ("granitehybrid", {}, granite),
    "granitemoehybrid-dense": (
        "granitehybrid",
        {"time_step_limit": (0.0, float("inf")), "intermediate_size": 48},
        granite,
    ),
    "nemotron_h": ("nemotron_h", {}, nemotron),
    "nemotron_h-latent": ("nemotron_h_moe", {}, nemotron),
    "falcon_h1": ("falcon-h1", {}, falcon),
    "falcon_h1-gate-alone": ("falcon-h1", {}, falcon),
    "mamba2": ("mamba2", {}, alone),
    "mamba": ("mamba", {}, first),
    "falcon_mamba": ("mamba", {"mixer_rms_eps": 0.02, "layer_norm_epsilon": 0.02}, first),
    "jamba": ("jamba", {}, jamba),
    "jamba-dense": ("jamba", {}, jamba),
}


def written(name: str, **options: Any) -> tuple[Any, Any]:
    """transformers' model, and the bytes of its file."""
    arch, own, facts = FILES[name]
    oracle = tiny(name.split("-")[0], **{**ARCHITECTURES[name], **own, **options})
    return oracle, hybrid_gguf(oracle, arch, facts(oracle.config))


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_logits_of_transformers(name: str, tmp_path: Path, load: Load) -> None:
    oracle, file = written(name)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    ids = prompt(41, 1)
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_the_first_files_of_qwen3_next_have_one_projection(tmp_path: Path, load: Load) -> None:
    """Its rows as in a folder; later files have it in two parts."""
    oracle, file = written("qwen3_next")
    for layer in range(2):
        name = f"model.layers.{layer}.linear_attn.in_proj_qkvz.weight"
        rows = oracle.state_dict()[name]
        for part in ("attn_qkv", "attn_gate"):
            file.tensors.pop(f"blk.{layer}.{part}.weight")
        data = rows.numpy().astype("<f4").tobytes()
        file.tensors[f"blk.{layer}.ssm_in.weight"] = (tuple(rows.shape)[::-1], 0, data)
    ids = prompt(41, 1)
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run("a", ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


def test_a_file_without_a_list_has_attention_in_every_nth_layer(tmp_path: Path) -> None:
    _, file = written("qwen3_5_text")
    file.metadata.pop("qwen35.attention.recurrent_layers")
    for every, kinds in ((None, "lll"), (2, "lfl"), (3, "llf")):
        if every is not None:
            file.metadata["qwen35.full_attention_interval"] = (U32, every)
        checkpoint = open_checkpoint(save_gguf(tmp_path / f"{every}.gguf", file))
        assert "".join(kind[0] for kind in checkpoint.config["layer_types"]) == kinds


def test_blocks_of_next_token_heads_come_last_and_are_not_layers(
    tmp_path: Path, load: Load
) -> None:
    oracle, file = written("qwen3_5_text")
    file.metadata["qwen35.block_count"] = (U32, 4)
    file.metadata["qwen35.nextn_predict_layers"] = (U32, 1)
    given = [True, True, False, False]
    file.metadata["qwen35.attention.recurrent_layers"] = (ARRAY, (BOOL, given))
    file.tensors["blk.3.nextn.enorm.weight"] = file.tensors["blk.0.attn_norm.weight"]
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", prompt(41, 1))
    assert (found - expected_logits(oracle, prompt(41, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() == ["blk.3.nextn.enorm.weight"]


def test_what_layers_keep_is_in_their_order() -> None:
    caches, of = kept("nemotron_h")
    assert [type(one) for one in caches] == [StateCache, AttentionCache, StateCache]
    assert of == [(0,), (), (1,), (2,)]
    caches, of = kept("falcon_h1")
    assert [type(one) for one in caches] == [AttentionCache, StateCache] * 3
    assert of == [(0, 1), (2, 3), (4, 5)]
    [state, _, pages], of = kept("qwen3_5_text")
    assert isinstance(state, StateCache) and of == [(0,), (1,), (2,)]
    assert [(part.name, part.shape) for part in state.parts] == [
        ("conv", (3, 2 * 2 * 8 + 4 * 12)),
        ("delta", (4, 8, 12)),
    ]
    assert pages == AttentionCache(2, 16, 16)


def kept(name: str) -> tuple[tuple[Any, ...], list[tuple[int, ...]]]:
    """The caches of a model, and the numbers of those of each layer."""
    config = read_config(tiny(name.split("-")[0], **ARCHITECTURES[name]).config.to_dict())
    return config.caches, [config.caches_of(layer) for layer in range(config.num_layers)]


@pytest.mark.parametrize(
    ("name", "ranks", "shapes"),
    [
        ("lfm2", 4, [(3, 16)]),
        ("granitemoehybrid-experts", 2, [(3, 64 + 2 * 12), (4, 16, 12)]),
        ("qwen3_5_text", 2, [(3, 2 * 8 + 2 * 12), (2, 8, 12)]),
        ("mamba", 4, [(3, 32), (32, 12)]),
    ],
)
def test_ranks_have_equal_parts_of_a_state(
    name: str, ranks: int, shapes: list[tuple[int, ...]]
) -> None:
    config = read_config(tiny(name.split("-")[0], **ARCHITECTURES[name]).config.to_dict())
    state = config.rank_caches(ranks)[0]
    assert isinstance(state, StateCache) and [part.shape for part in state.parts] == shapes


@pytest.mark.parametrize(
    ("name", "options", "ranks", "message"),
    [
        ("lfm2", {}, 3, "cannot split 64 channels of short convolutions over 3 ranks"),
        ("qwen3_5_text", {}, 4, "cannot split 2 key heads of delta nets over 4 ranks"),
        ("mamba", {}, 3, "cannot split 128 channels of Mamba-1 over 3 ranks"),
        ("mamba2", {"n_groups": 1}, 2, "cannot split 1 groups of Mamba-2 over 2 ranks"),
        ("falcon_h1", {"mamba_n_groups": 2}, 3, "cannot split 2 groups of Mamba-2 over 3 ranks"),
    ],
)
def test_states_that_cannot_be_divided_are_refused_by_name(
    name: str, options: dict[str, Any], ranks: int, message: str
) -> None:
    oracle = tiny(name.split("-")[0], **{**ARCHITECTURES[name], **options})
    with pytest.raises(AlignmentError, match=message):
        read_config(oracle.config.to_dict()).rank_caches(ranks)


def test_ranks_of_a_file_with_tiled_heads_have_all_heads_of_keys(
    tmp_path: Path, load: Load
) -> None:
    """Its heads of values in a row use the heads of keys in turn."""
    _, file = written("qwen3_5_text")
    path = save_gguf(tmp_path / "m.gguf", file)
    expected = Paged(load(open_checkpoint(path))).run("a", prompt(30, 1), [11])

    def work(own: Mesh) -> torch.Tensor:
        model = load(open_checkpoint(path), mesh=own)
        shapes = [part.shape for part in model.config.rank_caches(2)[0].parts]
        assert shapes == [(3, 2 * 2 * 8 + 2 * 12), (2, 8, 12)]
        return Paged(model, 1, ranks=2).run("a", prompt(30, 1), [11])

    for found in Ranks(2).run(work):
        assert (found - expected).abs().max() <= 1e-4
    config = read_config(open_checkpoint(path).config)
    with pytest.raises(AlignmentError, match=r"4 value heads of delta nets, in 2 turns, over 4"):
        config.rank_caches(4)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("lfm2", {"conv_L_cache": 1}, "conv_L_cache: expected at least 2 tokens, found 1"),
        ("lfm2", {"layer_types": ["conv", "mamba", "conv"]}, "expected .*conv.*, found 'mamba'"),
        ("lfm2_moe", {"use_expert_bias": False}, "use_expert_bias: expected True, found False"),
        (
            "qwen3_5_text",
            {"linear_num_value_heads": 3},
            "linear_num_value_heads: expected a multiple of 2 heads of keys, found 3",
        ),
        (
            "qwen3_5_text",
            {"linear_conv_kernel_dim": 1},
            "linear_conv_kernel_dim: expected at least",
        ),
        ("qwen3_5_text", {"hidden_act": "gelu"}, "hidden_act: expected silu, found gelu"),
        ("mamba", {"conv_kernel": 1}, "mamba_d_conv: expected at least 2 tokens, found 1"),
        ("mamba2", {"conv_kernel": 1}, "mamba_d_conv: expected at least 2 tokens, found 1"),
        ("mamba2", {"n_groups": 3}, "mamba_n_groups: expected a divisor of 8 heads, found 3"),
        (
            "granitemoehybrid-dense",
            {"time_step_limit": [0.9, 0.1]},
            r"time_step_limit: expected two numbers .*, found \[0.9, 0.1\]",
        ),
        (
            "granitemoehybrid-dense",
            {"position_embedding_type": "alibi"},
            "position_embedding_type: expected rope or null, found 'alibi'",
        ),
        ("falcon_h1", {"attention_bias": True}, "attention_bias: expected false, found true"),
        ("falcon_h1", {"mamba_proj_bias": True}, "mamba_proj_bias: expected false, found true"),
    ],
)
def test_a_config_that_is_impossible_or_asks_for_more_is_refused_by_name(
    name: str, changes: Mapping[str, Any], message: str
) -> None:
    config = tiny(name.split("-")[0], **ARCHITECTURES[name]).config.to_dict()
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        read_config({**config, **changes})


def test_infinite_limits_of_time_steps_are_read_in_either_spelling() -> None:
    config = tiny("mamba2", **ARCHITECTURES["mamba2"]).config.to_dict()
    for most in (float("inf"), {"__float__": "Infinity"}):
        spec = read_config({**config, "time_step_limit": [0.25, most]}).recurrent
        assert (spec.least, spec.most) == (0.25, float("inf"))


def test_convolutions_with_other_channels_are_refused_by_name(load: Load) -> None:
    checkpoint = checkpoint_of(tiny("olmo_hybrid", **ARCHITECTURES["olmo_hybrid"]))
    name = "model.layers.0.linear_attn.q_conv1d.weight"
    tensors = {**checkpoint.tensors, name: checkpoint.tensors[name][1:]}
    with pytest.raises(CheckpointError, match="conv1d: expected 192 channels, found 191"):
        load(DictCheckpoint(checkpoint.config, tensors))


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("lfm2", {"attention.head_count_kv": (ARRAY, (I32, [2, 2]))}, "array of 2.*3 integers"),
        (
            "qwen3_5_text",
            {"attention.recurrent_layers": (ARRAY, (BOOL, [True]))},
            "recurrent_layers is .*expected 3 values",
        ),
        ("lfm2", {"shortconv.l_cache": (U32, 1)}, "shortconv.l_cache is 1, expected an integer"),
        ("mamba", {"ssm.time_step_rank": (U32, 0)}, "time_step_rank is 0, expected an integer"),
        ("mamba2", {"ssm.group_count": (U32, 9)}, "ssm.group_count is 9, expected an integer"),
    ],
)
def test_metadata_that_contradict_are_refused_by_name(
    name: str, metadata: Facts, message: str, tmp_path: Path
) -> None:
    _, file = written(name)
    arch = FILES[name][0]
    file.metadata |= {f"{arch}.{key}": value for key, value in metadata.items()}
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
