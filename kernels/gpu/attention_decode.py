"""Attention of requests with one or a few queries in a step, with keys split among programs.

The queries are those of one new token, or of a token and drafts to verify. A program handles splits
of a list that was made on the card for this step (``attention_work.py``), each for one key head of
one request, with the query heads of all its queries as rows of one product. The grid is as large as
the card, whatever the lengths, so that a captured graph stays valid and no program is without work
while another has much of it.

With more than one split the parts go through memory. The program that stores the last part of a
request and key head adds them up, in the order of the splits: 1 % of the keys' bytes at 256 keys
per split and one query.

If all requests begin with the same pages, the splits in that prefix are computed once for all of
them (``shared_kernel``, "cascade" attention), before: keys are read once for as many rows as fit a
tile. The prefix has splits of its own.

q and out have one type, with q's rows at ``token * q_token + head * q_head`` and out ``[T, heads,
HEAD_DIM]``. parts ``[R, heads, slots, HEAD_DIM]`` and sums ``[R, heads, slots, 2]`` (maximum in
base 2, total) are float32; each of a request's
``QUERIES`` queries has an equal share of its slots. ``shared_len`` is
int32 ``[1]``, ``UNMIX`` the Hadamard block of the result if values are stored mixed, else 0. Must
match ``reference/attention.py``: to 2e-6 of a value's size in float32, otherwise up to the rounding
of the types of the pages and of out.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.attend import attend, begun, first_key, slope_of
from sdk.kernels.gpu.attention_work import LONGER, SPLIT, split_size
from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.page_codes import mixed


@triton.jit
def shared_keys(shared_len, BLOCK_N: tl.constexpr):
    """Keys of the shared prefix that are read once: whole tiles."""
    return tl.load(shared_len) // BLOCK_N * BLOCK_N


@triton.jit
def store_part(
    parts, sums, place, best, total, result, real, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr
):
    """One split of the rows at ``place [M]``."""
    column = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (column < HEAD_DIM)[None, :]
    tl.store(parts + place[:, None] * HEAD_DIM + column[None, :], result, mask=mask)
    tl.store(sums + place * 2, best, mask=real)
    tl.store(sums + place * 2 + 1, total, mask=real)


@triton.jit
def _joined(
    parts, sums, place, low, high, real,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    """The sum of the parts ``low .. high - 1`` of the rows at ``place [M]``: total and result.

    Other programs have just written them, so they are read past the first cache. The maximum is
    found first, so that the loads of ``BLOCK_S`` parts do not wait for each other. ``MOST``: load
    the maxima of that number of parts at once; 0: one by one.
    """
    column = tl.arange(0, BLOCK_D)
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    if MOST:
        each = low + tl.arange(0, MOST)
        peaks = tl.load(
            sums + (place[:, None] + each[None, :]) * 2,
            mask=real[:, None] & (each < high)[None, :], other=float("-inf"), cache_modifier=".cg",
        )  # fmt: skip
        best = tl.where(real, tl.max(peaks, axis=1), 0.0)
    else:
        best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        for part in range(low, high):
            peak = tl.load(sums + (place + part) * 2, mask=real, other=0.0, cache_modifier=".cg")
            best = tl.maximum(best, peak)
    total = tl.where(real, 0.0, 1.0)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for start in range(low, high, BLOCK_S):
        for i in tl.static_range(BLOCK_S):
            at = place + start + i
            known = real & (start + i < high)
            peak = tl.load(sums + at * 2, mask=known, other=float("-inf"), cache_modifier=".cg")
            weight = tl.load(sums + at * 2 + 1, mask=known, other=0.0, cache_modifier=".cg")
            values = tl.load(
                parts + at[:, None] * HEAD_DIM + column[None, :], mask=inside & known[:, None],
                other=0.0, cache_modifier=".cg",
            )  # fmt: skip
            factor = tl.exp2(peak - best)
            total += weight * factor
            result += values * factor[:, None]
    return total, result


@triton.jit
def _store_result(
    out, place, total, result, inside, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
    UNMIX: tl.constexpr,
):  # fmt: skip
    """The finished rows; ``place``: of their first values."""
    result = result / total[:, None]
    if UNMIX:
        result = mixed(result, BLOCK_M, BLOCK_D, UNMIX)
    tl.store(out + place[:, None] + tl.arange(0, BLOCK_D)[None, :], result, mask=inside)


@triton.jit
def _join_rows(
    out, parts, sums, low, high, slots, query_slots, heads, request_slot, kv_head, token, count,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, UNMIX: tl.constexpr,
    MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr, BLOCK_S: tl.constexpr,
):  # fmt: skip
    """Add up many parts, with ``ROWS`` rows instead of those of the product, and store them."""
    row, column = tl.arange(0, ROWS), tl.arange(0, BLOCK_D)
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    real = query < count
    place = (request_slot.to(tl.int64) * heads + head) * slots + query * query_slots
    total, result = _joined(
        parts, sums, place, low, high, real, ROWS, HEAD_DIM, BLOCK_D, BLOCK_S, MAX_SPLITS
    )
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    target = ((token + query).to(tl.int64) * heads + head) * HEAD_DIM
    _store_result(out, target, total, result, inside, ROWS, BLOCK_D, UNMIX)


@triton.jit
def _run_split(
    q, out, parts, sums, sinks, slopes, table, shared_len, counter, q_token, q_head,
    scale, softcap, window, slots, query_slots, heads, request_slot, rank, kv_head, token, count,
    length,
    k, k_scale, v, v_scale,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    K_STRIDES: tl.constexpr, V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr,
    V_DOT: tl.constexpr, V_STRIDES: tl.constexpr,
    CONVERT: tl.constexpr, WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr,
    UNMIX: tl.constexpr, COARSE: tl.constexpr, SHARED_COARSE: tl.constexpr, BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr, JOIN_M: tl.constexpr, JOIN_S: tl.constexpr, ONE: tl.constexpr,
):  # fmt: skip
    """The split ``rank`` from the end of one request and key head; rows are (query, head).

    Without ``ONE``, for several queries, additions are in the order of prompts, so that a short
    chunk of a prompt that fits one split gets the bits of a long one.
    """
    first = first_key(length - count, window, BLOCK_N, WINDOW)
    split = split_size(length, COARSE, MAX_SPLITS)
    splits = tl.cdiv(length, split)
    part, begin = splits - 1 - rank, tl.maximum((splits - 1 - rank) * split, first)
    # The first split that has keys; parts of the shared prefix, and the first one that has keys.
    low, before, first_part = first // split, split * 0, split * 0
    if SHARED:
        prefix = shared_keys(shared_len, BLOCK_N)
        prefix_split = split_size(prefix, SHARED_COARSE, MAX_SPLITS)
        before = tl.cdiv(prefix, prefix_split)
        first_part = tl.where(first < prefix, first // prefix_split, before)
        low = tl.maximum(first, prefix) // split
        begin = tl.maximum(begin, prefix)
    end = tl.minimum(part * split + split, length)
    if (part >= low) & (begin < end):
        row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
        query, head = row // GROUP, kv_head * GROUP + row % GROUP
        real = query < count
        inside = real[:, None] & (column < HEAD_DIM)[None, :]
        at = (token + query).to(tl.int64)
        source = q + (at * q_token + head * q_head)[:, None] + column[None, :]
        x = tl.load(source, mask=inside, other=0.0)
        best, total = begun(sinks, head, begin <= first, BLOCK_M, SINKS)
        slope = None
        if slopes is not None:
            slope = slope_of(slopes, head, scale, SOFTCAP)
        best, total, result = attend(
            x, length - count + query, best, total, tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
            begin, end, table, kv_head, scale, softcap, window, slope,
            k, k_scale, v, v_scale,
            K_KIND, K_GROUPS, K_GROUP, K_DOT, K_STRIDES,
            V_KIND, V_GROUPS, V_GROUP, V_DOT, V_STRIDES, CONVERT, WIDEN,
            PAGE, HEAD_DIM, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, True, ONE,
        )  # fmt: skip
        whole = splits - low + before - first_part == 1
        last = whole
        if not whole:
            place = (request_slot.to(tl.int64) * heads + head) * slots + query * query_slots
            own_place = place + before + part - low
            store_part(parts, sums, own_place, best, total, result, real, HEAD_DIM, BLOCK_D)
            tl.debug_barrier()  # the count below says that all threads have stored
            last = tl.atomic_add(counter, 1, sem="acq_rel") == splits - low - 1
            if last:
                tl.store(counter, 0)
                if JOIN_M:
                    _join_rows(
                        out, parts, sums, first_part, before + splits - low, slots, query_slots,
                        heads, request_slot, kv_head, token, count,
                        HEAD_DIM, BLOCK_D, GROUP, UNMIX, MAX_SPLITS,
                        JOIN_M if ONE else BLOCK_M, JOIN_S if ONE else BLOCK_S,
                    )  # fmt: skip
                    last = whole
                else:
                    total, result = _joined(
                        parts, sums, place, first_part, before + splits - low, real,
                        BLOCK_M, HEAD_DIM, BLOCK_D, BLOCK_S, 0,
                    )  # fmt: skip
        if last:
            target = (at * heads + head) * HEAD_DIM
            _store_result(out, target, total, result, inside, BLOCK_M, BLOCK_D, UNMIX)


@triton.jit(do_not_specialize=["splits", "slots", "begin_request", "end_request"])
def decode_kernel(
    q, out, parts, sums, sinks, slopes, query_start, context_len, table, shared_len, work,
    q_token, q_head, table_row, work_row, scale, softcap, window,
    splits, slots, begin_request, end_request, kv_heads,
    k, k_scale, v, v_scale,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    K_STRIDES: tl.constexpr, V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr,
    V_DOT: tl.constexpr, V_STRIDES: tl.constexpr,
    CONVERT: tl.constexpr, WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, SINKS: tl.constexpr, SHARED: tl.constexpr, UNMIX: tl.constexpr,
    QUERIES: tl.constexpr, BLOCK_ONE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_S: tl.constexpr,
    MAX_SPLITS: tl.constexpr, JOIN_M: tl.constexpr, JOIN_S: tl.constexpr,
):  # fmt: skip
    """Grid (programs): requests ``begin_request .. end_request - 1`` with 1 to ``QUERIES`` queries.

    Rows of one query are in tiles of ``BLOCK_ONE``, those of several in tiles of ``BLOCK_M``,
    whatever else is in the batch. ``splits``: the most of a request.
    """
    after_earlier()
    shared_by: tl.constexpr = LONGER if SHARED else 1
    several: tl.constexpr = LONGER if QUERIES > 1 else 1
    ranks = splits
    if WINDOW:
        ranks = tl.minimum(splits, (window + QUERIES + BLOCK_N) // SPLIT + 2)
    if SHARED:
        own = tl.load(work + MAX_SPLITS) - shared_keys(shared_len, BLOCK_N)
        ranks = tl.minimum(ranks, own // SPLIT + 2)
    total = tl.load(work + ranks - 1) * kv_heads
    # Registers for what does not change from split to split would cost programs per processor.
    for index in tl.range(tl.program_id(0), total, tl.num_programs(0), disable_licm=True):
        item, kv_head = index // kv_heads, index % kv_heads
        entry = tl.load(work + (1 + item // MAX_SPLITS) * work_row + item % MAX_SPLITS)
        request, rank = entry // MAX_SPLITS, entry % MAX_SPLITS
        token, length = tl.load(query_start + request), tl.load(context_len + request)
        count = tl.load(query_start + request + 1) - token
        own_table = table + request.to(tl.int64) * table_row
        counter = work + (1 + request) * work_row + MAX_SPLITS + kv_head
        mine = (request >= begin_request) & (request < end_request)  # of this turn
        if mine & (count == 1):
            _run_split(
                q, out, parts, sums, sinks, slopes, own_table, shared_len, counter, q_token, q_head,
                scale, softcap, window, slots, slots // QUERIES, kv_heads * GROUP,
                request - begin_request, rank, kv_head, token, count, length,
                k, k_scale, v, v_scale,
                K_KIND, K_GROUPS, K_GROUP, K_DOT, K_STRIDES,
                V_KIND, V_GROUPS, V_GROUP, V_DOT, V_STRIDES, CONVERT, WIDEN,
                PAGE, HEAD_DIM, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, GROUP, BLOCK_ONE, SINKS, SHARED,
                UNMIX, shared_by, shared_by * several, BLOCK_S, MAX_SPLITS, JOIN_M, JOIN_S, True,
            )  # fmt: skip
        if QUERIES > 1:  # noqa: SIM102 (a constant: without it the rest is compiled)
            if mine & (count > 1) & (count <= QUERIES):
                _run_split(
                    q, out, parts, sums, sinks, slopes, own_table, shared_len, counter, q_token,
                    q_head, scale, softcap, window, slots, slots // QUERIES, kv_heads * GROUP,
                    request - begin_request, rank, kv_head, token, count, length,
                    k, k_scale, v, v_scale,
                    K_KIND, K_GROUPS, K_GROUP, K_DOT, K_STRIDES,
                    V_KIND, V_GROUPS, V_GROUP, V_DOT, V_STRIDES, CONVERT,
                    WIDEN, PAGE, HEAD_DIM, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, GROUP, BLOCK_M,
                    SINKS, SHARED, UNMIX, shared_by * several, shared_by * several, BLOCK_S,
                    MAX_SPLITS, JOIN_M, JOIN_S, False,
                )  # fmt: skip


@triton.jit(do_not_specialize=["slots", "begin_request", "end_request"])
def shared_kernel(
    q, parts, sums, sinks, slopes, query_start, context_len, table, shared_len, q_token, q_head,
    scale, softcap, window, slots, begin_request, end_request, kv_heads,
    k, k_scale, v, v_scale,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    K_STRIDES: tl.constexpr, V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr,
    V_DOT: tl.constexpr, V_STRIDES: tl.constexpr,
    CONVERT: tl.constexpr, WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, SINKS: tl.constexpr, QUERIES: tl.constexpr, BLOCK_M: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of requests, key heads, splits): whole tiles of the first ``shared_len`` keys,
    which all requests have in the pages of the first one. Rows are (request, query, head)."""
    after_earlier()
    coarse: tl.constexpr = LONGER * LONGER if QUERIES > 1 else LONGER
    kv_head, part = tl.program_id(1), tl.program_id(2)
    prefix = shared_keys(shared_len, BLOCK_N)
    split = split_size(prefix, coarse, MAX_SPLITS)
    if part * split >= prefix:
        return
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    at_once: tl.constexpr = BLOCK_M // (GROUP * QUERIES)
    slot = tl.program_id(0) * at_once + row // (GROUP * QUERIES)
    request = begin_request + slot
    query = row // GROUP % QUERIES
    real = (row < at_once * GROUP * QUERIES) & (request < end_request)
    token = tl.load(query_start + request, mask=real, other=0)
    count = tl.load(query_start + request + 1, mask=real, other=0) - token
    real = real & (query < count) & (count <= QUERIES)
    length = tl.load(context_len + request, mask=real, other=0)
    head = kv_head * GROUP + row % GROUP
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    at_query = (token + query).to(tl.int64) * q_token + head * q_head
    x = tl.load(q + at_query[:, None] + column[None, :], mask=inside, other=0.0)
    starts = part * split <= first_key(length - count, window, BLOCK_N, WINDOW)
    best, total = begun(sinks, head, starts, BLOCK_M, SINKS)
    slope = None
    if slopes is not None:
        slope = slope_of(slopes, head, scale, SOFTCAP)
    best, total, result = attend(
        x, length - count + query, best, total, tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        part * split, tl.minimum(part * split + split, prefix), table, kv_head, scale, softcap,
        window, slope,
        k, k_scale, v, v_scale,
        K_KIND, K_GROUPS, K_GROUP, K_DOT, K_STRIDES,
        V_KIND, V_GROUPS, V_GROUP, V_DOT, V_STRIDES, CONVERT, WIDEN, PAGE,
        HEAD_DIM, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, True, False,
    )  # fmt: skip
    place = (slot.to(tl.int64) * (kv_heads * GROUP) + head) * slots
    place += query * (slots // QUERIES) + part
    store_part(parts, sums, place, best, total, result, real, HEAD_DIM, BLOCK_D)
