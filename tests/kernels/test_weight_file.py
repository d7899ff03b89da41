"""Packed weights in a file: the same numbers, and hardly any of them in memory."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.engine.pages.disk_space import disk_folder
from sdk.kernels.cpu.library import FilePart
from sdk.kernels.cpu.packed_weight import Packed
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Layout
from sdk.kernels.weights.offload import OnDisk

MIB = 2**20


def _offload(size: int, stays: int = 0) -> OnDisk:
    file = tempfile.TemporaryFile(dir=disk_folder(None))  # noqa: SIM115
    os.posix_fallocate(file.fileno(), 0, size)
    return OnDisk(stays, size, file)


@contextmanager
def _ops(offload: OnDisk | None, threads: int = 2) -> Iterator[Ops]:
    ops = Ops("cpu", num_threads=threads, backends=["cpu"], offload=offload)
    yield ops
    ops.close()


def _in_memory(inode: int) -> int:
    """Bytes of a file's mappings that are in this process's memory."""
    found, total = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        fields = line.split()
        if "-" in fields[0]:
            found = int(fields[4]) == inode
        elif found and fields[0] == "Rss:":
            total += int(fields[1]) * 1024
    return total


def _cached(part: FilePart) -> int:
    """Bytes of a part's pages that the system has in its cache of files."""
    begin = part.begin // mmap.PAGESIZE * mmap.PAGESIZE
    length = part.begin + part.bytes - begin
    seen = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
    library = ctypes.CDLL(None, use_errno=True)
    assert library.mincore(ctypes.c_void_p(begin), ctypes.c_size_t(length), seen) == 0
    return sum(one & 1 for one in seen) * mmap.PAGESIZE


def _packed(ops: Ops, layout: Layout) -> tuple[Any, Packed]:
    bound = ops.linear(layout)
    return bound, bound.packed


def _layouts(cases: Any) -> list[Layout]:
    return [
        cases.affine(40, 96, 4, 32, "zeros"),
        cases.affine(40, 96, 3, 32, "minus"),
        cases.affine(33, 96, 8, 32, "zero", signed=True),
        cases.repeating(48, 70, 4, 16, "zero"),
        cases.table(40, 512, 4, 32, torch.uint8, 256),
        cases.nested(40, 128),
        cases.blocks(37, 512, "q4_0"),
        cases.blocks(37, 512, "q4_k"),
        cases.blocks(37, 512, "q3_k"),
        cases.dense(37, 77, torch.bfloat16),
        cases.float8(40, 300, (128, 128)),
    ]


@pytest.mark.parametrize("threads", [1, 2])
def test_weights_in_a_file_multiply_to_the_same_bits(cases: Any, threads: int) -> None:
    with _ops(None, threads) as memory, _ops(_offload(MIB), threads) as disk:
        for layout in _layouts(cases):
            bound, packed = _packed(disk, layout)
            other = memory.linear(layout)
            assert packed.file is not None
            for tokens in (1, 3, 40):
                x = cases.activations(tokens, layout.shape[1])
                assert torch.equal(bound.matmul(x), other.matmul(x)), layout
            ids = torch.tensor([0, layout.shape[0] - 1])
            assert torch.equal(bound.rows(ids), other.rows(ids))
            assert cases.same(bound.layout(), layout)
        assert memory.context.offloaded == 0 < disk.context.offloaded


