"""GPTQ folders: every width and version, columns sorted by group, and what is wrong with files.

The writer below packs codes the other way round, from the description in loaders/formats/gptq.py;
tests/golden holds files that other programs wrote.
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
from sdk.quant.permuted import PermutedWeight
from sdk.quant.weight import AffineWeight

LAYER = "model.layers.0.mlp.down_proj"
ROWS, COLUMNS = 32, 64
PLANES = {2: [2], 3: [2, 1], 4: [4], 5: [4, 1], 6: [4, 2], 7: [4, 2, 1], 8: [8]}
Folder = Callable[..., Path]


def stream(codes: NDArray[Any], bits: int) -> Tensor:
    """Each row of codes as one bit stream in words: ``[M, n] -> [M, ceil(n * bits / 32)]``."""
    flat = (codes[:, :, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(codes), -1)
    flat = np.pad(flat, ((0, 0), (0, -flat.shape[1] % 32)))
    return torch.from_numpy(np.packbits(flat, axis=1, bitorder="little").view("<i4"))


def planar(codes: NDArray[Any], bits: int) -> Tensor:
    """Each row of codes as words of planes, 32 codes at a time."""
    words = []
    for start in range(0, codes.shape[1], 32):
        shift = 0
        for width in PLANES[bits]:
            plane = codes[:, start : start + 32] >> shift & ((1 << width) - 1)
            words.append(stream(plane, width))
            shift += width
    return torch.cat(words, dim=1)


class Layer:
    """A random layer: its values and, by ``tensors``, how a file holds them."""

    def __init__(
        self,
        bits: int = 4,
        group: int = 32,
        *,
        symmetric: bool = False,
        act_order: bool = False,
        rows: int = ROWS,
        columns: int = COLUMNS,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        self.bits = bits
        group = columns if group == -1 else group
        groups = -(-columns // group)
        self.codes = random.integers(0, 1 << bits, (rows, columns))
        self.zeros = random.integers(0, 1 << bits, (groups, rows))
        if symmetric:
            self.zeros[:] = 1 << (bits - 1)
        self.scales = torch.from_numpy(random.uniform(0.01, 0.1, (groups, rows))).half()
        self.g_idx = np.arange(columns) // group
        if act_order:
            self.g_idx = random.permutation(self.g_idx)

    @property
    def values(self) -> Tensor:
        zeros = torch.from_numpy(self.zeros[self.g_idx].T.copy())
        codes = torch.from_numpy(self.codes) - zeros
        return codes.float() * self.scales.float()[self.g_idx].T

    def tensors(self, version: str = "gptq_v2") -> dict[str, Tensor]:
        pack = planar if version == "gptq_p" else stream
        zeros = self.zeros
        if version == "gptq" and self.bits == 3:
            zeros = (zeros - 1) % 8
        qzeros = pack(zeros, self.bits)
        if version == "gptq" and self.bits != 3:  # from the whole word, borrowing
            ones = sum(1 << i for i in range(0, 32, self.bits))
            words = (qzeros.numpy().astype(np.int64) - ones) % (1 << 32)
            qzeros = torch.from_numpy(words.astype(np.uint32).view(np.int32))
        return {
            "qweight": pack(self.codes, self.bits).t().contiguous(),
            "qzeros": qzeros,
            "scales": self.scales,
            "g_idx": torch.from_numpy(self.g_idx).int(),
        }


def settings(bits: int = 4, group: int = 32, **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": False,
        "checkpoint_format": "gptq_v2",
        **others,
    }


@pytest.fixture
def write(files: Any, tmp_path: Path) -> Folder:
    """A folder with ``tensors`` as those of one layer."""

    def folder(
        tensors: dict[str, Tensor], config: dict[str, Any] | None = None, layer: str = LAYER
    ) -> Path:
        path = tmp_path / "model"
        quantized = {} if config is None else {"quantization_config": config}
        files.folder(path, config=files.config(**quantized))
        named = {f"{layer}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
        named["model.embed_tokens.weight"] = torch.ones(8, 32)
        save_file(named, path / "model.safetensors")
        return path

    return folder


VERSIONS = [(bits, version) for version in ("gptq", "gptq_v2") for bits in (2, 3, 4, 8)]
VERSIONS += [(bits, "gptq_p") for bits in range(2, 9)]


@pytest.mark.quick_cases(50)
@pytest.mark.parametrize(("bits", "version"), VERSIONS)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [-1, 32, 48, 128])
def test_the_values_are_those_that_were_packed(
    write: Folder, bits: int, version: str, symmetric: bool, act_order: bool, group: int
) -> None:
    layer = Layer(bits, group, symmetric=symmetric, act_order=act_order)
    config = settings(bits, group, sym=symmetric, desc_act=act_order, checkpoint_format=version)
    weight = open_checkpoint(write(layer.tensors(version), config)).weight(LAYER)
    assert torch.equal(weight.dequantize(), layer.values)
    assert isinstance(weight, PermutedWeight) == (act_order and group in (32, 48))
    assert weight.spec.symmetric == symmetric


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_words_may_end_in_the_middle_of_a_row(write: Folder, files: Any, bits: int) -> None:
    layer = Layer(bits, 16, rows=40, columns=72, act_order=True)
    path = write(layer.tensors(), settings(bits, 16))
    config = files.config(model_type="persimmon", quantization_config=settings(bits, 16))
    (path / "config.json").write_text(json.dumps(config))  # whose shapes are not known
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scales_keep_their_type_and_may_be_zero_negative_or_tiny(
    write: Folder, dtype: torch.dtype
) -> None:
    layer = Layer()
    odd = torch.tensor([0.0, -0.5, 1e-7, 6e-8])
    layer.scales = torch.cat([odd, layer.scales.flatten()[4:].float()]).view(2, ROWS).to(dtype)
    weight = open_checkpoint(write(layer.tensors(), settings())).weight(LAYER)
    assert torch.equal(weight.dequantize(), layer.values)
    assert isinstance(weight, AffineWeight) and weight.layout.scale.dtype == dtype  # type: ignore[attr-defined]


@pytest.mark.parametrize("stored", [0, 7, 8, 15, None])
def test_symmetric_means_the_middle_whatever_is_stored(
    write: Folder, caplog: pytest.LogCaptureFixture, stored: int | None
) -> None:
    layer = Layer()
    if stored is not None:
        layer.zeros[:] = stored
    path = write(layer.tensors(), settings(sym=True, checkpoint_format="gptq"))
    weight = open_checkpoint(path).weight(LAYER)
    assert ("sym is true, but the zero points differ" in caplog.text) == (stored is None)
    layer.zeros[:] = 8
    assert torch.equal(weight.dequantize(), layer.values)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize(
    ("stored", "meant"), [(7, (8, 8)), (8, (8, 8)), (3, (4, 3)), (15, (0, 15))]
)
def test_zero_points_in_the_middle_cannot_be_mislabelled(
    write: Folder, version: str, stored: int, meant: tuple[int, int]
) -> None:
    layer = Layer()
    layer.zeros[:] = stored
    config = settings(checkpoint_format=version)
    del config["sym"]
    weight = open_checkpoint(write(layer.tensors("gptq_v2"), config)).weight(LAYER)
    layer.zeros[:] = meant[version == "gptq_v2"]
    if (version, stored) != ("gptq", 15):  # a carry from one zero point into the next
        assert torch.equal(weight.dequantize(), layer.values)
    assert weight.spec.symmetric or stored == 15


def test_zero_points_that_autogptq_destroyed_are_reported_once(
    write: Folder, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = Layer().tensors("gptq")
    tensors["qzeros"][0, 0] |= -(1 << 20)
    checkpoint = open_checkpoint(write(tensors, settings(checkpoint_format="gptq")))
    checkpoint.weight(LAYER)
    checkpoint.weight(LAYER)
    assert caplog.text.count("zero points end in ones") == 1
    assert LAYER in caplog.text


def test_a_layer_may_have_settings_of_its_own(write: Folder) -> None:
    layer = Layer(8, 16)
    dynamic: dict[str, Any] = {"-:lm_head": {}, r"+:.*down.*": {"bits": 8, "group_size": 16}}
    path = write(layer.tensors(), settings(dynamic=dynamic))
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.weight(LAYER).dequantize(), layer.values)
    assert "gptq-w8g16" in [entry.format for entry in checkpoint.entries()]


def test_a_symmetric_layer_beside_others_is_seen_from_its_zero_points(write: Folder) -> None:
    layer = Layer()
    path = write(layer.tensors(), settings(sym=True, dynamic={"x": {"sym": False}}))
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)


def test_columns_without_groups_of_their_own_need_no_order(write: Folder) -> None:
    layer = Layer()
    tensors = layer.tensors()
    del tensors["g_idx"]
    weight = open_checkpoint(write(tensors, settings())).weight(LAYER)
    assert isinstance(weight, AffineWeight)
    assert torch.equal(weight.dequantize(), layer.values)


def test_the_tensors_decide_what_is_quantized_and_not_the_lists(write: Folder) -> None:
    layer = Layer()
    plain = "model.layers.0.mlp.up_proj"
    lists = {"modules_in_block_to_quantize": [["mlp.up_proj"]], "modules_to_not_convert": [LAYER]}
    path = write(layer.tensors(), settings(**lists))
    tensors = {f"{LAYER}.{name}": tensor for name, tensor in layer.tensors().items()}
    save_file({**tensors, f"{plain}.weight": torch.ones(64, 32)}, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.weight(LAYER).dequantize(), layer.values)
    assert str(checkpoint.weight(plain).spec) == "f32"


# -- the folder around the layer -------------------------------------------------------------------


def test_a_bias_of_zeros_is_dropped_and_another_one_kept(write: Folder) -> None:
    tensors = Layer().tensors()
    checkpoint = open_checkpoint(write({**tensors, "bias": torch.zeros(ROWS)}, settings()))
    assert not checkpoint.has(f"{LAYER}.bias")
    checkpoint.weight(LAYER)
    assert checkpoint.unused() == ["model.embed_tokens.weight"]
    assert checkpoint.tensor(f"{LAYER}.bias").tolist() == [0.0] * ROWS  # where one is required
    checkpoint = open_checkpoint(write({**tensors, "bias": torch.ones(ROWS)}, settings()))
    assert checkpoint.has(f"{LAYER}.bias")


def test_a_packed_layer_is_known_counted_and_shown_as_one(write: Folder) -> None:
    tensors = Layer(act_order=True).tensors()
    checkpoint = open_checkpoint(write(tensors, settings()))
    size = sum(tensor.nbytes for tensor in tensors.values())
    seen: list[tuple[int, int]] = []
    checkpoint.on_bytes = lambda done, total: seen.append((done, total))
    assert checkpoint.has(LAYER)
    assert not checkpoint.has("lm_head")
    entries = {entry.name: entry for entry in checkpoint.entries()}
    assert set(entries) == {LAYER, "model.embed_tokens.weight"}
    found = entries[LAYER]
    assert (found.shape, found.format, found.nbytes) == ((ROWS, COLUMNS), "gptq-w4g32", size)
    weight = checkpoint.weight(LAYER)
    assert seen[-1] == (size, size + 1024)
    assert weight.nbytes == size
    assert checkpoint.unused() == ["model.embed_tokens.weight"]


def test_a_quantized_head_is_a_layer_like_any_other(write: Folder, files: Any) -> None:
    layer = Layer(rows=8, columns=32)
    path = write(layer.tensors(), settings(lm_head=True), layer="lm_head")
    checkpoint = open_checkpoint(path)
    assert checkpoint.has("lm_head")
    assert torch.equal(checkpoint.weight("lm_head").dequantize(), layer.values)
    tied = files.config(quantization_config=settings(), tie_word_embeddings=True)
    (path / "config.json").write_text(json.dumps(tied))
    assert "lm_head.qweight" in open_checkpoint(path).unused()


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_packed_layers_are_found_in_a_model_that_also_sees(write: Folder, prefix: str) -> None:
    layer = Layer()
    stored = LAYER.replace("model.", prefix, 1)
    path = write(layer.tensors(), settings(), layer=stored)
    tensors = {f"{prefix}embed_tokens.weight": torch.ones(8, 32)}
    tensors |= {f"{stored}.{name}": tensor for name, tensor in layer.tensors().items()}
    save_file(tensors, path / "model.safetensors")
    checkpoint = open_checkpoint(path)
    assert torch.equal(checkpoint.weight(LAYER).dequantize(), layer.values)
    assert stored in [entry.name for entry in checkpoint.entries()]


def test_the_settings_may_lie_in_a_file_of_their_own_without_a_method(write: Folder) -> None:
    layer = Layer()
    path = write(layer.tensors(), None)
    given = settings()
    del given["quant_method"]
    (path / "quantize_config.json").write_text(json.dumps(given))
    assert torch.equal(open_checkpoint(path).weight(LAYER).dequantize(), layer.values)


# -- tensor parallelism and fusion -----------------------------------------------------------------


@pytest.mark.parametrize("symmetric", [False, True])
def test_ranks_get_their_rows_and_columns(write: Folder, symmetric: bool) -> None:
    layer = Layer(3, 32, symmetric=symmetric)
    weight = open_checkpoint(write(layer.tensors(), settings(3))).weight(LAYER)
    assert torch.equal(weight.narrow("out", 8, 16).dequantize(), layer.values[8:24])
    assert torch.equal(weight.narrow("in", 32, 32).dequantize(), layer.values[:, 32:])
    with pytest.raises(AlignmentError, match=r"in features 0\.\.16 cut through a group"):
        weight.narrow("in", 0, 16)


def test_sorted_columns_can_be_cut_by_rows_only(write: Folder) -> None:
    layer = Layer(act_order=True)
    weight = open_checkpoint(write(layer.tensors(), settings())).weight(LAYER)
    assert torch.equal(weight.narrow("out", 8, 16).dequantize(), layer.values[8:24])
    assert weight.narrow("in", 0, COLUMNS) is weight
    with pytest.raises(
        AlignmentError, match=r"in features 0\.\.32: .*sorted by group \(desc_act\)"
    ):
        weight.narrow("in", 0, 32)


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(({"bits": bits}, f"bits of .* is '{bits}', expected 2 to 8") for bits in (0, 1, 9, "4")),
        ({"bits": True}, "bits of .* is 'True', expected 2 to 8"),
        ({"bits": None}, "bits is missing in quantization_config"),
        *(
            ({"group_size": size}, f"group_size .* is '{size}', expected -1 to .* but not 0")
            for size in (0, -2, "128", 2**40)
        ),
        ({"group_size": None}, "group_size is missing"),
        ({"checkpoint_format": "gptq_v3"}, "is 'gptq_v3', expected gptq, gptq_v2 or gptq_p"),
        ({"checkpoint_format": ["gptq"]}, "expected gptq, gptq_v2 or gptq_p"),
        ({"bits": 5}, "5 bits with checkpoint_format gptq_v2, expected gptq_p"),
        ({"dynamic": {"x": {"bits": 6}}}, "6 bits with checkpoint_format gptq_v2"),
        ({"dynamic": {"x": {"bits": 12}}}, "bits of .* is '12', expected 2 to 8"),
        ({"dynamic": [1]}, r"the overrides for single layers are \[1\], expected an object"),
    ],
)
def test_impossible_settings_are_refused(
    write: Folder, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(Layer().tensors(), settings() | change))


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"checkpoint_format": "marlin"}, "marlin"),
        ({"checkpoint_format": "bitblas"}, "bitblas"),
        ({"is_marlin_format": True}, "marlin"),
    ],
)
def test_codes_in_the_order_of_a_gpu_kernel_are_refused_by_name(
    write: Folder, change: dict[str, Any], kernel: str
) -> None:
    with pytest.raises(UnsupportedError, match=f"GPTQ in the order of the GPU kernel {kernel}"):
        open_checkpoint(write(Layer().tensors(), settings() | change))


def test_without_settings_the_number_of_bits_is_asked_for(write: Folder) -> None:
    with pytest.raises(CheckpointError, match=r"bits is missing in quantization_config \(or quant"):
        open_checkpoint(write(Layer().tensors(), None))


ODD: list[Any] = [
    None, True, 0, -1, 2**70, 1.5, "", "x", "4", [], [1], [[]], {}, {"a": 1}, {"a": {"bits": []}},
    {"a": {"bits": 4, "sym": []}},
]  # fmt: skip
KEYS = (
    "quant_method", "bits", "group_size", "sym", "desc_act", "checkpoint_format", "format",
    "dynamic", "is_marlin_format", "version", "zero_point", "packing_format", "extra_config",
    "data_type", "act_bits", "producer", "w_bit", "rotation_config",
)  # fmt: skip


@pytest.mark.parametrize("method", ["gptq", "awq", "auto-round"])
def test_no_odd_setting_fails_in_another_way_than_by_an_error(write: Folder, method: str) -> None:
    path = write(Layer().tensors(), settings())
    config = json.loads((path / "config.json").read_text())
    opened = 0
    for key in KEYS:
        for value in ODD:
            config["quantization_config"] = {**settings(), "quant_method": method, key: value}
            (path / "config.json").write_text(json.dumps(config))
            try:
                checkpoint = open_checkpoint(path)
                checkpoint.entries()
                checkpoint.weight(LAYER)
                opened += 1
            except CheckpointError:
                pass
    assert 0 < opened < len(KEYS) * len(ODD) or method == "awq"


def changed(name: str, index: Any, value: Any) -> dict[str, Tensor]:
    tensor = Layer().tensors()[name].clone()
    tensor[index] = value
    return {name: tensor}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("g_idx", 3, 2), r"g_idx': group 2, expected 0 to 1"),
        (changed("g_idx", 3, -1), r"g_idx': group -1, expected 0 to 1"),
        (changed("g_idx", 3, 1), r"g_idx': groups of up to 33 columns, expected 32 in each"),
        ({"g_idx": torch.zeros(63, dtype=torch.int32)}, r"g_idx': shape \[63\], expected \[64\]"),
        ({"g_idx": torch.zeros(64)}, r"g_idx': F32, expected I32 or I64"),
        ({"qzeros": torch.zeros(4, 2).int()}, r"qzeros': shape \[4, 2\], expected \[2, 4\]"),
        ({"qzeros": torch.zeros(2, 4)}, r"qzeros': F32, expected I32"),
        ({"qzeros": None}, r"qzeros': missing"),
        (changed("scales", (0, 0), float("nan")), "scales': a scale is not a finite number"),
        (changed("scales", (1, 31), float("-inf")), "scales': a scale is not a finite number"),
        ({"scales": torch.ones(2, 32).int()}, r"scales': I32, expected F16 or BF16 or F32"),
        (
            {"scales": torch.ones(2, 32).to(torch.float8_e4m3fn)},
            "scales': F8_E4M3, expected F16 or BF16 or F32",
        ),
        ({"scales": torch.ones(3, 32)}, r"scales': 3 groups of 64 columns, .* has group_size 32"),
        ({"scales": torch.ones(2, 31)}, r"with scales \[2, 31\] is the shape of no known format"),
        ({"scales": torch.ones(64)}, r"with scales \[64\] is the shape of no known format"),
        ({"scales": None}, r"scales': missing"),
        ({"qweight": torch.zeros(8, 32)}, r"qweight': F32, expected I32"),
        (
            {"qweight": torch.zeros(16, 32).int()},
            r"qweight': 16 words hold 64 columns at 8 bits, but quantization_config has bits 4",
        ),
        (
            {"qweight": torch.zeros(8, 40).int(), "scales": torch.ones(2, 40)},
            r"qweight': shape \[40, 64\], the config asks for \[32, 64\]",
        ),
        (
            {"qweight": torch.zeros(64, 4).int(), "scales": torch.ones(2, 32)},
            r"is the shape of AWQ \(gemm\), but quantization_config says gptq",
        ),
        (
            {"qweight": torch.zeros(32, 8).int(), "scales": torch.ones(32, 32)},
            r"is the shape of AWQ \(gemv\), but quantization_config says gptq",
        ),
        (
            {"qweight": torch.zeros(8, 64).short(), "scales": torch.ones(32, 32)},
            r"is the shape of AWQ \(gemv_fast\), but quantization_config says gptq",
        ),
        (
            {"qweight": torch.zeros(8, 0).int(), "scales": torch.ones(2, 0)},
            r"shape \[0, 64\], the config asks for",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(
    write: Folder, change: dict[str, Tensor | None], message: str
) -> None:
    tensors = {**Layer().tensors(), **change}
    path = write({k: v for k, v in tensors.items() if v is not None}, settings())
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path).weight(LAYER)


def test_nothing_at_all_is_refused_where_shapes_are_not_known(write: Folder, files: Any) -> None:
    tensors = {"qweight": torch.zeros(0, 8).int(), "scales": torch.ones(0, 8)}
    path = write(tensors, settings())
    config = files.config(model_type="persimmon", quantization_config=settings())
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"qweight': 8 rows of 0 columns in 0 groups"):
        open_checkpoint(path).weight(LAYER)


def test_sorted_columns_without_their_groups_are_refused(write: Folder) -> None:
    tensors = Layer(act_order=True).tensors()
    del tensors["g_idx"]
    path = write(tensors, settings(desc_act=True))
    with pytest.raises(CheckpointError, match=r"g_idx': missing, .* has desc_act"):
        open_checkpoint(path).weight(LAYER)


def test_planes_of_a_part_of_32_codes_are_refused(write: Folder, files: Any) -> None:
    layer = Layer(4, 24, rows=40, columns=72)
    path = write(layer.tensors(), settings(4, 24, checkpoint_format="gptq_p"))
    config = json.loads((path / "config.json").read_text()) | {"model_type": "persimmon"}
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"\[40, 72\] in planes, expected multiples of 32"):
        open_checkpoint(path).weight(LAYER)
