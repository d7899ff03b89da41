"""Models with tensor names, orders of rows or tables of their own, written by the quantizer: the
files have those names and orders, and open as what they were made from."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import sdk
from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.errors import UnsupportedError
from sdk.quant.online import online_quantized
from tests.gguf_models import save_gguf
from tests.models.conftest import Paged, expected_logits, prompt, tiny
from tests.models.test_gguf_architectures import SCALES, written

VOCABULARY = Path(__file__).parents[1] / "golden" / "arch-llama3" / "hf"
#: Options of the models, and a matrix as its folder calls it.
MODELS: dict[str, tuple[dict[str, Any], str]] = {
    "gpt2": ({}, "transformer.h.1.attn.c_attn"),
    "gpt_bigcode": ({}, "transformer.h.1.mlp.c_fc"),
    "gpt_neox": ({}, "gpt_neox.layers.1.attention.query_key_value"),
    "falcon": (
        {"new_decoder_architecture": True, "num_kv_heads": 2},
        "transformer.h.1.self_attention.query_key_value",
    ),
    "gptj": ({"rotary_dim": 8}, "transformer.h.1.mlp.fc_in"),
    "mpt": ({"max_seq_len": 256}, "transformer.blocks.1.attn.Wqkv"),
    "bloom": ({}, "transformer.h.1.self_attention.query_key_value"),
    "opt": ({"ffn_dim": 128, "word_embed_proj_dim": 64}, "model.decoder.layers.1.fc1"),
    "phi": ({}, "model.layers.1.self_attn.dense"),
    "starcoder2": ({"sliding_window": None}, "model.layers.1.mlp.c_fc"),
    "hunyuan_v1_dense": ({}, "model.layers.1.self_attn.q_proj"),
    "granitemoehybrid": (
        {
            **SCALES,
            "num_local_experts": 0,
            "layer_types": ["full_attention"] * 3,
            "shared_intermediate_size": 128,
            "position_embedding_type": "rope",
        },
        "model.layers.1.shared_mlp.input_linear",
    ),
}
#: Those that llama.cpp does not know, or whose tensors its files divide.
ONLY_FOLDERS = ("opt", "granitemoehybrid")
IDS = prompt(41, 1)


@pytest.fixture(params=list(MODELS))
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def saved(name: str, folder: Path, **options: Any) -> Any:
    """transformers' model, in ``folder`` with a vocabulary."""
    own = MODELS[name][0] if name in MODELS else {}
    model = tiny(name, **{**own, "vocab_size": 448, **options})
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(VOCABULARY / file, folder / file)
    return model


def logits(checkpoint: Checkpoint) -> Tensor:
    ops = Ops(num_threads=1, compute="exact")
    found = Paged(build_model(checkpoint, Mesh(), ops, max_model_len=64)).run("a", IDS)
    assert checkpoint.unused() == []
    ops.close()
    return found


@pytest.mark.quick_cases(2)
def test_a_folder_has_the_names_of_its_model_and_the_same_logits(name: str, tmp_path: Path) -> None:
    """The same as packed while it is loaded, bit by bit: no row is in another place."""
    saved(name, tmp_path / "plain")
    made = sdk.quantize(tmp_path / "plain", tmp_path / "made", "rtn-w8s", num_threads=1)
    with safe_open(made / "model.safetensors", "pt") as file:
        stored = set(file.keys())
    with safe_open(tmp_path / "plain" / "model.safetensors", "pt") as file:
        plain = set(file.keys())
    packed = {key.removesuffix("_packed") for key in stored if key.endswith(".weight_packed")}
    assert f"{MODELS[name][1]}.weight" in packed
    assert packed < plain
    assert {key for key in stored if "weight_" not in key} <= plain
    expected = logits(online_quantized(open_checkpoint(tmp_path / "plain"), "rtn-w8s"))
    assert torch.equal(logits(open_checkpoint(made)), expected)


