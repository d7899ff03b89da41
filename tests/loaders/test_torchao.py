"""torchao's tensors in safetensors files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.weights.layouts import ActivationScheme
from sdk.quant.errors import CheckpointError, UnsupportedError

SETTINGS = {"quant_method": "torchao", "quant_type": {"default": {}}}
SHAPE = (12, 64)


def note(kind: str, bits: int = 8) -> dict[str, str]:
    target = {"_type": "torch.dtype", "_data": f"int{bits}"}
    text = json.dumps({"_type": kind, "_data": {"block_size": [1, 64], "target_dtype": target}})
    return {"model.layers.0.mlp.down_proj.weight": text}


def tensors(codes: Tensor, scale: Tensor, points: Tensor | None = None) -> dict[str, Tensor]:
    found = {"._weight_qdata": codes, "._weight_scale": scale}
    return found if points is None else {**found, "._weight_zero_point": points}


def random(bits: int, *shape: int) -> Tensor:
    half = 1 << bits - 1
    codes = torch.randint(-half, half, shape, generator=torch.Generator().manual_seed(bits))
    codes.view(-1)[0] = -half
    return codes.to(torch.int8)


@pytest.mark.parametrize("scale", [torch.rand(12, 1), torch.rand(1), torch.rand(12, 1).bfloat16()])
def test_bytes_with_a_scale_per_row_or_tensor(layers: Any, scale: Tensor) -> None:
    codes, points = random(8, *SHAPE), torch.zeros(scale.shape, dtype=torch.int8)
    found = tensors(codes, scale, points)
    weight = layers.weight(SETTINGS, found, SHAPE, note("Int8Tensor"))
    assert torch.equal(weight.dequantize(), codes.float() * scale.float().reshape(-1, 1))
    assert weight.layout.signed


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("asymmetric", [False, True])
def test_unpacked_codes_take_the_bits_they_need(layers: Any, bits: int, asymmetric: bool) -> None:
    codes, scale = random(bits, *SHAPE), torch.rand(12, 4)
    points = random(bits, 12, 4) if asymmetric else torch.zeros(12, 4, dtype=torch.int8)
    found = tensors(codes, scale, points)
    described = note("IntxUnpackedToInt8Tensor", bits)
    weight = layers.weight(SETTINGS, found, SHAPE, described)
    spread = scale.repeat_interleave(16, 1)
    expected = (codes.float() - points.float().repeat_interleave(16, 1)) * spread
    assert torch.equal(weight.dequantize(), expected)
    assert (weight.spec.bits, weight.spec.group) == (bits, 16)
    [entry] = layers.open(SETTINGS, found, SHAPE, described).entries()
    assert (entry.shape, entry.format) == (SHAPE, f"w{bits}g16")


@pytest.mark.parametrize("whole", [True, False])
def test_zero_points_may_be_floats(layers: Any, whole: bool) -> None:
    codes, scale = random(4, *SHAPE), torch.rand(12, 4) + 0.1
    points = torch.randint(-8, 8, (12, 4)).float() + (0.0 if whole else 0.375)
    weight = layers.weight(SETTINGS, tensors(codes, scale, points), SHAPE)
    spread = scale.repeat_interleave(16, 1)
    expected = (codes.float() - points.repeat_interleave(16, 1)) * spread
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=1e-6)
    assert weight.spec.bits == (4 if whole else 8)


def test_8_bit_floats(layers: Any) -> None:
    codes, scale = torch.randn(SHAPE).to(torch.float8_e4m3fn), torch.rand(12, 1)
    weight = layers.weight(SETTINGS, tensors(codes, scale), SHAPE, note("Float8Tensor"))
    assert torch.equal(weight.dequantize(), codes.float() * scale)
    [found] = layers.open(SETTINGS, tensors(codes, scale), SHAPE).entries()
    assert (found.shape, found.format, found.nbytes) == (SHAPE, "fp8", 12 * 64 + 12 * 4)


@pytest.mark.parametrize("kind", ["Int4Tensor", "Int4TilePackedTo4dTensor", "NVFP4Tensor"])
def test_other_kinds_of_tensors_are_refused_by_name(layers: Any, kind: str) -> None:
    found = tensors(random(8, *SHAPE), torch.rand(12, 1))
    with pytest.raises(UnsupportedError, match=f"packed as {kind}, expected Int8Tensor or Intx"):
        layers.weight(SETTINGS, found, SHAPE, note(kind))


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (tensors(random(8, 12, 32), torch.rand(12, 1)), r"\[12, 32\], the config asks for"),
        (tensors(random(8, *SHAPE), torch.rand(11, 1)), r"_weight_scale': scales of shape \[11, 1"),
        (tensors(random(8, *SHAPE), torch.rand(12, 5)), "scales of shape .*, expected .* equal gr"),
        (tensors(random(8, *SHAPE), torch.full((12, 1), torch.nan)), "not a finite number"),
        (tensors(random(8, *SHAPE), torch.rand(12, 4), random(8, 12, 1)), r"\[12, 1\], expected"),
        (tensors(random(8, *SHAPE), torch.rand(12, 4), torch.zeros(12, 4).int()), "I32, expected"),
        (tensors(torch.zeros(SHAPE).int(), torch.rand(12, 1)), "I32 of shape .*, expected a matr"),
        ({"._weight_qdata": random(8, *SHAPE)}, "_weight_scale': missing"),
        (tensors(random(8, *SHAPE), torch.full((12, 1), 1e30), torch.full((12, 1), 1e30)), "times"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    layers: Any, found: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        layers.weight(SETTINGS, found, SHAPE)


def test_a_zero_point_outside_of_the_range_of_the_codes_widens_them(layers: Any) -> None:
    codes, scale = random(4, *SHAPE), torch.rand(12, 1)
    points = torch.full((12, 1), 9, dtype=torch.int8)
    weight = layers.weight(SETTINGS, tensors(codes, scale, points), SHAPE)
    assert torch.equal(weight.dequantize(), (codes.float() - 9) * scale)
    assert weight.spec.bits == 5


@pytest.mark.parametrize("text", ["{", "[" * 100000, "{}" * 9000])
def test_metadata_that_is_not_sound_is_refused(layers: Any, text: str) -> None:
    found = tensors(random(8, *SHAPE), torch.rand(12, 1))
    with pytest.raises(CheckpointError, match=r"not valid JSON|characters of metadata"):
        layers.weight(SETTINGS, found, SHAPE, {"model.layers.0.mlp.down_proj.weight": text})


def rounding(kind: str, options: dict[str, Any], **more: Any) -> dict[str, str]:
    """The text about a tensor whose inputs are rounded, as torchao 0.18 writes it."""
    inputs = {"_type": kind, "_version": 1, "_data": options}
    text = json.dumps({"_type": "Int8Tensor", "_data": {"act_quant_kwargs": inputs, **more}})
    return {"model.layers.0.mlp.down_proj.weight": text}


@pytest.mark.parametrize(
    ("kind", "options", "scheme"),
    [
        ("Int8", {}, ActivationScheme("int")),
        ("Int8", {"reduce_range": True}, ActivationScheme("int", 7)),
        (
            "Int8",
            {"mapping_type": {"_type": "MappingType", "_data": "ASYMMETRIC"}},
            ActivationScheme("int", symmetric=False),
        ),
        ("Float8", {"hp_value_ub": None}, ActivationScheme("e4m3")),
    ],
)
def test_inputs_are_rounded_as_described(
    layers: Any, kind: str, options: dict[str, Any], scheme: ActivationScheme
) -> None:
    found = tensors(random(8, *SHAPE), torch.rand(12, 1))
    text = rounding(f"QuantizeTensorTo{kind}Kwargs", options)
    weight = layers.weight(SETTINGS, found, SHAPE, text)
    assert weight.layout.inputs == scheme
    found["._weight_act_quant_scale"] = torch.tensor([0.5])
    if scheme.symmetric:
        weight = layers.weight(SETTINGS, found, SHAPE, text)
        assert weight.layout.inputs == replace(scheme, static=0.5)


def test_inputs_of_unpacked_codes_are_rounded_without_symmetry(layers: Any) -> None:
    text = rounding("", {}, activation_quantization="int8_asym_per_token")
    weight = layers.weight(SETTINGS, tensors(random(8, *SHAPE), torch.rand(12, 1)), SHAPE, text)
    assert weight.layout.inputs == ActivationScheme("int", symmetric=False)


def test_other_ways_with_inputs_are_refused(layers: Any) -> None:
    found = tensors(random(8, *SHAPE), torch.rand(12, 1))
    for text in (rounding("QuantizeTensorToMXKwargs", {}), rounding([], {})):  # type: ignore[arg-type]
        with pytest.raises(UnsupportedError, match="activations quantized by"):
            layers.weight(SETTINGS, found, SHAPE, text)
    found["._weight_act_pre_scale"] = torch.ones(64)
    with pytest.raises(UnsupportedError, match="factors of activations"):
        layers.weight(SETTINGS, found, SHAPE)
