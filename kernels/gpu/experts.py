"""Routing tokens to experts: the choice, the order of the rows, their biases and weighted sums.

Nothing waits for the host, so a captured decode step computes new routes in every replay. Must
match ``reference/moe.py``: the order exactly, values to 1e-6 before rounding to 16 bits. A row's
result does not depend on the others.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu.launch import after_earlier, expect_on_device, run_kernel
from sdk.kernels.routes import Routes

_BLOCK = 1024


@triton.jit
def route_kernel(
    logits, chosen, weights, EXPERTS: tl.constexpr, K: tl.constexpr, NORMALIZED: tl.constexpr,
    BLOCK_E: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program per token: the K largest logits, the first of equals; NaN is larger than all.

    Compared as integers in the order of the floats, so that whatever the logits are, K different
    experts are chosen: rows that fill up a captured step hold anything.
    """
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_E)
    inside = lane < EXPERTS
    x = tl.load(logits + row * EXPERTS + lane, mask=inside, other=float("-inf")) + 0.0  # no -0
    bits = x.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    rank = tl.where(x != x, 0x7FFFFFFF, rank)
    rank = tl.where(inside, rank, -0x80000000)
    place = tl.arange(0, BLOCK_K)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    scores = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    for i in tl.static_range(K):
        expert = tl.argmax(rank, 0)
        score = tl.sum(tl.where(lane == expert, x, 0.0), 0)
        experts = tl.where(place == i, expert, experts)
        scores = tl.where(place == i, score, scores)
        rank = tl.where(lane == expert, -0x80000000, rank)
    best = tl.max(x, 0)
    shares = tl.exp(scores - best)
    total = tl.sum(shares, 0) if NORMALIZED else tl.sum(tl.exp(x - best), 0)
    wanted = place < K
    tl.store(chosen + row * K + place, experts, mask=wanted)
    tl.store(weights + row * K + place, shares / total, mask=wanted)


@triton.jit(do_not_specialize=["rows"])
def group_kernel(
    chosen, places, tokens, owners, starts, rows, experts, K: tl.constexpr, BLOCK: tl.constexpr
):
    """A program per expert: how many rows the experts before it have, then its own, by token."""
    after_earlier()
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, rows, BLOCK):
        owner = tl.load(chosen + start + lane, mask=start + lane < rows, other=0x7FFFFFFF)
        before += (owner < expert).to(tl.int32)
    at = tl.sum(before, 0)
    tl.store(starts + expert, at)
    if expert == experts - 1:
        tl.store(starts + experts, rows)
    for start in range(0, rows, BLOCK):
        row = start + lane
        mine = tl.load(chosen + row, mask=row < rows, other=-1) == expert
        count = mine.to(tl.int32)
        place = at + tl.cumsum(count, 0) - 1
        tl.store(places + row, place, mask=mine)
        tl.store(tokens + place, row // K, mask=mine)
        tl.store(owners + place, row * 0 + expert, mask=mine)
        at += tl.sum(count, 0)


@triton.jit
def active_kernel(starts, active, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """The experts that have rows, and how many they are."""
    after_earlier()
    expert = tl.arange(0, BLOCK_E)
    inside = expert < EXPERTS
    start = tl.load(starts + expert, mask=inside, other=0)
    used = tl.load(starts + expert + 1, mask=inside, other=0) > start
    count = used.to(tl.int32)
    tl.store(active + tl.cumsum(count, 0) - 1, expert, mask=used)
    tl.store(active + EXPERTS, tl.sum(count, 0))


@triton.jit
def owners_bias_kernel(x, bias, owners, width, BLOCK: tl.constexpr):
    """Grid (rows, blocks of columns)."""
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    owner = tl.load(owners + row).to(tl.int64)
    values = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
    values += tl.load(bias + owner * width + column, mask=mask, other=0.0)
    tl.store(x + row * width + column, values, mask=mask)


@triton.jit
def combine_kernel(x, weights, places, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    """Grid (tokens, blocks of columns): added in the order of a token's experts."""
    after_earlier()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(places + token * K + i).to(tl.int64)
        values = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights + token * K + i) * values
    tl.store(out + token * width + column, total, mask=mask)


class _Accepting:
    """An operator that accepts every problem."""

    def reject(self, problem: Problem) -> str | None:
        return None


class Route(_Accepting):
    """See :meth:`sdk.kernels.moe.MoEOps.route`."""

    name = "gpu.route"

    def run(self, logits: Tensor, normalized: bool, chosen: Tensor, weights: Tensor) -> None:
        expect_on_device("route", logits, chosen, weights)
        tokens, count = logits.shape
        k = chosen.shape[1]
        run_kernel(
            route_kernel,
            (tokens,),
            logits,
            chosen,
            weights,
            EXPERTS=count,
            K=k,
            NORMALIZED=normalized,
            BLOCK_E=triton.next_power_of_2(count),
            BLOCK_K=triton.next_power_of_2(k),
            num_warps=1,
        )


class Group(_Accepting):
    """Sorts the choices of all tokens by expert."""

    name = "gpu.group"

    def run(self, chosen: Tensor, routes: Routes) -> None:
        expect_on_device("group", chosen, routes.starts)
        count = routes.starts.shape[0] - 1
        run_kernel(
            group_kernel,
            (count,),
            chosen,
            routes.places,
            routes.tokens,
            routes.owners,
            routes.starts,
            chosen.numel(),
            count,
            K=chosen.shape[1],
            BLOCK=_BLOCK,
        )
        block = triton.next_power_of_2(count)
        run_kernel(active_kernel, (1,), routes.starts, routes.active, EXPERTS=count, BLOCK_E=block)


class AddOwnersBias(_Accepting):
    """See :meth:`sdk.kernels.moe.MoEOps.add_owners_bias`."""

    name = "gpu.add_owners_bias"

    def run(self, x: Tensor, bias: Tensor, routes: Routes) -> None:
        expect_on_device("add_owners_bias", x, bias, routes.owners)
        rows, width = x.shape
        grid = (rows, triton.cdiv(width, _BLOCK))
        run_kernel(
            owners_bias_kernel, grid, x, bias.contiguous(), routes.owners, width, BLOCK=_BLOCK
        )


class Combine(_Accepting):
    """See :meth:`sdk.kernels.moe.MoEOps.combine`."""

    name = "gpu.combine"

    def run(self, x: Tensor, routes: Routes, out: Tensor) -> None:
        expect_on_device("combine", x, routes.places, out)
        tokens, width = out.shape
        run_kernel(
            combine_kernel,
            (tokens, triton.cdiv(width, _BLOCK)),
            x.contiguous(),
            routes.weights,
            routes.places,
            out,
            width,
            K=routes.places.shape[1],
            BLOCK=_BLOCK,
        )


OPS: dict[str, tuple[Any, ...]] = {
    "route": (Route(),),
    "group": (Group(),),
    "add_owners_bias": (AddOwnersBias(),),
    "combine": (Combine(),),
}