@pytest.mark.quick_cases(2)
def test_a_gguf_file_has_the_logits_of_its_folder(name: str, tmp_path: Path) -> None:
    model, out = saved(name, tmp_path / "plain"), tmp_path / "made.gguf"
    if name in ONLY_FOLDERS:
        with pytest.raises(UnsupportedError, match=f"type {name} cannot be written as GGUF"):
            sdk.quantize(tmp_path / "plain", out, "f16")
        return
    sdk.quantize(tmp_path / "plain", out, "f16", num_threads=1)
    expected = expected_logits(model, IDS)
    assert (logits(open_checkpoint(out)) - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["gptq-w4g32-mix", "awq-w4g32", "w8a8"])
def test_methods_with_data_see_what_the_first_layer_reads(
    scheme: str, name: str, tmp_path: Path
) -> None:
    """Positions and the norm of embeddings are in the inputs that a method measures; 4 bits without
    data lose more."""
    model = saved(name, tmp_path / "plain")
    text = [prompt(48, seed) for seed in range(4)]
    how: dict[str, Any] = {"sequences": 4, "tokens": 48, "num_threads": 1}
    made = sdk.quantize(tmp_path / "plain", tmp_path / "made", scheme, calibration=text, **how)
    plain = sdk.quantize(tmp_path / "plain", tmp_path / "int4", "int4", num_threads=1)
    expected = expected_logits(model, IDS)
    error, other = ((logits(open_checkpoint(x)) - expected).norm() for x in (made, plain))
    assert error < 1.25 * other


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["granitemoehybrid", "mixtral", "bloom"])
def test_the_config_says_which_matrices_have_more_bits(name: str, tmp_path: Path) -> None:
    """Whatever the model's files call them: a reader takes the bits from the config."""
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2} if name == "mixtral" else {}
    saved(name, tmp_path / "plain", **experts)
    how: dict[str, Any] = {"sequences": 2, "tokens": 24, "num_threads": 1}
    text = [prompt(24, seed) for seed in range(2)]
    made = sdk.quantize(
        tmp_path / "plain", tmp_path / "made", "gptq-w4g32-mix", calibration=text, **how
    )
    settings = json.loads((made / "config.json").read_text())["quantization_config"]
    targets = settings["config_groups"]["group_2"]["targets"]
    found = set()
    with safe_open(made / "model.safetensors", "pt") as file:
        for key in file.keys():  # noqa: SIM118
            module = key.removesuffix(".weight_packed")
            if module != key:
                columns = int(file.get_tensor(f"{module}.weight_shape")[1])
                bits = file.get_tensor(key).shape[1] * 32 // columns
                named = any(re.match(target.removeprefix("re:"), module) for target in targets)
                assert bits == (5 if named else 4), module
                found.add(bits)
    assert found == {4, 5}


def test_blocks_of_rows_that_a_file_stores_apart_are_refused(tmp_path: Path) -> None:
    saved("bloom", tmp_path / "plain")
    with pytest.raises(UnsupportedError, match="fp8-block shares scales among neighbouring rows"):
        sdk.quantize(tmp_path / "plain", tmp_path / "made", "fp8-block", num_threads=1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt_neox", {"attention_bias": False}, "only with attention_bias True, found False"),
        ("gpt_neox", {"tie_word_embeddings": True}, "only with tie_word_embeddings False"),
        (
            "falcon",
            {"new_decoder_architecture": False, "alibi": True},
            "falcon is written as a GGUF file only with alibi False, found True",
        ),
        ("falcon", {"bias": True}, "falcon is written as a GGUF file only with bias False"),
    ],
)
def test_what_llama_cpp_does_not_know_is_not_written(
    name: str, options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    saved(name, tmp_path / "plain", **options)
    with pytest.raises(UnsupportedError, match=message):
        sdk.quantize(tmp_path / "plain", tmp_path / "made.gguf", "f16")


def test_a_gguf_file_becomes_another_one_of_its_own_architecture(tmp_path: Path) -> None:
    """Names and orders are those of the file, also where a folder of the model is written as
    another architecture."""
    oracle, file = written("hunyuan-moe")
    save_gguf(tmp_path / "plain.gguf", file)
    out = sdk.quantize(tmp_path / "plain.gguf", tmp_path / "made.gguf", "f16", num_threads=1)
    found, expected = logits(open_checkpoint(out)), expected_logits(oracle, IDS)
    assert (found - expected).norm() < 2e-3 * expected.norm()
