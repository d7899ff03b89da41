"""bitsandbytes: LLM.int8 and the 4-bit types, written here from their description."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.quant.errors import CheckpointError

SETTINGS = {"quant_method": "bitsandbytes", "load_in_4bit": True}
SHAPE = (12, 128)
TABLE = torch.linspace(-1, 1, 16) ** 3


def random(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0))


def int8(**changes: Tensor) -> dict[str, Tensor]:
    tensors = {
        "weight": random(-127, 128, *SHAPE).to(torch.int8),
        "SCB": torch.rand(12) + 0.1,
        "weight_format": torch.tensor(0, dtype=torch.uint8),
    }
    return {f".{name}": tensor for name, tensor in {**tensors, **changes}.items()}


def four_bits(
    shape: tuple[int, int] = SHAPE,
    block: int = 64,
    kind: str = "nf4",
    nested: int = 0,
    state: dict[str, Any] | None = None,
) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors and the values they stand for. ``nested``: blocks that share an outer scale."""
    count = shape[0] * shape[1]
    codes = random(0, 16, count)
    blocks = -(-count // block)
    absmax = torch.rand(blocks, generator=torch.Generator().manual_seed(1)) + 0.5
    described = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": shape}
    padded = torch.nn.functional.pad(codes, (0, count % 2))
    tensors = {
        "": (padded[0::2] << 4 | padded[1::2]).to(torch.uint8).reshape(-1, 1),
        ".absmax": absmax,
        ".quant_map": TABLE,
    }
    if nested:
        inner, outer = random(0, 256, blocks), torch.rand(-(-blocks // nested)) + 0.5
        meanings = torch.linspace(-1, 1, 256)
        absmax = meanings[inner] * outer[torch.arange(blocks) // nested] + 0.25
        tensors[".absmax"] = inner.to(torch.uint8)
        tensors[".nested_absmax"], tensors[".nested_quant_map"] = outer, meanings
        described |= {
            "nested_blocksize": nested,
            "nested_dtype": "float32",
            "nested_offset": 0.25,
        }
    text = json.dumps({**described, **(state or {})}).encode()
    tensors[f".quant_state.bitsandbytes__{kind}"] = torch.tensor(list(text), dtype=torch.uint8)
    values = TABLE[codes] * absmax[torch.arange(count) // block]
    return {f".weight{name}": tensor for name, tensor in tensors.items()}, values.reshape(shape)


def test_rows_of_bytes_take_a_127th_of_their_largest_value(layers: Any) -> None:
    tensors = int8()
    weight = layers.weight({"quant_method": "bitsandbytes", "load_in_8bit": True}, tensors, SHAPE)
    expected = tensors[".weight"].double() * tensors[".SCB"].double().unsqueeze(1) / 127
    torch.testing.assert_close(weight.dequantize().double(), expected, rtol=1e-6, atol=0)
    assert (weight.spec.bits, weight.spec.group) == (8, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"SCB": torch.ones(11)}, r"SCB': shape \[11\], expected \[12\], one per row"),
        ({"SCB": torch.ones(12, 1)}, r"SCB': shape \[12, 1\], expected \[12\]"),
        ({"SCB": torch.full((12,), float("nan"))}, "SCB': a scale is not a finite number"),
        ({"weight_format": torch.tensor(1).byte()}, r"weight_format': is \[1\], expected 0"),
        ({"weight_format": torch.zeros(2).byte()}, r"weight_format': is \[0, 0\], expected 0"),
        ({"weight": torch.zeros(*SHAPE)}, "weight': F32 of shape .*, expected a matrix in I8"),
        ({"weight": torch.zeros(12, 64).char()}, r"\[12, 64\], the config asks for \[12, 128\]"),
    ],
)
def test_bytes_that_do_not_fit_are_refused(
    layers: Any, changes: dict[str, Tensor], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        layers.weight(SETTINGS, int8(**changes), SHAPE)


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize(("block", "nested"), [(64, 0), (128, 0), (64, 16), (32, 32), (32, 64)])
def test_4_bit_codes_index_the_table_of_the_file(
    layers: Any, kind: str, block: int, nested: int
) -> None:
    tensors, expected = four_bits(block=block, kind=kind, nested=nested)
    weight = layers.weight(SETTINGS, tensors, SHAPE)
    assert torch.equal(weight.dequantize(), expected)
    assert (weight.spec.name, weight.layout.group) == (kind, block)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(12, 72), (12, 31)])
def test_blocks_over_the_end_of_a_row_are_dequantized_to_the_type_in_the_state(
    layers: Any, dtype: str, shape: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    tensors, expected = four_bits(shape, state={"dtype": dtype})
    weight = layers.weight(SETTINGS, tensors, shape)
    assert f"blocks cross row ends: stored in memory as {weight.spec}, not 4 bits" in caplog.text
    assert torch.equal(weight.dequantize(), expected.to(getattr(torch, dtype)).float())
    assert weight.layout.values.dtype == getattr(torch, dtype)
    [entry] = layers.open(SETTINGS, tensors, shape).entries()
    assert entry.format == str(weight.spec)
    assert weight.nbytes <= entry.held <= weight.nbytes + 1000


def test_nested_scales_stay_codes(layers: Any) -> None:
    tensors, _ = four_bits((64, 1024), nested=256)
    weight = layers.weight(SETTINGS, tensors, (64, 1024))
    state = ".weight.quant_state.bitsandbytes__nf4"
    stored = sum(tensor.nbytes for name, tensor in tensors.items() if name != state)
    assert weight.layout.scale.dtype == torch.uint8
    assert weight.nbytes <= stored + 4 * 64  # offsets, one for each row


def test_codes_may_be_stored_as_floats(layers: Any) -> None:
    tensors, expected = four_bits()
    tensors[".weight"] = tensors[".weight"].reshape(-1).view(torch.bfloat16).reshape(-1, 1)
    assert torch.equal(layers.weight(SETTINGS, tensors, SHAPE).dequantize(), expected)


def test_without_settings_the_tensors_decide(layers: Any) -> None:
    tensors, expected = four_bits()
    assert torch.equal(layers.weight(None, tensors, SHAPE).dequantize(), expected)
    [found] = layers.open(None, tensors, SHAPE).entries()
    assert (found.shape, found.format) == (SHAPE, "nf4")
    assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(
    ("ending", "value", "message"),
    [
        ("", torch.zeros(767, 1).byte(), "767 bytes, expected 768 for"),
        ("", torch.zeros(768, 1).char(), "I8, expected U8 or BF16"),
        (".absmax", torch.ones(23), r"shape \[23\], expected \[24\]"),
        (".absmax", torch.full((24,), float("inf")), "a scale is not a finite number"),
        (".absmax", torch.zeros(24).byte(), "nested_absmax': missing"),
        (".quant_map", torch.zeros(15), r"shape \[15\], expected \[16\]"),
        (".quant_map", torch.full((16,), float("nan")), "a scale is not a finite number"),
        (".quant_state.bitsandbytes__nf4", torch.zeros(4097).byte(), "expected 1 to 4096 bytes"),
        (".quant_state.bitsandbytes__nf4", torch.zeros(9).byte(), "not valid JSON"),
        (".quant_state.bitsandbytes__nf4", torch.full((4000,), 91).byte(), "not valid JSON|nested"),
        (".quant_state.bitsandbytes__nf4", torch.tensor([255, 1]).byte(), "not valid JSON"),
    ],
)
def test_4_bit_tensors_that_do_not_fit_are_refused(
    layers: Any, ending: str, value: Tensor, message: str
) -> None:
    tensors, _ = four_bits()
    tensors[f".weight{ending}"] = value
    with pytest.raises(CheckpointError, match=f"down_proj.weight.*{message}"):
        layers.weight(SETTINGS, tensors, SHAPE)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"shape": [12, 129]}, r"shape \[12, 129\], the config asks for \[12, 128\]"),
        ({"shape": [1 << 62, 1 << 62]}, "the config asks for"),
        ({"shape": [12, -128]}, r"shape is \[12, -128\], expected two sizes"),
        ({"shape": "12x128"}, "shape is 12x128, expected two sizes"),
        ({"quant_type": "fp4"}, "quant_type is fp4, expected nf4"),
        ({"blocksize": 0}, "blocksize is 0, expected a power of two"),
        ({"blocksize": "64"}, "blocksize is 64, expected a power of two"),
        ({"blocksize": 96}, "blocksize is 96, expected a power of two"),
        ({"dtype": "int8"}, "dtype is int8, expected float32 or float16 or bfloat16"),
        ({"dtype": ["float32"]}, "dtype is .*, expected float32 or float16 or bfloat16"),
        ({"nested_blocksize": -1}, "nested_blocksize is -1, expected a power of two"),
        (
            {"nested_blocksize": 0},
            "scales are quantized, but quant_state has no nested",
        ),
        ({"nested_offset": "0"}, "nested_offset is 0, expected a finite number"),
        ({"nested_offset": 1e999}, "Infinity is not allowed in JSON"),
        ({"nested_dtype": "float64"}, "nested_dtype is float64, expected float32"),
    ],
)
def test_a_state_that_is_not_sound_is_refused(
    layers: Any, state: dict[str, Any], message: str
) -> None:
    tensors, _ = four_bits(nested=16, state=state)
    with pytest.raises(CheckpointError, match=f"bitsandbytes__nf4': {message}|{message}"):
        layers.weight(SETTINGS, tensors, SHAPE)


@pytest.mark.parametrize(
    ("ending", "size"), [(".nested_absmax", 1), (".nested_absmax", 3), (".nested_quant_map", 16)]
)
def test_nested_scales_of_another_size_are_refused(layers: Any, ending: str, size: int) -> None:
    tensors, _ = four_bits(nested=16)
    tensors[f".weight{ending}"] = torch.ones(size)
    with pytest.raises(CheckpointError, match=rf"{ending}': shape \[{size}\], expected"):
        layers.weight(SETTINGS, tensors, SHAPE)
