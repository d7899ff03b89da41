"""Quantizing hybrids, latent attention and blocks of multi-token prediction."""

from __future__ import annotations

import json
import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import sdk
from sdk.api.errors import UnsupportedError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.loaders.gguf_files.reader import read_gguf
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.rewritten_checkpoint import RewrittenCheckpoint
from sdk.quant.weight import Weight, weight_of
from sdk.testing import tiny_model
from tests.gguf_models import ARRAY, I32, U32, save_gguf
from tests.models.conftest import Paged, prompt, tiny
from tests.models.test_heads_of_kinds import _file as mimo_file, oracle_of
from tests.models.test_hybrids import written
from tests.models.test_rwkv import folder as rwkv_folder
from tests.models.tiny_architectures import ARCHITECTURES
from tests.next_token import LAYERS, parts_of, random_model, write_folder, write_gguf

_WIDE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "moe_intermediate_size": 64,
    "linear_value_head_dim": 16,
    "linear_key_head_dim": 16,
    "q_lora_rank": 48,
}
#: What must be what it was, to the bit: tensors of states, and small gates of delta nets.
_SAME = (
    "conv1d.weight",
    ".conv.weight",
    "A_log",
    "dt_bias",
    ".D",
    "in_proj_a.weight",
    "_ba.weight",
)
TEXT = [prompt(64, seed) for seed in range(4)]


def _check(path: Path, original: Path, most: float, *, latent: bool = False) -> None:
    """The result computes what its matrices say, which are those of the original but for a relative
    error of ``most`` (Frobenius)."""
    with closing(open_checkpoint(path)) as made, closing(open_checkpoint(original)) as source:

        def change(name: str, weight: Weight) -> Weight:
            values, before = made.weight(name).dequantize(), weight.dequantize()
            assert (values - before).norm() <= most * before.norm(), name
            return weight_of(Dense(values))

        logits = []
        for checkpoint in (open_checkpoint(path), RewrittenCheckpoint(source, change)):
            with closing(Ops(compute="exact", num_threads=1)) as ops:
                model = build_model(checkpoint, Mesh(), ops, max_model_len=64)
                logits.append(Paged(model).run("a", prompt(41, 1)))
            assert checkpoint.unused() == []
    # keys' matrices of latent attention are float16 where they were packed
    assert (logits[0] - logits[1]).abs().max() <= (3e-2 if latent else 1e-4)


