"""Routing tokens to experts: the choice, the order of the rows, their biases and weighted sums.

Nothing waits for the host, so a captured decode step computes new routes in every replay. Must
match ``reference/moe.py``: the order exactly, values to 1e-6 before rounding to 16 bits. A row's
result does not depend on the others.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu.launch import after_earlier, expect_on_device, run_kernel
from sdk.kernels.operators.route_rule import GATES, RouteRule
from sdk.kernels.operators.routes import TILE_ROWS, Routes

_BLOCK = 1024
#: Rows that are compared with each other to find their places: 128 x 128 take 128 registers of a
#: thread.
_PART = 64
#: Sizes of tiles, each twice as large as the one before: ``TILE_ROWS``.
_SMALLEST, _SIZES = tl.constexpr(TILE_ROWS[0]), tl.constexpr(len(TILE_ROWS))


@triton.jit
def order_of(x):
    """Integers in the order of floats: -0 as 0, NaN above all."""
    x = x + 0.0
    bits = x.to(tl.int32, bitcast=True)
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(x != x, 0x7FFFFFFF, rank)


@triton.jit
def best_groups(
    values, lane, inside, SIZE: tl.constexpr, GROUPS: tl.constexpr, USED: tl.constexpr,
    BEST: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """Which lanes are in one of the ``USED`` groups with the largest sums of ``BEST`` values."""
    number = tl.arange(0, BLOCK_G)
    sums = tl.zeros((BLOCK_G,), tl.float32)
    owner = lane // SIZE
    for g in range(GROUPS):
        rank = tl.where(inside & (owner == g), order_of(values), -0x80000000)
        total = 0.0
        for _ in tl.static_range(BEST):
            at = tl.argmax(rank, 0)
            total += tl.sum(tl.where(lane == at, values, 0.0), 0)
            rank = tl.where(lane == at, -0x80000000, rank)
        sums = tl.where(number == g, total, sums)
    rank = tl.where(number < GROUPS, order_of(sums), -0x80000000)
    kept = owner < 0
    for _ in tl.static_range(USED):
        at = tl.argmax(rank, 0)
        kept = kept | (owner == at)
        rank = tl.where(number == at, -0x80000000, rank)
    return kept


@triton.jit
def scores_of(x, GATE: tl.constexpr):
    """The scores of logits; lanes of no expert have -inf."""
    if GATE == 0:
        shares = tl.exp(x - tl.max(x, 0))
        return shares / tl.sum(shares, 0)
    if GATE == 1:
        return 1.0 / (1.0 + tl.exp(-x))
    y = tl.exp(tl.minimum(x, 20.0))
    one = 1.0 + y  # rounds y: the factor after the logarithm undoes it (Kahan's log1p)
    log = tl.where(one == 1.0, y, tl.log(one) * (y / (one - 1.0)))
    return tl.sqrt(tl.where(x > 20.0, x, log))


@triton.jit
def route_kernel(
    logits, bias, factors, chosen, weights, epsilon, least, scale, reach, EXPERTS: tl.constexpr,
    K: tl.constexpr, GATE: tl.constexpr, NORMALIZED: tl.constexpr, BY_SCORES: tl.constexpr,
    GROUPS: tl.constexpr, USED: tl.constexpr, BEST: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """A program per token: the K best experts, the first of equals; NaN is larger than all.

    Compared as integers in the order of the floats, so that whatever the logits are, K different
    experts are chosen: rows that fill up a captured step hold anything. ``BY_SCORES``: weights are
    scores, not the softmax of the chosen logits. Gates have the numbers of ``GATES``. ``factors``
    ``[EXPERTS]`` multiply the weights.
    """
    after_earlier()
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BLOCK_E)
    inside = lane < EXPERTS
    x = tl.load(logits + row * EXPERTS + lane, mask=inside, other=float("-inf")) + 0.0  # no -0
    values = x
    scores = x
    if BY_SCORES:
        scores = scores_of(x, GATE)
    if bias is not None:
        values = scores_of(x, GATE) + tl.load(bias + lane, mask=inside, other=0.0)
    elif GROUPS > 1:
        values = scores_of(x, GATE)
    open_ = inside
    if GROUPS > 1:
        kept = best_groups(values, lane, inside, EXPERTS // GROUPS, GROUPS, USED, BEST, BLOCK_G)
        open_ = inside & kept
    rank = tl.where(open_, order_of(values), -0x80000000)
    place = tl.arange(0, BLOCK_K)
    experts = tl.zeros((BLOCK_K,), tl.int32)
    found = tl.full((BLOCK_K,), float("-inf"), tl.float32)
    left = inside
    for i in tl.static_range(K):
        expert = tl.argmax(rank, 0)
        score = tl.sum(tl.where(lane == expert, scores, 0.0), 0)
        if GATE == 3:  # the sparse mixer: a softmax over those that this one exceeds by little
            near = (score - x) / tl.maximum(tl.abs(x), score)
            near = left & (near <= reach) | (left & (near != near))
            left = left & (lane != expert)
            score = 1.0 / tl.sum(tl.where(near, tl.exp(x - score), 0.0), 0)
        experts = tl.where(place == i, expert, experts)
        found = tl.where(place == i, score, found)
        rank = tl.where(lane == expert, -0x80000000, rank)
    wanted = place < K
    if BY_SCORES or GATE == 3:
        shares = tl.where(wanted, found, 0.0)
        total = tl.maximum(tl.sum(shares, 0) + epsilon, least) if NORMALIZED else 1.0
    else:
        best = tl.max(x, 0)
        shares = tl.exp(found - best)
        total = tl.sum(shares, 0) if NORMALIZED else tl.sum(tl.exp(x - best), 0)
    tl.store(chosen + row * K + place, experts, mask=wanted)
    shares = shares / total * scale
    if factors is not None:
        shares *= tl.load(factors + experts, mask=wanted, other=0.0)
    tl.store(weights + row * K + place, shares, mask=wanted)


@triton.jit(do_not_specialize=["rows"])
def count_kernel(
    chosen, counts, rows, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr
):
    """How many of a program's ``BLOCK`` rows each expert has: ``counts [programs, EXPERTS]``."""
    after_earlier()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    owner = tl.load(chosen + row, mask=row < rows, other=EXPERTS)
    expert = tl.arange(0, BLOCK_E)
    count = tl.histogram(owner, BLOCK_E)
    tl.store(counts + tl.program_id(0) * EXPERTS + expert, count, mask=expert < EXPERTS)


