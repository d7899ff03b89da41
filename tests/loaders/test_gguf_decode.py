"""Decoded GGUF blocks against the gguf package, bit for bit."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import gguf
import libgguf
import numpy as np
import pytest
import torch
from gguf.scripts.gguf_convert_endian import byteswap_tensors
from numpy.typing import NDArray

from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.layouts import BLOCK_TYPES, Blocks, Dense
from sdk.loaders.formats import gguf_codebooks, gguf_decode
from sdk.loaders.formats.gguf_byte_order import to_little_endian
from sdk.loaders.formats.gguf_decode import decode_matrix
from sdk.loaders.formats.gguf_types import GGUF_TYPES, GgufType
from sdk.loaders.gguf_files.reader import read_gguf
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import weight_of

BY_NAME = {kind.name: kind for kind in GGUF_TYPES.values()}
#: I2_S: tests/models/test_bitnet.py.
QUANTIZED = [k.name for k in GGUF_TYPES.values() if k.elements > 1 and not k.tail]
#: Types whose blocks stay as they are.
KEPT = [name for name in QUANTIZED if name.lower() in BLOCK_TYPES]


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def random_rows(kind: GgufType, rows: int, columns: int) -> NDArray[np.uint8]:
    """Blocks of random bits, all codes and sub-scales, with scales that are finite."""
    rng = np.random.default_rng(len(kind.name) + columns)
    blocks = rng.integers(0, 256, (rows * columns // kind.elements, kind.nbytes), np.uint8)
    for offset in kind.halves:
        scales = rng.standard_normal(len(blocks)).astype("<f2")
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    if kind.name == "MXFP4":
        blocks[:, 0] = rng.integers(0, 251, len(blocks))  # above, 6 times it overflows
    if kind.name == "NVFP4":
        blocks[:, :4] &= 0x7F
    if kind.name == "IQ1_M":
        blocks[:, 55] &= 0xBF  # the exponent's top bit
    return blocks.reshape(rows, -1)


def native(kind: GgufType, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    if kind.name == "Q2_0":  # in neither package: (code - 1) * d, four codes to a byte
        blocks = data.reshape(len(data), -1, 18)
        codes = np.stack([blocks[:, :, 2:] >> shift & 3 for shift in (0, 2, 4, 6)], axis=3)
        d = blocks[:, :, :2].copy().view("<f2").astype(np.float32)
        return ((codes.reshape(*d.shape[:2], 64).astype(np.float32) - 1) * d).reshape(len(data), -1)
    number = next(number for number, one in GGUF_TYPES.items() if one is kind)
    return np.asarray(libgguf.dequantize_rows(data, number), np.float32).reshape(len(data), -1)


def reference(kind: GgufType, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    if kind.name in ("Q1_0", "Q2_0"):  # not in this package
        return native(kind, data)
    values: NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.name])
    return values


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", [(3, 256), (5, 1536), (700, 1024)])
def test_random_blocks_decode_to_the_same_bits(name: str, shape: tuple[int, int]) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, *shape)
    layout = decode_matrix(kind, data, shape[1], "test")
    assert layout.shape == shape
    found = bits(decode(layout).numpy())
    assert np.array_equal(found, bits(reference(kind, data)))
    assert np.array_equal(found, bits(native(kind, data)))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rows_shorter_than_a_k_quant_block_decode(name: str) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, 7, 96)
    layout = decode_matrix(kind, data, 96, "test")
    assert np.array_equal(bits(decode(layout).numpy()), bits(reference(kind, data)))


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_take_as_many_bytes_as_their_type_says(name: str) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, 4, 512)
    layout = decode_matrix(kind, data, 512, "test")
    assert isinstance(layout, Blocks) == (name in KEPT)
    assert layout.nbytes == data.nbytes // kind.nbytes * (kind.held or kind.nbytes)
    assert str(weight_of(layout).spec) == name.lower()
    if name not in ("TQ1_0", *gguf_codebooks.DECODERS):
        assert layout.nbytes == data.nbytes


@pytest.mark.parametrize("name", gguf_codebooks.DECODERS)
def test_every_entry_of_a_codebook_and_every_sign_has_its_value(name: str) -> None:
    """Random indices miss some of 2048; here each comes with each sign."""
    kind = BY_NAME[name]
    rng = np.random.default_rng(1)
    rows = [random_rows(kind, 64, 256)]
    for value in range(256):
        row = random_rows(kind, 8, 256)
        codes = row[:, kind.halves[0] + 2 :] if kind.halves else row[:, :48]
        codes[:] = rng.permuted(np.full_like(codes, value) ^ rng.integers(0, 8, codes.shape) << 5)
        rows.append(row)
    data = np.concatenate(rows)
    layout = decode_matrix(kind, data, 256, "test")
    assert np.array_equal(bits(decode(layout).numpy()), bits(native(kind, data)))


@pytest.mark.parametrize("name", ["IQ3_XXS", "TQ1_0", "NVFP4"])
def test_rows_of_a_large_matrix_are_taken_apart_in_stretches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, 50, 512)
    at_once = decode(decode_matrix(kind, data, 512, "test"))
    monkeypatch.setattr(gguf_decode, "_STRETCH", 7 * data.shape[1] + 1)
    layout = decode_matrix(kind, data, 512, "test")
    assert layout.shape == (50, 512)
    assert torch.equal(decode(layout), at_once)


@pytest.mark.parametrize("name", ["F64", "I8", "I16", "I32", "I64"])
def test_other_numbers_become_float32(name: str) -> None:
    dtype = np.dtype({"F": "<f", "I": "<i"}[name[0]] + str(int(name[1:]) // 8))
    values = np.random.default_rng(2).integers(-128, 128, (3, 32)).astype(dtype)
    layout = decode_matrix(BY_NAME[name], values.view(np.uint8).reshape(3, -1), 32, "test")
    assert np.array_equal(decode(layout).numpy(), values)


def test_an_integer_float32_cannot_hold_is_refused() -> None:
    values = np.array([[1 << 24, (1 << 24) + 1]], "<i4")
    with pytest.raises(CheckpointError, match="here: expected integers that float32 holds"):
        decode_matrix(BY_NAME["I32"], values.view(np.uint8).reshape(1, -1), 2, "here")


@pytest.mark.parametrize("name", ["F32", "F16", "BF16"])
def test_dense_tensors_keep_their_float_type(name: str) -> None:
    values = np.random.default_rng(1).standard_normal((3, 32)).astype(np.float32)
    data = gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8)
    layout = decode_matrix(BY_NAME[name], data.reshape(3, -1), 32, "test")
    assert isinstance(layout, Dense)
    assert layout.nbytes == data.nbytes
    expected = reference(BY_NAME[name], data.reshape(3, -1))
    assert np.array_equal(bits(decode(layout).numpy()), bits(expected))


def test_dense_tensors_share_the_bytes_they_come_from_unless_misaligned() -> None:
    raw = np.zeros(3 * 64 + 1, np.uint8)
    aligned = decode_matrix(BY_NAME["F16"], raw[:-1].reshape(3, 64), 32, "test")
    shifted = decode_matrix(BY_NAME["F16"], raw[1:].reshape(3, 64), 32, "test")
    raw[:] = 0x3C
    assert decode(aligned).max() > 0
    assert decode(shifted).max() == 0


@pytest.mark.parametrize("name", [kind.name for kind in BY_NAME.values() if kind.halves])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    kind = BY_NAME[name]
    for offset in kind.halves:
        data = random_rows(kind, 4, 512)
        per_row = 512 // kind.elements
        blocks = data.reshape(-1, kind.nbytes)
        blocks[2 * per_row + 1, offset : offset + 2] = np.array([bad], "<f2").view(np.uint8)
        with pytest.raises(CheckpointError, match=r"here: a scale in row 2 is -?(nan|inf)"):
            decode_matrix(kind, data, 512, "here")


@pytest.mark.parametrize(
    ("name", "byte", "bad", "message"),
    [
        ("IQ1_M", 55, 0x7C, "a scale in row 1 is"),
        ("MXFP4", 0, 255, r"a scale in row 1 is the byte 255, expected 0 to 254 \(MXFP4\)"),
        ("NVFP4", 2, 0x80, r"a scale in row 1 is the byte 128, expected 0 to 127 \(NVFP4\)"),
    ],
)
def test_a_scale_that_is_no_number_is_refused(name: str, byte: int, bad: int, message: str) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, 2, 256)
    data.reshape(2, -1, kind.nbytes)[1, 0, byte] = bad
    if name == "IQ1_M":
        data.reshape(2, -1, kind.nbytes)[1, 0, 53] = 0xC0  # the rest of the exponent
    with pytest.raises(CheckpointError, match=f"here: {message}"):
        decode_matrix(kind, data, 256, "here")


@pytest.mark.parametrize("kind", GGUF_TYPES.values(), ids=lambda kind: kind.name)
def test_big_endian_tensors_are_turned_round_or_refused(kind: GgufType) -> None:
    if kind.elements > 1:
        data = random_rows(kind, 3, 512)
    else:
        numbers = np.random.default_rng(3).integers(0, 100, (3, 512))
        dtype = {"F16": "<f2", "BF16": "<i2"}.get(
            kind.name, f"<{kind.name[0].lower()}{kind.nbytes}"
        )
        data = numbers.astype(dtype).view(np.uint8)
    if kind.name in ("Q5_0", "Q5_1", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ3_XXS"):
        with pytest.raises(UnsupportedError, match=f"here: the byte order of {kind.name}"):
            to_little_endian(kind, data, "here")
        return
    turned = data.copy().reshape(3, -1, kind.nbytes)
    words = [*kind.halves, *([2] if kind.name == "IQ4_XS" else [])]
    if kind.elements == 1:
        turned = turned[:, :, ::-1].copy()
    for at in words:
        turned[:, :, [at, at + 1]] = turned[:, :, [at + 1, at]]
    found = to_little_endian(kind, turned.reshape(data.shape), "here")
    assert np.array_equal(found, data)


@pytest.mark.parametrize("name", ["MXFP4", "NVFP4", "Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_blocks_are_turned_round_as_the_gguf_package_does(name: str) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, 3, 512)
    turn = byteswap_tensors[gguf.GGMLQuantizationType[name]]
    flat = SimpleNamespace(data=data.copy().reshape(-1))
    for at in range(0, data.size, kind.nbytes):
        turn(flat, at)
    assert np.array_equal(to_little_endian(kind, data, "here").reshape(-1), flat.data)


GOLDEN_FILES = sorted((Path(__file__).parents[1] / "golden").glob("*/model.gguf"))


@pytest.mark.parametrize("path", GOLDEN_FILES, ids=lambda path: path.parent.name)
def test_every_tensor_of_the_golden_files_decodes_to_the_same_bits(path: Path) -> None:
    found = read_gguf(path)
    theirs = gguf.GGUFReader(path).tensors
    assert len(theirs) == len(found.tensors) > 20
    for tensor in theirs:
        mine = found.tensors[tensor.name]
        layout = decode_matrix(mine.type, found.data(tensor.name), mine.shape[-1], tensor.name)
        expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(mine.shape)
        values = decode(layout).reshape(mine.shape).numpy()
        assert np.array_equal(bits(values), bits(expected)), tensor.name
