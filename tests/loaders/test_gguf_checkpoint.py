"""GGUF files as checkpoints: names, undone transforms, configs, and contradictions."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk.kernels.errors import SdkError
from sdk.loaders.gguf_checkpoint import GgufCheckpoint
from sdk.loaders.gguf_names import gguf_name
from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import AffineWeight, BlockWeight, DenseWeight

Save = Callable[..., Path]
GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_FILES = sorted(GOLDEN.glob("*/model.gguf"))
MATRICES = (
    "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
    "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
)  # fmt: skip
VECTORS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm", "self_attn.q_norm", "self_attn.k_norm",
)  # fmt: skip


def pull_all(checkpoint: Any) -> None:
    """What a model's constructors do, without knowing the model."""
    checkpoint.weight("model.embed_tokens")
    checkpoint.tensor("model.norm.weight")
    if checkpoint.has("lm_head"):
        checkpoint.weight("lm_head")
    for layer in range(checkpoint.config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name in (*MATRICES, "self_attn.qkv_proj", "mlp.gate_up_proj"):
            if checkpoint.has(prefix + name):
                checkpoint.weight(prefix + name)
            if checkpoint.has(f"{prefix}{name}.bias"):
                checkpoint.tensor(f"{prefix}{name}.bias")
        for name in VECTORS:
            if checkpoint.has(f"{prefix}{name}.weight"):
                checkpoint.tensor(f"{prefix}{name}.weight")


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.parent.name)
def test_the_rows_of_the_golden_files_are_exact(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    golden = np.load(path.parent / "golden.npz")
    names = [name for name in golden.files if name.startswith("w_")]
    assert names
    for name in names:
        weight = checkpoint.weight(f"model.layers.{name[2:]}")
        assert np.array_equal(weight.dequantize()[:8].numpy(), golden[name]), name


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("arch-*")), ids=lambda path: path.name)
def test_a_gguf_file_holds_the_model_it_was_made_from(folder: Path) -> None:
    ours, original = open_checkpoint(folder / "model.gguf"), open_checkpoint(folder / "hf")
    for entry in original.entries():
        name = entry.name
        if len(entry.shape) == 2:
            stem = name.removesuffix(".weight")
            values = ours.weight(stem).dequantize()
            assert torch.equal(values, original.weight(stem).dequantize()), name
        else:
            assert torch.equal(ours.tensor(name), original.tensor(name)), name
    assert ours.unused() == original.unused() == []


@pytest.mark.parametrize("folder", sorted(GOLDEN.glob("arch-*")), ids=lambda path: path.name)
def test_the_config_of_a_gguf_file_agrees_with_the_original(folder: Path) -> None:
    ours, original = (dict(open_checkpoint(folder / name).config) for name in ("model.gguf", "hf"))
    rope = original.pop("rope_parameters")
    if "rope_parameters" in ours:
        assert ours.pop("rope_parameters") == rope
    else:
        assert ours["rope_theta"] == rope["rope_theta"]
    shared = ours.keys() & original.keys()
    assert len(shared) >= 14
    assert {key: ours[key] for key in shared} == {key: original[key] for key in shared}


def test_llama_3_factors_become_part_of_the_config(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / "arch-llama3" / "model.gguf")
    scaling = checkpoint.config["rope_scaling"]
    assert scaling["rope_type"] == "freq_factors"
    assert len(scaling["factors"]) == 8
    assert scaling["factors"][0] == 1.0
    assert max(scaling["factors"]) > 1.0


@pytest.mark.parametrize("fixture", ["smollm2", "gemma3"])
def test_a_real_model_is_read_to_the_last_tensor(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(fixture))
    progress: list[tuple[int, int]] = []
    checkpoint.on_bytes = lambda done, total: progress.append((done, total))
    pull_all(checkpoint)
    assert checkpoint.unused() == []
    assert progress == sorted(progress)
    assert len(progress) == len(checkpoint.entries())
    assert progress[-1][0] == progress[-1][1] == sum(e.nbytes for e in checkpoint.entries())