#: Relative errors of matrices: half a step of 8 bits in groups is 0.5 % of random numbers, GPTQ
#: moves more, and e4m3 has 3 bits behind the leading one.
ERRORS = {"rtn-w8g16": 0.01, "gptq-w8g16": 0.05, "fp8-channel": 0.04, "q8_0": 0.01}


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("scheme", ["rtn-w8g16", "gptq-w8g16", "fp8-channel"])
@pytest.mark.parametrize(
    "name",
    [
        *("lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "nemotron_h"),
        *("granitemoehybrid", "falcon_h1", "olmo_hybrid", "glm4_moe_lite"),
    ],
)
def test_a_folder_of_a_hybrid_becomes_a_packed_folder(
    name: str, scheme: str, tmp_path: Path
) -> None:
    options = {**ARCHITECTURES.get(name, {}), **_WIDE}
    tiny(name, **options).save_pretrained(tmp_path / "in")
    sdk.quantize(tmp_path / "in", tmp_path / "out", scheme, calibration=TEXT, tokens=64)
    made, original = (load_file(tmp_path / at / "model.safetensors") for at in ("out", "in"))
    for key, values in original.items():
        if key.endswith(_SAME) or "linear_attn.a_proj" in key:
            assert torch.equal(made[key], values), key
    latent = "kv_lora_rank" in options
    _check(tmp_path / "out", tmp_path / "in", ERRORS[scheme], latent=latent)


def _logits(path: Path) -> torch.Tensor:
    ops = Ops(compute="exact", num_threads=1)
    with closing(open_checkpoint(path)) as checkpoint, closing(ops):
        model = build_model(checkpoint, Mesh(), ops, max_model_len=64)
        return Paged(model).run("a", prompt(41, 1))


@pytest.mark.parametrize("name", ["qwen3_5_text", "falcon_h1", "mamba"])
def test_factors_of_a_hybrid_go_only_into_norms_that_nothing_else_reads(
    name: str, tmp_path: Path
) -> None:
    """Beside attention Falcon-H1 has Mamba, and up a gate with a factor of its own."""
    tiny(name, **ARCHITECTURES[name]).save_pretrained(tmp_path / "in")
    sdk.quantize(tmp_path / "in", tmp_path / "out", "w8a8", calibration=TEXT, tokens=64)
    before, after = _logits(tmp_path / "in"), _logits(tmp_path / "out")
    assert (before - after).norm() < 0.1 * before.norm()


@pytest.mark.parametrize("scheme", ["int8", "fp8"])
@pytest.mark.parametrize("name", ["mamba", "jamba", "qwen3_5_text", "rwkv7"])
def test_the_config_of_a_folder_names_the_matrices_that_stay_in_floats(
    name: str, scheme: str, tmp_path: Path
) -> None:
    source = (
        rwkv_folder(tmp_path / "f") if name == "rwkv7" else tiny_model(tmp_path, "float16", name)
    )
    made = sdk.quantize(source, tmp_path / "made", scheme)
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    named = [one.removeprefix("re:") for one in settings["ignore"]]
    tensors = load_file(made / "model.safetensors")
    floats = {
        key.removesuffix(".weight")
        for key, one in tensors.items()
        if one.dim() == 2 and one.dtype.is_floating_point and one.dtype.itemsize > 1
        if ".layers." in key and key.endswith(".weight")
    }
    assert floats
    assert {one for one in floats if not any(re.match(f"{n}$", one) for n in named)} == set()


def test_what_makes_time_steps_need_not_suit_an_awq_scheme(tmp_path: Path) -> None:
    """Mamba-1's rank of 6 has no groups of 32."""
    tiny("mamba", **ARCHITECTURES["mamba"]).save_pretrained(tmp_path / "in")
    sdk.quantize(tmp_path / "in", tmp_path / "out", "awq-w4g32", calibration=TEXT, tokens=64)
    made = load_file(tmp_path / "out" / "model.safetensors")
    assert "backbone.layers.0.mixer.dt_proj.weight" in made
    assert "backbone.layers.0.mixer.in_proj.qweight" in made
    _logits(tmp_path / "out")


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "qwen3_next", "nemotron_h"])
def test_a_file_of_a_hybrid_becomes_another_file(name: str, tmp_path: Path) -> None:
    """Its tensors of states are as they were."""
    source = save_gguf(tmp_path / "m.gguf", written(name, hidden_size=256)[1])
    sdk.quantize(source, tmp_path / "q8.gguf", "q8_0")
    before, after = read_gguf(source), read_gguf(tmp_path / "q8.gguf")
    assert before.tensors.keys() == after.tensors.keys()
    assert before.metadata.keys() <= after.metadata.keys()
    for key, stored in before.tensors.items():
        assert after.tensors[key].shape == stored.shape, key
        large = key.endswith(("_in.weight", "_out.weight"))
        if "conv.weight" in key or ("ssm_" in key and not large):
            assert np.array_equal(after.data(key), before.data(key)), key
    before.close()
    after.close()
    _check(tmp_path / "q8.gguf", source, ERRORS["q8_0"])


def _drafts(path: Path) -> tuple[list[int], int]:
    """An answer with the model's own block, and how many of its drafts were right."""
    options = {"skip_tokenizer_init": True, "compute": "exact", "num_threads": 1}
    given = [{"prompt_token_ids": prompt(20, 3)}]
    params = sdk.SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with sdk.LLM(path, max_model_len=128, **options) as llm:
        plain = list(llm.generate(given, params)[0].outputs[0].token_ids)
    with sdk.LLM(path, max_model_len=128, speculative_config={"method": "mtp"}, **options) as llm:
        assert list(llm.generate(given, params)[0].outputs[0].token_ids) == plain
        return plain, int(llm.get_metrics()["num_accepted_tokens"])


@pytest.mark.parametrize("kind", ["glm4_moe", "exaone_moe", "qwen3_next", "qwen3_5_text"])
def test_the_block_of_multi_token_prediction_is_kept(kind: str, tmp_path: Path) -> None:
    model = random_model(kind)
    beside = kind != "glm4_moe"
    source = write_folder(tmp_path / "in", model, parts_of(model), beside=beside)
    sdk.quantize(source, tmp_path / "out", "rtn-w8g16")
    assert _drafts(tmp_path / "out")[1] > 0


