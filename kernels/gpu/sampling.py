"""Samples one token per row of logits, without sorting and without waiting for the host.

The definition is :mod:`sdk.kernels.operators.sampling`, the reference ``reference/sampling.py``.
Weights are float32 exponentials summed in float64, so tokens differ only if a draw or the mass of a
truncation is within 1e-7 of a boundary.

Launches, in stream order, with a program for each chunk of each row if nothing else is said:

1. ``peaks_kernel`` (sampling_rows.py) finds maxima;
2. ``shape_kernel`` (sampling_shapes.py) changes rows that have shapes, if any has;
3. ``count_kernel`` (sampling_candidates.py) sums weights and counts tokens by gap;
4. ``bounds_kernel``, one program per row, finds which tokens the truncations may keep;
5. ``gather_kernel`` lists them;
6. ``sample_kernel`` (sampling_draw.py), one program per row, truncates and draws.

Without draws the third to the fifth are left out. Programs exchange data between launches alone,
with no atomics: nothing depends on which program is first, nothing has to be reset before a graph
is replayed, and a row's token does not depend on the other rows.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu.launch import expect_on_device, run_kernel
from sdk.kernels.gpu.sampling_candidates import bounds_kernel, count_kernel, gather_kernel
from sdk.kernels.gpu.sampling_draw import sample_kernel
from sdk.kernels.gpu.sampling_rows import peaks_kernel
from sdk.kernels.gpu.sampling_shapes import shape_kernel
from sdk.kernels.gpu.scratch import SAMPLER_BINS, SAMPLER_CHUNK, SAMPLER_ROOM
from sdk.kernels.operators.sampling import Draws, SampleBuffers
from sdk.kernels.packed_shapes import PackedShapes

#: Candidates that a program processes at a time: most rows have fewer than 512, and then a pass
#: takes 283 to 328 instructions, of 458 to 557 with 1024 (sm_90).
_BLOCK = 512
#: The same for entries of changes.
_ENTRIES = 1024


class Sample:
    """See :meth:`sdk.kernels.operators.ops.Ops.sample`."""

    name = "gpu.sample"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, logits: Tensor, draws: Draws | None, out: SampleBuffers) -> None:
        """Sample ``logits [R, V]`` float32, R and V at least 1; without ``draws`` the argmax.

        Needs one copy to the device and one back.
        """
        rows = logits.shape[0]
        numbers = None
        if draws is not None and (draws["temperature"][:rows] > 0).any():
            raw = torch.from_numpy(draws[:rows].view("f8").reshape(rows, 8))
            numbers = raw.to(logits.device, non_blocking=True)
        shapes = None
        if out.shaped(rows):
            shapes = PackedShapes.of(out, rows, logits.shape[1], logits.device)
        out.write(self.rows(logits, numbers, shapes).cpu().numpy())

    def rows(
        self, logits: Tensor, draws: Tensor | None, shapes: PackedShapes | None = None
    ) -> Tensor:
        """See :meth:`sdk.kernels.operators.ops.Ops.sample_rows`; without ``draws`` the argmax."""
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        side = None if shapes is None else shapes.side
        expect_on_device("sample", logits, draws, side)
        rows, width = logits.shape
        chunks = triton.cdiv(width, SAMPLER_CHUNK)
        peaks, places = _peaks(logits, rows, chunks)
        run_kernel(
            peaks_kernel,
            (rows, chunks),
            logits, peaks, places, width, logits.stride(0), chunks,
            CHUNK=SAMPLER_CHUNK, num_warps=8,
        )  # fmt: skip
        changed: tuple[Tensor | None, ...] = (None,) * 4
        if shapes is not None:
            changed = (shapes.owners, side, *_shape(logits, shapes))
        sizes = width, logits.stride(0), chunks
        options = {"SHAPED": shapes is not None, "CHUNKS": triton.next_power_of_2(chunks)}
        found: tuple[Tensor | None, ...] = (None,) * 3
        if draws is not None:
            given = logits, peaks, places, draws, *changed
            found = _candidates(given, sizes, options)
        out = logits.new_empty(rows, 3, dtype=torch.float64)
        run_kernel(
            sample_kernel,
            (rows,),
            logits, peaks, places, draws, *changed, *found, out, *sizes, **options,
            DRAWN=draws is not None, CHUNK=SAMPLER_CHUNK, ROOM=SAMPLER_ROOM, BLOCK=_BLOCK,
            num_warps=8,
        )  # fmt: skip
        return out


def _peaks(logits: Tensor, rows: int, chunks: int) -> tuple[Tensor, Tensor]:
    """Room for the maxima of chunks and for where they stand."""
    return logits.new_empty(rows, chunks), logits.new_empty(rows, chunks, dtype=torch.int32)


def _shape(logits: Tensor, shapes: PackedShapes) -> tuple[Tensor, Tensor]:
    """Write changed rows to ``shapes.side``; returns the maxima of their chunks, and the places."""
    slots, width = shapes.side.shape
    chunks = triton.cdiv(width, SAMPLER_CHUNK)
    peaks, places = _peaks(logits, slots, chunks)
    run_kernel(
        shape_kernel,
        (len(logits), chunks),
        logits, shapes.owners, shapes.slots, shapes.changes, shapes.entries, shapes.masks,
        shapes.side, peaks, places, width, logits.stride(0), chunks, shapes.masks.shape[1],
        CHUNK=SAMPLER_CHUNK, BLOCK=_ENTRIES, num_warps=8,
    )  # fmt: skip
    return peaks, places


def _candidates(
    given: tuple[Tensor | None, ...], sizes: tuple[int, int, int], options: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of chunks, the ids of candidates and their numbers, of ``given``: the tensors that
    the kernels of a drawn row read."""
    logits, chunks = given[0], sizes[2]
    assert logits is not None
    rows = len(logits)
    counts = logits.new_empty(rows, chunks, SAMPLER_BINS, dtype=torch.int32)
    sums = logits.new_empty(rows, chunks, 3, dtype=torch.float64)
    bounds = logits.new_empty(rows, 6, dtype=torch.int32)
    begins = logits.new_empty(rows, chunks, dtype=torch.int32)
    ids = logits.new_empty(rows, SAMPLER_ROOM, dtype=torch.int32)
    run_kernel(
        count_kernel,
        (rows, chunks),
        *given, counts, sums, *sizes, **options,
        BINS=SAMPLER_BINS, CHUNK=SAMPLER_CHUNK, num_warps=16,
    )  # fmt: skip
    run_kernel(
        bounds_kernel,
        (rows,),
        *given, counts, sums, bounds, begins, *sizes, **options,
        BINS=SAMPLER_BINS, ROOM=SAMPLER_ROOM, num_warps=16,
    )  # fmt: skip
    run_kernel(
        gather_kernel,
        (rows, chunks),
        *given, sums, bounds, begins, ids, *sizes, **options,
        CHUNK=SAMPLER_CHUNK, ROOM=SAMPLER_ROOM, PART=SAMPLER_CHUNK // 8, num_warps=8,
    )  # fmt: skip
    return sums, bounds, ids


OPS: dict[str, tuple[Any, ...]] = {"sample": (Sample(),)}
