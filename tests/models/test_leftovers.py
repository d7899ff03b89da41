"""Every tensor of the language model is used, or the load says that it is not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdk
from sdk.loaders.open import open_checkpoint
from sdk.models.leftovers import Leftovers
from sdk.quant.errors import CheckpointError, UnsupportedError
from tests.gguf_models import gguf_of, save_gguf
from tests.models.conftest import DictCheckpoint, Paged, expected_logits, prompt, tiny

Load = Callable[..., Any]
EVERYTHING = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.mlp.up_proj.weight"]


def folder_of(model: Any, folder: Path, **more: Tensor) -> Path:
    """The model's folder with more tensors, whose names have two underscores for each dot."""
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    extra = {name.replace("__", "."): tensor for name, tensor in more.items()}
    save_file({**tensors, **extra}, folder / "model.safetensors", {"format": "pt"})
    return folder


def logits_of(load: Load, path: Path, ids: list[int]) -> Tensor:
    checkpoint = open_checkpoint(path)
    found = Paged(load(checkpoint)).run("a", ids)
    assert checkpoint.unused() == []
    return found


# -- a head beside tied embeddings -----------------------------------------------------------------


@pytest.mark.parametrize("model_type", ["llama", "qwen3", "gemma2", "granite", "olmo3"])
def test_a_head_of_the_files_own_is_used_whatever_the_config_says(
    model_type: str, tmp_path: Path, load: Load
) -> None:
    options = {"sliding_window": 8} if model_type in ("gemma2", "olmo3") else {}
    oracle = tiny(model_type, tie_word_embeddings=False, **options)
    oracle.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    ids = prompt(20, 1)
    found = logits_of(load, tmp_path, ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float().eval()
    assert (found - expected_logits(theirs, ids)).abs().max() <= 1e-4


def test_the_embedding_written_twice_is_in_memory_once(tmp_path: Path, load: Load) -> None:
    oracle = tiny("llama", tie_word_embeddings=True)
    path = folder_of(oracle, tmp_path, lm_head__weight=oracle.lm_head.weight.detach().clone())
    checkpoint = open_checkpoint(path)
    model = load(checkpoint)
    assert model.head.linear.weight is model.embedding.weight
    assert checkpoint.unused() == []
    assert "lm_head.weight" not in [entry.name for entry in checkpoint.entries()]
    with sdk.LLM(str(path), skip_tokenizer_init=True, max_model_len=64) as llm:
        assert llm.load_warnings == ()


def test_a_head_that_differs_in_one_number_is_a_head_of_its_own(tmp_path: Path) -> None:
    oracle = tiny("llama", tie_word_embeddings=True)
    head = oracle.lm_head.weight.detach().clone()
    head[-1, -1] += 1
    checkpoint = open_checkpoint(folder_of(oracle, tmp_path, lm_head__weight=head))
    assert checkpoint.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("model_type", ["qwen3", "mistral"])
def test_a_body_without_a_head_embeds_and_does_not_generate(
    model_type: str, tmp_path: Path
) -> None:
    """As embedding models are published: ``Qwen3Model``, names without ``model.``, not tied."""
    oracle = tiny(model_type, tie_word_embeddings=False, sliding_window=None)
    oracle.model.save_pretrained(tmp_path)
    prompts = [{"prompt_token_ids": prompt(20, 1)}]
    with torch.no_grad():
        expected = oracle.model(input_ids=torch.tensor([prompt(20, 1)])).last_hidden_state[0, -1]
    with sdk.LLM(tmp_path, skip_tokenizer_init=True, max_model_len=64, compute="exact") as llm:
        [found] = llm.encode(prompts, pooling="last", normalize=False)
        assert (torch.tensor(found.outputs.data) - expected).abs().max() <= 1e-4
        assert llm.load_warnings == ()
        with pytest.raises(sdk.RequestError, match=r"without a head .* cannot generate; use"):
            llm.generate(prompts)
    with pytest.raises(UnsupportedError, match="classifier_from_token: expected a model with"):
        sdk.LLM(
            tmp_path,
            skip_tokenizer_init=True,
            max_model_len=64,
            hf_overrides={"classifier_from_token": ["yes", "no"]},
        )


def test_a_causal_language_model_must_have_its_head(tmp_path: Path) -> None:
    oracle = tiny("qwen3", tie_word_embeddings=False)
    oracle.model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["architectures"] = ["Qwen3ForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="lm_head is missing"):
        sdk.LLM(tmp_path, skip_tokenizer_init=True, max_model_len=64)


# -- biases ----------------------------------------------------------------------------------------

SUBSETS = {
    "llama": ("q_proj",),
    "qwen2": ("k_proj",),
    "qwen3": ("q_proj", "k_proj", "v_proj"),
    "granite": ("o_proj", "up_proj"),
    "gemma2": ("v_proj", "down_proj"),
    "olmo2": ("gate_proj", "o_proj"),
    "olmo3": ("q_proj", "o_proj"),
}


@pytest.mark.parametrize(("model_type", "parts"), SUBSETS.items())
def test_a_gguf_file_may_have_any_biases(
    model_type: str, parts: tuple[str, ...], tmp_path: Path, load: Load
) -> None:
    options: dict[str, Any] = {"tie_word_embeddings": False}
    metadata: dict[str, tuple[int, Any]] = {}
    if model_type in ("gemma2", "olmo3"):
        options["sliding_window"] = 8
        metadata["attention.sliding_window"] = (4, 8)
    if model_type == "gemma2":
        options["query_pre_attn_scalar"] = 16  # files do not say it: the head size
    oracle = tiny(model_type, **options)
    if model_type == "granite":
        metadata |= {
            "attention.scale": (6, oracle.config.attention_multiplier),
            "embedding_scale": (6, oracle.config.embedding_multiplier),
            "residual_scale": (6, oracle.config.residual_multiplier),
            "logit_scale": (6, oracle.config.logits_scaling),
        }
    for name, module in oracle.named_modules():
        if type(module) is torch.nn.Linear and name.startswith("model.layers."):
            size = len(module.weight)
            has = name.rpartition(".")[2] in parts
            values = torch.sin(torch.arange(size) * 1.7) * 0.5 if has else None
            module.bias = None if values is None else torch.nn.Parameter(values)
    ids = prompt(20, 4)
    path = save_gguf(tmp_path / "m.gguf", gguf_of(oracle, metadata))
    found = logits_of(load, path, ids)
    assert (found - expected_logits(oracle, ids)).abs().max() <= 1e-4


# -- what is left over -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.input_layernorm.bias",
        "model.layers.0.self_attn.sinks",
        "model.layers.0.mlp.gate.e_score_correction_bias",
        "model.norm.bias",
        "lm_head.bias",
    ],
)
def test_an_unknown_tensor_of_the_language_model_stops_the_load(name: str, tmp_path: Path) -> None:
    path = folder_of(tiny("llama"), tmp_path, **{name.replace(".", "__"): torch.ones(4)})
    with pytest.raises(CheckpointError, match=rf"use every tensor.*found '{name}' unused.*config"):
        sdk.LLM(str(path), skip_tokenizer_init=True, max_model_len=64)


