"""Packed folders of hybrids and of latent attention, as published ones store them.

Convolutions, decays, small gates and routers stay plain, experts are apart. The oracle is the float
model with the values of the packed matrices.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sdk.kernels.weights.layouts import Dense
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.hf_writer import _encoding
from sdk.quant.quantize import quantize_rows, quantize_without_data
from sdk.quant.scheme import Scheme
from sdk.quant.weight import weight_of
from tests.models.conftest import Paged, prompt, tiny
from tests.models.tiny_architectures import ARCHITECTURES

Load = Callable[..., Any]
#: What published folders leave plain, besides what is not a matrix.
_PLAIN = re.compile(
    r"embed|lm_head|norm|conv1d|\.conv\.|in_proj_a\b|in_proj_b\b|in_proj_ba|\.gate\.|router"
    r"|shared_expert_gate|\.a_proj|\.b_proj|latent"
)
_WIDE = {"hidden_size": 192, "intermediate_size": 256, "moe_intermediate_size": 64}
_DELTA = {"linear_value_head_dim": 16, "linear_key_head_dim": 16}
_LATENT = {"kv_lora_rank": 128, "q_lora_rank": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
#: Widths that groups of 32 divide. A head of GLM has rows of two blocks of FP8.
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": {**_DELTA, "shared_expert_intermediate_size": 64},
    "qwen3_next": {**_DELTA, "shared_expert_intermediate_size": 64},
    "deepseek_v2": {**_LATENT, "qk_nope_head_dim": 64},
    "deepseek_v3": {**_LATENT, "qk_nope_head_dim": 64},
    "glm4_moe_lite": {**_LATENT, "qk_nope_head_dim": 48},
}
FORMATS = ("gptq-w4g32", "awq-w4g32", "rtn-w4g32", "fp8-block", "mxfp4", "nvfp4")


def _matrices(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str, slice, Tensor]]:
    """Of each matrix that is packed its tensor, its name, its rows in the tensor and its values."""
    for key, values in tensors.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            path, _, joined = key.rpartition(".")
            parts = ("gate_proj", "up_proj") if joined == "gate_up_proj" else ("down_proj",)
            rows = values.shape[1] // len(parts)
            for expert, whole in enumerate(values):
                for at, part in enumerate(parts):
                    own = slice(at * rows, (at + 1) * rows)
                    yield f"{key}#{expert}", f"{path}.{expert}.{part}", own, whole[own]
        elif values.dim() == 2 and key.endswith(".weight") and not _PLAIN.search(key):
            yield key, key.removesuffix(".weight"), slice(None), values


def _quantized(name: str, values: Tensor, scheme: Scheme) -> Any:
    if scheme.method in ("fp8", "float4", "rtn"):
        return quantize_without_data(name, values.clone(), scheme)
    return quantize_rows(name, weight_of(Dense(values.clone())), scheme.spec)


def packed_folder(model: Any, text: str, folder: Path) -> Any:
    """Write the packed folder; what it computes, as a folder of floats beside it."""
    model.save_pretrained(folder)
    (folder / "floats").mkdir()
    model.save_pretrained(folder / "floats")
    tensors, scheme = load_file(folder / "model.safetensors"), Scheme.parse(text)
    encode, settings = _encoding(
        scheme, lambda name: name.rpartition(".")[2], ("v_proj", "down_proj")
    )
    made, floats = dict(tensors), {key: values.clone() for key, values in tensors.items()}
    ending = ".weight_scale" if text == "fp8-block" else ""
    for tensor, name, rows, values in _matrices(tensors):
        layout = _quantized(name, values, scheme)
        key, _, expert = tensor.partition("#")
        made.pop(key, None)
        for end, stored in encode(layout).items():
            made[name + (".weight_scale_inv" if end == ending else end)] = stored.contiguous()
        back = weight_of(layout).dequantize()
        (floats[key][int(expert)] if expert else floats[key])[rows] = back
    plain = [key.removesuffix(".weight") for key in made if key in tensors and made[key].dim() > 1]
    plain = [name for name in plain if f"{name}.weight_scale_inv" not in made]
    if text == "fp8-block":
        settings = {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": plain,
        }
    elif "ignore" in settings:
        settings["ignore"] = plain
    elif settings["quant_method"] == "awq":
        settings["modules_to_not_convert"] = plain
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    save_file(floats, folder / "floats" / "model.safetensors", metadata={"format": "pt"})
    return folder / "floats"


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("text", FORMATS)
@pytest.mark.parametrize(
    "name",
    [
        *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "lfm2", "lfm2_moe", "nemotron_h"),
        *("granitemoehybrid", "falcon_h1", "olmo_hybrid"),
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    ],
)
def test_a_packed_folder_computes_what_its_matrices_say(
    name: str, text: str, tmp_path: Path, load: Load
) -> None:
    options = {**ARCHITECTURES.get(name, {}), **_WIDE, **_SIZES.get(name, {})}
    floats, ids = packed_folder(tiny(name, **options), text, tmp_path), prompt(41, 1)
    checkpoint = open_checkpoint(tmp_path)
    found = Paged(load(checkpoint)).run("a", ids, [7, 30])
    expected = Paged(load(open_checkpoint(floats))).run("a", ids, [7, 30])
    assert checkpoint.unused() == []
    # Keys' matrices of latent attention are transposed, as 16-bit floats: 2 ** -11 of a number,
    # in each of three layers, whose results are up to 8.
    latent = "kv_lora_rank" in options
    assert torch.isfinite(found).all()
    assert (found - expected).abs().max() <= (3e-2 if latent else 1e-4)
