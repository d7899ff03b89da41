"""GGUF files of each architecture against transformers, and what llama.cpp refuses or changes.

The files are laid out as llama.cpp's converter of October 2026 writes them; its files of the same
models have the same logits here (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.loaders.folders.hf_folder import complete_config
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.gguf_metadata import model_metadata
from sdk.models.architecture import gguf_names
from sdk.models.configs.config import ModelConfig
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import BOOL, F32, I32, STRING, U32, gguf_of, save_gguf
from tests.models.conftest import Paged, expected_logits, prompt, tiny
from tests.models.tiny_architectures import EXPERTS, LATENT, V3, YARN as LATENT_YARN

Load = Callable[..., Any]
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 3000.0}}
HALF = {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 0.5}}
PLAIN = {**ROPE, "tie_word_embeddings": False, "rms_norm_eps": 1e-4}
FULL = ["full_attention"] * 3
COUNTS = {
    "expert_count": (U32, 6),
    "expert_used_count": (U32, 3),
    "expert_feed_forward_length": (U32, 48),
}
V3_COUNTS = {
    **COUNTS,
    "expert_gating_func": (U32, 2),
    "expert_weights_norm": (BOOL, True),
    "expert_weights_scale": (F32, 2.5),
    "expert_group_count": (U32, 3),
    "expert_group_used_count": (U32, 2),
    "expert_shared_count": (U32, 2),
    "leading_dense_block_count": (U32, 1),
}
#: The scale of queries begins to differ from 1 at position 16.
YARN = {
    **ROPE["rope_parameters"],
    "rope_type": "yarn",
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.4,
}
YARN_FACTS = {
    "rope.scaling.type": (STRING, "yarn"),
    "rope.scaling.factor": (F32, 16.0),
    "rope.scaling.original_context_length": (U32, 16),
    "rope.scaling.yarn_log_multiplier": (F32, 1.0),
    "attention.temperature_scale": (F32, 0.4),
}
LINEAR = {"rope_type": "linear", "rope_theta": 3000.0, "factor": 2.0}
LINEAR_FACTS = {
    "rope.scaling.type": (STRING, "linear"),
    "rope.scaling.factor": (F32, 2.0),
}
ALPHA = {"rope_type": "dynamic", "factor": 1.0, "alpha": 50.0, "rope_theta": 10_000.0}
BASES = [3000.0, 0, 3000.0, 0, 3000.0]
SCALES = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "logits_scaling": 4.0,
    "attention_multiplier": 0.25,
}
SCALE_FACTS = {
    "embedding_scale": (F32, 3.0),
    "residual_scale": (F32, 0.5),
    "logit_scale": (F32, 4.0),
}
#: The name in the file, which what follows a hyphen tells apart: transformers' model, its options,
#: and metadata besides the usual ones.
#: Latent attention, as files have it since April 2025 and before.
LATENT_FACTS = {
    "attention.q_lora_rank": (U32, 40),
    "attention.kv_lora_rank": (U32, 48),
    "attention.head_count_kv": (U32, 1),
    "attention.key_length": (U32, 64),
    "attention.value_length": (U32, 48),
    "attention.key_length_mla": (U32, 40),
    "attention.value_length_mla": (U32, 32),
    "rope.dimension_count": (U32, 16),
}
OLD_LATENT_FACTS = {
    **{key: LATENT_FACTS[key] for key in ("attention.kv_lora_rank", "rope.dimension_count")},
    "attention.key_length": (U32, 40),
    "attention.value_length": (U32, 32),
}
#: DeepSeek's files have a tenth of YaRN's multiplier.
DEEPSEEK_YARN = {
    "rope.scaling.type": (STRING, "yarn"),
    "rope.scaling.factor": (F32, 8.0),
    "rope.scaling.original_context_length": (U32, 32),
    "rope.scaling.yarn_log_multiplier": (F32, 0.0707),
}
FILES: dict[str, tuple[str, dict[str, Any], dict[str, tuple[int, Any]]]] = {
    "deepseek2": ("deepseek_v3", {**V3, **LATENT}, {**V3_COUNTS, **LATENT_FACTS}),
    "deepseek2-old": (
        "deepseek_v2",
        {
            **(V3 | LATENT | {"q_lora_rank": None, "topk_method": "greedy"}),
            "norm_topk_prob": False,
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": {**LATENT_YARN, "mscale": 0.707, "mscale_all_dim": 0.707},
        },
        {
            **{key: V3_COUNTS[key] for key in (*COUNTS, "expert_weights_scale")},
            **{key: V3_COUNTS[key] for key in ("expert_shared_count", "leading_dense_block_count")},
            **OLD_LATENT_FACTS,
            **DEEPSEEK_YARN,
        },
    ),
    "deepseek2-groups": (
        "deepseek_v2",
        {**V3, **LATENT, "topk_method": "group_limited_greedy", "norm_topk_prob": False},
        {
            **V3_COUNTS,
            **LATENT_FACTS,
            "expert_gating_func": (U32, 1),
            "expert_weights_norm": (BOOL, False),
        },
    ),
    "deepseek2-dense": (
        "youtu",
        LATENT,
        {
            **LATENT_FACTS,
            "leading_dense_block_count": (U32, 3),
            "expert_feed_forward_length": (U32, 128),
            "expert_shared_count": (U32, 0),
        },
    ),
    "minicpm3": (
        "minicpm3",
        {
            **(LATENT | {"v_head_dim": 16, "tie_word_embeddings": True}),
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 256,
        },
        {
            **OLD_LATENT_FACTS,
            "attention.q_lora_rank": (U32, 40),
            "attention.value_length": (U32, 16),
        },
    ),
    "gemma": ("gemma", {"tie_word_embeddings": True}, {}),
    "smollm3": ("smollm3", {"num_hidden_layers": 5}, {}),
    "exaone4": ("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 3}, {}),
    "chatglm": ("glm", HALF, {"rope.dimension_count": (U32, 8)}),
    "glm4": ("glm4", HALF, {"rope.dimension_count": (U32, 8)}),
    "ernie4_5": ("ernie4_5", {"use_bias": True}, {}),
    "seed_oss": ("seed_oss", {"attention_out_bias": True}, {}),
    "qwen2moe": (
        "qwen2_moe",
        {**EXPERTS, "num_experts": 5, "shared_expert_intermediate_size": 80},
        {**COUNTS, "expert_count": (U32, 5), "expert_shared_feed_forward_length": (U32, 80)},
    ),
    "glm4moe": (
        "glm4_moe",
        {**V3, **HALF, "use_qk_norm": True, "attention_bias": True},
        {**V3_COUNTS, "rope.dimension_count": (U32, 8)},
    ),
    "dots1": ("dots1", {**V3, "sliding_window": None, "layer_types": FULL}, V3_COUNTS),
    "minimax-m2": (
        "minimax_m2",
        {"num_local_experts": 5, "num_experts_per_tok": 2, "rotary_dim": 8},
        {
            "expert_count": (U32, 5),
            "expert_used_count": (U32, 2),
            "expert_feed_forward_length": (U32, 128),
            "expert_gating_func": (U32, 2),
            "rope.dimension_count": (U32, 8),
        },
    ),
    "ernie4_5-moe": (
        "ernie4_5_moe",
        {
            "moe_num_experts": 6,
            "moe_k": 3,
            "moe_intermediate_size": 48,
            "moe_layer_interval": 2,
            "num_hidden_layers": 4,
        },
        {
            **COUNTS,
            "interleave_moe_layer_step": (U32, 2),
            "leading_dense_block_count": (U32, 1),
            "expert_shared_count": (U32, 2),
            "expert_shared_feed_forward_length": (U32, 64),  # wrong in files of some converters
        },
    ),
    "hunyuan-moe": (
        "hunyuan_v1_moe",
        {"num_experts": 6, "moe_topk": 3},
        {
            **COUNTS,
            "expert_feed_forward_length": (U32, 128),
            "expert_shared_count": (U32, 1),
            "expert_shared_feed_forward_length": (U32, 128),
        },
    ),
    "granitemoe": (
        "granitemoe",
        {**SCALES, "num_local_experts": 6, "num_experts_per_tok": 3},
        {
            **COUNTS,
            **SCALE_FACTS,
            "expert_feed_forward_length": (U32, 128),
            "attention.scale": (F32, 0.25),
        },
    ),
    "exaone-moe": (
        "exaone_moe",
        {
            **EXPERTS,
            "num_experts": 6,
            "n_group": 3,
            "topk_group": 2,
            "sliding_window": 8,
            "num_hidden_layers": 4,
        },
        {
            **V3_COUNTS,
            "expert_shared_count": (U32, 1),
            "attention.sliding_window": (U32, 8),
            "attention.sliding_window_pattern": (U32, 4),
        },
    ),
    "mistral3": ("mistral", {"sliding_window": None}, {}),
    "mistral3-scaled": ("ministral3", {"rope_parameters": YARN}, YARN_FACTS),
    # mscale_all_dim: cos and sin are multiplied by the quotient of two factors
    "mistral3-magnitude": (
        "ministral3",
        {"rope_parameters": {**YARN, "mscale_all_dim": 0.5}},
        {**YARN_FACTS, "rope.scaling.yarn_log_multiplier": (F32, 0.5)},
    ),
    # the base that alpha makes of 10,000
    "hunyuan-dense": (
        "hunyuan_v1_dense",
        {"rope_parameters": ALPHA},
        {
            "rope.freq_base": (F32, 10_000.0 * 50.0 ** (16 / 14)),
            "rope.scaling.type": (STRING, "none"),
        },
    ),
    "granite-dense4": (
        "granitemoehybrid",
        {
            **SCALES,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "shared_intermediate_size": 128,
            "position_embedding_type": "rope",
        },
        {
            **SCALE_FACTS,
            "attention.scale": (F32, 0.25),
            "attention.head_count_kv": (9, (I32, [2, 2, 2])),
            "rope.scaling.finetuned": (BOOL, True),
            "expert_count": (U32, 0),
            "expert_used_count": (U32, 0),
            "expert_shared_feed_forward_length": (U32, 128),
            "ssm.conv_kernel": (U32, 4),
            "ssm.state_size": (U32, 256),
            "ssm.group_count": (U32, 1),
            "ssm.inner_size": (U32, 128),
            "ssm.time_step_rank": (U32, 128),
        },
    ),
    "granite_swa": (
        "granite_swa",
        {**SCALES, "sliding_window": 9, "num_hidden_layers": 5, "layer_rope_theta": BASES},
        {
            **SCALE_FACTS,
            "attention.scale": (F32, 0.25),
            "attention.sliding_window": (U32, 9),
            "attention.sliding_window_pattern": (9, (BOOL, [False, True, True, True, False])),
            "attention.rope_pattern": (9, (BOOL, [bool(base) for base in BASES])),
        },
    ),
    "internlm2": ("llama", {}, {}),
    "xverse": ("llama", {}, {}),
    "exaone": ("llama", {}, {}),
    "pangu-embedded": ("llama", {"attention_bias": True}, {}),
    "command-r": (
        "cohere",
        {
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-4,
            "use_qk_norm": True,
        },
        {"logit_scale": (F32, 0.5)},
    ),
    "cohere2": (
        "cohere2",
        {
            "logit_scale": 0.5,
            "tie_word_embeddings": True,
            "layer_norm_eps": 1e-4,
            "sliding_window": 8,
            "num_hidden_layers": 5,
        },
        {"logit_scale": (F32, 0.5), "attention.sliding_window": (U32, 8)},
    ),
    "olmo": ("olmo", {"clip_qkv": 1.5}, {"attention.clamp_kqv": (F32, 1.5)}),
    "nemotron": (
        "nemotron",
        {**HALF, "norm_eps": 1e-4, "attention_bias": True, "mlp_bias": True},
        {"rope.dimension_count": (U32, 8)},
    ),
    "arcee": ("arcee", {"mlp_bias": True}, {}),
    "apertus": ("apertus", {}, {}),
    "stablelm": (
        "stablelm",
        {**HALF, "layer_norm_eps": 1e-4, "use_qkv_bias": True, "qk_layernorm": True},
        {"rope.dimension_count": (U32, 8), "use_parallel_residual": (BOOL, True)},
    ),
    "phi2": (
        "phi",
        {**HALF, "layer_norm_eps": 1e-4, "num_key_value_heads": 4},
        {"rope.dimension_count": (U32, 8)},
    ),
    "jais2": ("jais2", {"layer_norm_eps": 1e-4}, {}),
    "bitnet-b1.58": ("bitnet", {}, {}),
    "bitnet": ("bitnet", {"hidden_act": "silu", "num_key_value_heads": 4}, {}),
    "starcoder2": ("starcoder2", {"norm_epsilon": 1e-4, "tie_word_embeddings": True}, {}),
    "mellum": (
        "mellum",
        {
            **EXPERTS,
            "num_experts": 6,
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
            "rope_parameters": {
                "full_attention": LINEAR,
                "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
            },
        },
        {
            **COUNTS,
            "attention.sliding_window": (U32, 9),
            "attention.sliding_window_pattern": (9, (BOOL, [False, True, True, True])),
            "rope.freq_base_swa": (F32, 777.0),
            **LINEAR_FACTS,
        },
    ),
    "laguna": (
        "laguna",
        {
            **EXPERTS,
            "num_experts": 6,
            "shared_expert_intermediate_size": 80,
            "moe_routed_scaling_factor": 2.5,
            "num_attention_heads_per_layer": [4, 6, 6, 6],
            "num_hidden_layers": 4,
            "sliding_window": 9,
            "layer_types": ["full_attention"] + ["sliding_attention"] * 3,
            "rope_parameters": {
                "full_attention": {**LINEAR, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 777.0},
            },
        },
        {
            **{k: v for k, v in V3_COUNTS.items() if "group" not in k and "shared" not in k},
            "expert_shared_feed_forward_length": (U32, 80),
            "attention.head_count": (9, (I32, [4, 6, 6, 6])),
            "attention.sliding_window": (U32, 9),
            "rope.dimension_count": (U32, 8),
            "rope.dimension_count_swa": (U32, 16),
            "rope.freq_base_swa": (F32, 777.0),
            **LINEAR_FACTS,
        },
    ),
    "dbrx": (
        "dbrx",
        {
            "d_model": 64,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 3000.0},
            "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 6, "moe_top_k": 3},
        },
        {**COUNTS, "feed_forward_length": (U32, 48), "attention.clamp_kqv": (F32, 1.5)},
    ),
    "orion": (
        "stablelm",
        {"rope_parameters": {**ROPE["rope_parameters"], "partial_rotary_factor": 1.0}},
        {},
    ),
    "codeshell": ("starcoder2", {"norm_epsilon": 1e-4, "sliding_window": None}, {}),
    "maincoder": ("hunyuan_v1_dense", {}, {}),
    "paddleocr": ("llama", {}, {"rope.dimension_sections": (9, (I32, [2, 3, 3, 0]))}),
    "baichuan": ("llama", {"num_hidden_layers": 32, "num_key_value_heads": 4}, {}),
    # the same where its factors change nothing
    "bailingmoe": (
        "granitemoeshared",
        {
            "num_local_experts": 6,
            "num_experts_per_tok": 3,
            "shared_intermediate_size": 256,
            "attention_multiplier": 0.25,
        },
        {
            **COUNTS,
            "expert_feed_forward_length": (U32, 128),
            "expert_shared_count": (U32, 2),
            "expert_weights_norm": (BOOL, True),
        },
    ),
    "minicpm": (
        "granite",
        SCALES,
        SCALE_FACTS,
    ),
}


def written(name: str) -> tuple[Any, Any]:
    """transformers' model, and the bytes of its file."""
    model_type, options, metadata = FILES[name]
    oracle = tiny(model_type, **{**PLAIN, **options})
    return oracle, gguf_of(oracle, metadata, arch=arch_of(name))


