"""Attention over latent pages on the GPU, and the write of latents and of rotated keys into them.

One key serves all query heads of a token, and its first numbers are the value: a tile of keys is
loaded once and multiplied twice, with all heads of several queries as rows. It is in two parts
(latent and what turns, 512 and 64 in DeepSeek's models), each padded to a power of two by itself.

The keys of a request are divided into splits where the tiles of queries alone would not fill the
card; their parts go through memory, and ``join_kernel`` adds them up in the order of the splits.
With ``fixed`` there is one split, so that no row's result depends on the batch. Must match
``reference/attention.py`` and ``reference/rope.py``, with the tolerances of ``attention_decode.py``
and ``rope.py``.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.attend import LOG2E, first_key, places_of
from sdk.kernels.gpu.attention import convert_of, dot_type
from sdk.kernels.gpu.attention_prefill import request_of
from sdk.kernels.gpu.launch import (
    INTERPRETED,
    after_earlier,
    expect_on_device,
    old_card,
    run_kernel,
)
from sdk.kernels.gpu.page_codes import decoded, mixed, operand
from sdk.kernels.gpu.pages import FLOAT, PageSide, key_side
from sdk.kernels.gpu.rope import write_rows
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import QueryScale

#: int4 packs halves of a key into bytes, which lie in both parts.
_TYPES = tuple(
    name for name, kind in KV_TYPES.items() if kind.gpu_kind is not None and name != "int4"
)
_MAX_DIM = 1024
#: Rows of a tile, at most, and the bytes of the parts of all splits.
_ROWS, _PARTS = 64, 64 << 20
#: Keys of a split, at least; splits of a request, at most.
_SPLIT, _MOST_SPLITS = 256, 64


def reject(problem: Problem) -> str | None:
    """Why these kernels reject a problem; ``None``: they accept it."""
    if problem.kv_dtype not in _TYPES:
        return f"latent pages of {problem.kv_dtype}: expected {', '.join(_TYPES)}"
    values, keys = problem.value_dim or problem.head_dim, problem.head_dim
    if values % 8 or keys % 8 or not 0 < values < keys <= _MAX_DIM:
        return f"latents of {values} in keys of {keys}: expected multiples of 8 up to {_MAX_DIM}"
    if torch.version.hip is not None:
        # Triton 3.6 for gfx90a and gfx942: 2.5 to 5.6 KB of spilled registers for attention, and
        # the write, which chooses between two pointers, does not compile.
        return "latent pages on AMD's cards: expected one of NVIDIA"
    return None


@triton.jit
def _part(
    codes, scales, page, slot, seen, FIRST: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    STRIDES: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, DOT: tl.constexpr,
    CONVERT: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Numbers ``FIRST .. FIRST + WIDTH - 1`` of keys, as an operand ``[BLOCK_N, BLOCK]``."""
    column = tl.arange(0, BLOCK)
    mask = seen[:, None] & (column < WIDTH)[None, :]
    place = page * STRIDES[0] + slot * STRIDES[2] + FIRST
    x = tl.load(codes + place[:, None] + column[None, :], mask=mask, other=0)
    if KIND != FLOAT:
        at_scale = scales + page * STRIDES[3] + slot
        if GROUP:
            group = (FIRST + column) // GROUP * STRIDES[4]
            step = tl.load(at_scale[:, None] + group[None, :], mask=mask, other=0)
        else:
            step = tl.load(at_scale, mask=seen, other=0)[:, None]
        x = decoded(x, KIND, CONVERT).to(tl.float32) * step.to(tl.float32)
    return operand(x, DOT, WIDEN)


@triton.jit
def _rows(
    source, real, WIDTH: tl.constexpr, BLOCK: tl.constexpr, DOT: tl.constexpr, WIDEN: tl.constexpr
):
    """A part of queries, as an operand ``[rows, BLOCK]``."""
    column = tl.arange(0, BLOCK)
    mask = real[:, None] & (column < WIDTH)[None, :]
    x = tl.load(source[:, None] + column[None, :], mask=mask, other=0.0)
    return operand(x, DOT, WIDEN)


