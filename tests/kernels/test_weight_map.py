"""Packed weights that lie in a file: records, sums, and what a file can do to its reader."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sdk.kernels.cpu.library import find_library
from sdk.kernels.cpu.packed_record import bound_of, bytes_of, record_of, tensor_of
from sdk.kernels.cpu.weight_map import PIECE, WeightMap
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import type_name
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import ActivationScheme, Layout

LIBRARY = find_library()
assert isinstance(LIBRARY, ctypes.CDLL)
N, K = 48, 512
LAYOUTS: dict[str, Callable[[Any], Layout]] = {
    "bfloat16": lambda c: c.dense(N, K, torch.bfloat16),
    "float8": lambda c: c.float8(N, K, (16, 128), powers=True),
    "float8 per tensor": lambda c: c.float8(N, K, (N, K), torch.float8_e5m2),
    "q2_k": lambda c: c.blocks(N, K, "q2_k"),
    "q3_k": lambda c: c.blocks(N - 3, K, "q3_k"),
    "q5_k": lambda c: c.blocks(N, K, "q5_k"),
    "q8_0": lambda c: c.blocks(N, K, "q8_0"),
    "mxfp4": lambda c: c.blocks(N, K, "mxfp4"),
    "zeros": lambda c: c.affine(N, K, 4, 32, "zeros"),
    "floats": lambda c: c.affine(N, K, 3, 64, "floats", scale=torch.bfloat16),
    "signed": lambda c: c.affine(N, K, 8, 128, "zero", signed=True),
    "columns": lambda c: c.repeating(N, K, 4, 16, "minus"),
    "table": lambda c: c.table(N, K, super_group=256),
    "nested": lambda c: c.nested(N, K),
}


@pytest.fixture(scope="module")
def ops() -> Iterator[Ops]:
    opened = Ops(num_threads=2)
    yield opened
    opened.close()


def mapped(data: bytes, folder: Path, size: int | None = None) -> WeightMap:
    path = folder / "weights"
    path.write_bytes(data)
    return WeightMap(os.open(path, os.O_RDONLY), size or len(data), 2, LIBRARY)


def sums_of(data: bytes) -> Any:
    pieces = (data[at : at + PIECE] for at in range(0, len(data), PIECE))
    return np.array([LIBRARY.embedlm_sum(piece, len(piece)) for piece in pieces], np.uint64)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_record_gives_the_weight_back_bit_for_bit(
    name: str, ops: Ops, cases: Any, tmp_path: Path
) -> None:
    layout = LAYOUTS[name](cases)
    bound = ops.linear(layout, 16)
    ops.finish_packing()
    found = record_of(bound)
    assert found is not None
    record, tensors = json.loads(json.dumps(found[0])), found[1]
    data, places = bytearray(), {}
    for part, tensor in tensors.items():
        data += bytes(-len(data) % 64)
        places[part] = len(data), type_name(tensor.dtype), tuple(tensor.shape)
        data += bytes_of(tensor).tobytes()
    weights = mapped(bytes(data), tmp_path)
    again = bound_of(
        record,
        {
            part: tensor_of(weights.bytes_at(at, tensors[part].nbytes), dtype, shape)
            for part, (at, dtype, shape) in places.items()
        },
        weights.check(0, len(data), sums_of(bytes(data))),
        ops.context,
    )
    x = cases.activations(3, K)
    assert torch.equal(again.matmul(x), bound.matmul(x))
    assert cases.same(again.layout(), layout)
    assert again.nbytes == bound.nbytes and again.choice.name == bound.choice.name


def test_a_scheme_of_activations_is_part_of_the_record(ops: Ops, cases: Any) -> None:
    from dataclasses import replace

    scheme = ActivationScheme("int", static=0.5, zero=3, symmetric=False)
    layout = replace(cases.affine(N, K, 8, K, "zero", signed=True), inputs=scheme)
    found = record_of(ops.linear(layout))
    assert found is not None
    assert found[0]["kernel"] == "cpu.linear_as_file"
    assert found[0]["facts"]["inputs"]["zero"] == 3


def test_a_weight_of_reference_kernels_has_no_record(cases: Any) -> None:
    opened = Ops(num_threads=1, backends=["reference"])
    assert record_of(opened.linear(cases.dense(N, K, torch.float32))) is None
    opened.close()


def test_another_choice_of_kernels_is_an_error(ops: Ops, cases: Any, tmp_path: Path) -> None:
    found = record_of(ops.linear(cases.blocks(N, K, "q4_k")))
    assert found is not None
    record = found[0] | {"kernel": "cpu.linear_exact"}
    check = mapped(bytes(64), tmp_path).check(0, 64, sums_of(bytes(64)))
    with pytest.raises(KernelError, match=r"expected cpu.linear_exact for .* found cpu.linear"):
        bound_of(record, found[1], check, ops.context)


def test_the_sum_shows_every_bit_and_every_exchange_of_words() -> None:
    data = np.random.default_rng(0).integers(0, 256, 1000, np.uint8)
    whole = LIBRARY.embedlm_sum(data.ctypes.data, len(data))
    for bit in range(8 * len(data)):
        data[bit // 8] ^= 1 << bit % 8
        assert LIBRARY.embedlm_sum(data.ctypes.data, len(data)) != whole
        data[bit // 8] ^= 1 << bit % 8
    words = data[:512].reshape(-1, 8)
    for one, other in ((0, 1), (0, 16), (5, 37)):
        words[[one, other]] = words[[other, one]]
        assert LIBRARY.embedlm_sum(data.ctypes.data, len(data)) != whole
        words[[one, other]] = words[[other, one]]
    assert LIBRARY.embedlm_sum(data.ctypes.data, len(data)) == whole
    assert LIBRARY.embedlm_sum(data.ctypes.data, len(data) - 1) != whole


@pytest.mark.parametrize("flip", [None, 0, PIECE + 5, 3 * PIECE + 100])
def test_threads_compare_a_weight_together(flip: int | None, tmp_path: Path) -> None:
    data = bytearray(os.urandom(3 * PIECE + 101))
    sums = sums_of(bytes(data))
    if flip is not None:
        data[flip] ^= 4
    weights = mapped(bytes(data), tmp_path)
    check = weights.check(0, len(data), sums)
    found: list[int] = []

    def compare() -> None:
        found.append(LIBRARY.embedlm_check(ctypes.byref(check)))

    threads = [threading.Thread(target=compare) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == ({0} if flip is None else {6})
    assert check.done == 4


def test_a_product_does_not_run_on_damaged_weights(ops: Ops, cases: Any, tmp_path: Path) -> None:
    found = record_of(ops.linear(cases.dense(N, K, torch.float32)))
    assert found is not None
    record, tensors = found
    ops.finish_packing()
    weights = mapped(bytes(64), tmp_path)
    check = weights.check(0, 64, sums_of(b"\1" + bytes(63)))
    bound = bound_of(record, tensors, check, ops.context)
    for use in (
        lambda: bound.matmul(torch.ones(1, K)),
        lambda: bound.rows(torch.zeros(1, dtype=torch.int64)),
        bound.layout,
    ):
        with pytest.raises(KernelError, match="in the cache of weights are damaged"):
            use()
    right = ops.linear(cases.dense(N, K, torch.float32))  # the engine itself goes on
    assert right.matmul(torch.ones(1, K)).isfinite().all()


def test_files_that_cannot_be_mapped_are_errors(tmp_path: Path) -> None:
    with pytest.raises(KernelError, match="became shorter"):
        mapped(bytes(100), tmp_path, 101)
    with pytest.raises(KernelError, match="cannot be read: Is a directory"):
        WeightMap(os.open(tmp_path, os.O_RDONLY), 4096, 1, LIBRARY)
    with pytest.raises(KernelError, match="cannot map 10 bytes"):
        WeightMap(socket.socket().detach(), 10, 1, LIBRARY)


def test_the_mapping_lives_as_long_as_an_array_of_it(tmp_path: Path) -> None:
    part = mapped(b"abcdef", tmp_path).bytes_at(2, 3)
    assert part.tobytes() == b"cde"
    assert "weights" in Path("/proc/self/maps").read_text()
    del part
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
