"""HQQ's tensors in safetensors files, written here from their description."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.quant.errors import CheckpointError
from sdk.quant.weight import concat

SETTINGS = {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}
SHAPE = (12, 80)
#: By the name of a packing: bits of a code, codes in a word, type of a word.
PACKINGS = {
    "8bit_u8": (8, 1, torch.uint8),
    "4bit_u8": (4, 2, torch.uint8),
    "2bit_u8": (2, 4, torch.uint8),
    "1bit_u8": (1, 8, torch.uint8),
    "3bit_32": (3, 10, torch.int32),
}


def text(value: str) -> Tensor:
    return torch.tensor(list(value.encode()), dtype=torch.uint8)


def matrix(
    packing: str,
    group: int = 16,
    axis: int = 1,
    bits: int | None = None,
    whole: bool = False,
    shape: tuple[int, int] = SHAPE,
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors and the values they stand for, in float64."""
    most, per_word, dtype = PACKINGS[packing]
    bits = bits or most
    groups = shape[0] * shape[1] // group
    grid, along = ((groups, group), (-1, 1)) if axis == 1 else ((group, groups), (1, -1))
    rng = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, grid, generator=rng)
    scale = (torch.rand(groups, generator=rng) / 8 + 0.01).half()
    zero = (torch.rand(groups, generator=rng) * ((1 << bits) - 1)).half()
    zero = zero.round() if whole else zero
    rows = torch.nn.functional.pad(codes, (0, 0, 0, -len(codes) % per_word)).chunk(per_word)
    words = sum(part << most * (per_word - 1 - i) for i, part in enumerate(rows))
    tensors = {
        ".W_q": torch.as_tensor(words).to(dtype),
        ".scale": scale.reshape(along),
        ".zero": zero.reshape(along),
        ".nbits": torch.tensor(bits, dtype=torch.int32),
        ".group_size": torch.tensor(group, dtype=torch.int32),
        ".shape": torch.tensor(shape),
        ".axis": torch.tensor(axis, dtype=torch.int32),
        ".packing": text(packing),
        ".view_as_float": torch.tensor(0, dtype=torch.uint8),
        ".quant_scale": torch.tensor(0, dtype=torch.uint8),
        ".compute_dtype": text("torch.float16"),
    }
    values = (codes.double() - zero.double().reshape(along)) * scale.double().reshape(along)
    return tensors, values.reshape(shape)


def close(found: Tensor, expected: Tensor, bits: int) -> None:
    """To what float32 makes of ``(code - zero) * scale``: scales are below 0.15."""
    bound = 0.15 * (1 << bits) * 2**-23
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=bound)


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("group", [16, 80, 40])
def test_groups_along_the_rows_stay_packed(layers: Any, packing: str, group: int) -> None:
    tensors, expected = matrix(packing, group)
    weight = layers.weight(SETTINGS, tensors, SHAPE)
    close(weight.dequantize(), expected, PACKINGS[packing][0])
    assert (weight.spec.bits, weight.layout.group) == (PACKINGS[packing][0], group)
    assert weight.layout.scale.dtype == torch.float16


@pytest.mark.parametrize("bits", [5, 6])
def test_codes_of_fewer_bits_than_their_bytes_are_packed_on(layers: Any, bits: int) -> None:
    tensors, expected = matrix("8bit_u8", bits=bits)
    weight = layers.weight(SETTINGS, tensors, SHAPE)
    close(weight.dequantize(), expected, bits)
    assert weight.spec.bits == bits


