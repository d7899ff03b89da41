"""Logits that change in the draw, against plain numpy: native at every level, reference."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
import torch

from sdk.kernels.cpu import CpuBackend, open_backend
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import (
    Change,
    ChangeKind,
    SampleBuffers,
    Shape,
    join_draws,
    mask_of,
    pack_draw,
)
from sdk.kernels.reference.sampling import Sample as Reference
from tests.shaping import buffers_of, changed, expected, logits_for, some_mask

WIDTHS = (1, 2, 31, 32, 33, 511, 512, 1000, 4099)
FIELDS = ({"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}, {"mirostat_mu": 3.0})


def draws_of(rows: int, rng: np.random.Generator) -> np.ndarray:
    packed = [pack_draw(**FIELDS[row % len(FIELDS)]) for row in range(rows)]
    return join_draws(packed, list(rng.random(rows)))


def check(kernel, width: int, rng: np.random.Generator) -> None:
    buffers = buffers_of(width, rng)
    logits = logits_for(buffers, width, rng)
    untouched = logits.clone()
    for draws in (None, draws_of(len(logits), rng)):
        kernel.run(logits, draws, buffers)
        found = buffers.read(len(logits))
        wanted = expected(kernel, logits, draws, buffers)
        assert found.tokens == wanted.tokens
        np.testing.assert_array_equal(found.best, wanted.best)
        assert found.probabilities == wanted.probabilities
        assert found.probabilities.count(0.0) >= 4  # of finite rows that are not any more
        assert np.array_equal(logits.numpy(), untouched.numpy(), equal_nan=True)


@pytest.mark.quick_cases(10)
@pytest.mark.parametrize("width", WIDTHS)
def test_the_native_draw_is_that_of_the_changed_rows(backend: CpuBackend, width: int) -> None:
    (kernel,) = backend.implementations("sample")
    for seed in range(3):
        check(kernel, width, np.random.default_rng([width, seed]))


@pytest.mark.parametrize("width", WIDTHS)
def test_the_reference_s_draw_is_that_of_the_changed_rows(width: int) -> None:
    check(Reference(), width, np.random.default_rng(width))


def test_a_draw_changes_with_what_its_shape_holds_by_then(backend: CpuBackend) -> None:
    (kernel,) = backend.implementations("sample")
    logits = torch.zeros(2, 100)
    logits[:, 7], logits[:, 8] = 2.0, 1.0
    change = Change(ChangeKind.FORBID, [3])
    shape = Shape(None, [change])
    buffers = SampleBuffers(2)
    buffers.set_shape(1, shape)

    def tokens() -> list[int]:
        kernel.run(logits, buffers.draws, buffers)
        return buffers.read(2).tokens

    assert tokens() == [7, 7]
    change.resize(40)  # the ids move
    change.ids[1:40] = 7
    assert tokens() == [7, 8]
    shape.set_changes([change, Change(ChangeKind.ADD, [90], [5.0])])
    assert tokens() == [7, 90]
    change.resize(1)
    shape.set_changes([change])
    buffers.use_masks(100)[1] = 0
    buffers.set_mask(1, 1)
    buffers.masks[1, 2] = 1 << 5
    assert tokens() == [7, 69]
    buffers.set_mask(1, -1)
    assert tokens() == [7, 7]
    shape.set_changes([Change(ChangeKind.FORCE, [99])])
    assert tokens() == [7, 99]
    buffers.set_shape(1, None)
    assert tokens() == [7, 7] and buffers.shaped(2) == []


def test_a_row_that_changes_is_the_same_in_any_batch(backend: CpuBackend) -> None:
    rng = np.random.default_rng(9)
    buffers = buffers_of(5003, rng)
    logits = logits_for(buffers, 5003, rng)
    draws = draws_of(len(logits), rng)
    (kernel,) = backend.implementations("sample")
    kernel.run(logits, draws, buffers)
    together = list(zip(*buffers.read(len(logits)), strict=True))
    one = open_backend("cpu", 1, backend.runtime.level)
    (kernel,) = one.implementations("sample")
    for row in range(len(logits)):
        alone = SampleBuffers(1)
        alone.set_shape(0, buffers.shapes[row])
        mask = buffers.mask(row)
        if mask is not None:
            alone.use_masks(5003)[0] = mask
            alone.set_mask(0, 0)
        kernel.run(logits[row : row + 1], draws[row : row + 1], alone)
        np.testing.assert_array_equal([*zip(*alone.read(1), strict=True)], [together[row]])
    one.close()


def test_a_recorded_step_reads_the_shapes_of_each_replay() -> None:
    ops = Ops(num_threads=1)
    logits = torch.zeros(3, 64)
    logits[:, 5] = 1.0
    buffers = SampleBuffers(3)
    graph = ops.recording.capture(
        lambda: ops.sampling.sample_into(logits, buffers), tokens=3, outputs=3, requests=3
    )
    graph.replay(tokens=3, outputs=3, requests=3)
    assert buffers.read(3).tokens == [5, 5, 5]
    buffers.set_shape(1, Shape(mask_of([40, 63])))
    buffers.use_masks(64, 1)[0] = [0, 1 << 31]
    buffers.set_mask(2, 0)
    graph.replay(tokens=3, outputs=3, requests=3)
    assert buffers.read(3).tokens == [5, 40, 63]
    ops.close()


def test_a_shape_is_the_same_in_another_process() -> None:
    rng = np.random.default_rng(0)
    change = Change(ChangeKind.PENALIZE, [3, 0], [2.0, 0.0], (1.3, 0.2, 0.4))
    change.resize(1)
    there = pickle.loads(pickle.dumps(change))
    row = rng.standard_normal(9).astype(np.float32)
    wanted = changed(row, Shape(None, [change]), None)
    assert np.array_equal(changed(row, Shape(None, [there]), None), wanted)
    assert there.count == 1 and not np.array_equal(row, wanted)


def test_masks_that_kernels_could_not_read_are_refused() -> None:
    mask = some_mask(200, np.random.default_rng(0))
    for wrong in (mask.astype(np.int64), mask[::2], mask[None]):
        with pytest.raises(KernelError, match="expected a mask of contiguous uint32 words, found"):
            Shape(wrong)
    buffers = SampleBuffers(2)
    with pytest.raises(KernelError, match="expected a mask slot below 0, found 0"):
        buffers.set_mask(0, 0)
    buffers.use_masks(100)
    assert buffers.use_masks(100) is buffers.masks and buffers.masks.shape == (2, 4)
    for slot in (2, -2):
        with pytest.raises(KernelError, match=f"slot below 2, found {slot}"):
            buffers.set_mask(0, slot)


def test_a_mask_of_ids_leaves_these_alone() -> None:
    for ids in ([0], [31], [32], [5, 64, 63, 5]):
        left = changed(np.zeros(100, np.float32), Shape(mask_of(ids)), None)
        assert set(np.flatnonzero(left == 0)) == set(ids)
