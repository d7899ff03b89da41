"""Rows that stay in their file have the bits of the same matrix in memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu.packed_weight import BLOCK_SOURCES
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import BLOCK_TYPES, Blocks, Dense, Layout
from sdk.kernels.weights.stored_rows import OpenRows, StoredRows, open_rows

ROWS, COLUMNS, OFFSET = 37, 768, 96
FLOATS = ("float32", "float16", "bfloat16")


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=2)
    yield opened
    opened.close()


def _layout(kind: str) -> tuple[Layout, Tensor]:
    """A matrix, and the bytes of its rows."""
    random = torch.Generator().manual_seed(1)
    if kind in FLOATS:
        values = torch.randn(ROWS, COLUMNS, generator=random).to(getattr(torch, kind))
        return Dense(values), values.view(torch.uint8)
    block = BLOCK_TYPES[kind]
    width = COLUMNS // block.elements * block.nbytes
    # Exponents of scales stay small: 0 to 0x3F in the high byte of a float16.
    data = torch.randint(0, 0x40, (ROWS, width), generator=random, dtype=torch.uint8)
    return Blocks((ROWS, COLUMNS), kind, data), data


def _stored(path: Path, kind: str, data: Tensor) -> StoredRows:
    path.write_bytes(bytes(OFFSET) + data.numpy().tobytes())
    descriptor = os.open(path, os.O_RDONLY)
    return StoredRows((ROWS, COLUMNS), kind, descriptor, OFFSET, data.shape[1])


def _open(path: Path, kind: str, ops: Ops) -> tuple[OpenRows, Layout]:
    layout, data = _layout(kind)
    stored = _stored(path, kind, data)
    found = open_rows(stored, ops.context)
    os.close(stored.descriptor)  # the operator has its own
    assert found is not None
    return found, layout


@pytest.mark.parametrize("kind", [*FLOATS, *BLOCK_SOURCES])
def test_rows_have_the_bits_of_a_matrix_in_memory(kind: str, ops: Ops, tmp_path: Path) -> None:
    opened, layout = _open(tmp_path / "rows", kind, ops)
    ids = torch.tensor([0, 36, 5, 5, 17, 16, 15])
    wanted = ops.linear(layout, 16).rows(ids)
    found = opened.rows(ids)
    assert torch.equal(found.isnan(), wanted.isnan())
    assert torch.equal(found.nan_to_num(), wanted.nan_to_num())
    assert opened.rows(torch.empty(0, dtype=torch.int64)).shape == (0, COLUMNS)


def test_a_step_that_is_recorded_reads_them_when_it_runs(ops: Ops, tmp_path: Path) -> None:
    opened, _ = _open(tmp_path / "rows", "q8_0", ops)
    ids = torch.zeros(8, dtype=torch.int64)
    graph = ops.recording.capture(lambda: opened.rows(ids), tokens=8, outputs=8, requests=8)
    ids[:3] = torch.tensor([30, 2, 9])
    graph.replay(tokens=3, outputs=0, requests=0)
    assert torch.equal(graph.result[:3], opened.rows(ids[:3]))


def test_rows_of_a_truncated_file_are_not_a_number(ops: Ops, tmp_path: Path) -> None:
    opened, _ = _open(tmp_path / "rows", "q4_k", ops)
    os.truncate(tmp_path / "rows", OFFSET + 10 * COLUMNS // 256 * 144)
    found = opened.rows(torch.tensor([9, 10]))
    assert found[0].isfinite().all() and found[1].isnan().all()


def test_ids_beyond_the_rows_are_refused(ops: Ops, tmp_path: Path) -> None:
    opened, _ = _open(tmp_path / "rows", "float16", ops)
    with pytest.raises(KernelError, match=r"rows: expected ids in 0..36, found 37"):
        opened.rows(torch.tensor([1, 37]))


def test_rows_that_no_kernel_reads_are_declined(ops: Ops) -> None:
    for kind, columns in (("q8_0", 96), ("iq1_s", 256)):
        assert open_rows(StoredRows((4, columns), kind, 0, 0, 1), ops.context) is None
    plain = Ops("cpu", num_threads=1, backends=("reference",))
    assert open_rows(StoredRows((4, 256), "q8_0", 0, 0, 1), plain.context) is None
    plain.close()
