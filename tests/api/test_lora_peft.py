"""Adapters that peft saved give peft's log-probabilities, on every kind of file of the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from sdk import LLM
from tests.peft_adapters import expected, save, scores, with_peft

IDS = [1, 7, 44, 200, 13, 9, 9, 310, 2, 77, 5, 6]
OPTIONS: dict[str, Any] = {
    "max_model_len": 64,
    "compute": "exact",
    "enable_lora": True,
    "skip_tokenizer_init": True,
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
VARIANTS: dict[str, dict[str, Any]] = {
    "two": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 3, "lora_alpha": 5, "target_modules": ALL},
    "all-linear": {"r": 8, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 5, "lora_alpha": 7, "target_modules": ALL, "use_rslora": True},
    "patterns": {
        "r": 4,
        "target_modules": ALL,
        "rank_pattern": {"q_proj": 6, r"layers\.0\.mlp\..*": 2},
        "alpha_pattern": {r"^model\.layers\.[01]\.mlp\.(up|down)_proj": 11, "v_proj": 3},
    },
    "a-layer": {"r": 2, "target_modules": ["o_proj"], "layers_to_transform": [1]},
    "fan-in": {"r": 2, "target_modules": ["down_proj"], "fan_in_fan_out": True},
    "ends": {"r": 4, "target_modules": ["embed_tokens", "lm_head", "k_proj"]},
    "gaussian": {"r": 4, "target_modules": ALL, "init_lora_weights": "gaussian"},
    "orthogonal": {"r": 4, "target_modules": ALL, "init_lora_weights": "orthogonal"},
}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_of_the_config_is_followed(variant: str, golden: Path, tmp_path: Path) -> None:
    base = golden / "arch-llama3" / "hf"
    model = with_peft(base, **VARIANTS[variant])
    save(model, tmp_path / "adapter")
    with LLM(base, **OPTIONS) as llm:
        plain = scores(llm, IDS, None)
        llm.add_lora("a", tmp_path / "adapter")
        found = scores(llm, IDS, "a")
        assert (found - expected(model, IDS)).abs().max() < 2e-4
        assert (found - plain).abs().max() > 0.05
        assert (scores(llm, IDS, None) == plain).all()  # its pages are others


@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_are_those_of_the_adapter(bias: str, tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    base = transformers.Qwen2ForCausalLM(config)
    for name, parameter in base.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.1)
    base.save_pretrained(tmp_path / "base")
    model = with_peft(base, r=4, target_modules=["q_proj", "o_proj"], bias=bias)
    save(model, tmp_path / "adapter")
    with LLM(tmp_path / "base", **OPTIONS) as llm:
        llm.add_lora("a", tmp_path / "adapter")
        assert (scores(llm, IDS, "a") - expected(model, IDS)).abs().max() < 2e-4


def test_a_joined_matrix_has_one_adapter(tmp_path: Path) -> None:
    config = transformers.Phi3Config(
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    base = transformers.Phi3ForCausalLM(config)
    base.save_pretrained(tmp_path / "base")
    model = with_peft(base, r=4, target_modules=["qkv_proj", "gate_up_proj"])
    save(model, tmp_path / "adapter")
    with LLM(tmp_path / "base", **OPTIONS) as llm:
        llm.add_lora("a", tmp_path / "adapter")
        assert (scores(llm, IDS, "a") - expected(model, IDS)).abs().max() < 2e-4


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("file", ["hf", "model.gguf"])
@pytest.mark.parametrize("name", ["arch-llama3", "arch-qwen3", "arch-gemma3"])
def test_a_model_is_followed(name: str, file: str, golden: Path, tmp_path: Path) -> None:
    """GGUF files of llama hold the rows of q and k in another order, gemma's embedding is tied and
    scaled; F16 holds these weights exactly."""
    targets = [*ALL, "embed_tokens"]
    model = with_peft(golden / name / "hf", r=4, lora_alpha=6, target_modules=targets)
    save(model, tmp_path / "adapter")
    with LLM(golden / name / file, **OPTIONS) as llm:
        llm.add_lora("a", tmp_path / "adapter")
        found = scores(llm, IDS, "a")
        assert (found - expected(model, IDS)).abs().max() < 2e-4
        assert (found - scores(llm, IDS, None)).abs().max() > 0.05