def test_gemma_3_270m_is_described_as_its_original(gemma3: Path) -> None:
    config = open_checkpoint(gemma3).config
    expected = {
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 256, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "sliding_window": 512, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
        "tie_word_embeddings": True, "vocab_size": 262144, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    assert {key: config[key] for key in expected} == expected
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 3


_MEASURE = """
import resource, sys, torch
from sdk.loaders.open import open_checkpoint
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
checkpoint = open_checkpoint(sys.argv[1])
names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
names += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
weights = [checkpoint.weight("model.embed_tokens")]
for layer in range(checkpoint.config["num_hidden_layers"]):
    weights += [checkpoint.weight(f"model.layers.{layer}.{name}") for name in names]
print(peak() - before, sum(weight.nbytes for weight in weights))
"""


@pytest.mark.parametrize("fixture", ["smollm2", "gemma3"])
def test_a_load_peaks_near_the_size_of_the_file(
    fixture: str, request: pytest.FixtureRequest
) -> None:
    """Pages already repacked are given back: without that the peak is twice the file."""
    path = request.getfixturevalue(fixture)
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", _MEASURE, str(path)]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    peak, packed = map(int, done.stdout.split())
    size = path.stat().st_size
    assert 0.9 * size < packed <= size
    assert peak < size + (40 << 20)


# -- pulling ---------------------------------------------------------------------------------------


def test_layouts_follow_the_types_of_the_file(golden: Path) -> None:
    mixed = open_checkpoint(golden / "gguf-Q4_K_M" / "model.gguf")
    assert isinstance(mixed.weight("lm_head"), BlockWeight)
    q4 = open_checkpoint(golden / "gguf-Q4_0" / "model.gguf")
    assert isinstance(q4.weight("model.layers.0.mlp.up_proj"), AffineWeight)
    dense = open_checkpoint(golden / "arch-qwen3" / "model.gguf")
    weight = dense.weight("model.layers.0.mlp.up_proj")
    assert isinstance(weight, DenseWeight)
    assert str(weight.spec) == "f16"


def test_weights_stay_valid_after_close(files: Any, save: Save) -> None:
    checkpoint = open_checkpoint(save(files.llama().build()))
    weight = checkpoint.weight("model.layers.0.mlp.up_proj")
    before = weight.dequantize().clone()
    checkpoint.close()
    checkpoint.close()
    assert torch.equal(weight.dequantize(), before)
    with pytest.raises(CheckpointError, match=r"closed"):
        checkpoint.weight("model.layers.0.mlp.up_proj")


def test_a_plain_tensor_may_be_changed_without_changing_the_file(files: Any, save: Save) -> None:
    checkpoint = open_checkpoint(save(files.llama().build()))
    first = checkpoint.tensor("model.norm.weight")
    first.zero_()
    assert checkpoint.tensor("model.norm.weight").abs().max() > 0


def test_an_exception_of_the_progress_hook_stops_the_pull(files: Any, save: Save) -> None:
    checkpoint = open_checkpoint(save(files.llama().build()))

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    checkpoint.on_bytes = stop
    with pytest.raises(KeyboardInterrupt):
        checkpoint.weight("lm_head" if checkpoint.has("lm_head") else "model.embed_tokens")


def test_progress_counts_a_tensor_once(files: Any, save: Save) -> None:
    checkpoint = open_checkpoint(save(files.llama().build()))
    seen: list[int] = []
    checkpoint.on_bytes = lambda done, total: seen.append(done)
    checkpoint.weight("model.embed_tokens")
    checkpoint.weight("model.embed_tokens")
    assert seen == [8 * 32 * 4]


def test_entries_and_left_overs_carry_the_names_of_the_file(files: Any, save: Save) -> None:
    model = files.llama()
    model.tensors["blk.1.attn_q.weight"] = ((32, 32), 0, files.f32(32, 32))
    checkpoint = open_checkpoint(save(model.build()))
    pull_all(checkpoint)
    assert checkpoint.unused() == ["blk.1.attn_q.weight"]
    entry = checkpoint.entries()[0]
    assert (entry.name, entry.shape, entry.format) == ("token_embd.weight", (8, 32), "F32")
    assert (entry.nbytes, entry.bits_per_weight) == (1024, 32)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "model.layers.7.mlp.up_proj",
            "model.layers.7.mlp.up_proj is missing.*blk.7.ffn_up.weight",
        ),
        ("model.layers.0.mlp.gate_up_proj", "gate_up_proj is missing.*'llama' has no such tensor"),
        ("model.layers.0.self_attn.q_proj.bias", "blk.0.attn_q.bias"),
        ("visual.patch_embed", "visual.patch_embed is missing"),
        ("lm_head", "lm_head is missing.*'output.weight'"),
    ],
)
def test_a_missing_tensor_is_named_with_the_name_tried(
    files: Any, save: Save, name: str, message: str
) -> None:
    checkpoint = open_checkpoint(save(files.llama().build()))
    assert not checkpoint.has(name)
    with pytest.raises(CheckpointError, match=message):
        checkpoint.weight(name)