@triton.jit
def _softmax(score, best, total, key, at, high, window, factor, WINDOW: tl.constexpr):
    """Weights in base 2, by what earlier sums shrink, the new maximum and total."""
    hidden = (key[None, :] > at[:, None]) | (key >= high)[None, :]
    if WINDOW:
        hidden = hidden | (key[None, :] <= at[:, None] - window)
    score = tl.where(hidden, float("-inf"), score * factor)
    peak = tl.maximum(best, tl.max(score, axis=1))
    safe = tl.where(peak == float("-inf"), 0.0, peak)
    weight, shrink = tl.exp2(score - safe[:, None]), tl.exp2(best - safe)
    return weight, shrink, peak, total * shrink + tl.sum(weight, axis=1)


@triton.jit(do_not_specialize=["requests"])
def latent_kernel(
    q, out, parts, sums, query_start, context_len, table, q_token, q_head, table_row,
    scale, window, requests, heads, head_tiles, codes, scales,
    KIND: tl.constexpr, GROUP: tl.constexpr, STRIDES: tl.constexpr, DOT: tl.constexpr,
    CONVERT: tl.constexpr, WIDEN: tl.constexpr, PAGE: tl.constexpr, VALUES: tl.constexpr,
    REST: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, HEADS: tl.constexpr, SPLIT: tl.constexpr,
    SPLITS: tl.constexpr, UNMIX: tl.constexpr,
):  # fmt: skip
    """Grid (tiles of queries times tiles of heads, splits). Rows are (query, head).

    ``out [T, heads, VALUES]``; with several splits parts ``[T, heads, SPLITS, VALUES]`` and sums
    ``[T, heads, SPLITS, 2]`` (maximum in base 2, total), float32.
    """
    after_earlier()
    QUERIES: tl.constexpr = BLOCK_M // HEADS
    index, split = tl.program_id(0), tl.program_id(1)
    tile, head_tile = index // head_tiles, index % head_tiles
    request = request_of(query_start, tile, requests, QUERIES)
    start = tl.load(query_start + request)
    count = tl.load(query_start + request + 1) - start
    begin = (tile - start // QUERIES - request) * QUERIES
    if begin >= count:
        return
    length = tl.load(context_len + request)
    row = tl.arange(0, BLOCK_M)
    query, head = begin + row // HEADS, head_tile * HEADS + row % HEADS
    real = (query < count) & (head < heads)
    token = (start + query).to(tl.int64)
    at = length - count + query
    column = tl.arange(0, BLOCK_V)
    inside = real[:, None] & (column < VALUES)[None, :]
    source = q + token * q_token + head * q_head
    still = _rows(source, real, VALUES, BLOCK_V, DOT, WIDEN)
    turned = _rows(source + VALUES, real, REST, BLOCK_R, DOT, WIDEN)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    result = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)
    own_table = table + request.to(tl.int64) * table_row
    low = first_key(length - count + begin, window, BLOCK_N, WINDOW)
    high = tl.minimum(length - count + begin + QUERIES, length)
    if SPLITS > 1:
        size = tl.maximum(SPLIT, tl.cdiv(tl.cdiv(length, SPLITS), BLOCK_N) * BLOCK_N)
        low, high = tl.maximum(low, split * size), tl.minimum(high, split * size + size)
    for first in range(low, high, BLOCK_N):
        key = first + tl.arange(0, BLOCK_N)
        seen = key < high
        page, slot = places_of(own_table, first, seen, BLOCK_N, PAGE)
        latent = _part(
            codes, scales, page, slot, seen, 0, VALUES, BLOCK_V, STRIDES, KIND, GROUP, DOT,
            CONVERT, WIDEN,
        )  # fmt: skip
        other = _part(
            codes, scales, page, slot, seen, VALUES, REST, BLOCK_R, STRIDES, KIND, GROUP, DOT,
            CONVERT, WIDEN,
        )  # fmt: skip
        score = tl.dot(still, tl.trans(latent), input_precision="ieee")
        score = tl.dot(turned, tl.trans(other), score, input_precision="ieee")
        weight, shrink, best, total = _softmax(
            score, best, total, key, at, high, window, scale * LOG2E, WINDOW
        )
        weight = operand(weight, DOT, WIDEN)
        result = tl.dot(weight, latent, result * shrink[:, None], input_precision="ieee")
    place = token * heads + head
    if SPLITS > 1:
        place = place * SPLITS + split
        tl.store(parts + place[:, None] * VALUES + column[None, :], result, mask=inside)
        tl.store(sums + place * 2, best, mask=real)
        tl.store(sums + place * 2 + 1, total, mask=real)
    else:
        result = result / total[:, None]
        if UNMIX:
            result = mixed(result, BLOCK_M, BLOCK_V, UNMIX)
        tl.store(out + place[:, None] * VALUES + column[None, :], result, mask=inside)


