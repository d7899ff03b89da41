"""GGUF files as checkpoints: names, undone transforms, configs, and contradictions."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk.loaders.gguf_files.names import gguf_name
from sdk.loaders.open import open_checkpoint
from sdk.models.architecture import architectures
from sdk.quant.errors import CheckpointError
from sdk.quant.weight import BlockWeight, DenseWeight

Save = Callable[..., Path]
GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_FILES = sorted(GOLDEN.glob("*/model.gguf"))


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
    fixture: str, files: Any, request: pytest.FixtureRequest
) -> None:
    checkpoint = open_checkpoint(request.getfixturevalue(fixture))
    progress: list[tuple[int, int]] = []
    checkpoint.on_bytes = lambda done, total: progress.append((done, total))
    files.pull_all(checkpoint)
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
from sdk.models.architecture import architectures
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


@pytest.mark.quick_cases(1)
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
    assert str(q4.weight("model.layers.0.mlp.up_proj").spec) == "q4_0"
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
    files.pull_all(checkpoint)
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


def test_a_file_without_a_vocabulary_has_no_tokenizer(files: Any, save: Save) -> None:
    model = files.llama()
    model.metadata = {k: v for k, v in model.metadata.items() if not k.startswith("tokenizer")}
    checkpoint = open_checkpoint(save(model.build()))
    assert checkpoint.tokenizer is None
    assert checkpoint.config["vocab_size"] == 8


def test_the_tokenizer_of_a_file_comes_from_its_metadata(golden: Path) -> None:
    checkpoint = open_checkpoint(golden / "arch-llama3" / "model.gguf")
    ids = checkpoint.tokenizer.encode("hello")
    assert checkpoint.tokenizer.decode(ids) == "hello"
    assert checkpoint.tokenizer is checkpoint.tokenizer


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
    rules = [own.gguf for own in architectures() if own.gguf and own.gguf.name == architecture]
    assert rules
    assert [gguf_name(found, name) for found in rules] == [expected] * len(rules)
