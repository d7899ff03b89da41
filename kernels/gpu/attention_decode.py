"""Attention of requests with one query in a step, with keys split among programs.

A program handles one key head of one request, with all its query heads as rows of one product, and
one split: the keys ``s * split .. (s + 1) * split - 1``. The size of a split depends only on the
request's length, so a row's result does not depend on the batch. With more than one split the parts
go through memory and ``join_kernel`` sums them: 1 % of the keys' bytes at 256 keys per split.

If all requests begin with the same pages, the splits in that prefix are computed once for all of
them (``shared_kernel``, "cascade" attention): keys are read once for as many rows as fit a tile.
The splits are then those of the longest request.

The grid only depends on numbers known beforehand (requests, heads, the longest context), so that a
captured graph stays valid; programs without keys end at once.

q and out have one type, with q's rows at ``token * q_token + head * q_head`` and out ``[T, heads,
HEAD_DIM]``. parts ``[R, heads, splits, HEAD_DIM]`` and sums ``[R, heads, splits, 2]`` (maximum in
base 2, total) are float32. ``shared_len`` is int32 ``[1]``, ``longest`` a bound of all lengths,
``UNMIX`` the Hadamard block of the result if values are stored mixed, else 0. Must match
``reference/attention.py``: to 2e-6 of a value's size in float32, otherwise up to the rounding of
the types of the pages and of out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu import scratch
from sdk.kernels.gpu.attend import LOG2E, attend
from sdk.kernels.gpu.page_codes import mixed

SPLIT = tl.constexpr(scratch.SPLIT)
MAX_SPLITS = tl.constexpr(scratch.MAX_SPLITS)


@triton.jit
def split_size(length):
    """Keys of a split of a context."""
    split = SPLIT
    while split * MAX_SPLITS < length:
        split *= 2
    return split


@triton.jit
def first_key(position, window, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr):
    """Where the tiles begin of which the query at ``position`` sees anything."""
    first = 0
    if WINDOW:
        first = tl.maximum(position - window + 1, 0) // BLOCK_N * BLOCK_N
    return first


@triton.jit
def _store_part(
    parts, sums, place, best, total, result, real, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One split of the rows at ``place [M]``."""
    column = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(parts + place[:, None] * HEAD_DIM + column[None, :], result, mask=mask)
    tl.store(sums + place * 2, best, mask=real)
    tl.store(sums + place * 2 + 1, total, mask=real)


