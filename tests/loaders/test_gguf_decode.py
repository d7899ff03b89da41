"""Decoded GGUF blocks against the gguf package, bit for bit."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from sdk.kernels.layouts import Blocks, Dense
from sdk.kernels.reference.decode import decode
from sdk.loaders.formats.gguf_decode import SUPPORTED_TYPES, decode_matrix
from sdk.loaders.formats.gguf_types import GGUF_TYPES, GgufType
from sdk.loaders.gguf_reader import read_gguf
from sdk.quant.errors import CheckpointError, UnsupportedError

BY_NAME = {kind.name: kind for kind in GGUF_TYPES.values()}
QUANTIZED = [name for name in SUPPORTED_TYPES if name not in ("F32", "F16", "BF16")]
#: Where the float16 scales (and minima) of a block lie.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
}  # fmt: skip


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(values, np.float32).view(np.uint32)


def random_rows(kind: GgufType, rows: int, columns: int) -> NDArray[np.uint8]:
    """Blocks of random bits, all codes and sub-scales, with scales that are finite."""
    rng = np.random.default_rng(len(kind.name) + columns)
    blocks = rng.integers(0, 256, (rows * columns // kind.elements, kind.nbytes), np.uint8)
    for offset in SCALES[kind.name]:
        scales = rng.standard_normal(len(blocks)).astype("<f2")
        blocks[:, offset : offset + 2] = scales.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def reference(kind: GgufType, data: NDArray[np.uint8]) -> NDArray[np.float32]:
    values: NDArray[np.float32] = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind.name])
    return values


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("shape", [(3, 256), (5, 1536), (700, 1024)])
def test_random_blocks_decode_to_the_same_bits(name: str, shape: tuple[int, int]) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, *shape)
    layout = decode_matrix(kind, data, shape[1], "test")
    assert layout.shape == shape
    assert np.array_equal(bits(decode(layout).numpy()), bits(reference(kind, data)))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rows_shorter_than_a_k_quant_block_decode(name: str) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, 7, 96)
    layout = decode_matrix(kind, data, 96, "test")
    assert np.array_equal(bits(decode(layout).numpy()), bits(reference(kind, data)))


@pytest.mark.parametrize("name", QUANTIZED)
def test_packed_weights_take_no_more_bytes_than_in_the_file(name: str) -> None:
    kind = BY_NAME[name]
    data = random_rows(kind, 4, 512)
    layout = decode_matrix(kind, data, 512, "test")
    assert isinstance(layout, Blocks)
    assert layout.nbytes == data.nbytes


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


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_scale_that_is_not_finite_is_refused(name: str, bad: float) -> None:
    kind = BY_NAME[name]
    for offset in SCALES[name]:
        data = random_rows(kind, 4, 512)
        per_row = 512 // kind.elements
        blocks = data.reshape(-1, kind.nbytes)
        blocks[2 * per_row + 1, offset : offset + 2] = np.array([bad], "<f2").view(np.uint8)
        with pytest.raises(CheckpointError, match=r"here: a scale in row 2 is -?(nan|inf)"):
            decode_matrix(kind, data, 512, "here")


@pytest.mark.parametrize(
    "kind", [kind for kind in GGUF_TYPES.values() if kind.name not in SUPPORTED_TYPES]
)
def test_types_that_do_not_run_are_named_with_what_to_do(kind: GgufType) -> None:
    data = np.zeros((2, kind.nbytes), np.uint8)
    with pytest.raises(UnsupportedError, match=rf"f.gguf: 'w'.*{kind.name} .*Q4_K.*llama-quantize"):
        decode_matrix(kind, data, kind.elements, "f.gguf: 'w'")


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
