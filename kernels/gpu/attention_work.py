"""Which keys the programs of decode attention read: a list made once per step, for all layers.

Decode attention divides each request's keys into splits. Which requests have how many depends on
their lengths, which only the card knows when a captured graph runs. So a kernel lists the splits of
a step (``work_kernel``), and attention starts as many programs as fill the card, which share the
list. A split depends only on its own request's length, so a row's result does not depend on the
batch.

The list is int32 ``[requests + 1, MAX_SPLITS + kv_heads]``, with ``MAX_SPLITS`` splits of a request
at most (``scratch.most_splits``):

- Row 0: how many splits are the last of their request, how many are one of the last two, and so on
  up to the splits of the longest possible context; in column ``MAX_SPLITS`` the longest one.
- The first ``MAX_SPLITS`` columns of the other rows, in turn: the splits as ``request * MAX_SPLITS
  + rank``, where rank 0 is a request's last one. All of rank 0 come first, then those of rank 1,
  ..., so that a layer with a window only looks at the first ranks.
- The other columns of row ``1 + request``: for each key head how many programs have stored their
  result. The last one adds them up and sets this to 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import scratch
from sdk.kernels.gpu.launch import after_earlier, run_kernel
from sdk.kernels.operators.batch import AttentionBatch, WorkShape

SPLIT = tl.constexpr(scratch.SPLIT)
MOST_QUERIES = tl.constexpr(scratch.MOST_QUERIES)
#: Splits of a request with several queries are so many times longer: its parts are larger.
LONGER = tl.constexpr(scratch.LONGER)


@triton.jit
def split_size(length, COARSE: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Keys of a split of a context, ``COARSE`` times as many as usual."""
    split = SPLIT
    while split * MAX_SPLITS < length:
        split *= 2
    return split * COARSE


@triton.jit
def _split_counts(query_start, context_len, request, requests, MAX_SPLITS: tl.constexpr):
    """Splits of each request, 0 for those that another kernel handles; and the longest context."""
    real = request < requests
    start = tl.load(query_start + request, mask=real, other=0)
    queries = tl.load(query_start + request + 1, mask=real, other=0) - start
    length = tl.load(context_len + request, mask=real & (queries > 0), other=0)
    longest = tl.max(length)
    split = tl.where(queries > 1, LONGER * SPLIT, SPLIT)
    size = SPLIT
    while size * MAX_SPLITS < longest:
        split = tl.where(size * MAX_SPLITS < length, split * 2, split)
        size *= 2
    return tl.where(queries <= MOST_QUERIES, tl.cdiv(length, split), 0), longest


@triton.jit(do_not_specialize=["requests"])
def work_kernel(
    query_start, context_len, work, work_row, width, requests,
    BLOCK: tl.constexpr, MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (splits of the longest context): a program lists the splits of one rank. ``width``: of
    the list."""
    after_earlier()
    rank = tl.program_id(0)
    before = rank * 0
    longest = rank * 0
    for begin in range(0, requests, BLOCK):
        request = begin + tl.arange(0, BLOCK)
        counts, most = _split_counts(query_start, context_len, request, requests, MAX_SPLITS)
        before += tl.sum(tl.minimum(counts, rank))
        longest = tl.maximum(longest, most)
    for begin in range(0, requests, BLOCK):
        request = begin + tl.arange(0, BLOCK)
        counts, _ = _split_counts(query_start, context_len, request, requests, MAX_SPLITS)
        listed = (counts > rank).to(tl.int32)
        place = before + tl.cumsum(listed) - listed
        target = work + (1 + place // MAX_SPLITS) * work_row + place % MAX_SPLITS
        tl.store(target, request * MAX_SPLITS + rank, mask=listed > 0)
        before += tl.sum(listed)
        column = MAX_SPLITS + rank
        while column < width:
            tl.store(work + (1 + request) * work_row + column, 0, mask=request < requests)
            column += tl.num_programs(0)
    tl.store(work + rank, before)
    if rank == 0:
        tl.store(work + MAX_SPLITS, longest)


def list_work(batch: AttentionBatch, work: Tensor, splits: int) -> None:
    """Write the list of a step into ``work``; ``splits``: ``MAX_SPLITS``."""
    run_kernel(
        work_kernel,
        (scratch.split_count(batch.max_context_len, splits),),
        batch.query_start,
        batch.context_len,
        work,
        work.stride(0),
        work.shape[1],
        batch.num_requests,
        BLOCK=256,
        MAX_SPLITS=splits,
        num_warps=4,
    )


def work_of(batch: AttentionBatch, shape: WorkShape) -> Tensor:
    """The step's list; a batch without one gets its own.

    :raises KernelError: the batch's list has no room for its requests or key heads, or its splits
        are no power of two.
    """
    rows, width, splits = shape.rows, shape.width, shape.splits
    work = batch.work
    if work is None:
        work = torch.empty(rows, width, dtype=torch.int32, device=batch.context_len.device)
        list_work(batch, work, splits)
    elif work.dtype != torch.int32 or work.shape[0] < rows or work.shape[1] < width:
        raise KernelError(
            f"attention: expected a list of work of int32 [{rows}, {width}] or more, "
            f"found {work.dtype} {list(work.shape)}"
        )
    if splits < 1 or splits & (splits - 1):
        raise KernelError(f"attention: expected a power of two of splits, found {splits}")
    return work