def test_what_fits_stays_in_memory_and_the_rest_goes_to_the_file(cases: Any) -> None:
    layout = cases.blocks(256, 1024, "q4_0")
    with _ops(None) as memory:
        size = memory.linear(layout).nbytes
    with _ops(_offload(MIB, 2 * size + size // 4)) as disk:
        packed = [_packed(disk, layout)[1] for _ in range(4)]
        # a tile of the self-check comes first, scales of the third still fit
        assert [p.file is None for p in packed[:2]] == [True, True]
        assert packed[2].file is not None and packed[2].file.bytes < size
        assert packed[3].file is not None and packed[3].file.bytes == size


def _large(cases: Any, ops: Ops, count: int) -> tuple[list[Any], list[FilePart]]:
    bound, parts = [], []
    for seed in range(count):
        one, packed = _packed(ops, cases.blocks(2048, 2048, "q4_0", seed))
        assert packed.file is not None
        bound.append(one)
        parts.append(packed.file)
    return bound, parts


@pytest.mark.parametrize("threads", [1, 2])
def test_a_weight_leaves_the_process_when_the_next_is_multiplied_with(
    cases: Any, threads: int
) -> None:
    offload = _offload(16 * MIB)
    inode = os.fstat(offload.file.fileno()).st_ino
    with _ops(offload, threads) as ops:
        bound, parts = _large(cases, ops, 4)
        assert _in_memory(inode) < MIB  # packed and handed back
        x = cases.activations(3, 2048)
        for _ in range(2):
            for one in bound:
                one.matmul(x)
                # of its own codes little is left, nothing of the others': 2.25 MiB each
                assert _in_memory(inode) < MIB
        bound[0].rows(torch.arange(2048))
        assert _in_memory(inode) > parts[0].bytes // 2
        bound[0].rows(torch.tensor([5]))  # the rows before are handed back
        assert _in_memory(inode) < MIB
        bound[2].layout()
        assert _in_memory(inode) < MIB


def test_the_weight_that_came_next_the_last_time_is_asked_for(cases: Any) -> None:
    """The first of the file after the last: the system's own reading ahead goes the other way."""
    offload = _offload(16 * MIB)
    with _ops(offload) as ops:
        bound, parts = _large(cases, ops, 6)
        x = cases.activations(1, 2048)
        for one in (bound[5], bound[0], bound[5], bound[0]):
            one.matmul(x)
        os.fsync(offload.file.fileno())
        ops.linear(cases.affine(40, 96)).matmul(cases.activations(1, 96))  # hands it back
        os.posix_fadvise(offload.file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert all(_cached(part) < part.bytes // 8 for part in parts)  # pages in use stay
        bound[5].matmul(x)
        asked = 0
        for _ in range(10**5):  # the disk takes its time
            asked = _cached(parts[0])
            if asked >= parts[0].bytes:
                break
        assert asked >= parts[0].bytes
        assert _cached(parts[1]) < parts[1].bytes // 2


def test_a_part_is_remembered_longer_than_its_weight(cases: Any) -> None:
    with _ops(_offload(16 * MIB)) as ops:
        bound, _ = _large(cases, ops, 2)
        x = cases.activations(1, 2048)
        expected = bound[1].matmul(x)
        bound[0].matmul(x)
        del bound[0]
        assert torch.equal(bound[0].matmul(x), expected)


def test_experts_in_a_file_multiply_to_the_same_bits_and_are_handed_back(cases: Any) -> None:
    experts = [cases.blocks(1024, 1024, "q4_0", seed) for seed in range(8)]
    x, logits = cases.activations(5, 1024), cases.activations(5, 8)
    offload = _offload(8 * MIB)
    inode = os.fstat(offload.file.fileno()).st_ino
    found = []
    with _ops(None) as memory, _ops(offload) as disk:
        for ops in (memory, disk):
            group = ops.moe.group([ops.linear(layout) for layout in experts])
            assert group is not None
            routes = ops.moe.route(logits, 2)
            found += [group.matmul(x, routes, by_token=True) for _ in range(2)]
        assert all(torch.equal(one, found[0]) for one in found)
        # Of 4.5 MiB the scales of those that had rows, and pages at the ends of chunks.
        assert _in_memory(inode) < MIB


def test_weights_larger_than_planned_get_more_room_while_there_is_some(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _ops(_offload(MIB)) as ops:
        bound, parts = _large(cases, ops, 3)
        assert parts[-1].bytes > MIB
        assert bound[2].matmul(cases.activations(1, 2048)).isfinite().all()
    with _ops(_offload(MIB)) as ops:

        def full(descriptor: int, offset: int, length: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(
            KernelError, match=r"no disk space for \d+ bytes in addition to the 1048576 of"
        ):
            _large(cases, ops, 1)
        assert ops.linear(cases.affine(40, 96)).matmul(cases.activations(1, 96)).isfinite().all()
