"""8- and 4-bit floats of ModelOpt, FBGEMM and gpt-oss, written here from their descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.layouts import E2M1
from sdk.loaders.folders.safetensors_reader import SafetensorsFiles
from sdk.loaders.formats import mxfp4
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError

SHAPE = (12, 64)


def modelopt(algorithm: Any) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "producer": {"name": "modelopt"}}


def values(*shape: int) -> Tensor:
    rng = torch.Generator().manual_seed(0)
    return torch.randn(shape or SHAPE, generator=rng).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("algorithm", "scale"), [("FP8", ()), ("FP8", (1,)), ("FP8_PER_CHANNEL_PER_TOKEN", (12,))]
)
def test_modelopt_scales_of_a_tensor_or_its_rows_multiply(
    layers: Any, algorithm: str, scale: tuple[int, ...]
) -> None:
    factor = torch.rand(scale) + 0.1
    tensors = {".weight": values(), ".weight_scale": factor, ".input_scale": torch.ones(1)}
    weight = layers.weight(modelopt(algorithm), tensors, SHAPE)
    assert torch.equal(weight.dequantize(), values().float() * factor.reshape(-1, 1))


@pytest.mark.parametrize("algorithm", ["FP8_PB_WO", "FP8_BLOCK_SCALES"])
@pytest.mark.parametrize("grid", [(3, 1, 2, 1), (3, 2)])
def test_modelopt_blocks_have_128_rows_and_columns(
    layers: Any, algorithm: str, grid: tuple[int, ...]
) -> None:
    weight, scale = values(300, 192), torch.rand(grid)
    tensors = {".weight": weight, ".weight_scale": scale}
    spread = scale.reshape(3, 2).repeat_interleave(128, 0).repeat_interleave(128, 1)
    found = layers.weight(modelopt(algorithm), tensors, (300, 192))
    assert torch.equal(found.dequantize(), weight.float() * spread[:300, :192])


def test_modelopt_mxfp8_scales_are_powers_of_two(layers: Any) -> None:
    powers = torch.randint(100, 140, (12, 2), dtype=torch.uint8)
    tensors = {".weight": values(), ".weight_scale": powers}
    expected = torch.ldexp(values().float(), powers.repeat_interleave(32, 1).int() - 127)
    assert torch.equal(layers.weight(modelopt("MXFP8"), tensors, SHAPE).dequantize(), expected)


def nvfp4() -> tuple[dict[str, Tensor], Tensor]:
    codes = torch.randint(0, 16, SHAPE, generator=torch.Generator().manual_seed(0))
    scale = torch.rand(12, 4).to(torch.float8_e4m3fn)
    tensors = {
        ".weight": (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8),
        ".weight_scale": scale,
        ".weight_scale_2": torch.tensor(0.003),
        ".input_scale": torch.ones(1),
    }
    return tensors, torch.tensor(E2M1)[codes] * (scale.float() * 0.003).repeat_interleave(16, 1)


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "MIXED_PRECISION"])
def test_modelopt_nvfp4_scales_are_multiplied_by_the_second(layers: Any, algorithm: str) -> None:
    tensors, expected = nvfp4()
    checkpoint = layers.open(modelopt(algorithm), tensors, SHAPE)
    weight = checkpoint.weight("model.layers.0.mlp.down_proj")
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=0)
    spec = "nvfp4" if algorithm == "W4A16_NVFP4" else "nvfp4afp4"
    assert checkpoint.unused() == [] and str(weight.spec) == spec
    assert [(e.shape, e.format) for e in checkpoint.entries()] == [(SHAPE, "nvfp4")]


def test_modelopt_may_keep_its_settings_in_a_file_of_their_own(layers: Any) -> None:
    tensors, expected = nvfp4()
    layers.open(modelopt("NVFP4"), tensors, SHAPE)
    path: Path = layers.path
    config = json.loads((path / "config.json").read_text())
    del config["quantization_config"]
    (path / "config.json").write_text(json.dumps(config))
    apart = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    (path / "hf_quant_config.json").write_text(json.dumps(apart))
    weight = layers.reopen().weight("model.layers.0.mlp.down_proj")
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("algorithm", ["W4A8_AWQ", "INT8_SQ", "W4A16_AWQ"])
def test_other_algorithms_of_modelopt_are_refused_by_name(layers: Any, algorithm: str) -> None:
    with pytest.raises(UnsupportedError, match=f"ModelOpt's quant_algo '{algorithm}' is not"):
        layers.open(modelopt(algorithm), nvfp4()[0], SHAPE)


@pytest.mark.parametrize("algorithm", [None, 8, ["FP8"]])
def test_modelopt_without_an_algorithm_is_refused(layers: Any, algorithm: Any) -> None:
    with pytest.raises(CheckpointError, match=r"quant_algo is .*, expected one of FP8, "):
        layers.open(modelopt(algorithm), nvfp4()[0], SHAPE)


@pytest.mark.parametrize(
    ("ending", "value", "message"),
    [
        (".weight_scale_2", None, "weight_scale_2': missing"),
        (".weight_scale_2", torch.tensor(float("inf")), "not a finite number"),
        (".weight_scale", torch.ones(12, 4), "F32, expected F8_E4M3"),
        (".weight_scale", torch.ones(12, 8).to(torch.float8_e4m3fn), r"expected \[12, 4\]"),
        (".weight", torch.zeros(12, 33).byte(), r"\[12, 66\], the config asks for \[12, 64\]"),
        (".weight", torch.zeros(12, 64), "F32 of shape .*, expected a matrix in F8_E4M3 or U8"),
    ],
)
def test_tensors_of_modelopt_that_do_not_fit_are_refused(
    layers: Any, ending: str, value: Tensor | None, message: str
) -> None:
    tensors, _ = nvfp4()
    del tensors[ending]
    if value is not None:
        tensors[ending] = value
    with pytest.raises(CheckpointError, match=message):
        layers.weight(modelopt("NVFP4"), tensors, SHAPE)


def test_fbgemm_has_a_scale_per_row(layers: Any) -> None:
    scale = torch.rand(12, 1)
    tensors = {
        ".weight": values(),
        ".weight_scale": scale,
        ".input_scale_ub": torch.tensor([1200.0]),
    }
    said = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    assert torch.equal(layers.weight(said, tensors, SHAPE).dequantize(), values().float() * scale)
    [found] = layers.open(said, tensors, SHAPE).entries()
    assert (found.shape, found.format, found.nbytes) == (SHAPE, "fp8", 12 * 64 + 12 * 4 + 4)
    tensors[".weight_scale"] = torch.rand(12, 4)
    with pytest.raises(CheckpointError, match=r"shape \[12, 4\], expected \[12, 1\] for \[12, 64"):
        layers.weight(said, tensors, SHAPE)


def expert_layer(path: Path, **tensors: Tensor) -> StoredLayer:
    save_file(
        {f"experts.down_proj_{name}": t for name, t in tensors.items()}, path / "a.safetensors"
    )
    files = SafetensorsFiles([path / "a.safetensors"])
    return StoredLayer(
        "experts.down_proj",
        None,
        files.tensors,
        {},
        path,
        lambda stored: files.tensor(stored.name),
        lambda *_: None,
    )


def test_the_experts_of_gpt_oss_are_one_matrix_of_4_bit_floats(tmp_path: Path) -> None:
    codes = torch.randint(0, 16, (3, 12, 64), generator=torch.Generator().manual_seed(0))
    powers = torch.randint(110, 140, (3, 12, 2), dtype=torch.uint8)
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8).reshape(3, 12, 2, 16)
    layer = expert_layer(tmp_path, blocks=blocks, scales=powers)
    assert mxfp4.outline(layer, None) == ((3, 12, 64), "mxfp4")
    found = mxfp4.decode(layer, None)
    wide = powers.repeat_interleave(32, 2).int() - 127
    expected = torch.ldexp(torch.tensor(E2M1)[codes], wide)
    assert torch.equal(decode(found), expected.flatten(0, 1))


@pytest.mark.parametrize(
    ("blocks", "powers", "message"),
    [
        ((3, 12, 2, 16), (3, 12, 3), r"_scales': shape \[3, 12, 3\], expected \[3, 12, 2\]"),
        ((3, 12, 2, 15), (3, 12, 2), r"_blocks': shape \[3, 12, 2, 15\], expected .experts, N"),
        ((3, 12, 32), (3, 12, 2), r"_blocks': shape \[3, 12, 32\], expected .experts, N, K / 32"),
    ],
)
def test_experts_whose_shapes_disagree_are_refused(
    tmp_path: Path, blocks: tuple[int, ...], powers: tuple[int, ...], message: str
) -> None:
    layer = expert_layer(
        tmp_path, blocks=torch.zeros(blocks).byte(), scales=torch.zeros(powers).byte()
    )
    with pytest.raises(CheckpointError, match=message):
        mxfp4.decode(layer, None)