@triton.jit(do_not_specialize=["longest", "splits"])
def decode_kernel(
    q, out, parts, sums, sinks, query_start, context_len, table, shared_len,
    q_token, q_head, table_row, scale, softcap, window, longest, splits, kv_heads,
    k, k_scale, k_page, k_head, k_slot, k_scale_page, k_scale_group,
    v, v_scale, v_page, v_head, v_slot, v_scale_page, v_scale_group,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr, V_DOT: tl.constexpr,
    WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr,
    WHOLE: tl.constexpr, UNMIX: tl.constexpr,
):  # fmt: skip
    """Grid (requests, key heads, splits). ``WHOLE``: one split, and ``out`` is written."""
    request, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start + request)
    if tl.load(query_start + request + 1) - token != 1:
        return
    length = tl.load(context_len + request)
    first = first_key(length - 1, window, BLOCK_N, WINDOW)
    split = split_size(longest if SHARED else length)
    begin = tl.maximum(part * split, first)
    end = tl.minimum(part * split + split, length)
    if SHARED:  # whole splits of the prefix are shared_kernel's
        begin = tl.maximum(begin, tl.load(shared_len) // split * split)
    if begin >= end:
        return
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    head = kv_head * GROUP + row
    inside = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
    token = token.to(tl.int64)
    at_query = token * q_token + head * q_head
    query = tl.load(q + at_query[:, None] + column[None, :], mask=inside, other=0.0)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:  # the first split counts it
        logit = tl.load(sinks + head, mask=row < GROUP, other=0.0)
        best = tl.where(begin <= first, logit * LOG2E, best)
        total = tl.where(begin <= first, 1.0, total)
    best, total, result = attend(
        query, tl.full((BLOCK_M,), 0, tl.int32) + (length - 1), best, total,
        tl.zeros((BLOCK_M, BLOCK_D), tl.float32), begin, end,
        table + request.to(tl.int64) * table_row, kv_head, scale, softcap, window,
        k, k_scale, k_page, k_head, k_slot, k_scale_page, k_scale_group,
        v, v_scale, v_page, v_head, v_slot, v_scale_page, v_scale_group,
        K_KIND, K_GROUPS, K_GROUP, K_DOT, V_KIND, V_GROUPS, V_GROUP, V_DOT, WIDEN, PAGE, HEAD_DIM,
        BLOCK_D, BLOCK_N, WINDOW, SOFTCAP,
    )  # fmt: skip
    if WHOLE:
        result = result / total[:, None]
        if UNMIX:
            result = mixed(result, BLOCK_M, BLOCK_D, UNMIX)
        place = (token * (kv_heads * GROUP) + head) * HEAD_DIM
        tl.store(out + place[:, None] + column[None, :], result, mask=inside)
    else:
        place = (request.to(tl.int64) * (kv_heads * GROUP) + head) * splits + part
        _store_part(parts, sums, place, best, total, result, row < GROUP, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["longest", "splits", "requests"])
def shared_kernel(
    q, parts, sums, sinks, query_start, context_len, table, shared_len, q_token, q_head,
    scale, softcap, window, longest, splits, requests, kv_heads,
    k, k_scale, k_page, k_head, k_slot, k_scale_page, k_scale_group,
    v, v_scale, v_page, v_head, v_slot, v_scale_page, v_scale_group,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr, V_DOT: tl.constexpr,
    WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of requests, key heads, splits): the whole splits of the first ``shared_len``
    keys, which all requests have in the pages of the first one. Rows are (request, head)."""
    kv_head, part = tl.program_id(1), tl.program_id(2)
    split = split_size(longest)
    if part * split + split > tl.load(shared_len):
        return
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    request = tl.program_id(0) * (BLOCK_M // GROUP) + row // GROUP
    real = (row < BLOCK_M // GROUP * GROUP) & (request < requests)
    token = tl.load(query_start + request, mask=real, other=0).to(tl.int64)
    following = tl.load(query_start + request + 1, mask=real, other=0)
    real = real & (following - token == 1)
    head = kv_head * GROUP + row % GROUP
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    at_query = token * q_token + head * q_head
    query = tl.load(q + at_query[:, None] + column[None, :], mask=inside, other=0.0)
    position = tl.load(context_len + request, mask=real, other=0) - 1
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        starts = part * split <= first_key(position, window, BLOCK_N, WINDOW)
        best = tl.where(starts, tl.load(sinks + head) * LOG2E, best)
        total = tl.where(starts, 1.0, total)
    best, total, result = attend(
        query, position, best, total, tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        part * split, part * split + split, table, kv_head, scale, softcap, window,
        k, k_scale, k_page, k_head, k_slot, k_scale_page, k_scale_group,
        v, v_scale, v_page, v_head, v_slot, v_scale_page, v_scale_group,
        K_KIND, K_GROUPS, K_GROUP, K_DOT, V_KIND, V_GROUPS, V_GROUP, V_DOT, WIDEN, PAGE, HEAD_DIM,
        BLOCK_D, BLOCK_N, WINDOW, SOFTCAP,
    )  # fmt: skip
    place = (request.to(tl.int64) * (kv_heads * GROUP) + head) * splits + part
    _store_part(parts, sums, place, best, total, result, real, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["longest", "splits"])
def join_kernel(
    parts, sums, out, query_start, context_len, window, longest, splits, heads,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr,
    WINDOW: tl.constexpr, SHARED: tl.constexpr, UNMIX: tl.constexpr,
):  # fmt: skip
    """Grid (requests, heads): the sum of a row's parts, in the order of the splits."""
    request, head = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start + request)
    if tl.load(query_start + request + 1) - token != 1:
        return
    length = tl.load(context_len + request)
    split = split_size(longest if SHARED else length)
    low = first_key(length - 1, window, BLOCK_N, WINDOW) // split
    high = tl.cdiv(length, split)
    place = (request.to(tl.int64) * heads + head) * splits
    column = tl.arange(0, BLOCK_D)
    best = tl.full((1,), float("-inf"), tl.float32)
    total = tl.zeros((1,), tl.float32)
    result = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(low, high, BLOCK_S):
        part = start + tl.arange(0, BLOCK_S)
        real = part < high
        peaks = tl.load(sums + (place + part) * 2, mask=real, other=float("-inf"))
        totals = tl.load(sums + (place + part) * 2 + 1, mask=real, other=0.0)
        mask = real[:, None] & (column < HEAD_DIM)[None, :]
        values = tl.load(
            parts + (place + part)[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0
        )
        peak = tl.maximum(best, tl.max(peaks, axis=0))
        safe = tl.where(peak == float("-inf"), 0.0, peak)
        factor = tl.exp2(peaks - safe)
        shrink = tl.exp2(best - safe)
        total = total * shrink + tl.sum(totals * factor, axis=0)
        result = result * shrink + tl.sum(values * factor[:, None], axis=0)
        best = peak
    result = result / total
    if UNMIX:
        result = tl.reshape(mixed(result[None, :], 1, BLOCK_D, UNMIX), (BLOCK_D,))
    at = (token.to(tl.int64) * heads + head) * HEAD_DIM
    tl.store(out + at + column, result, mask=column < HEAD_DIM)