def test_a_vector_is_not_a_matrix(files: Any, save: Save) -> None:
    checkpoint = open_checkpoint(save(files.llama().build()))
    with pytest.raises(CheckpointError, match=r"output_norm.weight.*expected a matrix"):
        checkpoint.weight("model.norm")


def test_interleaved_rows_are_put_back_for_weights_and_biases(files: Any, save: Save) -> None:
    heads, half = 4, 4
    original = np.arange(32, dtype="<f4")
    # Row (h, i, j) of the file is row (h, j, i) of the model: i counts pairs, j its two members.
    stored = [
        original[h * 2 * half + j * half + i]
        for h in range(heads)
        for i in range(half)
        for j in range(2)
    ]
    model = files.llama()
    rows = np.repeat(np.array(stored, "<f4")[:, None], 32, axis=1)
    model.tensors["blk.0.attn_q.weight"] = ((32, 32), 0, rows.tobytes())
    model.tensors["blk.0.attn_q.bias"] = ((32,), 0, np.array(stored, "<f4").tobytes())
    checkpoint = open_checkpoint(save(model.build()))
    name = "model.layers.0.self_attn.q_proj"
    assert checkpoint.weight(name).dequantize()[:, 0].tolist() == original.tolist()
    assert checkpoint.tensor(f"{name}.bias").tolist() == original.tolist()
    assert checkpoint.config["attention_bias"] is True


def test_a_tensor_with_a_scale_that_is_not_finite_is_refused(golden: Path, save: Save) -> None:
    path = golden / "gguf-Q4_0" / "model.gguf"
    raw = bytearray(path.read_bytes())
    stored = open_checkpoint(path)._opened().tensors["blk.0.ffn_up.weight"]  # type: ignore[attr-defined]
    raw[stored.start : stored.start + 2] = b"\x00\x7c"
    checkpoint = open_checkpoint(save(bytes(raw)))
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight': a scale in row 0 is inf"):
        checkpoint.weight("model.layers.0.mlp.up_proj")


