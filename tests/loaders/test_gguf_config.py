"""GGUF metadata as the configs of single architectures."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError

Save = Callable[..., Path]


# -- configs of single architectures ---------------------------------------------------------------


def as_architecture(files: Any, name: str, **metadata: tuple[int, Any]) -> Any:
    """The tiny llama under another architecture's name."""
    model = files.llama()
    model.metadata = {
        key.replace("llama.", f"{name}."): value for key, value in model.metadata.items()
    }
    model.metadata["general.architecture"] = (8, name)
    model.metadata |= {f"{name}.{key.replace('__', '.')}": v for key, v in metadata.items()}
    return model


def config_of(model: Any, save: Save) -> dict[str, Any]:
    return dict(open_checkpoint(save(model.build())).config)


def test_a_llama_with_a_sliding_window_is_a_mistral(files: Any, save: Save) -> None:
    config = config_of(as_architecture(files, "llama", attention__sliding_window=(4, 16)), save)
    assert (config["model_type"], config["sliding_window"]) == ("mistral", 16)


def test_gemma_2_alternates_and_caps_its_logits(files: Any, save: Save) -> None:
    model = as_architecture(files, "gemma2", block_count=(4, 3))
    config = config_of(model, save)
    assert config["layer_types"] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50, 30)
    assert (config["sliding_window"], config["query_pre_attn_scalar"]) == (4096, 8)


def test_the_27b_gemmas_scale_by_hidden_size_per_head(files: Any, save: Save) -> None:
    model = as_architecture(files, "gemma3", block_count=(4, 62), attention__key_length=(4, 16))
    assert config_of(model, save)["query_pre_attn_scalar"] == 8
    model.metadata["gemma3.block_count"] = (4, 34)
    assert config_of(model, save)["query_pre_attn_scalar"] == 16


def test_gemma_3_scales_positions_of_global_layers_only(files: Any, save: Save) -> None:
    model = as_architecture(
        files, "gemma3", rope__scaling__type=(8, "linear"), rope__scaling__factor=(6, 8.0),
        rope__freq_base=(6, 1e6), attention__sliding_window=(4, 16),
    )  # fmt: skip
    config = config_of(model, save)
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }


def test_gemma_3_without_a_window_has_global_layers_only(files: Any, save: Save) -> None:
    assert config_of(as_architecture(files, "gemma3"), save)["layer_types"] == ["full_attention"]


def test_a_stored_pattern_of_local_layers_is_used(files: Any, save: Save) -> None:
    window = {"attention__sliding_window": (4, 16), "block_count": (4, 3)}
    stored = {"attention__sliding_window_pattern": (9, (7, [False, True, True]))}
    model = as_architecture(files, "gemma3", **window, **stored)
    assert config_of(model, save)["layer_types"] == [
        "full_attention", "sliding_attention", "sliding_attention",
    ]  # fmt: skip
    model = as_architecture(
        files, "gemma3", **window, attention__sliding_window_pattern=(9, (7, [True]))
    )
    with pytest.raises(CheckpointError, match=r"sliding_window_pattern.*expected 3 values"):
        config_of(model, save)


def test_granite_keeps_its_multipliers(files: Any, save: Save) -> None:
    model = as_architecture(
        files, "granite", attention__scale=(6, 0.015625), embedding_scale=(6, 12.0),
        residual_scale=(6, 0.22), logit_scale=(6, 8.0),
    )  # fmt: skip
    config = config_of(model, save)
    assert config["attention_multiplier"] == 0.015625
    assert config["embedding_multiplier"] == 12.0
    assert config["residual_multiplier"] == 0.22
    assert config["logits_scaling"] == 8.0


def test_granite_without_an_attention_scale_uses_the_head_size(files: Any, save: Save) -> None:
    config = config_of(as_architecture(files, "granite"), save)
    assert config["attention_multiplier"] == 8**-0.5
    assert config["embedding_multiplier"] == config["logits_scaling"] == 1.0


def test_phi_3_factors_become_longrope(files: Any, save: Save) -> None:
    model = as_architecture(
        files, "phi3", rope__dimension_count=(4, 6), rope__scaling__attn_factor=(6, 1.19),
        rope__scaling__original_context_length=(4, 16),
    )  # fmt: skip
    for name, values in (("long", [2, 3, 4]), ("short", [1, 1, 2])):
        raw = np.array(values, "<f4").tobytes()
        model.tensors[f"rope_factors_{name}.weight"] = ((3,), 0, raw)
    checkpoint = open_checkpoint(save(model.build()))
    assert checkpoint.config["partial_rotary_factor"] == 0.75
    assert checkpoint.config["original_max_position_embeddings"] == 16
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "longrope", "long_factor": [2, 3, 4], "short_factor": [1, 1, 2],
        "attention_factor": 1.19, "original_max_position_embeddings": 16,
    }  # fmt: skip
    assert not any("rope_factors" in name for name in checkpoint.unused())
    del model.tensors["rope_factors_short.weight"]
    with pytest.raises(CheckpointError, match=r"'rope_factors_short.weight' is missing"):
        config_of(model, save)


def test_olmo_2_with_a_window_is_olmo_3(files: Any, save: Save) -> None:
    assert config_of(as_architecture(files, "olmo2"), save)["model_type"] == "olmo2"
    model = as_architecture(files, "olmo2", attention__sliding_window=(4, 16), block_count=(4, 4))
    config = config_of(model, save)
    assert config["model_type"] == "olmo3"
    assert config["layer_types"] == ["sliding_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        ({}, None),
        ({"type": (8, "none")}, None),
        ({"type": (8, "linear"), "factor": (6, 4.0)}, {"rope_type": "linear", "factor": 4.0}),
        ({"type": (8, "linear"), "factor": (6, 0.0)}, None),
        (
            {
                "type": (8, "yarn"), "factor": (6, 4.0), "original_context_length": (4, 32),
                "yarn_beta_fast": (6, 32.0), "yarn_attn_factor": (6, 1.0),
            },
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                "beta_fast": 32.0,
            },
        ),
    ],
)  # fmt: skip
def test_rope_scaling_is_translated(
    files: Any, save: Save, metadata: dict[str, Any], expected: dict[str, Any] | None
) -> None:
    named = {f"rope__scaling__{key}": value for key, value in metadata.items()}
    assert config_of(as_architecture(files, "qwen2", **named), save)["rope_scaling"] == expected


def test_sampling_defaults_and_end_tokens_are_kept(files: Any, save: Save) -> None:
    model = files.llama()
    model.metadata |= {
        "general.sampling.temp": (6, 0.6),
        "general.sampling.top_k": (5, 20),
        "tokenizer.ggml.eot_token_id": (4, 3),
    }
    found = open_checkpoint(save(model.build())).generation_config
    assert found == {"temperature": 0.6, "top_k": 20, "eos_token_id": [2, 3]}


def test_equal_heads_of_all_layers_may_be_an_array(files: Any, save: Save) -> None:
    heads = {"attention__head_count": (9, (4, [4])), "attention__head_count_kv": (9, (4, [2]))}
    config = config_of(as_architecture(files, "llama", **heads), save)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