def arch_of(name: str) -> str:
    return name if name in gguf_names() else name.rpartition("-")[0]


@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("name", FILES)
def test_a_file_has_the_logits_of_transformers(name: str, tmp_path: Path, load: Load) -> None:
    oracle, file = written(name)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    ids = prompt(41, 1)
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    assert checkpoint.unused() == []
    assert arch_of(name) in gguf_names()


@pytest.mark.parametrize(
    ("name", "metadata", "message"),
    [
        ("glm4", {"rope.dimension_sections": (9, (I32, [4, 2, 2, 0]))}, "of a vision model"),
        ("exaone", {"attention.temperature_scale": (F32, 0.1)}, "temperature_scale: expected 0"),
        ("granite_swa", {"attention.rope_pattern": (9, (BOOL, [True] * 4))}, "expected 5 values"),
        ("minicpm", {"logit_scale": (F32, 0.0)}, "minicpm.logit_scale: expected a number"),
        ("olmo", {"attention.layer_norm_epsilon": (F32, 1e-6)}, "expected 1e-05, found 1e-06"),
        ("smollm3", {"attention.sliding_window_pattern": (U32, 2)}, "pattern: expected 0, found 2"),
    ],
)
def test_what_a_file_asks_for_besides_is_refused_by_name(
    name: str, metadata: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, file = written(name)
    file.metadata |= {f"{name}.{key}": value for key, value in metadata.items()}
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_a_window_of_exaone4_is_that_of_64_layers_alone(tmp_path: Path, load: Load) -> None:
    """llama.cpp reads no window of other files, whatever they say."""
    oracle, file = written("exaone4")
    file.metadata["exaone4.attention.sliding_window"] = (U32, 4)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", prompt(41, 1))
    assert (found - expected_logits(oracle, prompt(41, 1))).abs().max() <= 1e-4
    kinds = ["sliding_attention"] * 3 + ["full_attention"]
    options = {**PLAIN, "num_hidden_layers": 64, "layer_types": kinds * 16}
    slides = tiny("exaone4", **options, sliding_window=4)
    file = gguf_of(slides, {"attention.sliding_window": (U32, 4)})
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))).run(
        "a", prompt(21, 1)
    )
    assert (found - expected_logits(slides, prompt(21, 1))).abs().max() <= 1e-3


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 0]}),
        ("exaone4", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 3}),
        ("ministral3", {"sliding_window": 8}),
        ("granite_swa", {"layer_rope_theta": [3000.0, 0, 77.0], "rope_theta": 3000.0}),
        ("starcoder2", {"sliding_window": 8}),
        (
            "olmoe",
            {
                "norm_topk_prob": True,
                "num_key_value_heads": 4,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
        ),
        ("olmoe", {"num_key_value_heads": 2, "num_experts": 4, "num_experts_per_tok": 2}),
        ("glm", {"head_dim": 24}),
        ("cohere", {"use_qk_norm": True}),
        ("arcee", {"mlp_bias": True}),
        ("ernie4_5", {"use_bias": True}),
        ("ernie4_5_moe", {"moe_num_experts": 4, "moe_layer_interval": 2}),
        ("seed_oss", {"attention_out_bias": True}),
        ("phi", {"tie_word_embeddings": True}),
        ("starcoder2", {"use_bias": False}),
    ],
)
def test_a_model_that_a_file_cannot_express_is_not_written(
    model_type: str, options: dict[str, Any]
) -> None:
    config = {**tiny(model_type, **options).config.to_dict(), **options}
    with pytest.raises(UnsupportedError, match=f"{model_type} is written as a GGUF file only"):
        model_metadata(config, "here")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("xielu.alpha_p", None, "xielu.alpha_p: expected a number, found None"),
        ("xielu.beta", (9, (F32, [0.5, 0.5])), "xielu.beta: expected 3 numbers, found 2"),
        ("xielu.eps", (F32, 1.0), "act_fn: expected numbers, eps at most 0, found .* eps 1"),
    ],
)
def test_numbers_of_apertus_that_are_missing_or_wrong_are_named(
    key: str, value: Any, message: str, tmp_path: Path, load: Load
) -> None:
    _, file = written("apertus")
    file.metadata.pop(key)
    file.metadata |= {} if value is None else {key: value}
    with pytest.raises(CheckpointError, match=message):
        load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file)))