def test_a_file_keeps_its_block_of_multi_token_prediction(tmp_path: Path) -> None:
    model = random_model("glm4_moe")
    source = write_gguf(tmp_path / "m.gguf", model, parts_of(model))
    sdk.quantize(source, tmp_path / "q8.gguf", "q8_0")
    file = read_gguf(tmp_path / "q8.gguf")
    assert file.metadata["glm4moe.nextn_predict_layers"] == 1
    assert file.metadata["glm4moe.block_count"] == LAYERS + 1
    file.close()
    assert _drafts(tmp_path / "q8.gguf")[1] > 0


def test_blocks_that_are_not_written_are_not_counted(tmp_path: Path) -> None:
    """Of a model whose blocks of multi-token prediction are not run."""
    oracle_of("mimo_v2_flash").save_pretrained(tmp_path / "in")
    file = mimo_file("mimo2", tmp_path / "in")
    file.metadata |= {"mimo2.block_count": (U32, 6), "mimo2.nextn_predict_layers": (U32, 1)}
    file.metadata["mimo2.attention.head_count_kv"] = (ARRAY, (I32, [1, 2, 2, 2, 1, 2]))
    source = save_gguf(tmp_path / "m.gguf", file)
    sdk.quantize(source, tmp_path / "q8.gguf", "q8_0")
    found = read_gguf(tmp_path / "q8.gguf")
    assert (found.metadata["mimo2.block_count"], found.metadata["mimo2.nextn_predict_layers"]) == (
        5,
        0,
    )
    assert list(found.metadata["mimo2.attention.head_count_kv"]) == [1, 2, 2, 2, 1]
    found.close()
    _check(tmp_path / "q8.gguf", source, ERRORS["q8_0"])


@pytest.mark.parametrize(("inputs", "why"), [(0, "read the keys of ear"), (16, "read the keys of")])
def test_text_does_not_run_through_layers_that_need_others(
    inputs: int, why: str, tmp_path: Path
) -> None:
    """Gemma 4 E2B: without text its table of embeddings stays plain."""
    options = {**ARCHITECTURES["gemma4_text-e"], "hidden_size_per_layer_input": inputs}
    tiny("gemma4_text", **options).save_pretrained(tmp_path / "in")
    with pytest.raises(UnsupportedError, match=f"layers of gemma4_text {why}"):
        sdk.quantize(tmp_path / "in", tmp_path / "out", "gptq-w8g16", calibration=TEXT, tokens=64)
    sdk.quantize(tmp_path / "in", tmp_path / "out", "rtn-w8g16")
    _check(tmp_path / "out", tmp_path / "in", ERRORS["rtn-w8g16"])


def test_text_does_not_run_through_the_layers_of_rwkv_one_by_one(tmp_path: Path) -> None:
    source = rwkv_folder(tmp_path / "in")
    with pytest.raises(UnsupportedError, match="layers of rwkv7 read the values of the first one"):
        sdk.quantize(source, tmp_path / "out", "gptq-w8g16", calibration=TEXT, tokens=64)
    sdk.quantize(source, tmp_path / "out", "rtn-w8g16")
    _check(tmp_path / "out", source, ERRORS["rtn-w8g16"])


@pytest.mark.parametrize(
    ("kind", "options", "why"),
    [
        ("opt", {"ffn_dim": 96, "do_layer_norm_before": False}, "are post-norm"),
        ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32}, "are wider than embeddings"),
        ("gemma3n_text", {}, "have several residual streams"),
    ],
)
@pytest.mark.parametrize("scheme", ["rtn-w8g16", "gptq-w8g16"])
def test_models_with_more_than_layers_are_refused_by_name(
    scheme: str, kind: str, options: dict[str, Any], why: str, tmp_path: Path
) -> None:
    if kind == "gemma3n_text":
        source = tiny_model(tmp_path, "float16", kind)
    else:
        source = tmp_path / "in"
        tiny(kind, **options).save_pretrained(source)
    with pytest.raises(UnsupportedError, match=f"layers of this {kind} model {why}"):
        sdk.quantize(source, tmp_path / "out", scheme, calibration=TEXT, tokens=64)
