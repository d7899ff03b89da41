"""compressed-tensors: every format it has, written here from its description."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.weights.layouts import E2M1
from sdk.quant.errors import CheckpointError, UnsupportedError

LAYER = "model.layers.0.mlp.down_proj"


def settings(*groups: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """``quantization_config``; a group is the ``weights`` entry of one of ``config_groups``."""
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": "mixed-precision",
        "config_groups": {
            f"group_{i}": {"targets": ["Linear"], "weights": weights, "input_activations": None}
            for i, weights in enumerate(groups)
        },
        **changes,
    }


def ints(bits: int, group: int | None = None) -> dict[str, Any]:
    strategy = "channel" if group is None else "group"
    return {"num_bits": bits, "type": "int", "strategy": strategy, "group_size": group}


def floats(bits: int, **changes: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "float", "strategy": "tensor", **changes}


def words(codes: Tensor, bits: int, per_word: int | None = None) -> Tensor:
    """Rows of codes as int32: one stream of bits, or this many codes in every word."""
    rows = []
    for row in codes.tolist():
        step = per_word or len(row)
        data = b""
        for start in range(0, len(row), step):
            part = row[start : start + step]
            number = sum(code << bits * i for i, code in enumerate(part))
            size = 4 if per_word else -(-len(row) * bits // 32) * 4
            data += number.to_bytes(size, "little")
        rows.append(list(memoryview(data).cast("i")))
    return torch.tensor(rows, dtype=torch.int32)


def random(low: int, high: int, *shape: int, seed: int = 0) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def scales(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) / 16 + 0.001


def spread(scale: Tensor, group: int, columns: int) -> Tensor:
    return scale.float().repeat_interleave(group, 1)[:, :columns]


def packed(bits: int, shape: tuple[int, int], group: int) -> tuple[dict[str, Tensor], Tensor]:
    """Symmetric pack-quantized tensors and the values they stand for."""
    codes = random(0, 1 << bits, *shape)
    scale = scales(shape[0], -(-shape[1] // group))
    tensors = {
        ".weight_packed": words(codes, bits),
        ".weight_scale": scale,
        ".weight_shape": torch.tensor(shape),
    }
    return tensors, (codes - (1 << bits - 1)).float() * spread(scale, group, shape[1])


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize(("columns", "group"), [(64, 16), (72, 16), (72, 72), (36, 12)])
def test_packed_integers_of_every_width_decode_exactly(
    layers: Any, bits: int, columns: int, group: int
) -> None:
    tensors, expected = packed(bits, (12, columns), group)
    weight = layers.weight(settings(ints(bits, group)), tensors, (12, columns))
    assert torch.equal(weight.dequantize(), expected)
    assert (weight.spec.bits, weight.spec.symmetric) == (bits, True)


@pytest.mark.parametrize("bits", range(2, 9))
def test_zero_points_are_packed_along_the_rows(layers: Any, bits: int) -> None:
    tensors, _ = packed(bits, (12, 64), 16)
    codes, points = random(0, 1 << bits, 12, 64), random(0, 1 << bits, 12, 4, seed=1)
    tensors[".weight_zero_point"] = words(points.t(), bits).t()
    expected = (codes - points.repeat_interleave(16, 1)).float()
    expected *= spread(tensors[".weight_scale"], 16, 64)
    weight = layers.weight(settings(ints(bits, 16)), tensors, (12, 64))
    assert torch.equal(weight.dequantize(), expected)
    assert not weight.spec.symmetric
    tensors[".weight_zero_point"] = (points - (1 << bits - 1)).to(torch.int8)  # older files
    assert torch.equal(
        layers.weight(settings(ints(bits, 16)), tensors, (12, 64)).dequantize(), expected
    )


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_words_of_older_files_hold_whole_codes(layers: Any, bits: int) -> None:
    tensors, _ = packed(bits, (12, 64), 16)
    codes, points = random(0, 1 << bits, 12, 64), random(0, 1 << bits, 12, 4, seed=1)
    tensors[".weight_packed"] = words(codes, bits, 32 // bits)
    tensors[".weight_zero_point"] = words(points.t(), bits, 32 // bits).t()
    expected = (codes - points.repeat_interleave(16, 1)).float()
    expected *= spread(tensors[".weight_scale"], 16, 64)
    weight = layers.weight(settings(ints(bits, 16)), tensors, (12, 64))
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_keep_the_type_of_the_file_and_codes_its_bytes(
    layers: Any, dtype: torch.dtype
) -> None:
    tensors, _ = packed(4, (12, 64), 16)
    tensors[".weight_scale"] = tensors[".weight_scale"].to(dtype)
    layout = layers.weight(settings(ints(4, 16)), tensors, (12, 64)).layout
    assert layout.scale.dtype == dtype
    assert torch.equal(layout.codes.view(torch.int32), tensors[".weight_packed"])


@pytest.mark.parametrize("shape", [(), (1,), (12,), (12, 1)])
def test_bytes_of_integers_take_one_scale_or_one_per_row(
    layers: Any, shape: tuple[int, ...]
) -> None:
    codes, scale = random(-128, 128, 12, 64).to(torch.int8), scales(*shape)
    tensors = {
        ".weight": codes,
        ".weight_scale": scale,
        ".input_scale": torch.ones(1),
        ".input_zero_point": torch.zeros(1, dtype=torch.int8),
    }
    weight = layers.weight(settings(ints(8)), tensors, (12, 64))
    assert torch.equal(weight.dequantize(), codes.float() * scale.reshape(-1, 1))
    assert weight.layout.signed


@pytest.mark.parametrize("shape", [(1,), (12,), (12, 1)])
def test_bytes_of_integers_take_one_zero_point_or_one_per_row(
    layers: Any, shape: tuple[int, ...]
) -> None:
    codes, scale = random(-128, 128, 12, 64).to(torch.int8), scales(*shape)
    points = random(-128, 128, *shape, seed=1).to(torch.int8)
    tensors = {".weight": codes, ".weight_scale": scale, ".weight_zero_point": points}
    weight = layers.weight(settings(ints(8)), tensors, (12, 64))
    expected = (codes.float() - points.float().reshape(-1, 1)) * scale.reshape(-1, 1)
    assert torch.equal(weight.dequantize(), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_bytes_of_few_bits_are_packed(layers: Any, bits: int, symmetric: bool) -> None:
    half = 1 << bits - 1
    codes = random(-half, half, 12, 64).to(torch.int8)
    codes[0, 0], codes[0, 1] = -half, half - 1
    scale, points = scales(12, 4), random(-half, half, 12, 4, seed=1).to(torch.int8)
    points = torch.zeros_like(points) if symmetric else points
    tensors = {".weight": codes, ".weight_scale": scale, ".weight_zero_point": points}
    weight = layers.weight(settings(ints(bits, 16)), tensors, (12, 64))
    expected = (codes.float() - points.float().repeat_interleave(16, 1)) * spread(scale, 16, 64)
    assert torch.equal(weight.dequantize(), expected)
    assert (weight.spec.bits, weight.spec.symmetric) == (bits, symmetric)
    assert weight.layout.codes.shape == (12, 64 * bits // 8)
    [entry] = layers.open(settings(ints(bits, 16)), tensors, (12, 64)).entries()
    assert entry.held == entry.nbytes - codes.nbytes + codes.nbytes * bits // 8


@pytest.mark.parametrize(
    ("said", "shape", "block"),
    [
        ({}, (1,), (12, 64)),
        ({"strategy": "channel"}, (12, 1), (1, 64)),
        ({"strategy": "block", "block_structure": [8, 24]}, (2, 3), (8, 24)),
        ({"strategy": "block", "block_structure": "8x24"}, (2, 3), (8, 24)),
        ({"strategy": "group", "group_size": 16}, (12, 4), (1, 16)),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_take_scales_of_every_strategy(
    layers: Any,
    said: dict[str, Any],
    shape: tuple[int, ...],
    block: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    values = torch.randn(12, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    scale = scales(*shape)
    tensors = {".weight": values, ".weight_scale": scale, ".input_scale": torch.ones(1)}
    weight = layers.weight(settings(floats(8, **said)), tensors, (12, 64))
    grid = scale.reshape(-(-12 // block[0]), -1)
    wide = grid.repeat_interleave(block[0], 0)[:12].repeat_interleave(block[1], 1)[:, :64]
    assert torch.equal(weight.dequantize(), values.float() * wide)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_scales_are_powers_of_two(layers: Any, dtype: torch.dtype) -> None:
    values = torch.randn(12, 64).to(torch.float8_e4m3fn)
    powers = random(0, 255, 12, 2).to(torch.uint8)
    powers[0] = torch.tensor([0, 254])
    said = floats(8, strategy="group", group_size=32, scale_dtype="torch.uint8")
    tensors = {".weight": values, ".weight_scale": powers.view(dtype)}
    weight = layers.weight(settings(said), tensors, (12, 64))
    exact = torch.ldexp(values.double(), powers.repeat_interleave(32, 1).long() - 127)
    assert torch.equal(weight.dequantize().double(), exact.float().double())


def four_bit_floats(group: int) -> tuple[Tensor, Tensor]:
    """Bytes of two e2m1 floats and their values, before any scale."""
    codes = random(0, 16, 12, 64)
    return (codes[:, 0::2] | codes[:, 1::2] << 4).to(torch.uint8), torch.tensor(E2M1)[codes]


def test_nvfp4_scales_are_divided_by_the_global_one(layers: Any) -> None:
    data, values = four_bit_floats(16)
    scale = (scales(12, 4) * 900).to(torch.float8_e4m3fn)
    tensors = {
        ".weight_packed": data,
        ".weight_scale": scale,
        ".weight_global_scale": torch.tensor([300.0]),
        ".input_global_scale": torch.tensor([7.0]),
    }
    weight = layers.weight(settings(floats(4, group_size=16)), tensors, (12, 64))
    expected = values * (scale.float() / 300).repeat_interleave(16, 1)
    torch.testing.assert_close(weight.dequantize(), expected, rtol=1e-6, atol=0)
    assert str(weight.spec) == "nvfp4"


def test_mxfp4_scales_are_powers_of_two(layers: Any) -> None:
    data, values = four_bit_floats(32)
    powers = random(100, 140, 12, 2).to(torch.uint8)
    tensors = {".weight_packed": data, ".weight_scale": powers}
    weight = layers.weight(settings(floats(4, group_size=32)), tensors, (12, 64))
    wide = powers.repeat_interleave(32, 1).int() - 127
    assert torch.equal(weight.dequantize(), torch.ldexp(values, wide))
    assert str(weight.spec) == "mxfp4"


def test_the_spec_says_to_how_many_bits_the_file_rounds_activations(layers: Any) -> None:
    tensors, _ = packed(4, (32, 64), 16)
    said = settings(ints(4, 16))
    assert str(layers.weight(said, tensors).spec) == "w4a16g16s"
    rounded = {"num_bits": 8, "type": "int", "dynamic": True}
    said["config_groups"]["group_0"]["input_activations"] = rounded
    assert str(layers.weight(said, tensors).spec) == "w4a8g16s"
    codes = {".weight": random(-128, 128, 32, 64).char(), ".weight_scale": scales(32, 1)}
    said = settings(ints(8))
    said["config_groups"]["group_0"]["input_activations"] = rounded
    assert str(layers.weight(said, codes).spec) == "w8a8s"


def test_groups_of_unlike_layers_may_be_mixed(layers: Any) -> None:
    said = settings(ints(4, 16), ints(8), floats(8), floats(4, group_size=32))
    tensors, expected = packed(4, (32, 64), 16)
    assert torch.equal(layers.weight(said, tensors).dequantize(), expected)
    values = torch.ones(32, 64).to(torch.float8_e4m3fn)
    eight = {".weight": values, ".weight_scale": torch.tensor([0.5])}
    assert str(layers.weight(said, eight).spec) == "fp8"


def test_without_settings_the_tensors_decide(layers: Any) -> None:
    tensors, expected = packed(3, (32, 64), 16)
    assert torch.equal(layers.weight(None, tensors).dequantize(), expected)
    del tensors[".weight_shape"]
    assert torch.equal(layers.weight(None, tensors).dequantize(), expected)


@pytest.mark.parametrize("groups", [torch.full((64,), -1), torch.arange(64) // 16])
def test_a_list_of_groups_that_says_nothing_new_is_accepted(layers: Any, groups: Tensor) -> None:
    tensors, expected = packed(4, (32, 64), 16)
    tensors[".weight_g_idx"] = groups.int()
    assert torch.equal(layers.weight(settings(ints(4, 16)), tensors).dequantize(), expected)


def test_columns_may_name_their_groups(layers: Any) -> None:
    tensors, values = packed(4, (32, 64), 16)
    groups = torch.randperm(64, generator=torch.Generator().manual_seed(3)) // 16
    tensors[".weight_g_idx"] = groups.int()
    unscaled = values / spread(tensors[".weight_scale"], 16, 64)
    weight = layers.weight(settings({**ints(4, 16), "actorder": "group"}), tensors)
    expected = unscaled.round() * tensors[".weight_scale"][:, groups]
    assert torch.equal(weight.dequantize(), expected)


def test_one_entry_stands_for_all_tensors_of_a_layer(layers: Any) -> None:
    tensors, _ = packed(4, (32, 64), 16)
    [found] = layers.open(settings(ints(4, 16)), tensors).entries()
    assert (found.name, found.shape, found.format) == (LAYER, (32, 64), "w4g16")
    assert found.nbytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize(("value", "shown"), [(math.nan, 1), (0.0, 1), (-1.0, 1), (0.25, 0.25)])
def test_scales_for_a_kv_cache_are_reported_and_left_alone(
    layers: Any, caplog: pytest.LogCaptureFixture, value: float, shown: float
) -> None:
    names = (".self_attn.k_scale", ".self_attn.v_proj.v_scale", ".self_attn.k_proj.output_scale")
    tensors, expected = packed(4, (32, 64), 16)
    said = settings(ints(4, 16), kv_cache_scheme={"num_bits": 8, "type": "float"})
    beside = {name: torch.tensor([value]) for name in names}
    with caplog.at_level("INFO", logger="sdk"):
        weight = layers.weight(said, {**tensors, **beside})
    assert torch.equal(weight.dequantize(), expected)
    range_of_all = f"({shown} to {shown})"
    assert caplog.text.count(f"3 scales for an 8-bit KV cache {range_of_all} are not used") == 1
    unsound = "3 scales of the KV cache are not positive numbers, such as .*; 1 is used"
    assert bool(re.search(unsound, caplog.text)) == (value != shown)
    assert list(layers.reopen().kv_scales.values()) == [shown] * 3


def test_outputs_that_should_be_rounded_are_told_of_and_stay_floats(
    layers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tensors, expected = packed(4, (32, 64), 16)
    said = settings(ints(4, 16))
    layers.weight(said, tensors)
    assert caplog.text == ""
    said["config_groups"]["group_0"]["output_activations"] = {"num_bits": 8, "type": "float"}
    said["config_groups"]["cache"] = {**said["config_groups"]["group_0"], "weights": None}
    weight = layers.weight(said, tensors)
    assert "output_activations of 2 config_groups, such as group_0, have no effect" in caplog.text
    assert torch.equal(weight.dequantize(), expected)


def corrupt(ending: str, value: Tensor | None) -> tuple[dict[str, Tensor], list[dict[str, Any]]]:
    tensors, _ = packed(4, (32, 64), 16)
    if value is None:
        del tensors[ending]
    else:
        tensors[ending] = value
    return tensors, [ints(4, 16)]


def scale_with(value: float) -> Tensor:
    scale = scales(32, 4)
    scale[3, 2] = value
    return scale


@pytest.mark.parametrize(
    ("ending", "value", "message"),
    [
        (".weight_scale", None, r"weight_scale': missing"),
        (".weight_scale", scales(32, 5), r"shape \[32, 5\], expected \[32, 1\] or groups of \[16"),
        (".weight_scale", scales(4, 32), r"shape \[4, 32\], expected \[32, 1\]"),
        (".weight_scale", scale_with(float("nan")), "a scale is not a finite number"),
        (".weight_scale", scale_with(float("inf")), "a scale is not a finite number"),
        (".weight_scale", scales(32, 4).double(), "F64, expected F32 or F16 or BF16"),
        (".weight_packed", torch.zeros(32, 7).int(), "rows of 7 words for 64 columns, .* 4 bits"),
        (".weight_packed", torch.zeros(32, 6).int(), "rows of 6 words for 64 columns, .* 4 bits"),
        (".weight_packed", torch.zeros(31, 8).int(), r"has 31 rows, weight_shape is \[32, 64\]"),
        (".weight_packed", torch.zeros(8).int(), r"I32 of shape \[8\], expected a matrix in"),
        (".weight_packed", torch.zeros(32, 8), "F32 of shape .*, expected a matrix in I32 or U8"),
        (".weight_shape", torch.tensor([32, 65]), r"\[32, 65\], the config asks for \[32, 64\]"),
        (".weight_shape", torch.tensor([32, -64]), r"is \[32, -64\], expected two sizes"),
        (".weight_shape", torch.tensor([32]), r"is \[32\], expected two sizes"),
        (".weight_zero_point", torch.zeros(4, 5).int(), r"shape \[4, 5\], expected \[4, 4\]"),
        (".weight_zero_point", torch.zeros(32, 4).int(), r"shape \[32, 4\], expected \[4, 4\]"),
        (".weight_g_idx", torch.full((64,), 4).int(), "groups from 4 to 4, expected 0 to 3"),
        (".weight_g_idx", torch.full((64,), -2).int(), "groups from -2 to -2, expected 0 to 3"),
        (".weight_g_idx", torch.zeros(64).int(), "groups of different sizes, expected 16 columns"),
        (".weight_g_idx", torch.zeros(63).int(), r"shape \[63\], expected \[64\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    layers: Any, ending: str, value: Tensor | None, message: str
) -> None:
    tensors, groups = corrupt(ending, value)
    with pytest.raises(CheckpointError, match=f"down_proj.*{message}"):
        layers.weight(settings(*groups), tensors)


@pytest.mark.parametrize(
    ("ending", "value", "message"),
    [
        (".weight_global_scale", torch.tensor([0.0]), "is 0.0, expected a positive number"),
        (".weight_global_scale", torch.tensor([-1.0]), "is -1.0, expected a positive number"),
        (".weight_global_scale", torch.tensor([1e-44]), "expected a finite factor"),
        (".weight_global_scale", torch.tensor([float("nan")]), "not a finite number"),
        (".weight_global_scale", torch.ones(2), r"shape \[2\], expected one number"),
        (".weight_scale", torch.full((12, 4), 127).byte().view(torch.float8_e4m3fn), "not a fin"),
        (".weight_scale", torch.ones(12, 2).to(torch.float8_e4m3fn), r"expected \[12, 4\] for"),
        (".weight_scale", torch.ones(12, 4), "F32, expected F8_E4M3"),
        (".weight_packed", torch.zeros(12, 31).byte(), r"\[12, 62\], the config asks for"),
    ],
)
def test_4_bit_floats_that_do_not_fit_are_refused(
    layers: Any, ending: str, value: Tensor, message: str
) -> None:
    tensors = {
        ".weight_packed": four_bit_floats(16)[0],
        ".weight_scale": torch.ones(12, 4).to(torch.float8_e4m3fn),
        ".weight_global_scale": torch.tensor([300.0]),
        ending: value,
    }
    with pytest.raises(CheckpointError, match=f"down_proj.*: .*{message}"):
        layers.weight(settings(floats(4, group_size=16)), tensors, (12, 64))


def test_a_power_of_255_is_no_scale(layers: Any) -> None:
    powers = torch.full((12, 2), 127).byte()
    powers[5, 1] = 255
    tensors = {".weight_packed": four_bit_floats(32)[0], ".weight_scale": powers}
    with pytest.raises(CheckpointError, match=r"weight_scale': a scale is 255, which is not a num"):
        layers.weight(settings(floats(4)), tensors, (12, 64))


@pytest.mark.parametrize(("dtype", "code"), [("e4m3fn", 0x7F), ("e4m3fn", 0xFF), ("e5m2", 0x7C)])
def test_an_8_bit_float_that_is_no_number_is_refused(layers: Any, dtype: str, code: int) -> None:
    values = torch.zeros(300, 64).byte()
    values[299, 63] = code
    tensors = {
        ".weight": values.view(getattr(torch, f"float8_{dtype}")),
        ".weight_scale": torch.ones(1),
    }
    with pytest.raises(CheckpointError, match=r"weight': a weight in row 299 is not a finite"):
        layers.weight(settings(floats(8)), tensors, (300, 64))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([ints(8, 16)], r"rows of 8 words for 64 columns, .* codes of 8 bits as quantization_conf"),
        ([floats(8)], r"not hold codes of no bits as quantization_config"),
        ([ints(4, 32)], r"shape \[32, 4\], expected \[32, 1\] or groups of \[32\] columns"),
        ([ints(4)], r"shape \[32, 4\], expected \[32, 1\] or groups of \[64\] columns"),
    ],
)
def test_settings_that_describe_other_tensors_are_refused(
    layers: Any, groups: list[dict[str, Any]], message: str
) -> None:
    tensors, _ = packed(4, (32, 64), 16)
    with pytest.raises(CheckpointError, match=message):
        layers.weight(settings(*groups), tensors)


def test_bytes_beyond_the_width_in_the_settings_are_refused(layers: Any) -> None:
    codes = random(-128, 128, 32, 64).to(torch.int8)
    tensors = {".weight": codes, ".weight_scale": scales(32, 4)}
    with pytest.raises(CheckpointError, match=r"codes from -128 to 127, expected .* of 4 bits"):
        layers.weight(settings(ints(4, 16)), tensors)
    with pytest.raises(CheckpointError, match=r"holds 8-bit int weights, .* describes 8-bit float"):
        layers.weight(settings(floats(8, group_size=16)), tensors)
    tensors[".weight"] = torch.zeros(32, 64).to(torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match=r"holds 8-bit float weights, .* describes 4-bit int"):
        layers.weight(settings(ints(4, 16)), tensors)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"config_groups": []}, None),
        ({"config_groups": {"g": 3}}, r"config_groups\.g is 3, expected an object"),
        ({"config_groups": "all"}, "config_groups is all, expected an object"),
        (settings({"num_bits": "4"}), r"group_0\.weights\.num_bits is '4', expected 1 to 8"),
        (settings({"num_bits": 0}), "num_bits is 0, expected 1 to 8"),
        (settings({"num_bits": 9}), "num_bits is 9, expected 1 to 8"),
        (settings({"num_bits": True}), "num_bits is True, expected 1 to 8"),
        (settings({"type": "complex"}), "type is 'complex', expected int or float"),
        (settings({"group_size": 0}), "group_size is 0, expected 1 or more"),
        (settings({"group_size": -2}), "group_size is -2, expected 1 or more"),
        (settings({"group_size": "128"}), "group_size is 128, expected 1 or more"),
        (settings({"block_structure": [128]}), "block_structure is .*, expected .rows, columns"),
        (settings({"block_structure": "0x1"}), "block_structure is .*, expected .rows, columns"),
        ({"sparsity_config": "yes"}, "sparsity_config is yes, expected an object"),
    ],
)
def test_settings_that_are_not_sound_are_refused(
    layers: Any, said: dict[str, Any], message: str | None
) -> None:
    tensors, _ = packed(4, (32, 64), 16)
    said = {"quant_method": "compressed-tensors", **said}
    if message is None:
        layers.weight(said, tensors)
        return
    with pytest.raises(CheckpointError, match=message):
        layers.open(said, tensors)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"format": "marlin-24"}, "the compressed-tensors format 'marlin-24' is not supported"),
        ({"format": "sparse-bitmask"}, "the compressed-tensors format 'sparse-bitmask' is not"),
        ({"config_groups": {"g": {"format": "new"}}}, "the compressed-tensors format 'new'"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse and rotated weights are"),
        ({"transform_config": {"config_groups": {"R1": {}}}}, "sparse and rotated weights are not"),
        ({"quantization_status": "frozen"}, "is 'frozen', expected 'compressed'"),
    ],
)
def test_what_is_not_run_is_refused_by_name(
    layers: Any, said: dict[str, Any], message: str
) -> None:
    tensors, _ = packed(4, (32, 64), 16)
    with pytest.raises(UnsupportedError, match=message):
        layers.open(settings(ints(4, 16), **said), tensors)
    plain = {"sparsity_config": {"format": "dense"}, "transform_config": {}}
    layers.open(settings(ints(4, 16), **plain), tensors)


def test_a_zero_point_beyond_the_width_in_the_settings_is_refused(layers: Any) -> None:
    points = torch.full((32, 4), 8, dtype=torch.int8)
    tensors, _ = packed(4, (32, 64), 16)
    tensors[".weight_zero_point"] = points
    with pytest.raises(CheckpointError, match=r"a zero point is outside the range of 4 bits"):
        layers.weight(settings(ints(4, 16)), tensors)
    codes = {".weight": random(-8, 8, 32, 64).char(), ".weight_scale": scales(32, 4)}
    with pytest.raises(CheckpointError, match=r"codes from -8 to 8, expected integers of 4 bits"):
        layers.weight(settings(ints(4, 16)), {**codes, ".weight_zero_point": points})