@pytest.mark.parametrize("name", ["blk.1.attn_norm.bias", "position_embd.weight", "output.bias"])
def test_an_unknown_tensor_of_a_gguf_file_stops_the_load(name: str, tmp_path: Path) -> None:
    file = gguf_of(tiny("llama", tie_word_embeddings=False))
    file.tensors[name] = ((4,), 0, bytes(16))
    path = save_gguf(tmp_path / "m.gguf", file)
    with pytest.raises(CheckpointError, match=rf"m.gguf: .*found '{name}' unused"):
        sdk.LLM(str(path), skip_tokenizer_init=True, max_model_len=64)


def test_what_changes_nothing_is_reported(tmp_path: Path) -> None:
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.1.self_attn.rotary_emb.inv_freq": torch.ones(8),
        "model.layers.3.eh_proj.weight": torch.ones(4, 4),
        "vision_tower.x.weight": torch.ones(4),
    }
    names = {name.replace(".", "__"): values for name, values in extra.items()}
    path = folder_of(tiny("llama"), tmp_path, **names)
    with sdk.LLM(str(path), skip_tokenizer_init=True, max_model_len=64) as llm:
        assert sorted(llm.load_warnings) == [
            "2 unused tensors, such as model.layers.0.self_attn.rotary_emb.inv_freq (computed from "
            "the config)",
            "unused tensor model.layers.3.eh_proj.weight (of layers after the model's 3)",
            "unused tensor vision_tower.x.weight (beside the language model)",
        ]
        assert all(warning in llm.explain() for warning in llm.load_warnings)


def test_many_leftovers_are_counted_and_their_reasons_are_told_apart() -> None:
    left = [f"model.layers.0.x.{index}" for index in range(5)]
    found = Leftovers.of(left, [*EVERYTHING, *left], 2)
    with pytest.raises(CheckpointError, match=r"'model.layers.0.x.2' and 2 more unused"):
        found.check(DictCheckpoint.path, "llama")
    harmless = ["model.mtp.0.norm.weight", "model.layers.0.mlp.up_proj.input_scale", "model.odd"]
    found = Leftovers.of(harmless, [*EVERYTHING, *harmless], 2, ignored=[r"^model\.odd$"])
    assert found.of_the_model == ()
    assert [why for _, why in found.harmless] == [
        "of multi-token prediction",
        "of quantized activations or caches",
        "which transformers' model ignores",
    ]


@pytest.mark.parametrize("layer", ["model.layers.1.self_attn.{}_proj", "blk.1.attn_{}"])
def test_only_layers_that_read_keys_of_another_one_may_have_unused_matrices_for_them(
    layer: str,
) -> None:
    """Released files of Gemma 3n and 4 have them."""
    left = [f"{layer.format(part)}.weight" for part in "kv"]
    left.append(left[0].replace("_proj", "_norm").replace("attn_k.", "attn_k_norm."))
    found = Leftovers.of(left, left, 2, sharing=[1], only_text=True)
    assert found.of_the_model == ()
    assert {why for _, why in found.harmless} == {
        "of layers that read the keys and values of another one"
    }
    query = f"{layer.format('q')}.weight"
    for sharing, unused in ([], left), ([0], left), ([1], [query]):
        assert list(Leftovers.of(unused, left, 2, sharing=sharing, only_text=True)[0]) == unused


def test_a_tower_beside_the_language_model_of_a_multimodal_model_is_no_part_of_it() -> None:
    used = ["model.language_model.norm.weight", "lm_head.weight"]
    left = ["model.visual.norm.bias", "model.language_model.norm.bias"]
    found = Leftovers.of(left, [*used, *left], 2)
    assert found.of_the_model == ("model.language_model.norm.bias",)
