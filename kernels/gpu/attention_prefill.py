"""Attention of requests with several queries in a step: prompts and chunks of prompts.

A program handles a tile of one request's queries, with all query heads of a key head as rows of one
product, and loops over the keys. The grid has the largest possible number of tiles, ``T // tile +
requests``, whatever the lengths; a program finds its request by bisecting ``query_start``. Keys of
a cached prefix are in the pages like any others. Must match ``reference/attention.py`` with the
tolerances of ``attention_decode.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.attend import LOG2E, attend
from sdk.kernels.gpu.attention_decode import first_key
from sdk.kernels.gpu.page_codes import mixed


@triton.jit(do_not_specialize=["requests"])
def prefill_kernel(
    q, out, sinks, query_start, context_len, table, q_token, q_head, table_row,
    scale, softcap, window, requests, kv_heads,
    k, k_scale, k_page, k_head, k_slot, k_scale_page, k_scale_group,
    v, v_scale, v_page, v_head, v_slot, v_scale_page, v_scale_group,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr, V_DOT: tl.constexpr,
    WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SINKS: tl.constexpr, LONE: tl.constexpr,
    UNMIX: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries, key heads); ``LONE``: of one too. Tensors as in ``decode_kernel``."""
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    index, kv_head = tl.program_id(0), tl.program_id(1)
    request = index * 0  # the last one whose tiles begin at or before this one
    high = requests
    while high - request > 1:
        middle = (request + high) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= index:
            request = middle
        else:
            high = middle
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    begin = (index - start // QUERIES - request) * QUERIES
    if (begin >= count) | (count == (0 if LONE else 1)):
        return
    length = tl.load(context_len + request)
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_D)
    query = begin + row // GROUP
    real = (row < QUERIES * GROUP) & (query < count)
    head = kv_head * GROUP + row % GROUP
    token = (start + query).to(tl.int64)
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    at_query = token * q_token + head * q_head
    x = tl.load(q + at_query[:, None] + column[None, :], mask=inside, other=0.0)
    position = length - count + query
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if SINKS:
        best = tl.load(sinks + head) * LOG2E
        total += 1.0
    best, total, result = attend(
        x, position, best, total, tl.zeros((BLOCK_M, BLOCK_D), tl.float32),
        first_key(length - count + begin, window, BLOCK_N, WINDOW),
        tl.minimum(length - count + begin + QUERIES, length),
        table + request.to(tl.int64) * table_row, kv_head, scale, softcap, window,
        k, k_scale, k_page, k_head, k_slot, k_scale_page, k_scale_group,
        v, v_scale, v_page, v_head, v_slot, v_scale_page, v_scale_group,
        K_KIND, K_GROUPS, K_GROUP, K_DOT, V_KIND, V_GROUPS, V_GROUP, V_DOT, WIDEN, PAGE, HEAD_DIM,
        BLOCK_D, BLOCK_N, WINDOW, SOFTCAP,
    )  # fmt: skip
    result = result / total[:, None]
    if UNMIX:
        result = mixed(result, BLOCK_M, BLOCK_D, UNMIX)
    place = (token * (kv_heads * GROUP) + head) * HEAD_DIM
    tl.store(out + place[:, None] + column[None, :], result, mask=inside)
