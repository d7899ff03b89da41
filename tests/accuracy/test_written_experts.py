"""Mixtures of experts, and Phi-3 with long rope factors, written by the quantizer.

A GGUF file is compared, byte for byte, with what llama.cpp's converter makes of the same model, as
tests/accuracy/test_both_formats.py builds it by hand.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import sdk
from sdk import QuantizationError, UnsupportedError
from sdk.loaders.open import open_checkpoint
from tests.accuracy.test_both_formats import MODELS, gguf_of
from tests.models.conftest import expected_logits, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

TOKENS = 24
VOCABULARY = 448  # of the tokenizer in tests/golden


@pytest.fixture
def save(golden: Path, tmp_path: Path) -> Callable[..., tuple[Any, Path]]:
    """``save(model_type, **options)``: a model whose weights float16 holds, and its folder."""

    def make(model_type: str, **options: Any) -> tuple[Any, Path]:
        usual = MODELS[model_type] if model_type in MODELS else ARCHITECTURES[model_type]
        model = tiny(model_type, **{**usual, "vocab_size": VOCABULARY, **options})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(parameter.half().float())
        model.save_pretrained(tmp_path / "folder")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(golden / "arch-llama3" / "hf" / name, tmp_path / "folder" / name)
        return model, tmp_path / "folder"

    return make


def calibration() -> list[list[int]]:
    ids = torch.randint(3, 96, (6, TOKENS), generator=torch.Generator().manual_seed(3))
    return ids.tolist()


@pytest.mark.parametrize("model_type", list(MODELS))
def test_a_gguf_file_is_the_one_the_converter_of_llama_cpp_makes(
    model_type: str,
    save: Callable[..., tuple[Any, Path]],
    tmp_path: Path,
    logits_of: Callable[..., Tensor],
) -> None:
    model, folder = save(model_type)
    out = sdk.quantize(folder, tmp_path / "made.gguf", "f16")
    (tmp_path / "theirs.gguf").write_bytes(gguf_of(model).build())
    found, expected = (gguf.GGUFReader(tmp_path / f"{n}.gguf") for n in ("made", "theirs"))
    ours = {tensor.name: tensor for tensor in found.tensors}
    assert sorted(ours) == sorted(tensor.name for tensor in expected.tensors)
    for tensor in expected.tensors:
        mine = ours[tensor.name]
        assert (mine.tensor_type, list(mine.shape)) == (tensor.tensor_type, list(tensor.shape))
        np.testing.assert_array_equal(mine.data, tensor.data, err_msg=tensor.name)
    for key, field in expected.fields.items():
        if not key.startswith("GGUF."):
            theirs = field.contents()
            if isinstance(theirs, float):
                theirs = pytest.approx(theirs, rel=1e-6)
            assert found.fields[key].contents() == theirs, key
    ids = prompt(40, 3)
    difference = logits_of(out, torch.tensor(ids), "exact", len(ids)) - expected_logits(model, ids)
    assert difference.abs().max() <= 1e-4


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("scheme", ["q4_0", "gptq-w4g32", "rtn-w8g32s"])
@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_packed_experts_are_read_back_and_routers_stay_as_they_are(
    model_type: str,
    scheme: str,
    save: Callable[..., tuple[Any, Path]],
    tmp_path: Path,
    logits_of: Callable[..., Tensor],
) -> None:
    model, folder = save(model_type)
    out = tmp_path / ("made.gguf" if scheme.startswith("q") else "made")
    sdk.quantize(folder, out, scheme, calibration=calibration(), tokens=TOKENS)
    made, original = open_checkpoint(str(out)), open_checkpoint(str(folder))
    names = ["mlp.router" if model_type == "gpt_oss" else "mlp.gate", "mlp.experts.1.up_proj"]
    router, expert = (f"model.layers.1.{name}" for name in names)
    assert torch.equal(made.weight(router).dequantize(), original.weight(router).dequantize())
    values = original.weight(expert).dequantize()
    error = (made.weight(expert).dequantize() - values).norm() / values.norm()
    assert 1e-3 < error < 0.35
    made.close()
    original.close()
    ids = prompt(40, 3)
    difference = logits_of(out, torch.tensor(ids), "exact", len(ids)) - expected_logits(model, ids)
    # 4 bits of random weights send tokens to other experts (0.63); unrelated logits are 1.4 apart
    assert difference.norm() / expected_logits(model, ids).norm() < 0.8


@pytest.mark.parametrize(
    ("scheme", "mixtral", "expert"),
    [("rtn-w4g32", "block_sparse_moe", "w2.weight_packed"), ("hqq-w4g32", "mlp", "down_proj.W_q")],
)
def test_experts_are_written_under_the_names_that_readers_look_for(
    scheme: str, mixtral: str, expert: str, save: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    """And their routers in the type of the file, and as what is not to be unpacked."""
    model, folder = save("mixtral")
    model.half().save_pretrained(folder)
    out = sdk.quantize(folder, tmp_path / "made", scheme)
    with safe_open(out / "model.safetensors", "pt") as made:
        names = set(made.keys())
        assert f"model.layers.1.{mixtral}.experts.3.{expert}" in names
        assert made.get_tensor(f"model.layers.1.{mixtral}.gate.weight").dtype == torch.float16
    settings = json.loads((out / "config.json").read_text())["quantization_config"]
    routers = "re:.*[.](gate|router|shared_expert_gate|gate[.]wg|router[.]layer)$"
    assert settings.get("ignore", []) == (["lm_head", routers] if scheme.startswith("rtn") else [])


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("scheme", ["q4_0", "rtn-w4g32", "gptq-w4g32"])
@pytest.mark.parametrize("model_type", ["qwen2_moe", "glm4_moe", "minimax_m2"])
def test_what_is_beside_experts_is_packed_and_keeps_its_names(
    model_type: str,
    scheme: str,
    save: Callable[..., tuple[Any, Path]],
    tmp_path: Path,
    logits_of: Callable[..., Tensor],
) -> None:
    """Shared experts as the other matrices; gates and biases of routers stay as they are."""
    options: dict[str, Any] = {"qwen2_moe": {"mlp_only_layers": []}}.get(model_type, {})
    widths = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
    model, folder = save(model_type, **widths, **options)
    out = tmp_path / ("made.gguf" if scheme.startswith("q") else "made")
    sdk.quantize(folder, out, scheme, calibration=calibration(), tokens=TOKENS)
    ids = prompt(40, 3)
    difference = logits_of(out, torch.tensor(ids), "exact", len(ids)) - expected_logits(model, ids)
    assert difference.norm() / expected_logits(model, ids).norm() < 0.8
    if out.suffix:
        return
    with safe_open(folder / "model.safetensors", "pt") as given:
        stored = list(given.keys())
    beside = [name for name in stored if "shared_" in name or name.endswith("_bias")]
    routers = [name for name in stored if name.endswith("mlp.gate.weight")]
    with safe_open(out / "model.safetensors", "pt") as made:
        names = set(made.keys())
    packed = ".weight_packed" if scheme.startswith("rtn") else ".qweight"
    for name in beside:
        one = "shared_expert_gate" in name or name.endswith("_bias")
        assert (name if one else name.replace(".weight", packed)) in names
    assert names.issuperset(routers)


def test_experts_of_gpt_oss_stay_what_they_are_in_a_gguf_file(golden: Path, tmp_path: Path) -> None:
    """They come in MXFP4, whose largest code of a block may be below 4: another scale then says the
    same values."""
    source = golden / "gptoss-mxfp4"
    folder = tmp_path / "folder"
    shutil.copytree(source, folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(golden / "arch-llama3" / "hf" / name, folder / name)
    out = sdk.quantize(folder, tmp_path / "made.gguf", "mxfp4_moe")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(out).tensors}
    original = open_checkpoint(str(source))
    for theirs, ours in {"gate": "gate_proj", "down": "down_proj"}.items():
        tensor = tensors[f"blk.1.ffn_{theirs}_exps.weight"]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        for expert in range(len(values)):
            name = f"model.layers.1.mlp.experts.{expert}.{ours}"
            expected = original.weight(name).dequantize().numpy()
            np.testing.assert_array_equal(values[expert], expected)
    assert {t.tensor_type.name for n, t in tensors.items() if "exps.weight" in n} == {"MXFP4"}
    assert {t.tensor_type.name for n, t in tensors.items() if "attn_q.weight" in n} == {"Q8_0"}
    original.close()


def test_an_expert_that_no_token_was_sent_to_keeps_its_values(
    save: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    _, folder = save("mixtral", num_experts_per_tok=1)
    out = sdk.quantize(folder, tmp_path / "made", "gptq-w4g32", calibration=[[5, 6]], tokens=2)
    made, original = open_checkpoint(str(out)), open_checkpoint(str(folder))
    for expert in range(5):  # two tokens, one expert each: three at least are seen by nothing
        name = f"model.layers.0.mlp.experts.{expert}.down_proj"
        values = original.weight(name).dequantize()
        error = (made.weight(name).dequantize() - values).norm() / values.norm()
        assert error < 0.5
    made.close()
    original.close()


@pytest.mark.parametrize("scheme", ["awq-w4g32", "w8a8"])
def test_methods_that_change_norms_refuse_experts(
    scheme: str, save: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    _, folder = save("mixtral")
    with pytest.raises(QuantizationError, match="all experts share one norm"):
        sdk.quantize(folder, tmp_path / "made", scheme, calibration=calibration(), tokens=TOKENS)


@pytest.mark.parametrize(
    "options", [{"norm_topk_prob": False}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}]
)
def test_a_mixture_that_gguf_cannot_describe_is_refused(
    options: dict[str, Any], save: Callable[..., tuple[Any, Path]], tmp_path: Path
) -> None:
    _, folder = save("qwen3_moe", **options)
    with pytest.raises(UnsupportedError, match="only with norm_topk_prob and experts in every"):
        sdk.quantize(folder, tmp_path / "made.gguf", "q8_0")


def test_routers_are_not_packed_at_load(save: Callable[..., tuple[Any, Path]]) -> None:
    _, folder = save("mixtral")
    options = {"max_model_len": 64, "skip_tokenizer_init": True}
    with sdk.LLM(folder, quantization="int4", **options) as llm:
        formats = {layer.name: layer.format for layer in llm.quant_report().layers}
    routers = {form for name, form in formats.items() if name.endswith("mlp.gate")}
    experts = {form for name, form in formats.items() if "experts" in name}
    assert routers == {"f32"} and experts == {"w4a16", "w4a16g64"}
