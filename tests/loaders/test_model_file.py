"""Model files that end, change or vanish while they are read."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from sdk.kernels.system.blocks import MemoryBlocks
from sdk.loaders.model_file import ModelFile
from sdk.quant.errors import CheckpointError

#: Large enough for a block that is used again.
SIZE = 1 << 17


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.bin"
    path.write_bytes(np.arange(SIZE, dtype=np.uint32).astype(np.uint8).tobytes())
    return path


def test_a_file_larger_than_the_memory_is_opened(tmp_path: Path) -> None:
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    path = tmp_path / "large.bin"
    with path.open("wb") as data:
        data.write(b"GGUF")
        data.truncate(2 * memory + (30 << 30))  # a hole, which takes no room on the disk
    file = ModelFile(path)
    assert file.size > 2 * memory
    assert file.read(file.size - 4, 4).tolist() == [0] * 4


def test_bytes_outside_of_a_file_are_refused(path: Path) -> None:
    file = ModelFile(path)
    assert file.read(SIZE - 2, 2).tolist() == [254, 255]
    for start, nbytes in ((SIZE - 2, 3), (-1, 2), (0, -1), (2**63, 1)):
        with pytest.raises(CheckpointError, match=f"are needed, the file has {SIZE}"):
            file.read(start, nbytes)


def _cut(path: Path) -> None:
    os.truncate(path, SIZE // 2)


def _overwritten(path: Path) -> None:
    before = path.stat().st_mtime_ns
    with path.open("r+b") as data:
        data.write(b"other")
    os.utime(path, ns=(before, before + 1))  # whatever the clock's steps are


def _longer(path: Path) -> None:
    with path.open("ab") as data:
        data.write(b"more")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_cut, f"truncated while it was read: it had {SIZE} bytes .* and has {SIZE // 2} now"),
        (_overwritten, "written to while it was read"),
        (_longer, "written to while it was read"),
    ],
)
def test_a_file_that_changes_is_an_error_at_the_next_read(
    path: Path, change: Callable[[Path], None], message: str
) -> None:
    file = ModelFile(path)
    first = file.read(0, SIZE)
    before = first.copy()
    change(path)
    with pytest.raises(CheckpointError, match=message) as caught:
        file.read(0, 16)
    assert str(path) in str(caught.value)
    assert np.array_equal(first, before), "what was read does not change with the file"


def test_a_deleted_or_replaced_file_is_read_to_its_end(path: Path, tmp_path: Path) -> None:
    file = ModelFile(path)
    expected = path.read_bytes()
    other = tmp_path / "other"
    other.write_bytes(bytes(10))
    other.replace(path)
    assert file.read(0, SIZE).tobytes() == expected
    path.unlink()
    assert file.read(0, SIZE).tobytes() == expected


def test_a_disk_that_fails_is_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = ModelFile(path)

    def fail(*args: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(
        CheckpointError, match=r"bytes 8 to 24 cannot be read: .*Input/output error"
    ):
        file.read(8, 16)


def descriptors(path: Path) -> int:
    """Of this file: those of other tests' objects are closed when they are collected."""
    links = Path("/proc/self/fd").iterdir()
    return sum(1 for link in links if link.is_symlink() and link.readlink() == path)


def test_a_closed_file_has_given_back_its_descriptor_and_says_so(path: Path) -> None:
    file = ModelFile(path)
    data = file.read(0, SIZE)
    assert descriptors(path) == 1
    file.close()
    file.close()
    assert descriptors(path) == 0
    with pytest.raises(CheckpointError, match="the file is closed"):
        file.read(0, 1)
    assert data.tobytes() == path.read_bytes()
    ModelFile(path)  # forgotten without a close
    assert descriptors(path) == 0


def test_memory_is_used_again_only_when_nothing_refers_to_it() -> None:
    blocks = MemoryBlocks()
    views: list[Callable[[NDArray[np.uint8]], object]] = [
        lambda array: array,
        lambda array: array[3:9].reshape(2, 3),
        lambda array: array.view("<f4")[4:].T,
        lambda array: torch.from_numpy(array).view(torch.int16)[7:],
        lambda array: memoryview(array)[5:],
        lambda array: np.frombuffer(array, np.uint8)[1:],
    ]
    for view in views:
        array = blocks.take(SIZE)
        address = array.ctypes.data
        kept = view(array)
        del array
        other = blocks.take(SIZE)
        assert other.ctypes.data != address
        del kept
        assert blocks.take(SIZE - 10).ctypes.data == address, "free, and nearly of that size"
        del other
        blocks.clear()


def test_only_so_much_memory_is_kept_for_the_next_reads() -> None:
    blocks = MemoryBlocks()
    tracemalloc.start()
    try:
        for megabytes in range(1, 40):
            blocks.take(megabytes << 20)
        blocks.take(100 << 20)
        assert tracemalloc.get_traced_memory()[0] <= (64 << 20) + 10**5
        blocks.clear()
        assert tracemalloc.get_traced_memory()[0] <= 10**5
    finally:
        tracemalloc.stop()


def test_memory_that_later_reads_have_no_use_for_is_given_back() -> None:
    blocks = MemoryBlocks()
    tracemalloc.start()
    try:
        blocks.take(30 << 20)  # an embedding
        for _ in range(5):  # layers
            for megabytes in (1, 2, 2, 4):
                blocks.take(megabytes << 20)
        assert tracemalloc.get_traced_memory()[0] <= (1 + 2 + 2 + 4 << 20) + 10**5
    finally:
        tracemalloc.stop()
