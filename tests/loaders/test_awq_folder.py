"""AWQ folders in their three orders, AutoRound's, and what is wrong with files.

The writers below are those of AutoAWQ written again from their description, not its code;
tests/golden holds files that AutoAWQ wrote.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from sdk.loaders.open import open_checkpoint
from sdk.quant.errors import AlignmentError, CheckpointError, UnsupportedError
from sdk.quant.weight import AffineWeight

LAYER = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS = 32, 64
ORDERS = ("gemm", "gemv", "gemv_fast")
Folder = Callable[..., Path]


def nibbles(codes: NDArray[Any], order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """Eight codes of a row in a word, ``order[i]`` being nibble i."""
    words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
    for i, j in enumerate(order):
        words |= codes[:, j::8].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))


def interleaved(codes: NDArray[Any]) -> Tensor:
    """Four rows in one of int16, 64 columns at a time."""
    rows, columns = codes.shape
    # where column k of 32 goes: pairs of the four runs of 8, even columns before odd ones
    place = [k // 8 + 4 * (k % 2) + 8 * (k // 2 % 4) for k in range(32)]
    moved = np.empty_like(codes).reshape(rows, -1, 32)
    moved[:, :, place] = codes.reshape(rows, -1, 32)
    moved = moved.reshape(rows // 4, 4, columns // 64, 64).transpose(0, 2, 1, 3).reshape(-1, 4)
    words = sum(moved[:, i].astype(np.uint16) << np.uint16(4 * i) for i in range(4))
    return torch.from_numpy(np.asarray(words).view(np.int16).reshape(rows // 4, columns))


class Layer:
    """A random layer and how files hold it."""

    def __init__(self, group: int = 32, *, symmetric: bool = False, columns: int = COLUMNS) -> None:
        random = np.random.default_rng(0)
        self.group = columns if group == -1 else group
        self.groups = -(-columns // self.group)
        self.codes = random.integers(0, 16, (ROWS, columns))
        self.zeros = random.integers(0, 16, (ROWS, self.groups))
        if symmetric:
            self.zeros[:] = 8
        scales = random.uniform(0.01, 0.1, (ROWS, self.groups))
        self.scales = torch.from_numpy(scales).half()

    @property
    def values(self) -> Tensor:
        index = np.arange(self.codes.shape[1]) // self.group
        codes = torch.from_numpy(self.codes - self.zeros[:, index])
        return codes.float() * self.scales.float()[:, index]

    def tensors(self, order: str) -> dict[str, Tensor]:
        if order == "gemm":
            mixed = (0, 2, 4, 6, 1, 3, 5, 7)
            return {
                "qweight": nibbles(self.codes.T, mixed),
                "qzeros": nibbles(self.zeros.T, mixed),
                "scales": self.scales.t(),
            }
        several = 1 if self.group >= 128 else 128 // self.group
        more = -self.groups % (8 * several)
        scales = torch.nn.functional.pad(self.scales, (0, more))
        if order == "gemv":
            zeros = np.pad(self.zeros, ((0, 0), (0, more)))
            return {"qweight": nibbles(self.codes), "qzeros": nibbles(zeros), "scales": scales}
        minus = self.scales * torch.from_numpy(self.zeros).half()
        added = torch.nn.functional.pad(-minus, (0, more))
        return {"qweight": interleaved(self.codes), "qzeros": added.t(), "scales": scales.t()}


def settings(group: int = 32, **others: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, **others}


@pytest.fixture
def write(files: Any, tmp_path: Path) -> Folder:
    """A folder with ``tensors`` as those of one layer."""

    def folder(tensors: dict[str, Tensor], config: dict[str, Any] | None) -> Path:
        path = tmp_path / "model"
        quantized = {} if config is None else {"quantization_config": config}
        files.folder(path, config=files.config(**quantized))
        named = {f"{LAYER}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        named["model.embed_tokens.weight"] = torch.ones(8, 32)
        save_file(named, path / "model.safetensors")
        return path

    return folder


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group", [-1, 32, 64])
def test_the_values_are_those_that_were_packed(
    write: Folder, order: str, symmetric: bool, group: int
) -> None:
    layer = Layer(group, symmetric=symmetric)
    path = write(layer.tensors(order), settings(group, version=order.upper()))
    checkpoint = open_checkpoint(path)
    weight = checkpoint.weight(LAYER)
    if order != "gemv_fast":
        assert torch.equal(weight.dequantize(), layer.values)
        assert weight.spec.symmetric == symmetric
    else:  # code * scale - minus, the product of scale and zero point rounded to float16
        index = np.arange(COLUMNS) // layer.group
        minus = (layer.scales * torch.from_numpy(layer.zeros).half()).float()[:, index]
        codes = torch.from_numpy(layer.codes).float()
        assert torch.equal(weight.dequantize(), codes * layer.scales.float()[:, index] - minus)
    assert checkpoint.unused() == ["model.embed_tokens.weight"]
    entry = next(entry for entry in checkpoint.entries() if entry.name == LAYER)
    assert entry.shape == (ROWS, COLUMNS)
    assert entry.format == ("awq-w4g32" if group == 32 else "awq-w4")


def test_an_odd_number_of_columns_and_a_cut_group(write: Folder, files: Any) -> None:
    layer = Layer(16, columns=39)
    path = write(layer.tensors("gemm"), settings(16))
    config = files.config(model_type="persimmon", quantization_config=settings(16))
    (path / "config.json").write_text(json.dumps(config))  # whose shapes are not known
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)


def test_zero_points_may_be_called_scaled_zeros(write: Folder) -> None:
    tensors = Layer().tensors("gemv_fast")
    expected = open_checkpoint(write(tensors, settings())).weight(LAYER).dequantize()
    tensors["scaled_zeros"] = tensors.pop("qzeros")
    found = open_checkpoint(write(tensors, settings(version="llm-awq"))).weight(LAYER)
    assert torch.equal(found.dequantize(), expected)


def test_without_zero_points_the_middle_is_meant(write: Folder) -> None:
    layer = Layer(symmetric=True)
    tensors = layer.tensors("gemm")
    path = write(tensors, settings(zero_point=False))
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)
    del tensors["qzeros"]
    path = write(tensors, settings(zero_point=False))
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)


def test_gemm_says_everything_without_a_config(write: Folder) -> None:
    layer = Layer()
    path = write(layer.tensors("gemm"), None)
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)
    (path / "quant_config.json").write_text(json.dumps({"w_bit": 4, "q_group_size": 32}))
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_get_their_rows_and_columns(write: Folder, order: str) -> None:
    weight = open_checkpoint(write(Layer().tensors(order), settings())).weight(LAYER)
    assert isinstance(weight, AffineWeight)
    whole = weight.dequantize()
    assert torch.equal(weight.narrow("out", 8, 16).dequantize(), whole[8:24])
    assert torch.equal(weight.narrow("in", 32, 32).dequantize(), whole[:, 32:])
    with pytest.raises(AlignmentError, match="cut through a group"):
        weight.narrow("in", 0, 16)


# -- AutoRound -------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["auto-round", "intel/auto-round"])
def test_auto_round_packs_as_awq(write: Folder, method: str) -> None:
    layer = Layer()
    config = {
        "quant_method": method,
        "packing_format": "auto_round:auto_awq",
        "bits": 4,
        "group_size": 32,
        "data_type": "int",
    }
    checkpoint = open_checkpoint(write(layer.tensors("gemm"), config))
    assert torch.equal(checkpoint.weight(LAYER).dequantize(), layer.values)
    assert "awq-w4g32" in [entry.format for entry in checkpoint.entries()]


@pytest.mark.parametrize(
    ("packing", "added"),
    [
        ("auto_round:auto_gptq", 1),
        (None, 1),
        ("auto_round", 0),
        ("auto_round:gptqmodel", 0),
        ("auto_round:exllamav2", 0),
    ],
)
def test_auto_round_packs_as_either_version_of_gptq(
    write: Folder, packing: str | None, added: int
) -> None:
    layer = Layer()
    layer.zeros %= 15
    tensors = {
        "qweight": nibbles(layer.codes).t(),
        "qzeros": nibbles(layer.zeros.T),
        "scales": layer.scales.t(),
    }
    config = {
        "quant_method": "auto-round",
        "packing_format": packing,
        "bits": 8,
        "group_size": 128,
        "sym": False,
        "extra_config": {LAYER: {"bits": 4, "group_size": 32}, "lm_head": {"bits": 16}},
    }
    checkpoint = open_checkpoint(write(tensors, config))
    layer.zeros += added
    assert torch.equal(checkpoint.weight(LAYER).dequantize(), layer.values)
    assert "gptq-w4g32" in [entry.format for entry in checkpoint.entries()]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packing_format": "auto_round:fp8_static"}, "auto-round with auto_round:fp8_static"),
        ({"packing_format": "auto_round:llm_compressor"}, "auto_round:llm_compressor"),
        ({"data_type": "mx_fp4"}, "auto-round with .* and data_type mx_fp4"),
        ({"act_bits": 8}, "auto-round with activations of 8 bits"),
        ({"rotation_config": {"a": 1}}, "auto-round with rotated weights: rotation_config"),
    ],
)
def test_what_auto_round_writes_besides_is_refused_by_name(
    write: Folder, change: dict[str, Any], message: str
) -> None:
    config = {"quant_method": "auto-round", "bits": 4, "group_size": 32, **change}
    with pytest.raises(UnsupportedError, match=message):
        open_checkpoint(write(Layer().tensors("gemm"), config))


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 0}, "bits of .* is '0', expected 1 to 16"),
        ({"bits": "4"}, "bits of .* is '4', expected"),
        ({"bits": 3}, "AWQ with 3 bits"),
        ({"group_size": 0}, "group_size of .* is '0', expected -1 to .* but not 0"),
        ({"group_size": -2}, "group_size of .* is '-2'"),
        ({"version": "marlin"}, "AWQ of version 'marlin'"),
    ],
)
def test_impossible_settings_are_refused(
    write: Folder, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(Layer().tensors("gemm"), settings() | change))


def odd_scale(order: str, value: float) -> dict[str, Tensor]:
    scales = Layer().tensors(order)["scales"].clone()
    scales[0, 0] = value
    return {"scales": scales}


@pytest.mark.parametrize(
    ("order", "config", "change", "message"),
    [
        (
            "gemm",
            {"version": "gemv"},
            {},
            r"of AWQ \(gemm\), but quantization_config has version gemv",
        ),
        (
            "gemv",
            {"version": "gemm"},
            {},
            r"of AWQ \(gemv\), but quantization_config has version gemm",
        ),
        ("gemm", {"group_size": 16}, {}, r"scales': 2 groups of 64 columns, .* group_size 16"),
        ("gemv", {"group_size": 1}, {}, r"scales': 32 groups of 64 columns, .* group_size 1"),
        ("gemv", {"group_size": None}, {}, r"quantization_config has no group_size"),
        ("gemm", {}, odd_scale("gemm", float("nan")), "a scale is not a finite number"),
        ("gemv", {}, odd_scale("gemv", float("inf")), "a scale is not a finite number"),
        ("gemv_fast", {}, odd_scale("gemv_fast", float("inf")), "a scale is not a finite number"),
        ("gemm", {}, {"scales": None}, "scales': missing"),
        ("gemm", {}, {"qzeros": None}, "qzeros': missing"),
        ("gemm", {}, {"qzeros": torch.zeros(4, 2).int()}, r"shape \[4, 2\], expected \[2, 4\]"),
        ("gemv", {}, {"qzeros": torch.zeros(32, 3).int()}, r"shape \[32, 3\], expected \[32, 4\]"),
        (
            "gemv_fast",
            {},
            {"qzeros": torch.full((32, 32), float("nan"))},
            "qzeros': a zero point is not a finite number",
        ),
        ("gemm", {}, {"qweight": torch.zeros(64, 4)}, "qweight': F32, expected I32"),
        (
            "gemm",
            {},
            {"qweight": torch.zeros(72, 4).int()},
            r"shape \[32, 72\], the config asks for \[32, 64\]",
        ),
        (
            "gemm",
            {},
            {"qweight": torch.zeros(8, 32).int()},
            r"is the shape of GPTQ, but quantization_config says awq",
        ),
        (
            "gemm",
            {},
            {"qweight": torch.zeros(8, 33).int()},
            r"is the shape of no known format, but quantization_config says awq",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    write: Folder,
    order: str,
    config: dict[str, Any],
    change: dict[str, Tensor | None],
    message: str,
) -> None:
    tensors = {**Layer().tensors(order), **change}
    path = write({k: v for k, v in tensors.items() if v is not None}, settings() | config)
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path).weight(LAYER)


@pytest.mark.parametrize(("order", "columns"), [("gemm", 0), ("gemv_fast", 32)])
def test_sizes_no_program_writes_are_refused(
    write: Folder, files: Any, order: str, columns: int
) -> None:
    words = torch.zeros(columns, 4).int() if order == "gemm" else torch.zeros(8, columns).short()
    tensors = {"qweight": words, "scales": torch.ones(8, 32), "qzeros": torch.ones(8, 32)}
    path = write(tensors, settings())
    config = files.config(model_type="persimmon", quantization_config=settings())
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"holds 32 rows of 0 columns|32 columns, expected a"):
        open_checkpoint(path).weight(LAYER)
