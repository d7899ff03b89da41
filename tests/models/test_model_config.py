"""Configs of every dialect give one ModelConfig; bad ones are refused by field name."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sdk.models.architecture import LayerRules, architecture
from sdk.models.auto import model_type, read_config
from sdk.models.configs.config import ModelConfig
from sdk.models.rope import RopeSpec, inverse_frequencies
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.models.conftest import tiny

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def read(**changes: Any) -> ModelConfig:
    return ModelConfig.from_dict({**LLAMA, **changes})


def test_what_a_llama_config_leaves_out_has_the_values_of_the_family() -> None:
    config = read()
    assert (config.num_kv_heads, config.head_dim, config.activation) == (4, 16, "silu")
    assert config.sliding_windows == (None,) * 4
    assert config.ropes[0] == RopeSpec(10000.0, 16, 512, original_max_position=512, turning_dim=16)
    assert len(config.ropes) == 1
    assert config.attention_scale == 0.25
    assert (config.embedding_scale, config.residual_scale, config.logits_scale) == (1.0, 1.0, 1.0)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)


def test_transformers_4_and_5_say_the_same_about_rope() -> None:
    old = read(
        rope_theta=500000.0,
        rope_scaling={"type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
    )
    new = read(
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "original_max_position_embeddings": 64,
            **LLAMA3,
        }
    )
    assert old == new
    assert old.ropes[0].type == "llama3"
    assert old.ropes[0].theta == 500000.0


def test_gemma3_of_transformers_4_and_5_are_one() -> None:
    gemma = {**LLAMA, "model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 8}
    old = ModelConfig.from_dict(
        {
            **gemma,
            "rope_theta": 1e6,
            "rope_local_base_freq": 10000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "sliding_window_pattern": 6,
        }
    )
    new = ModelConfig.from_dict(
        {
            **gemma,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        }
    )
    assert old == new
    assert old.sliding_windows == (8, 8, 8, 8, 8, None, 8)
    assert (old.ropes[0].factor, old.ropes[0].theta) == (8.0, 1e6)
    assert len(old.ropes) == 2
    assert (old.ropes[1].factor, old.ropes[1].theta) == (1.0, 10000.0)
    assert (old.head_dim, old.attention_scale) == (256, 1 / 16)
    assert old.embedding_scale == math.sqrt(64)
    assert old.tie_word_embeddings
    assert old.activation == "gelu_tanh"


def test_a_multimodal_config_is_read_as_its_text_part() -> None:
    text = {**LLAMA, "model_type": "gemma3_text", "sliding_window": 8}
    outer = {"model_type": "gemma3", "vision_config": {}, "text_config": text}
    assert ModelConfig.from_dict(outer) == ModelConfig.from_dict(text)
    assert model_type(outer) == "gemma3_text"
    assert ModelConfig.from_dict({**text, "model_type": "gemma3"}).model_type == "gemma3_text"


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"model_type": "mistral", "sliding_window": 9}, (9, 9, 9, 9)),
        ({"model_type": "mistral", "sliding_window": None}, (None,) * 4),
        ({"model_type": "phi3", "sliding_window": 9}, (9, 9, 9, 9)),
        ({"model_type": "gemma2", "sliding_window": 9}, (9, None, 9, None)),
        ({"model_type": "qwen2", "sliding_window": 9}, (None,) * 4),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}
            | {"max_window_layers": 3},
            (None, None, None, 9),
        ),
        ({"model_type": "llama", "sliding_window": 9}, (None,) * 4),
        (
            {"model_type": "qwen3", "sliding_window": 5}
            | {"layer_types": ["full_attention", "sliding_attention"] * 2},
            (None, 5, None, 5),
        ),
    ],
)
def test_each_layer_has_the_window_of_its_family(
    changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert read(**changes).sliding_windows == windows


def test_the_facts_of_a_model_can_be_read_without_building_it() -> None:
    assert read_config(LLAMA) == ModelConfig.from_dict(LLAMA)
    other = read_config({**LLAMA, "model_type": "persimmon", "num_attention_heads": 8})
    assert (other.model_type, other.num_kv_heads, other.head_dim) == ("persimmon", 8, 8)
    with pytest.raises(UnsupportedError, match="neither this package nor transformers"):
        read_config({"model_type": "no_such_model"})


def test_null_switches_gemma2_soft_caps_off() -> None:
    assert read(model_type="gemma2").attention_softcap == 50.0
    assert read(model_type="gemma2").final_softcap == 30.0
    off = read(model_type="gemma2", attn_logit_softcapping=None, final_logit_softcapping=None)
    assert (off.attention_softcap, off.final_softcap) == (None, None)


def test_attention_scores_are_scaled_as_the_family_says() -> None:
    assert read(model_type="gemma2", query_pre_attn_scalar=25).attention_scale == 0.2
    assert read(model_type="granite").attention_scale == 1.0
    assert read(model_type="granite", attention_multiplier=0.5).attention_scale == 0.5


def test_biases_follow_the_config() -> None:
    qwen = read(model_type="qwen2")
    assert (qwen.attention_bias, qwen.output_bias) == (True, False)
    llama = read(attention_bias=True)
    assert (llama.attention_bias, llama.output_bias) == (True, True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": None}, "model_type: expected a name, found None"),
        ({"vocab_size": 0}, r"vocab_size: expected an integer in 1\.\.\d+, found 0"),
        ({"vocab_size": 2**63}, "vocab_size: expected an integer"),
        ({"hidden_size": None}, "hidden_size: expected an integer"),
        ({"hidden_size": "64"}, "hidden_size: expected an integer .* found '64'"),
        ({"hidden_size": True}, "hidden_size: expected an integer"),
        ({"hidden_size": 66}, "num_attention_heads: expected a divisor of hidden_size 66, found 4"),
        ({"intermediate_size": -1}, "intermediate_size: expected"),
        ({"num_hidden_layers": 513}, r"num_hidden_layers: expected an integer in 1\.\.512"),
        ({"num_attention_heads": 1.5}, "num_attention_heads: expected"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor of 4 heads, found 3"),
        ({"head_dim": 5000}, "head_dim: expected an integer"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps: expected a number above 0, found 0.0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a number above 0, found nan"),
        ({"max_position_embeddings": None}, "max_position_embeddings: expected an integer"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, found 1"),
        ({"hidden_act": "relu6"}, "hidden_act: expected one of .* found 'relu6'"),
        ({"rope_theta": 1.0}, "rope_theta: expected a number above 1, found 1.0"),
        ({"rope_scaling": 7}, "rope_scaling: expected an object, found 7"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_type: expected one of .*'spiral'"),
        (
            {"rope_scaling": {"rope_type": "linear"}},
            "factor: expected a number above 0, found None",
        ),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 0.5}},
            "high_freq_factor: expected a number above low_freq_factor 1.0, found 0.5",
        ),
        (
            {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0]}},
            "long_factor: expected a list of 8 numbers, found 1",
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "longrope",
                    "original_max_position_embeddings": 1,
                }
            },
            "original_max_position_embeddings: expected at least 2 tokens, found 1",
        ),
        (
            {"rope_scaling": {"rope_type": "freq_factors", "factors": [1.0] * 7 + ["x"]}},
            "factors: 7: expected a number above 0, found 'x'",
        ),
        ({"partial_rotary_factor": 0.01}, "partial_rotary_factor: expected an even share"),
        (
            {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}, "head_dim": 2},
            "expected at least 4 rotated dimensions, found 2",
        ),
        (
            {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 9},
            r"layer_types\[1\]: found 'sliding_attention', but .* llama .*expected full_attention",
        ),
        (
            {"model_type": "mistral", "layer_types": ["full_attention"] * 4, "sliding_window": 9},
            r"layer_types\[0\]: found 'full_attention', .* expected sliding_attention",
        ),
        ({"is_causal": "no"}, "is_causal: expected true or false, found 'no'"),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": "both"},
            "use_bidirectional_attention: expected true or false, found 'both'",
        ),
        (
            {"use_bidirectional_attention": True},
            "use_bidirectional_attention: expected False, found True",
        ),
        ({"per_layer_config": {"0": {}}}, "per_layer_config: expected None, found {'0': {}}"),
        ({"layer_types": ["full_attention"]}, "layer_types: expected a list of 4 names, found 1"),
        ({"layer_types": ["mamba"] * 4}, "layer_types: expected full_attention.* found 'mamba'"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window: expected an integer"),
        (
            {"model_type": "qwen2", "sliding_window": 9, "use_sliding_window": True}
            | {"max_window_layers": "x"},
            "max_window_layers: expected a number of layers, found 'x'",
        ),
    ],
)
def test_a_bad_field_is_named_with_what_was_expected(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        read(**changes)


NUMBERS = (0, -1, 1, 3, 2**63, 10**400, 0.5, 1e300, 1e-300, float("nan"), float("inf"))
ODD = (*NUMBERS, None, True, "", "x", [], [1], {}, {"a": 1})


@pytest.mark.parametrize("model", ["llama", "qwen3", "gemma2", "gemma3_text", "phi3", "granite"])
def test_no_value_of_any_field_gives_another_error_or_hangs(model: str) -> None:
    """Every field times every odd value; what is accepted must also give frequencies."""
    scalings = [
        {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "llama3", "original_max_position_embeddings": 64, **LLAMA3},
        {"rope_type": "longrope", "long_factor": [1.0] * 8, "short_factor": [1.0] * 8},
        {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    ]
    base = {**LLAMA, "model_type": model, "head_dim": 16, "sliding_window": 8}
    names = [
        *base,
        *("rope_theta", "rope_scaling", "rope_parameters", "rope_local_base_freq", "layer_types"),
        *("attn_logit_softcapping", "query_pre_attn_scalar", "embedding_multiplier", "text_config"),
        *("original_max_position_embeddings", "partial_rotary_factor", "sliding_window_pattern"),
    ]
    variants: list[dict[str, Any]] = [{**base, name: value} for name in names for value in ODD]
    for scaling in scalings:
        inner = [*scaling, "attention_factor", "beta_fast", "beta_slow", "mscale", "truncate"]
        variants += [{**base, "rope_scaling": {**scaling, k: v}} for k in inner for v in ODD]
    accepted = 0
    for variant in variants:
        try:
            config = ModelConfig.from_dict(variant)
        except CheckpointError:
            continue
        accepted += 1
        inverse_frequencies(config.ropes[0], 512)
    assert 0 < accepted < len(variants)


@pytest.mark.parametrize("name", ["auto", "config", "rope", "hf_backend", "os.path", "../llama"])
def test_only_model_files_are_models(name: str) -> None:
    assert architecture(name) is None


@pytest.mark.parametrize("found", [None, 7, "", "../llama", "a/b"])
def test_a_model_type_must_be_a_name(found: object) -> None:
    with pytest.raises(CheckpointError, match="model_type: expected a name"):
        model_type({"model_type": found})


def test_an_unsupported_rope_type_is_an_unsupported_error() -> None:
    with pytest.raises(UnsupportedError):
        read(rope_scaling={"rope_type": "mrope"})


def test_an_activation_with_numbers_of_its_own_has_no_place_beside_a_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The product of gate and up takes none; Apertus has no gate."""
    apertus = tiny("apertus").config.to_dict()
    assert ModelConfig.from_dict(apertus).activation == "xielu"
    known = architecture("apertus")
    assert known is not None
    gated = known._replace(layer=LayerRules())
    monkeypatch.setattr("sdk.models.configs.config.architecture", lambda name: gated)
    with pytest.raises(UnsupportedError, match=r"hidden_act: expected .* found 'xielu'"):
        ModelConfig.from_dict(apertus)