def test_a_file_of_cohere2_without_a_window_is_refused(tmp_path: Path) -> None:
    _, file = written("cohere2")
    del file.metadata["cohere2.attention.sliding_window"]
    with pytest.raises(CheckpointError, match=r"cohere2\.attention\.sliding_window: expected"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_blocks_of_stablelm_are_parallel_where_there_is_one_norm(
    tmp_path: Path, load: Load
) -> None:
    """llama.cpp goes by the tensors; the first files have a flag that says otherwise."""
    oracle = tiny("stablelm", **{**PLAIN, **HALF}, use_parallel_residual=True)
    file = gguf_of(oracle, {"rope.dimension_count": (U32, 8)})
    found = Paged(load(open_checkpoint(save_gguf(tmp_path / "m.gguf", file))))
    expected = expected_logits(oracle, prompt(41, 1))
    assert (found.run("a", prompt(41, 1)) - expected).abs().max() <= 1e-4


def _with_linear_biases(model: Any, ids: list[int], heads: int) -> Any:
    """A Llama's logits whose queries and keys do not turn, with the biases of ALiBi's paper for a
    number of heads that is a power of two."""
    model.model.rotary_emb.inv_freq.zero_()
    distance = torch.arange(len(ids))[None, :] - torch.arange(len(ids))[:, None]
    slopes = torch.tensor([2.0 ** (-8 * (i + 1) / heads) for i in range(heads)])
    mask = slopes[:, None, None] * distance
    mask = mask.masked_fill(distance > 0, float("-inf"))[None]
    with torch.no_grad():
        return model(input_ids=torch.tensor([ids]), attention_mask=mask).logits[0]


@pytest.mark.parametrize(("arch", "layers"), [("refact", 3), ("baichuan", 40)])
def test_llamas_with_linear_biases(arch: str, layers: int, tmp_path: Path, load: Load) -> None:
    kv_heads = 1 if arch == "refact" else 4
    options = {**PLAIN, "num_hidden_layers": layers, "num_key_value_heads": kv_heads}
    oracle, ids = tiny("llama", **options), prompt(41, 1)
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", gguf_of(oracle, {}, arch=arch)))
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    assert (found - _with_linear_biases(oracle, ids, 4)).abs().max() <= 2e-4


def test_spark_is_laguna_with_other_gates_and_without_norms_of_heads(
    tmp_path: Path, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {
        **FILES["laguna"][1],
        "hidden_act": "gelu",
        "mlp_layer_types": ["dense"] * 4,
        "num_attention_heads_per_layer": [4] * 4,
    }
    oracle = tiny("laguna", **{**PLAIN, **options})
    for layer in oracle.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    facts = {k: v for k, v in FILES["laguna"][2].items() if "expert" not in k and "dense" not in k}
    del facts["attention.head_count"]
    facts["attention.sliding_window_pattern"] = (9, (BOOL, [False, True, True, True]))
    file = gguf_of(oracle, facts, arch="spark2_5")
    checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
    found = Paged(load(checkpoint)).run("a", prompt(41, 1), [7, 30])
    monkeypatch.setattr(torch.nn.functional, "softplus", torch.sigmoid)
    assert (found - expected_logits(oracle, prompt(41, 1))).abs().max() <= 1e-4
    assert checkpoint.unused() == []


def test_a_baichuan_of_another_size_is_refused(tmp_path: Path) -> None:
    file = gguf_of(tiny("llama", **PLAIN), {}, arch="baichuan")
    with pytest.raises(UnsupportedError, match=r"block_count: expected 32 .* found 3"):
        open_checkpoint(save_gguf(tmp_path / "m.gguf", file))


def test_a_folder_of_baichuan_2_is_refused() -> None:
    config = tiny("llama").config.to_dict() | {"model_type": "baichuan", "vocab_size": 125_696}
    with pytest.raises(UnsupportedError, match="vocab_size: expected that of Baichuan 1"):
        ModelConfig.from_dict(config)


def test_weights_of_deepseeks_experts_sum_to_1_only_if_a_file_says_so(tmp_path: Path) -> None:
    _, file = written("bailingmoe")
    file.metadata = {
        key.replace("bailingmoe", "deepseek"): (
            kind,
            "deepseek" if value == "bailingmoe" else value,
        )
        for key, (kind, value) in file.metadata.items()
    }
    for stated in (True, False):
        file.metadata["deepseek.expert_weights_norm"] = (BOOL, stated)
        checkpoint = open_checkpoint(save_gguf(tmp_path / "m.gguf", file))
        assert checkpoint.config["model_type"] == "deepseek"
        experts = ModelConfig.from_dict(checkpoint.config).experts
        assert experts is not None and experts.route.normalized is stated


def test_a_folder_of_a_model_that_is_read_from_gguf_files_alone_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="'refact': folders of this model are not supported"):
        complete_config({"model_type": "refact"}, "here")