@pytest.mark.parametrize("packing", ["8bit_u8", "4bit_u8", "2bit_u8"])
def test_zeros_take_no_more_than_in_the_file(layers: Any, packing: str) -> None:
    bits = PACKINGS[packing][0]
    for whole, nbytes in ((True, 12 * -(-5 * bits // 8)), (False, 12 * 5 * 2)):
        tensors, expected = matrix(packing, whole=whole)
        weight = layers.weight(SETTINGS, tensors, SHAPE)
        assert torch.equal(weight.dequantize(), expected.float()) or not whole
        assert weight.layout.zeros.nbytes == nbytes


@pytest.mark.parametrize(("axis", "group"), [(0, 16), (0, 80), (1, 64)])
@pytest.mark.parametrize("packing", ["4bit_u8", "3bit_32"])
def test_groups_across_rows_are_dequantized_to_the_type_of_the_scales(
    layers: Any, packing: str, axis: int, group: int, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, expected = matrix(packing, group, axis)
    weight = layers.weight(SETTINGS, tensors, SHAPE)
    assert "groups cross row ends: kept in memory as floats" in caplog.text
    assert str(weight.spec) == "f16"
    [entry] = layers.open(SETTINGS, tensors, SHAPE).entries()
    assert entry.format == "f16" and weight.nbytes <= entry.held <= weight.nbytes + 1000
    torch.testing.assert_close(weight.dequantize().double(), expected, rtol=2**-11, atol=2**-24)


@pytest.mark.parametrize(("shape", "group"), [((32, 80), 16), ((48, 70), 16), ((24, 33), 24)])
@pytest.mark.parametrize("packing", ["8bit_u8", "4bit_u8", "2bit_u8", "3bit_32"])
@pytest.mark.parametrize("whole", [False, True])
def test_groups_of_every_so_many_rows_stay_packed(
    layers: Any, packing: str, shape: tuple[int, int], group: int, whole: bool
) -> None:
    tensors, expected = matrix(packing, group, 0, whole=whole, shape=shape)
    weight = layers.weight(SETTINGS, tensors, shape)
    bits = PACKINGS[packing][0]
    close(weight.dequantize(), expected, bits)
    assert str(weight.spec) == f"w{bits}a16g{group}"
    assert weight.layout.scale.shape == (shape[0] // group, shape[1])
    part = weight.narrow("out", shape[0] // group, shape[0] // group)
    close(part.dequantize(), expected[shape[0] // group : 2 * (shape[0] // group)], bits)
    half = weight.narrow("in", 10, shape[1] - 10)
    close(half.dequantize(), expected[:, 10:], bits)
    close(concat([weight, weight]).dequantize(), torch.cat([expected, expected]), bits)


@pytest.mark.parametrize("packing", ["4bit_u8", "3bit_32"])
def test_words_may_be_stored_as_floats(layers: Any, packing: str) -> None:
    tensors, expected = matrix(packing)
    tensors[".W_q"] = tensors[".W_q"].view(torch.float16)
    tensors[".view_as_float"] = torch.tensor(1, dtype=torch.uint8)
    close(layers.weight(SETTINGS, tensors, SHAPE).dequantize(), expected, 4)


def test_without_settings_the_tensors_decide(layers: Any) -> None:
    tensors, expected = matrix("4bit_u8")
    close(layers.weight(None, tensors, SHAPE).dequantize(), expected, 4)
    [found] = layers.open(None, tensors, SHAPE).entries()
    assert (found.shape, found.format) == (SHAPE, "w4g16")
    assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("ending", "value", "message"),
    [
        (".W_q", torch.zeros(30, 15).byte(), r"shape \[30, 15\], expected torch.uint8 \[30, 16\]"),
        (".W_q", torch.zeros(30, 16).int(), r"int32 of shape .*, expected torch.uint8 \[30, 16\]"),
        (".W_q", torch.zeros(30, 16).char(), "I8, expected U8 or I32"),
        (".W_q", torch.zeros(30, 7).half(), r"float16 of shape \[30, 7\], expected torch.uint8"),
        (".W_q", torch.tensor(0.5), r"float32 of shape \[\], expected torch.uint8"),
        (
            ".scale",
            torch.ones(59, 1),
            r"shape \[59, 1\], expected one number for each of 60 groups",
        ),
        (".zero", torch.full((60, 1), float("nan")), "a scale is not a finite number"),
        (".nbits", torch.tensor(0).int(), "is 0, packed as 4bit_u8"),
        (".nbits", torch.tensor(5).int(), "is 5, packed as 4bit_u8"),
        (".nbits", torch.tensor([4, 4]).int(), r"shape \[2\], expected one number"),
        (".group_size", torch.tensor(0).int(), r"is 0, which does not divide \[12, 80\]"),
        (".group_size", torch.tensor(7).int(), r"is 7, which does not divide \[12, 80\]"),
        (".axis", torch.tensor(2).int(), "is 2, expected 0 or 1"),
        (".shape", torch.tensor([12, 81]), r"\[12, 81\], the config asks for \[12, 80\]"),
        (".shape", torch.tensor([1 << 62, 0]), "expected two sizes"),
        (".packing", text("5bit_u8"), "is '5bit_u8', expected 8bit_u8 or"),
        (".packing", text("x" * 5000), "is 'xxxxxxxxxxxxxxxx', expected 8bit_u8 or"),
        (".quant_scale", torch.tensor(1).byte(), "the scales are quantized"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    layers: Any, ending: str, value: Tensor, message: str
) -> None:
    tensors, _ = matrix("4bit_u8", bits=3)
    tensors[ending] = value
    with pytest.raises(CheckpointError, match=f"down_proj{ending}': .*{message}"):
        layers.weight(SETTINGS, tensors, SHAPE)


def test_a_zero_that_overflows_with_its_scale_is_refused(layers: Any) -> None:
    tensors, _ = matrix("4bit_u8")
    tensors[".scale"] = torch.full((60, 1), 1e30)
    tensors[".zero"] = torch.full((60, 1), 1e30) + 0.5
    with pytest.raises(CheckpointError, match=r"zero': times its scale is not a finite number"):
        layers.weight(SETTINGS, tensors, SHAPE)


def test_a_code_beyond_its_bits_is_refused(layers: Any) -> None:
    tensors, _ = matrix("4bit_u8")
    tensors[".nbits"] = torch.tensor(3, dtype=torch.int32)
    with pytest.raises(CheckpointError, match=r"W_q': a code is 15, expected 3 bits"):
        layers.weight(SETTINGS, tensors, SHAPE)
