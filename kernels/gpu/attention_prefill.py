"""Attention of requests with many queries in a step: prompts and chunks of prompts.

A program handles a tile of one request's queries, with all query heads of a key head as rows of one
product, and loops over the keys: first those that begin to be inside the window of some queries,
then those that all queries see, without masks, then those up to the last one that a query sees.
With a window in both directions all of them have masks. The grid has the
largest possible number of tiles, ``T // tile + requests``, whatever the lengths; a program finds
its request by bisecting ``query_start``. A request's last tiles have the most keys and begin first,
so that the programs that run alone at the end are short. Keys of a cached prefix are in the pages
like any others. Must match ``reference/attention.py`` with the tolerances of
``attention_decode.py``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from sdk.kernels.gpu.attend import attend, begun, first_key, first_seen, slope_of
from sdk.kernels.gpu.launch import after_earlier
from sdk.kernels.gpu.page_codes import mixed


@triton.jit
def _request_of(query_start, tile, requests, QUERIES: tl.constexpr):
    """The last request whose tiles begin at or before this one."""
    request = tile * 0
    high = requests
    while high - request > 1:
        middle = (request + high) // 2
        if tl.load(query_start + middle) // QUERIES + middle <= tile:
            request = middle
        else:
            high = middle
    return request


@triton.jit
def _ends(ahead, token, at, length, real):
    """How many keys the tokens at positions ``at`` see."""
    more = tl.load(ahead + token, mask=real, other=0)
    return tl.minimum(at + 1 + tl.maximum(more, 0), length)


#: For latent pages.
request_of = _request_of


@triton.jit(do_not_specialize=["requests", "fewest"])
def prefill_kernel(
    q, out, sinks, slopes, query_start, context_len, table, q_token, q_head, table_row,
    scale, softcap, window, requests, kv_heads, fewest,
    k, k_scale, v, v_scale,
    K_KIND: tl.constexpr, K_GROUPS: tl.constexpr, K_GROUP: tl.constexpr, K_DOT: tl.constexpr,
    K_STRIDES: tl.constexpr, V_KIND: tl.constexpr, V_GROUPS: tl.constexpr, V_GROUP: tl.constexpr,
    V_DOT: tl.constexpr, V_STRIDES: tl.constexpr,
    CONVERT: tl.constexpr, WIDEN: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, SINKS: tl.constexpr, UNMIX: tl.constexpr,
    BOTH: tl.constexpr = False, ahead=None,
):  # fmt: skip
    """Grid (tiles of queries times key heads): requests with ``fewest`` queries or more. Tensors as
    in ``decode_kernel``; ``ahead``: see ``Ops.attention``."""
    after_earlier()
    QUERIES: tl.constexpr = BLOCK_M // GROUP
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    tile, kv_head = index // kv_heads, index % kv_heads
    request = _request_of(query_start, tile, requests, QUERIES)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    begin = (tile - start // QUERIES - request) * QUERIES
    if (begin >= count) | (count < fewest):
        return
    length = tl.load(context_len + request)
    row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    query = begin + row // GROUP
    real = (row < QUERIES * GROUP) & (query < count)
    head, token = kv_head * GROUP + row % GROUP, (start + query).to(tl.int64)
    inside = real[:, None] & (column < HEAD_DIM)[None, :]
    at_query = (token * q_token + head * q_head)[:, None] + column[None, :]
    x = tl.load(q + at_query, mask=inside, other=0.0)
    best, total = begun(sinks, head, head >= 0, BLOCK_M, SINKS)
    slope = None
    if slopes is not None:
        slope = slope_of(slopes, head, scale, SOFTCAP)
    result = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    own_table = table + request.to(tl.int64) * table_row
    position = length - count + begin
    last = tl.minimum(position + QUERIES, length)
    # Some queries see keys from ``edge`` on; all see those from ``since`` to ``to``.
    edge = first_key(position, window, BLOCK_N, WINDOW)
    to = (position + 1) // BLOCK_N * BLOCK_N
    if BOTH:
        if WINDOW:
            last = tl.minimum(last - 1 + window, length)
            to = edge
        else:
            last = length
            to = length // BLOCK_N * BLOCK_N
    sees = None
    latest = last - 1
    if ahead is not None:
        sees = _ends(ahead, token, length - count + query, length, real)
        last = tl.max(tl.where(real, sees, 0), axis=0)
    since = tl.minimum(tl.cdiv(first_seen(latest, window, WINDOW), BLOCK_N) * BLOCK_N, to)
    for phase in tl.static_range(3):
        low = edge if phase == 0 else since if phase == 1 else to
        high = since if phase == 0 else to if phase == 1 else last
        if WINDOW or phase > 0:
            best, total, result = attend(
                x, length - count + query, best, total, result, low, high,
                own_table, kv_head, scale, softcap, window, slope,
                k, k_scale, v, v_scale,
                K_KIND, K_GROUPS, K_GROUP, K_DOT, K_STRIDES,
                V_KIND, V_GROUPS, V_GROUP, V_DOT, V_STRIDES, CONVERT, WIDEN,
                PAGE, HEAD_DIM, BLOCK_D, BLOCK_N, WINDOW, SOFTCAP, phase != 1, False, BOTH, sees,
            )  # fmt: skip
    result = result / total[:, None]
    if UNMIX:
        result = mixed(result, BLOCK_M, BLOCK_D, UNMIX)
    place = (token * (kv_heads * GROUP) + head) * HEAD_DIM
    tl.store(out + place[:, None] + column[None, :], result, mask=inside)
