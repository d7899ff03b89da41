"""Towers in the formats of published files: 16 bits, blocks of GGUF, FP8 beside 16 bits."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.parallel import Mesh
from sdk.models.vision.tower import build_tower
from tests.gguf_models import save_gguf
from tests.models.test_vision_towers import encode
from tests.models.tiny_mmproj import mmproj_file, text_file
from tests.models.tiny_vision import MODELS, SIGLIP, expected_rows, image, vision_model

#: Rows of whole blocks of 32.
WIDE = {**SIGLIP, "hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 4}


@pytest.fixture
def ops() -> Iterator[Ops]:
    found = Ops(num_threads=1, compute="exact")
    yield found
    found.close()


def worst(oracle: Any, path: Path, ops: Ops) -> float:
    """The largest difference of the rows of two images, relative to the largest value."""
    tower = build_tower(open_checkpoint(path), Mesh(), ops)
    assert tower is not None
    side = tower.config.patch * (tower.config.tile_side if tower.config.one_size else 10)
    images = [image(tower.config, [(side, side)], seed) for seed in (1, 2)]
    wanted = expected_rows(oracle.float(), tower.config, images)
    found = encode(tower, images)
    return max(
        float((own - other).abs().max() / other.abs().max())
        for own, other in zip(found, wanted, strict=True)
    )


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "mistral3", "internvl"])
def test_a_folder_in_16_bits_is_computed_in_full_precision(
    name: str, kind: torch.dtype, tmp_path: Path, ops: Ops
) -> None:
    """The reference computes in float32 with the same rounded weights. It is loaded anew, because
    a conversion rounds its rotary frequencies too."""
    vision_model(name).to(kind).save_pretrained(tmp_path)
    auto = transformers.AutoModelForImageTextToText
    oracle = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    assert worst(oracle, tmp_path, ops) <= 1e-5


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q5_0", "Q4_0", "Q4_1"])
@pytest.mark.parametrize("name", ["gemma3", "llava", "internvl"])
def test_a_file_in_blocks_has_the_values_that_its_blocks_have(
    name: str, kind: str, tmp_path: Path, ops: Ops
) -> None:
    """Beside transformers with the matrices as the gguf package unpacks them."""
    vision = {**MODELS[name]["vision_config"], **WIDE}
    if name == "internvl":
        vision |= {"image_size": [56, 56], "patch_size": [7, 7]}
    oracle = vision_model(name, vision_config=vision)
    kind_of = gguf.GGMLQuantizationType[kind]

    def rounded(values: torch.Tensor) -> torch.Tensor:
        packed = gguf.quants.quantize(values.numpy(), kind_of)
        return torch.from_numpy(gguf.quants.dequantize(packed, kind_of).copy())

    with torch.no_grad():
        for key, values in oracle.named_parameters():
            inside = "vision" in key or "multi_modal_projector" in key
            if inside and values.dim() == 2 and ".layer" in key:
                values.copy_(rounded(values))
    file = mmproj_file(oracle, name)
    for stored, (shape, _, data) in list(file.tensors.items()):
        if len(shape) == 2 and stored.startswith("v.blk."):
            values = np.frombuffer(data, "<f4").reshape(shape[::-1])
            packed = gguf.quants.quantize(values, kind_of)
            file.tensors[stored] = (shape, int(kind_of), packed.tobytes())
    save_gguf(tmp_path / "mmproj-model.gguf", file)
    path = save_gguf(tmp_path / "model.gguf", text_file(oracle, name))
    assert worst(oracle, path, ops) <= 2e-5


def rewrite_fp8(folder: Path, quantized: Callable[[str], bool], ignored: list[str]) -> None:
    """Rewrite matrices as compressed-tensors does: a scale for each row."""
    path = folder / "model.safetensors"
    tensors, found = load_file(path), {}
    for name, values in tensors.items():
        if values.dim() == 2 and quantized(name):
            scale = values.float().abs().amax(dim=1, keepdim=True) / 448
            found[name] = (values.float() / scale).to(torch.float8_e4m3fn)
            found[f"{name.removesuffix('weight')}weight_scale"] = scale.to(torch.bfloat16)
        else:
            found[name] = values
    save_file(found, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "ignore": ignored,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
                "input_activations": None,
            }
        },
    }
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["gemma3", "qwen3_vl"])
def test_the_tower_of_a_folder_whose_text_is_in_fp8_stays_in_16_bits(
    name: str, tmp_path: Path, ops: Ops
) -> None:
    oracle = vision_model(name).to(torch.bfloat16)
    oracle.save_pretrained(tmp_path)
    rewrite_fp8(
        tmp_path,
        lambda key: "language_model.layers" in key and key.endswith("proj.weight"),
        ["re:.*vision.*", "re:.*visual.*", "re:.*multi_modal_projector.*", "lm_head"],
    )
    assert worst(oracle, tmp_path, ops) <= 1e-5


def test_a_tower_in_fp8_has_the_values_that_its_scales_say(tmp_path: Path, ops: Ops) -> None:
    oracle = vision_model("gemma3").to(torch.bfloat16)
    oracle.save_pretrained(tmp_path)

    def chosen(key: str) -> bool:
        return ".layers." in key and key.endswith(("proj.weight", "fc1.weight", "fc2.weight"))

    rewrite_fp8(tmp_path, chosen, ["re:.*multi_modal_projector.*", "lm_head"])
    oracle = oracle.float()
    with torch.no_grad():
        for key, values in oracle.named_parameters():
            if values.dim() == 2 and chosen(key):
                scale = values.abs().amax(dim=1, keepdim=True) / 448
                codes = (values / scale).to(torch.float8_e4m3fn).float()
                values.copy_(codes * scale.to(torch.bfloat16).float())
    assert worst(oracle, tmp_path, ops) <= 1e-5


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["gemma3", "qwen2_5_vl", "mistral3", "internvl", "qwen3_vl"])
def test_rounded_towers_are_closer_to_float32_than_transformers_in_bfloat16(
    name: str, kind: torch.dtype, tmp_path: Path
) -> None:
    """Also on a CPU that does not multiply bfloat16, where nothing is rounded."""
    vision_model(name).to(kind).save_pretrained(tmp_path)
    auto = transformers.AutoModelForImageTextToText
    exact = auto.from_pretrained(tmp_path, dtype=torch.float32).eval()
    half = auto.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    ops = Ops(num_threads=2)
    tower = build_tower(open_checkpoint(tmp_path), Mesh(), ops)
    assert tower is not None and tower.ops.rounded == ops.rounding().rounded
    side = tower.config.patch * (tower.config.tile_side if tower.config.one_size else 10)
    images = [image(tower.config, [(side, side)], seed) for seed in (1, 2)]
    found = encode(tower, images)
    for own, expected, theirs in zip(
        found,
        expected_rows(exact, tower.config, images),
        expected_rows(half, tower.config, images),
        strict=True,
    ):
        assert (own - expected).norm() <= (theirs.float() - expected).norm()
    for picture, rows in zip(images, found, strict=True):
        assert torch.equal(encode(tower, [picture], layers=1)[0], rows)
    ops.close()


def test_a_tower_in_float32_is_not_rounded(tmp_path: Path) -> None:
    vision_model("gemma3").save_pretrained(tmp_path)
    ops = Ops(num_threads=1)
    tower = build_tower(open_checkpoint(tmp_path), Mesh(), ops)
    assert tower is not None and not tower.ops.rounded
    ops.close()