@triton.jit(do_not_specialize=["rows"])
def group_kernel(
    chosen, counts, places, tokens, owners, starts, active, tiles, rows, K: tl.constexpr,
    EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """The rows in the order of their experts, those of one by token; a program has ``BLOCK``.

    ``counts``: from :func:`count_kernel`; with one program None, which counts them itself. A row's
    place among those of its expert is found by comparing ``PART`` rows with each other. ``BLOCK_E``
    experts are one more than there are, for rows that are not there.
    """
    after_earlier()
    block = tl.program_id(0)
    expert = tl.arange(0, BLOCK_E)
    real = expert < EXPERTS
    before = tl.zeros((BLOCK_E,), tl.int32)
    if counts is None:
        every = tl.arange(0, BLOCK)
        found = tl.load(chosen + every, mask=every < rows, other=EXPERTS)
        total = tl.where(real, tl.histogram(found, BLOCK_E), 0)
    else:
        total = before
        for other in range(tl.num_programs(0)):
            count = tl.load(counts + other * EXPERTS + expert, mask=real, other=0)
            total += count
            before += tl.where(other < block, count, 0)
    start = tl.cumsum(total, 0) - total
    if block == 0:
        tl.store(starts + expert, start, mask=real)
        tl.store(starts + EXPERTS, rows)
        used = total > 0
        count = used.to(tl.int32)
        tl.store(active + tl.cumsum(count, 0) - 1, expert, mask=used)
        tl.store(active + EXPERTS, tl.sum(count, 0))
    at = start + before
    index = tl.arange(0, PART)
    for first in range(block * BLOCK, tl.minimum(block * BLOCK + BLOCK, rows), PART):
        row = first + index
        owner = tl.load(chosen + row, mask=row < rows, other=EXPERTS)
        same = (owner[None, :] == owner[:, None]) & (index[None, :] < index[:, None])
        place = tl.gather(at, owner, 0) + tl.sum(same.to(tl.int32), 1)
        tl.store(places + row, place, mask=row < rows)
        tl.store(tokens + place, row // K, mask=row < rows)
        tl.store(owners + place, owner, mask=row < rows)
        at += tl.histogram(owner, BLOCK_E)
    list_tiles(tiles, start, total, rows, EXPERTS, BLOCK_E)


@triton.jit
def list_tiles(tiles, start, total, rows, EXPERTS: tl.constexpr, BLOCK_E: tl.constexpr):
    """``Routes.tiles`` of experts with ``total [BLOCK_E]`` rows from ``start`` on: each program
    writes some of an expert's tiles."""
    expert = tl.arange(0, BLOCK_E)
    place = rows * 0
    for i in tl.static_range(_SIZES):
        size = _SMALLEST << i
        number = (total + size - 1) // size
        own = tl.cumsum(number, 0) - number
        tl.store(tiles + 2 * place, tl.sum(number, 0), mask=tl.program_id(0) == 0)
        for j in range(tl.program_id(0), tl.max(number, 0), tl.num_programs(0)):
            entry = tiles + 2 * (place + 1 + own + j)
            tl.store(entry, expert, mask=j < number)
            tl.store(entry + 1, start + j * size, mask=j < number)
        place += 1 + rows // size + tl.minimum(rows, EXPERTS)


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
def combine_kernel(
    x, weights, places, shared, gate, out, width, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (tokens, blocks of columns): added in the order of a token's experts, then shared."""
    after_earlier()
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(K):
        row = tl.load(places + token * K + i).to(tl.int64)
        values = tl.load(x + row * width + column, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights + token * K + i) * values
    if shared is not None:
        values = tl.load(shared + token * width + column, mask=mask, other=0.0)
        if gate is not None:
            values = values / (1.0 + tl.exp(-tl.load(gate + token)))
        total += values
    tl.store(out + token * width + column, total, mask=mask)


class _Accepting:
    """An operator that accepts every problem."""

    def reject(self, problem: Problem) -> str | None:
        return None


class Route(_Accepting):
    """See :meth:`sdk.kernels.operators.moe.MoEOps.route`."""

    name = "gpu.route"

    def run(
        self,
        logits: Tensor,
        rule: RouteRule,
        bias: Tensor | None,
        chosen: Tensor,
        weights: Tensor,
        factors: Tensor | None = None,
    ) -> None:
        expect_on_device("route", logits, chosen, weights, factors)
        tokens, count = logits.shape
        k = chosen.shape[1]
        softmax = rule.gate == "softmax" and bias is None and rule.groups == 1
        literal = rule.normalized and bool(rule.epsilon or rule.least)
        run_kernel(
            route_kernel,
            (tokens,),
            *(logits, bias, factors, chosen, weights),
            *(rule.epsilon, rule.least, rule.scale, 2 * rule.jitter),
            EXPERTS=count,
            K=k,
            GATE=GATES.index(rule.gate),
            NORMALIZED=rule.normalized,
            BY_SCORES=rule.gate != "sparse_mixer" and (not softmax or literal),
            GROUPS=rule.groups,
            USED=rule.groups_used,
            BEST=rule.group_best,
            BLOCK_E=triton.next_power_of_2(count),
            BLOCK_K=triton.next_power_of_2(k),
            BLOCK_G=triton.next_power_of_2(rule.groups),
            num_warps=1,
        )


class GroupByExpert(_Accepting):
    """Sorts the choices of all tokens by expert."""

    name = "gpu.group"
    writes_tiles = True

    def run(self, chosen: Tensor, routes: Routes) -> None:
        expect_on_device("group", chosen, routes.starts)
        assert routes.tiles is not None
        rows, count = chosen.numel(), routes.starts.shape[0] - 1
        programs = triton.cdiv(rows, _BLOCK)
        sizes = {"EXPERTS": count, "BLOCK_E": triton.next_power_of_2(count + 1), "BLOCK": _BLOCK}
        counts = None
        if programs > 1:  # else the program that orders the rows counts them: a launch takes longer
            counts = torch.empty(programs, count, dtype=torch.int32, device=chosen.device)
            run_kernel(count_kernel, (programs,), chosen, counts, rows, **sizes)
        run_kernel(
            group_kernel,
            (programs,),
            *(chosen, counts, routes.places, routes.tokens, routes.owners),
            *(routes.starts, routes.active, routes.tiles, rows),
            K=chosen.shape[1],
            PART=_PART,
            **sizes,
        )


class AddOwnersBias(_Accepting):
    """See :meth:`sdk.kernels.operators.moe.MoEOps.add_owners_bias`."""

    name = "gpu.add_owners_bias"

    def run(self, x: Tensor, bias: Tensor, routes: Routes) -> None:
        expect_on_device("add_owners_bias", x, bias, routes.owners)
        rows, width = x.shape
        grid = (rows, triton.cdiv(width, _BLOCK))
        run_kernel(
            owners_bias_kernel, grid, x, bias.contiguous(), routes.owners, width, BLOCK=_BLOCK
        )


class Combine(_Accepting):
    """See :meth:`sdk.kernels.operators.moe.MoEOps.combine`."""

    name = "gpu.combine"

    def run(
        self,
        x: Tensor,
        routes: Routes,
        out: Tensor,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> None:
        expect_on_device("combine", x, routes.places, out)
        tokens, width = out.shape
        run_kernel(
            combine_kernel,
            (tokens, triton.cdiv(width, _BLOCK)),
            x.contiguous(),
            routes.weights,
            routes.places,
            shared,
            None if gate is None else gate.contiguous(),
            out,
            width,
            K=routes.places.shape[1],
            BLOCK=_BLOCK,
        )


OPS: dict[str, tuple[Any, ...]] = {
    "route": (Route(),),
    "group": (GroupByExpert(),),
    "add_owners_bias": (AddOwnersBias(),),
    "combine": (Combine(),),
}
