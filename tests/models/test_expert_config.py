"""What configs and metadata say of mixtures of experts, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk.kernels.operators.route_rule import RouteRule
from sdk.loaders.folders.expert_names import first_spelling, spelled_as_ours
from sdk.loaders.model_shapes import check_config
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_metadata import model_metadata
from sdk.models.configs.config import ModelConfig
from sdk.models.configs.experts import ExpertSpec
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import BOOL, F32, U32, gguf_of, save_gguf
from tests.models.conftest import (
    DictCheckpoint,
    Paged,
    checkpoint_of,
    expected_logits,
    prompt,
    tiny,
)
from tests.models.test_gguf_architectures import FILES, written
from tests.models.tiny_architectures import ARCHITECTURES


def experts_of(model_type: str, **changes: Any) -> ExpertSpec:
    config = tiny(model_type, **ARCHITECTURES[model_type]).config.to_dict()
    found = ModelConfig.from_dict({**config, **changes}).experts
    assert found is not None
    return found


def test_facts_of_a_router_come_from_the_model_and_from_its_config() -> None:
    found = experts_of("glm4_moe")
    assert found == ExpertSpec(
        count=6,
        per_token=3,
        width=48,
        layers=(False, True, True),
        route=RouteRule("sigmoid", epsilon=1e-20, scale=2.5, groups=3, groups_used=2),
        shared_width=96,
    )
    assert experts_of("ernie4_5_moe", moe_norm_min=1e-3).route.least == 1e-3
    assert experts_of("cohere2_moe").scale == 0.5
    assert experts_of("qwen2_moe").route == RouteRule(normalized=False)


def test_a_count_may_be_repeated_for_each_layer() -> None:
    assert experts_of("ernie4_5_moe", moe_k=[3, 3, 3, 3]).per_token == 3
    with pytest.raises(CheckpointError, match=r"moe_k: expected an integer .*, found \[3, 2\]"):
        experts_of("ernie4_5_moe", moe_k=[3, 2], num_experts_per_tok=None)


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("glm4_moe", {"n_group": 4}, "n_group: expected a divisor of 6 experts, found 4"),
        ("glm4_moe", {"n_group": 6}, "topk_group: expected groups of 1 with 3 experts together"),
        (
            "glm4_moe",
            {"n_group": 6, "topk_group": 3},
            "n_group: expected groups of at least 2 experts, found 6",
        ),
        ("glm4_moe", {"topk_group": 4}, r"topk_group: expected an integer in 1\.\.3, found 4"),
        ("glm4_moe", {"num_experts_per_tok": 7}, r"num_experts_per_tok: expected .* 1\.\.6"),
        ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor: expected a number"),
        ("glm4_moe", {"first_k_dense_replace": -2}, "first_k_dense_replace: expected the number"),
        ("glm4_moe", {"norm_topk_prob": 1}, "norm_topk_prob: expected true or false, found 1"),
        (
            "exaone_moe",
            {"mlp_layer_types": ["dense", "mixed", "sparse", "sparse", "sparse"]},
            "mlp_layer_types: expected 'dense' or 'sparse' for each of 5 layers",
        ),
        ("exaone_moe", {"mlp_layer_types": ["sparse"]}, "for each of 5 layers, found"),
        ("ernie4_5_moe", {"moe_layer_end_index": "x"}, "moe_layer_end_index: expected the number"),
        ("ernie4_5_moe", {"moe_norm_min": 0}, "moe_norm_min: expected a number above 0"),
        ("cohere2_moe", {"expert_selection_fn": "tanh"}, "expert_selection_fn: expected 'softmax'"),
        (
            "cohere2_moe",
            {"shared_expert_combination_strategy": "max"},
            "shared_expert_combination_strategy: expected 'sum' or 'average', found 'max'",
        ),
        ("qwen2_moe", {"mlp_only_layers": 1}, "mlp_only_layers: expected a list of layers"),
        (
            "qwen2_moe",
            {"layer_types": None, "use_sliding_window": True, "max_window_layers": -1},
            "max_window_layers: expected a number of layers, found -1",
        ),
        (
            "dots1",
            {"layer_types": None, "max_window_layers": "all"},
            "max_window_layers: expected a number of layers, found 'all'",
        ),
    ],
)
def test_impossible_facts_are_named(model_type: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        experts_of(model_type, **changes)


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        (
            "glm4moe",
            {"expert_gating_func": (U32, 1)},
            "glm4moe.expert_gating_func is 1, expected 2: other mixtures",
        ),
        ("qwen2moe", {"expert_group_count": (U32, 2)}, "expert_group_count is 2, expected 1"),
        ("qwen2moe", {"expert_weights_scale": (F32, 2.0)}, r"weights_scale is 2.0, expected 1.0"),
        ("minimax-m2", {"expert_shared_count": (U32, 1)}, "expert_shared_count is 1, expected 0"),
        ("minimax-m2", {"expert_weights_norm": (BOOL, False)}, "weights_norm is False, expected T"),
        ("minimax-m2", {"leading_dense_block_count": (U32, 1)}, "block_count is 1, expected 0"),
        ("dots1", {"nextn_predict_layers": (U32, 1)}, "nextn_predict_layers: expected 0, found 1"),
    ],
)
def test_what_a_file_asks_for_besides_is_refused_by_name(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = written(name)
    file.metadata |= {f"{name}.{key}": value for key, value in metadata.items()}
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


@pytest.mark.parametrize(
    ("arch", "metadata", "message"),
    [
        ("hy_v3", {"expert_shared_feed_forward_length": (U32, 50)}, "expected a multiple of 48"),
        ("cohere2moe", {}, "cohere2moe.attention.sliding_window: expected a number, found none"),
        (
            "cohere2moe",
            {
                "attention.sliding_window": (U32, 8),
                "expert_gating_func": (U32, 1),
                "expert_weights_norm": (BOOL, False),
            },
            "cohere2moe.expert_weights_norm: expected true with a softmax, found false",
        ),
    ],
)
def test_metadata_that_contradict_each_other_are_refused(
    arch: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model_type, options, facts = FILES["dots1"]
    leave_out = ("group", *["scale"] * (arch == "cohere2moe"))
    facts = {key: value for key, value in facts.items() if not any(x in key for x in leave_out)}
    eps = {"attention.layer_norm_epsilon": (F32, 1e-5)} if arch == "cohere2moe" else {}
    file = gguf_of(tiny(model_type, **options), {**facts, **eps, **metadata}, arch=arch)
    with pytest.raises((CheckpointError, UnsupportedError), match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_blocks_of_multi_token_prediction_are_left_out_of_a_file(
    tmp_path: Path, load: Callable[..., Any]
) -> None:
    """They come last and are counted."""
    oracle, file = written("glm4moe")
    file.metadata["glm4moe.block_count"] = (U32, 4)
    file.metadata["glm4moe.nextn_predict_layers"] = (U32, 1)
    last = [name for name in file.tensors if name.startswith("blk.2.")]
    ahead = {name.replace("blk.2.", "blk.3."): file.tensors[name] for name in last}
    ahead["blk.3.nextn.eh_proj.weight"] = file.tensors["blk.2.attn_q.weight"]
    file.tensors |= ahead
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", prompt(41, 1))
    assert (found - expected_logits(oracle, prompt(41, 1))).abs().max() <= 1e-4
    assert sorted(checkpoint.unused()) == sorted(ahead)


@pytest.mark.parametrize(
    ("model_type", "options", "message"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, "only without norm_topk_prob"),
        ("qwen2_moe", {"mlp_only_layers": [1]}, "experts in every layer"),
        ("dots1", {"layer_types": ["sliding_attention"] * 3}, "only without layers that slide"),
        (
            "ernie4_5_moe",
            {"moe_layer_end_index": 1, "use_bias": False, "moe_layer_interval": 1},
            "only with experts up to the last layer",
        ),
        ("exaone_moe", {}, "models of type exaone_moe cannot be written as GGUF files"),
    ],
)
def test_a_model_that_a_file_cannot_express_is_not_written(
    model_type: str, options: dict[str, Any], message: str
) -> None:
    usual = {"mlp_only_layers": [], "layer_types": ["full_attention"] * 3}
    config = {**tiny(model_type, **ARCHITECTURES[model_type]).config.to_dict(), **usual, **options}
    with pytest.raises(UnsupportedError, match=message):
        model_metadata(config, "here")


@pytest.mark.parametrize(
    "tensor", ["gate.e_score_correction_bias", "shared_experts.up_proj.weight"]
)
def test_a_missing_tensor_of_a_mixture_is_named(tensor: str, load: Callable[..., Any]) -> None:
    found = checkpoint_of(tiny("glm4_moe", **ARCHITECTURES["glm4_moe"]))
    name = f"model.layers.1.mlp.{tensor}"
    del found.tensors[name]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(found)


def test_a_bias_of_the_choice_has_one_number_for_each_expert(load: Callable[..., Any]) -> None:
    found = checkpoint_of(tiny("glm4_moe", **ARCHITECTURES["glm4_moe"]))
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    wrong = DictCheckpoint(found.config, {**found.tensors, name: found.tensors[name][:4]})
    with pytest.raises(
        CheckpointError, match=r"correction_bias: expected shape \[6\], found \[4\]"
    ):
        load(wrong)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("block_sparse_moe.experts.3.w1.weight", "mlp.experts.3.gate_proj.weight"),
        ("block_sparse_moe.experts.3.down_proj.qweight", "mlp.experts.3.down_proj.qweight"),
        ("block_sparse_moe.gate.weight", "mlp.gate.weight"),
        ("block_sparse_moe.input_linear.weight", "mlp.experts.gate_up_proj"),
        ("block_sparse_moe.output_linear.weight", "mlp.experts.down_proj"),
        ("block_sparse_moe.router.layer.weight", "mlp.gate.weight"),
        ("block_sparse_moe.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.moe_statics.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.expert_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.experts.e_score_correction_bias", "mlp.gate.e_score_correction_bias"),
        ("mlp.router.gate.weight", "mlp.gate.weight"),
        ("mlp.gate.wg.weight", "mlp.gate.weight"),
        ("mlp.shared_expert.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
        ("mlp.shared_mlp.up_proj.weight", "mlp.shared_experts.up_proj.weight"),
        ("shared_mlp.input_linear.weight", "mlp.shared_experts.gate_up_proj.weight"),
        ("shared_mlp.output_linear.weight", "mlp.shared_experts.down_proj.weight"),
        *((name, name) for name in ("mlp.shared_expert_gate.weight", "mlp.router.weight")),
        *((name, name) for name in ("mlp.experts.gate_up_proj", "self_attn.q_proj.weight")),
    ],
)
def test_names_of_files_are_ours(theirs: str, ours: str) -> None:
    assert spelled_as_ours(f"model.layers.1.{theirs}") == f"model.layers.1.{ours}"
    assert spelled_as_ours(f"model.layers.1.{ours}") == f"model.layers.1.{ours}"
    if ".w1." in theirs or theirs == "block_sparse_moe.gate.weight":
        assert first_spelling(f"model.layers.1.{ours}") == f"model.layers.1.{theirs}"


@pytest.mark.parametrize("model_type", ["qwen2_moe", "minimax_m2", "ernie4_5_moe", "hy_v3"])
def test_a_folder_as_transformers_saves_it_opens(
    model_type: str, tmp_path: Path, load: Callable[..., Any]
) -> None:
    """Experts, routers and biases under the names that published folders have."""
    oracle = tiny(model_type, **ARCHITECTURES[model_type])
    oracle.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    found = Paged(load(checkpoint)).run("a", prompt(24, 5))
    assert (found - expected_logits(oracle, prompt(24, 5))).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_counts_are_written_under_whichever_name_a_config_has() -> None:
    """ERNIE's may say ``moe_k`` or ``num_experts_per_tok``; a file must say how many."""
    config = tiny("ernie4_5_moe", moe_num_experts=6, moe_k=3).config.to_dict()
    assert model_metadata(config, "here")["ernie4_5-moe.expert_used_count"] == 3


@pytest.mark.parametrize("key", ["hidden_size", "num_key_value_heads"])
def test_only_the_number_of_experts_may_be_0(key: str) -> None:
    """Of models that may have MLPs alone; 0 key/value heads would be divided by."""
    config = {"model_type": "granitemoehybrid", "num_attention_heads": 4, "num_local_experts": 0}
    check_config(config, "config.json")
    with pytest.raises(CheckpointError, match=rf"config.json: {key} is 0, expected 1 to"):
        check_config({**config, key: 0}, "config.json")