# -- names -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "name", "expected"),
    [
        ("llama", "model.embed_tokens", "token_embd.weight"),
        ("llama", "model.layers.12.post_attention_layernorm.weight", "blk.12.ffn_norm.weight"),
        ("qwen2", "model.layers.0.self_attn.k_proj.bias", "blk.0.attn_k.bias"),
        ("qwen3", "model.layers.0.self_attn.q_norm.weight", "blk.0.attn_q_norm.weight"),
        ("gemma2", "model.layers.0.input_layernorm.weight", "blk.0.attn_norm.weight"),
        (
            "gemma2",
            "model.layers.0.post_attention_layernorm.weight",
            "blk.0.post_attention_norm.weight",
        ),
        ("gemma3", "model.layers.0.pre_feedforward_layernorm.weight", "blk.0.ffn_norm.weight"),
        (
            "gemma3",
            "model.layers.0.post_feedforward_layernorm.weight",
            "blk.0.post_ffw_norm.weight",
        ),
        ("olmo2", "model.layers.0.post_feedforward_layernorm.weight", "blk.0.post_ffw_norm.weight"),
        ("phi3", "model.layers.0.self_attn.qkv_proj", "blk.0.attn_qkv.weight"),
        ("phi3", "model.layers.0.mlp.gate_up_proj", "blk.0.ffn_up.weight"),
        ("granite", "lm_head", "output.weight"),
        ("llama", "model.layers.0.mlp.experts.0.up_proj", None),
        ("llama", "model.layers.99999999999.mlp.up_proj", None),
    ],
)  # fmt: skip
def test_names_follow_the_architecture(architecture: str, name: str, expected: str | None) -> None:
    assert gguf_name(architecture, name) == expected


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
                "yarn_beta_fast": (6, 32.0), "yarn_attn_factor": (6, 1.1),
            },
            {
                "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32,
                "beta_fast": 32.0, "attention_factor": 1.1,
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


# -- files that contradict themselves --------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, tuple[int, Any]], str]] = [
    ({"llama.block_count": (4, 0)}, "block_count is 0, expected an integer from 1 to 512"),
    ({"llama.block_count": (4, 2**31)}, "block_count is 2147483648, expected an integer"),
    ({"llama.block_count": (8, "1")}, "block_count is 1, expected an integer"),
    ({"llama.embedding_length": (10, 2**40)}, "embedding_length is 1099511627776"),
    ({"llama.attention.head_count": (4, 0)}, "head_count is 0"),
    ({"llama.attention.head_count": (4, 5)}, "head_count is 5, expected a divisor of 32"),
    ({"llama.attention.head_count": (9, (4, [4, 4]))}, "an array of 2, expected 1 integers"),
    ({"llama.attention.head_count": (9, (4, [0]))}, "head_count is 0, expected integers from 1"),
    ({"llama.attention.head_count_kv": (4, 3)}, "4 attention heads are not a multiple of 3"),
    ({"llama.attention.head_count_kv": (4, 8)}, "4 attention heads are not a multiple of 8"),
    ({"llama.attention.layer_norm_rms_epsilon": (6, 0.0)}, "rms_norm_eps is 0.0, expected a posi"),
    ({"llama.attention.layer_norm_rms_epsilon": (6, float("nan"))}, "expected a finite number"),
    ({"llama.rope.freq_base": (6, float("inf"))}, "freq_base is inf, expected a finite number"),
    ({"llama.rope.freq_base": (8, "1e4")}, "freq_base is 1e4, expected a finite number"),
    ({"llama.rope.dimension_count": (4, 64)}, "dimension_count is 64, expected an even number"),
    ({"llama.rope.freq_base": (12, 1e300)}, "freq_base is 1e.300, expected a finite number"),
    ({"llama.rope.scaling.type": (4, 1)}, "scaling.type is 1, expected a name"),
    ({"llama.expert_count": (4, 1025)}, "expert_count is 1025, expected an integer from 0 to 1024"),
    ({"llama.rope.scaling.type": (8, "magic")}, "scaling.type is magic, expected none, linear"),
    ({"llama.rope.scaling.type": (8, "longrope")}, "rope_factors_long.weight"),
    ({"llama.rope.scaling.factor": (6, -2.0)}, "factor is -2.0, expected a positive number"),
    ({"general.architecture": (4, 7)}, "general.architecture is 7, expected a name"),
    ({"tokenizer.ggml.eos_token_id": (4, 8)}, "eos_token_id is 8, expected 0 to 7"),
    ({"tokenizer.ggml.bos_token_id": (5, -1)}, "bos_token_id is -1, expected 0 to 7"),
    ({"tokenizer.ggml.tokens": (9, (8, ["a"]))}, "tokens has 1 entries.*has 8 rows"),
    ({"tokenizer.ggml.scores": (9, (6, [0.5] * 7))}, "scores has 7 entries"),
    ({"tokenizer.ggml.token_type": (9, (5, [1] * 9))}, "token_type has 9 entries"),
    ({"tokenizer.ggml.token_type": (4, 1)}, "token_type is not an array"),
]


@pytest.mark.parametrize(("metadata", "message"), CONTRADICTIONS)
def test_impossible_metadata_are_named(
    files: Any, save: Save, metadata: dict[str, tuple[int, Any]], message: str
) -> None:
    model = files.llama()
    model.metadata |= metadata
    path = save(model.build())
    with pytest.raises(CheckpointError, match=message) as caught:
        open_checkpoint(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "feed_forward_length",
            "attention.head_count", "attention.layer_norm_rms_epsilon"]
)  # fmt: skip
def test_missing_metadata_are_named(files: Any, save: Save, key: str) -> None:
    model = files.llama()
    del model.metadata[f"llama.{key}"]
    with pytest.raises(CheckpointError, match=f"llama.{key} is missing"):
        open_checkpoint(save(model.build()))


def test_a_missing_architecture_is_named(files: Any, save: Save) -> None:
    model = files.llama()
    del model.metadata["general.architecture"]
    with pytest.raises(CheckpointError, match=r"general.architecture is None"):
        open_checkpoint(save(model.build()))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": (8, "rwkv7")}, "'rwkv7' is not run.*llama, qwen2"),
        ({"llama.expert_count": (4, 8)}, "mixture-of-experts"),
        ({"llama.attention.value_length": (4, 16)}, "keys of length 8 with values of length 16"),
        (
            {"llama.block_count": (4, 2), "llama.attention.head_count_kv": (9, (4, [2, 4]))},
            "head_count_kv differs from layer to layer",
        ),
    ],
)
def test_what_is_sound_but_not_run_is_told_apart(
    files: Any, save: Save, metadata: dict[str, Any], message: str
) -> None:
    model = files.llama()
    model.metadata |= metadata
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(save(model.build()))