@triton.jit
def join_kernel(
    out, parts, sums,
    VALUES: tl.constexpr, BLOCK_V: tl.constexpr, SPLITS: tl.constexpr, BLOCK_S: tl.constexpr,
    UNMIX: tl.constexpr,
):  # fmt: skip
    """Grid (rows of ``out``): the sum of a row's parts. Those without keys have a total of 0."""
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    each, column = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    at = sums + (row * SPLITS + each) * 2
    best = tl.max(tl.load(at, mask=each < SPLITS, other=float("-inf")), axis=0)
    total = best * 0.0
    result = tl.zeros((1, BLOCK_V), tl.float32)
    for split in range(SPLITS):
        place = row * SPLITS + split
        factor = tl.exp2(tl.load(sums + place * 2) - best)
        total += tl.load(sums + place * 2 + 1) * factor
        values = tl.load(parts + place * VALUES + column, mask=column < VALUES, other=0.0)
        result += values[None, :] * factor
    result = result / total
    if UNMIX:
        result = mixed(result, 1, BLOCK_V, UNMIX)
    target = out + row * VALUES + column[None, :]
    tl.store(target, result, mask=(column < VALUES)[None, :])


class LatentAttention:
    """See :meth:`sdk.kernels.operators.ops.Ops.attention`, over latent pages.

    ``programs``, ``fixed``: see :class:`sdk.kernels.gpu.attention.Attention`.
    """

    def __init__(self, exact: bool, *, programs: int = 8, fixed: bool = False) -> None:
        self._exact, self._programs, self._fixed = exact, programs, fixed
        self.name = "gpu.latent_attention_exact" if exact else "gpu.latent_attention"

    def reject(self, problem: Problem) -> str | None:
        words = set(problem.format.split())
        if "latent" not in words:
            return "its pages are latent"
        if problem.compute == "exact" and not self._exact:
            return 'its products round to 16 bits, but compute="exact"'
        if words - {"latent", "window"}:
            return f"latent pages with {problem.format}: expected a window or nothing else"
        return reject(problem)

    def run(
        self,
        q: Tensor,
        pages: KVPages,
        batch: AttentionBatch,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
        slopes: Tensor | None,
        out: Tensor,
        causal: bool = True,
        biases: Tensor | None = None,
        chunked: bool = False,
    ) -> None:
        assert causal and softcap is None and sinks is slopes is biases is None and not chunked
        tokens, heads, width = q.shape
        values = out.shape[1] // heads
        side = _key_side(pages, width)
        index = (batch.query_start, batch.context_len, batch.page_table)
        expect_on_device("latent attention", q, side.codes, out, *index)
        if q.stride(2) != 1 or scale <= 0 or (window is not None and window < 1):
            raise KernelError(
                "latent attention: expected contiguous heads, a scale above 0 and a window of at "
                f"least 1, found strides {q.stride()}, {scale} and {window}"
            )
        block_v = max(16, triton.next_power_of_2(values))
        wide = self._exact or old_card(q.device)
        each, rows = _tile_rows(heads, batch.max_query_len, block_v, wide, bool(side.kind))
        head_tiles = triton.cdiv(heads, each)
        tiles = (tokens // (rows // each) + batch.num_requests) * head_tiles
        splits = 1 if self._fixed else self._splits(batch, tiles, tokens * heads * values)
        shape = (tokens * heads * splits, values) if splits > 1 else (1, 1)
        parts = torch.empty(shape, dtype=torch.float32, device=q.device)
        sums = torch.empty(shape[0], 2, dtype=torch.float32, device=q.device)
        unmix = _mixed_block(pages, width, values)
        fields = self._constants(pages, side, values, window, wide)
        run_kernel(
            latent_kernel,
            (tiles, splits),
            *(q, out, parts, sums, *index),
            *q.stride()[:2],
            batch.page_table.stride(0),
            scale,
            window or 0,
            batch.num_requests,
            heads,
            head_tiles,
            side.codes,
            side.scales,
            **fields,
            BLOCK_M=rows,
            HEADS=each,
            SPLITS=splits,
            UNMIX=unmix,
            num_warps=8,
            **({"num_stages": 1} if wide else {}),
        )
        if splits > 1:
            run_kernel(
                join_kernel,
                (tokens * heads,),
                *(out, parts, sums),
                VALUES=values,
                BLOCK_V=block_v,
                SPLITS=splits,
                BLOCK_S=triton.next_power_of_2(splits),
                UNMIX=unmix,
                num_warps=4,
            )

    def _constants(
        self, pages: KVPages, side: PageSide, values: int, window: int | None, wide: bool
    ) -> dict[str, Any]:
        """What does not depend on the step. ``wide``: operands are float32."""
        rest = pages.head_dim - values
        block_v = max(16, triton.next_power_of_2(values))
        return {
            "KIND": side.kind,
            "GROUP": side.group,
            "STRIDES": side.strides,
            "DOT": tl.float32 if wide else dot_type(side),
            "CONVERT": convert_of(side.codes.device).value,
            "WIDEN": INTERPRETED,
            "PAGE": pages.page_size,
            "VALUES": values,
            "REST": rest,
            "BLOCK_V": block_v,
            "BLOCK_R": max(16, triton.next_power_of_2(rest)),
            "BLOCK_N": 16 if wide or block_v > 256 else 32,
            "WINDOW": window is not None,
            "SPLIT": _SPLIT,
        }

    def _splits(self, batch: AttentionBatch, tiles: int, size: int) -> int:
        """A power of two: as many as fill the card, of at least ``_SPLIT`` keys each."""
        wanted = min(self._programs // max(tiles, 1), batch.max_context_len // _SPLIT)
        wanted = min(wanted, _PARTS // max(4 * size, 1), _MOST_SPLITS)
        return 1 << max(0, wanted.bit_length() - 1)


def _tile_rows(heads: int, queries: int, width: int, wide: bool, codes: bool) -> tuple[int, int]:
    """Heads of a tile, and its rows. ``wide``: operands are float32. ``codes``: pages have them.

    Matrix instructions take 16 rows. Accumulators are in registers: 32 rows of 512 spill 56 bytes
    with codes on sm_90. Operands of other products lie in shared memory: 8 rows of 512 take 54 KiB
    with one stage, 16 take 72 of a T4's 64, and several stages spill.
    """
    least = 8 if wide else 16
    most = least if wide else max(least, min(_ROWS, (1 << (13 if codes else 14)) // width))
    each = min(triton.next_power_of_2(heads), most)
    return each, max(least, each, min(most, each * triton.next_power_of_2(queries)))


def _key_side(pages: KVPages, width: int) -> PageSide:
    if pages.k.shape[1] != 1 or not pages.latent or pages.k_centre is not None:
        raise KernelError(
            "latent attention: expected latent pages of one key head without a centre, found keys "
            f"{list(pages.k.shape)} and values {list(pages.v.shape)}"
        )
    return key_side(pages, width)


def _mixed_block(pages: KVPages, width: int, values: int) -> int:
    """The Hadamard block of keys and values: see ``reference/page_codes.py``."""
    both = width | values
    return both & -both if pages.k_mixed else 0


@triton.jit
def latent_rope_kernel(
    q, turned, latent, k, cos, sin, slots, positions, beta, length,
    q_token, q_head, turned_token, turned_head, latent_token, k_token, cos_token, heads, half,
    codes, scales, page_stride, head_stride, slot_stride, scale_page, scale_group,
    KIND: tl.constexpr, GROUPS: tl.constexpr, GROUP: tl.constexpr, MIX: tl.constexpr,
    PAGE: tl.constexpr, VALUES: tl.constexpr, REST: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, tiles of heads of q, then the key). The last ``REST`` numbers of q are written;
    with ``positions`` all of q is multiplied by ``1 + beta * log(1 + position // length)``."""
    after_earlier()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    tiles = tl.cdiv(heads, BLOCK_H)
    column = tl.arange(0, BLOCK_D)
    inner = column - VALUES
    turns = (inner >= 0) & (inner < 2 * half)
    first = inner < half
    angle = token * cos_token + tl.where(first, inner, inner - half)
    c = tl.load(cos + angle, mask=turns, other=1.0)
    s = tl.load(sin + angle, mask=turns, other=0.0)
    s = tl.where(first, -s, s)
    partner = tl.where(first, inner + half, inner - half)
    is_key = part >= tiles
    head = tl.where(is_key, 0, part * BLOCK_H) + tl.arange(0, BLOCK_H)
    slot = tl.load(slots + token)
    # -1: see places_kernel
    real = tl.where(is_key, (head < 1) & (slot >= 0), head < heads)
    still = tl.where(is_key, latent + token * latent_token, q + token * q_token)
    rest = tl.where(is_key, k + token * k_token, turned + token * turned_token)
    at_still = head * tl.where(is_key, 0, q_head)
    at_rest = head * tl.where(is_key, 0, turned_head)
    mask = real[:, None] & (column < VALUES)[None, :]
    x = tl.load(still + at_still[:, None] + column[None, :], mask=mask, other=0.0).to(tl.float32)
    own = real[:, None] & ((inner >= 0) & (inner < REST))[None, :]
    y = tl.load(rest + at_rest[:, None] + inner[None, :], mask=own, other=0.0).to(tl.float32)
    both = real[:, None] & turns[None, :]
    z = tl.load(rest + at_rest[:, None] + partner[None, :], mask=both, other=0.0).to(tl.float32)
    x = tl.where((inner < 0)[None, :], x, y * c[None, :] + z * s[None, :])
    if is_key:
        write_rows(
            x, codes, scales, slot, head, real,
            page_stride, head_stride, slot_stride, scale_page, scale_group,
            PAGE, VALUES + REST, BLOCK_H, BLOCK_D, KIND, GROUPS, GROUP, MIX,
        )  # fmt: skip
    else:
        if positions is not None:
            steps = tl.load(positions + token) // length
            x *= 1.0 + beta * tl.log(1.0 + steps.to(tl.float32))
        if MIX:
            x = mixed(x, BLOCK_H, BLOCK_D, MIX)
        tl.debug_barrier()  # a thread reads what another overwrites
        target = q + token * q_token + (head * q_head)[:, None] + column[None, :]
        tl.store(target, x, mask=real[:, None] & (column < VALUES + REST)[None, :])


class LatentRopeAndCache:
    """See :meth:`sdk.kernels.operators.latent.LatentOps.rope_and_cache`."""

    name = "gpu.latent_rope_and_cache"

    def reject(self, problem: Problem) -> str | None:
        return reject(problem)

    def run(
        self,
        q: Tensor,
        turned: Tensor,
        latent: Tensor,
        k: Tensor,
        cos: Tensor,
        sin: Tensor,
        batch: AttentionBatch,
        pages: KVPages,
        scale: QueryScale | None = None,
    ) -> None:
        tokens, heads, width = q.shape
        values = latent.shape[2]
        side = _key_side(pages, width)
        named: dict[str, Tensor] = {"q": q, "turned": turned, "latent": latent, "k": k}
        if any(x.stride(-1) != 1 for x in (*named.values(), cos)) or cos.stride() != sin.stride():
            raise KernelError("latent rope: expected contiguous heads and angles of equal strides")
        expect_on_device("latent rope", *named.values(), cos, sin, batch.slots, side.codes)
        block = max(16, triton.next_power_of_2(width))
        rows = max(1, min(8, 2048 // block, triton.next_power_of_2(heads)))
        run_kernel(
            latent_rope_kernel,
            (tokens, triton.cdiv(heads, rows) + 1),
            *(q, turned, latent, k, cos, sin, batch.slots),
            *((None,) * 3 if scale is None else (batch.positions, scale.beta, scale.length)),
            *q.stride()[:2],
            *turned.stride()[:2],
            latent.stride(0),
            k.stride(0),
            cos.stride(0),
            heads,
            cos.shape[1],
            *(side.codes, side.scales, *side.strides),
            KIND=side.kind,
            GROUPS=side.groups,
            GROUP=side.group,
            MIX=_mixed_block(pages, width, values),
            PAGE=pages.page_size,
            VALUES=values,
            REST=width - values,
            BLOCK_D=block,
            BLOCK_H=rows,
            num_warps=4,
            enable_fp_fusion=False,  # codes of pages are the reference's, see page_codes.py
        )


OPS: dict[str, tuple[Any, ...]] = {"latent_rope_and_cache": (LatentRopeAndCache(),)}