def test_a_file_without_an_embedding_is_refused(files: Any, save: Save) -> None:
    model = files.llama()
    del model.tensors["token_embd.weight"]
    with pytest.raises(CheckpointError, match=r"token_embd.weight is missing"):
        open_checkpoint(save(model.build()))


def test_shapes_that_disagree_with_the_metadata_are_named(files: Any, save: Save) -> None:
    model = files.llama()
    model.metadata["llama.feed_forward_length"] = (4, 128)
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(
        CheckpointError, match=r"blk.0.ffn_up.weight.*\[64, 32\].*\[128, 32\].*layers.0.mlp.up_proj"
    ):
        checkpoint.weight("model.layers.0.mlp.up_proj")
    model.metadata["llama.embedding_length"] = (4, 64)
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(CheckpointError, match=r"output_norm.weight.*\[32\].*\[64\]"):
        checkpoint.tensor("model.norm.weight")


def test_rope_factors_must_be_positive_and_fit(files: Any, save: Save) -> None:
    model = files.llama()
    model.tensors["rope_freqs.weight"] = ((4,), 0, np.array([1, 1, 0, 1], "<f4").tobytes())
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight.*not positive"):
        open_checkpoint(save(model.build()))
    model.tensors["rope_freqs.weight"] = ((3,), 0, np.ones(3, "<f4").tobytes())
    with pytest.raises(CheckpointError, match=r"rope_freqs.weight.*\[3\], expected F32 \[4\]"):
        open_checkpoint(save(model.build()))


def test_rows_that_do_not_divide_into_pairs_are_refused(files: Any, save: Save) -> None:
    model = files.llama()
    model.metadata |= {
        "llama.attention.key_length": (4, 9),
        "llama.rope.dimension_count": (4, 8),
    }
    model.tensors["blk.0.attn_q.weight"] = ((32, 36), 0, files.f32(36, 32))
    checkpoint = open_checkpoint(save(model.build()))
    with pytest.raises(CheckpointError, match=r"36 rows do not divide into 4 heads of pairs"):
        checkpoint.weight("model.layers.0.self_attn.q_proj")


OTHER_TYPES: list[tuple[int, Any]] = [
    (4, 0), (5, -1), (10, 2**64 - 1), (11, -(2**63)), (6, float("nan")), (6, -0.0), (12, 1e300),
    (7, True), (8, ""), (8, "x" * 1000), (9, (4, [])), (9, (4, [1, 2])), (9, (8, ["a", "b"])),
    (9, (9, [(4, [1]), (8, ["a"])])), (9, (6, [0.5] * 8)), (9, (7, [True] * 8)),
]  # fmt: skip
OPTIONAL_KEYS = [
    "split.count", "split.no", "split.tensors.count", "general.alignment", "general.sampling.temp",
    "tokenizer.ggml.scores", "llama.vocab_size", "llama.expert_count", "llama.attention.key_length",
    "llama.attention.value_length", "llama.attention.sliding_window", "llama.rope.freq_base",
    "llama.rope.dimension_count", "llama.rope.scaling.type", "llama.rope.scaling.factor",
    "llama.rope.scaling.original_context_length", "llama.rope.scaling.yarn_beta_fast",
]  # fmt: skip


def test_no_value_of_another_type_fails_in_another_way_than_by_an_error(
    files: Any, save: Save
) -> None:
    keys = [*files.llama().metadata, *OPTIONAL_KEYS]
    read = 0
    for key in keys:
        for value in OTHER_TYPES:
            model = files.llama()
            model.metadata[key] = value
            try:
                pull_all(open_checkpoint(save(model.build())))
                read += 1
            except SdkError:
                pass
    assert 0 < read < len(keys) * len(OTHER_TYPES) / 2


def test_no_mutated_file_fails_in_another_way_than_by_an_error(files: Any, save: Save) -> None:
    model = files.llama()
    raw = model.build()
    rng = random.Random(7)
    read = 0
    for _ in range(500):
        mutant = bytearray(raw)
        for _ in range(rng.randint(1, 3)):
            mutant[rng.randrange(model.header_size)] = rng.choice(
                (0, 1, 0x7F, 0xFF, rng.randrange(256))
            )
        try:
            checkpoint = GgufCheckpoint(save(bytes(mutant)))
            pull_all(checkpoint)
            read += 1
        except SdkError:
            pass
    assert 0 < read < 450
