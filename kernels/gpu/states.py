"""The operators of recurrent layers: a program runs the tokens of a request one after another.

Must match ``reference/states.py`` to 1e-6 of a result's largest value before it is rounded to the
type of ``out``. A part of a state (32 columns of a delta rule's head, some rows of a Mamba-2 head)
stays in a program's registers while its tokens run, in the same order in every step: on one card a
request has the same bits one token at a time, in chunks and in a batch.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.gpu.launch import after_earlier, expect_on_device, run_kernel
from sdk.kernels.gpu.rates import GatedNorm, Rates
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.states import RwkvKeys, StateBatch

#: Tokens and channels of a program of a convolution.
CONV_TOKENS, CONV_CHANNELS = 32, 256
#: Numbers of a state that a program of 128 threads keeps: 32 registers of each.
STATE_NUMBERS = 4096


@triton.jit
def _save(state, value, mask, slot_stride, save_token, save_slot, save, last, t):
    """Write a state, whose place in slot 0 is ``state``, to each slot that asks for it after token
    ``t``; returns the next save."""
    at = tl.load(save_token + save, mask=save < last, other=-1)
    while at == t:
        slot = tl.load(save_slot + save).to(tl.int64)
        tl.store(state + slot * slot_stride, value, mask=mask)
        save += 1
        at = tl.load(save_token + save, mask=save < last, other=-1)
    return save


@triton.jit
def _conv_input(
    x, before, x_stride, before_stride, t, column, mask, first, tail, KEPT: tl.constexpr
):
    """The input of token t: of the step's rows, or of the state's, ``tail``, before ``first``."""
    ours = mask & (t >= first)
    found = tl.load(x + t * x_stride + column, mask=ours, other=0.0).to(tl.float32)
    if before is not None:
        factor = tl.load(before + t * before_stride + column, mask=ours, other=0.0)
        found *= factor.to(tl.float32)
    row = tl.arange(0, tail.shape[0])[:, None]
    older = tl.sum(tl.where(row == KEPT + t - first, tail, 0.0), 0)
    return tl.where(t >= first, found, older)


@triton.jit
def conv_kernel(
    x, weight, bias, before, after, out, state,
    query_start, initial, save_start, save_token, save_slot,
    x_stride, before_stride, after_stride, weight_stride, slot_stride, out_step,
    WIDTH: tl.constexpr, TAPS: tl.constexpr, ROWS: tl.constexpr, SILU: tl.constexpr,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr, SEVERAL: tl.constexpr,
):  # fmt: skip
    """Grid (requests, blocks of tokens, blocks of channels). ROWS: TAPS - 1 or more, a power of 2.

    The first block of a request's tokens alone reads its state, and writes all that it leaves.
    """
    after_earlier()
    request, block = tl.program_id(0), tl.program_id(1)
    first = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    begin = first + block * TOKENS
    if begin < end:
        KEPT: tl.constexpr = TAPS - 1
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = column < WIDTH
        row = tl.arange(0, ROWS)
        place = state + row[:, None] * WIDTH + column[None, :]
        tail = tl.zeros((ROWS, BLOCK), tl.float32)
        if block == 0:
            slot = tl.load(initial + request).to(tl.int64)
            known = (slot >= 0) & (row < KEPT)[:, None] & mask[None, :]
            tail = tl.load(place + slot * slot_stride, mask=known, other=0.0)
            tl.debug_barrier()  # a state may replace the one that was read
            for i in range(tl.load(save_start + request), tl.load(save_start + request + 1)):
                token = tl.load(save_token + i).to(tl.int64)
                to = tl.load(save_slot + i).to(tl.int64) * slot_stride
                for j in tl.static_range(KEPT):
                    value = _conv_input(
                        x, before, x_stride, before_stride, token + 1 - KEPT + j, column, mask,
                        first, tail, KEPT,
                    )  # fmt: skip
                    tl.store(state + to + j * WIDTH + column, value, mask=mask)
        for t in range(begin, tl.minimum(end, begin + TOKENS)):
            for several in tl.static_range(SEVERAL):
                row_of = several * WIDTH + column
                total = tl.zeros((BLOCK,), tl.float32)
                if bias is not None:
                    total += tl.load(bias + row_of, mask=mask, other=0.0)
                for j in tl.static_range(TAPS):
                    value = _conv_input(
                        x, before, x_stride, before_stride, t - KEPT + j, column, mask, first, tail,
                        KEPT,
                    )  # fmt: skip
                    tap = tl.load(weight + row_of * weight_stride + j, mask=mask, other=0.0)
                    total += tap * value
                if SILU:
                    total = total * tl.sigmoid(total)
                if after is not None:
                    factor = tl.load(after + t * after_stride + column, mask=mask, other=0.0)
                    total *= factor.to(tl.float32)
                tl.store(out + several * out_step + t * WIDTH + column, total, mask=mask)


@triton.jit
def delta_kernel(
    q, k, v, decay, beta, out, state,
    query_start, initial, save_start, save_token, save_slot,
    q_token, q_head, k_token, k_head, v_token, v_head, decay_token, decay_head, beta_token,
    beta_head, slot_stride, scale, eps,
    HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, TILED: tl.constexpr, BY_ROW: tl.constexpr,
    NORMALIZED: tl.constexpr,
):  # fmt: skip
    """Grid (requests, heads, blocks of columns). ROWS: DIM or more, a power of 2."""
    after_earlier()
    request, head = tl.program_id(0), tl.program_id(1)
    t = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if t < end:
        if TILED:
            of = head % KEY_HEADS
        else:
            of = head // (HEADS // KEY_HEADS)
        row = tl.arange(0, ROWS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        real, mask = row < DIM, column < WIDTH
        both = real[:, None] & mask[None, :]
        place = state + head.to(tl.int64) * DIM * WIDTH + row[:, None] * WIDTH + column[None, :]
        slot = tl.load(initial + request).to(tl.int64)
        s = tl.load(place + slot * slot_stride, mask=both & (slot >= 0), other=0.0)
        tl.debug_barrier()  # a state may replace the one that was read
        save, last = tl.load(save_start + request), tl.load(save_start + request + 1)
        while t < end:
            key = tl.load(k + t * k_token + of * k_head + row, mask=real, other=0.0)
            query = tl.load(q + t * q_token + of * q_head + row, mask=real, other=0.0)
            key, query = key.to(tl.float32), query.to(tl.float32)
            if NORMALIZED:
                key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
                query *= tl.rsqrt(tl.sum(query * query, 0) + eps)
            value = tl.load(v + t * v_token + head * v_head + column, mask=mask, other=0.0)
            rate = tl.load(beta + t * beta_token + head * beta_head)
            at = decay + t * decay_token + head * decay_head
            if BY_ROW:
                s *= tl.exp(tl.load(at + row, mask=real, other=0.0))[:, None]
            else:
                s *= tl.exp(tl.load(at))
            change = (value.to(tl.float32) - tl.sum(s * key[:, None], 0)) * rate
            s += key[:, None] * change[None, :]
            y = tl.sum(s * query[:, None], 0) * scale
            tl.store(out + (t * HEADS + head) * WIDTH + column, y, mask=mask)
            save = _save(place, s, both, slot_stride, save_token, save_slot, save, last, t)
            t += 1


@triton.jit
def rwkv_kernel(
    r, k, v, decay, rate, key_norm, key_mix, key_read, earlier, mix, out, own, state,
    query_start, initial, save_start, save_token, save_slot,
    r_token, r_head, k_token, k_head, v_token, v_head, decay_token, decay_head, rate_token,
    rate_head, earlier_token, earlier_head, mix_token, mix_head, slot_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (requests, heads, blocks of columns). ROWS: DIM or more, a power of 2."""
    after_earlier()
    request, head = tl.program_id(0), tl.program_id(1)
    t = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if t < end:
        row = tl.arange(0, ROWS)
        column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
        real, mask = row < DIM, column < DIM
        both = real[:, None] & mask[None, :]
        place = state + head.to(tl.int64) * DIM * DIM + row[:, None] * DIM + column[None, :]
        slot = tl.load(initial + request).to(tl.int64)
        s = tl.load(place + slot * slot_stride, mask=both & (slot >= 0), other=0.0)
        tl.debug_barrier()  # a state may replace the one that was read
        save, last = tl.load(save_start + request), tl.load(save_start + request + 1)
        of_norm = tl.load(key_norm + head * DIM + row, mask=real, other=0.0)
        of_mix = tl.load(key_mix + head * DIM + row, mask=real, other=0.0)
        of_read = tl.load(key_read + head * DIM + row, mask=real, other=0.0)
        while t < end:
            given = tl.load(k + t * k_token + head * k_head + row, mask=real, other=0.0)
            query = tl.load(r + t * r_token + head * r_head + row, mask=real, other=0.0)
            given, query = given.to(tl.float32), query.to(tl.float32)
            learns = tl.load(rate + t * rate_token + head * rate_head + row, mask=real, other=0.0)
            keeps = tl.load(decay + t * decay_token + head * decay_head + row, mask=real, other=0.0)
            unit = given * of_norm
            size = tl.sqrt(tl.sum(unit * unit, 0))
            unit /= tl.where(size < 1e-12, 1e-12, size)
            key = given + given * (learns - 1.0) * of_mix
            value = tl.load(v + t * v_token + head * v_head + column, mask=mask, other=0.0)
            value = value.to(tl.float32)
            if earlier is not None:
                at = earlier + t * earlier_token + head * earlier_head + column
                far = tl.load(mix + t * mix_token + head * mix_head + column, mask=mask, other=0.0)
                value += (tl.load(at, mask=mask, other=0.0).to(tl.float32) - value) * far
            seen = tl.sum(s * unit[:, None], 0)
            s = s * tl.exp(keeps)[:, None] - (unit * learns)[:, None] * seen[None, :]
            s += key[:, None] * value[None, :]
            at = (t * HEADS + head) * DIM + column
            tl.store(out + at, tl.sum(s * query[:, None], 0), mask=mask)
            tl.store(own + at, tl.sum(query * of_read * key, 0) * value, mask=mask)
            save = _save(place, s, both, slot_stride, save_token, save_slot, save, last, t)
            t += 1


@triton.jit
def space_kernel(
    x, dt, a, b, c, d, out, state,
    query_start, initial, save_start, save_token, save_slot,
    x_token, x_head, dt_token, dt_head, b_token, b_group, c_token, c_group, slot_stride,
    HEADS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (requests, heads, blocks of rows). COLUMNS: SIZE or more, a power of 2."""
    after_earlier()
    request, head = tl.program_id(0), tl.program_id(1)
    t = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if t < end:
        of = head // (HEADS // GROUPS)
        row = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        real, mask = row < WIDTH, column < SIZE
        both = real[:, None] & mask[None, :]
        place = state + head.to(tl.int64) * WIDTH * SIZE + row[:, None] * SIZE + column[None, :]
        slot = tl.load(initial + request).to(tl.int64)
        s = tl.load(place + slot * slot_stride, mask=both & (slot >= 0), other=0.0)
        tl.debug_barrier()  # a state may replace the one that was read
        save, last = tl.load(save_start + request), tl.load(save_start + request + 1)
        rate = tl.load(a + head)
        while t < end:
            step = tl.load(dt + t * dt_token + head * dt_head)
            given = tl.load(x + t * x_token + head * x_head + row, mask=real, other=0.0)
            given = given.to(tl.float32)
            into = tl.load(b + t * b_token + of * b_group + column, mask=mask, other=0.0)
            read = tl.load(c + t * c_token + of * c_group + column, mask=mask, other=0.0)
            change = (step * given)[:, None] * into.to(tl.float32)[None, :]
            s = s * tl.exp(step * rate) + change
            y = tl.sum(s * read.to(tl.float32)[None, :], 1)
            if d is not None:
                y += tl.load(d + head) * given
            tl.store(out + (t * HEADS + head) * WIDTH + row, y, mask=real)
            save = _save(place, s, both, slot_stride, save_token, save_slot, save, last, t)
            t += 1


@triton.jit
def scan_kernel(
    x, dt, a, b, c, d, out, state,
    query_start, initial, save_start, save_token, save_slot,
    x_token, dt_token, b_token, c_token, slot_stride,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (requests, blocks of channels). COLUMNS: SIZE or more, a power of 2."""
    after_earlier()
    request = tl.program_id(0)
    t = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    if t < end:
        row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
        column = tl.arange(0, COLUMNS)
        real, mask = row < WIDTH, column < SIZE
        both = real[:, None] & mask[None, :]
        at = row.to(tl.int64)[:, None] * SIZE + column[None, :]
        place = state + at
        slot = tl.load(initial + request).to(tl.int64)
        s = tl.load(place + slot * slot_stride, mask=both & (slot >= 0), other=0.0)
        tl.debug_barrier()  # a state may replace the one that was read
        save, last = tl.load(save_start + request), tl.load(save_start + request + 1)
        rate = tl.load(a + at, mask=both, other=0.0)
        while t < end:
            step = tl.load(dt + t * dt_token + row, mask=real, other=0.0)
            given = tl.load(x + t * x_token + row, mask=real, other=0.0).to(tl.float32)
            into = tl.load(b + t * b_token + column, mask=mask, other=0.0).to(tl.float32)
            read = tl.load(c + t * c_token + column, mask=mask, other=0.0).to(tl.float32)
            s = s * tl.exp(step[:, None] * rate) + (step * given)[:, None] * into[None, :]
            y = tl.sum(s * read[None, :], 1)
            if d is not None:
                y += tl.load(d + row, mask=real, other=0.0) * given
            tl.store(out + t * WIDTH + row, y, mask=real)
            save = _save(place, s, both, slot_stride, save_token, save_slot, save, last, t)
            t += 1


def _index(batch: AttentionBatch, states: StateBatch) -> tuple[Tensor, ...]:
    return (
        batch.query_start,
        states.initial,
        states.save_start,
        states.save_token,
        states.save_slot,
    )


class CausalConv:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.causal_conv`."""

    name = "gpu.causal_conv"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        states: StateBatch,
        activation: str | None,
        before: Tensor | None,
        after: Tensor | None,
        out: Tensor,
    ) -> None:
        weight = weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        index = _index(batch, states)
        expect_on_device("causal_conv", x, weight, bias, before, after, out, state, *index)
        width, taps = weight.shape[-2:]
        chunks = triton.cdiv(batch.max_query_len, CONV_TOKENS)
        run_kernel(
            conv_kernel,
            (batch.num_requests, chunks, triton.cdiv(width, CONV_CHANNELS)),
            x,
            weight,
            bias,
            before,
            after,
            out,
            state,
            *index,
            x.stride(0),
            0 if before is None else before.stride(0),
            0 if after is None else after.stride(0),
            weight.stride(-2),
            state.stride(0),
            out.stride(0) if weight.dim() == 3 else 0,
            WIDTH=width,
            TAPS=taps,
            ROWS=triton.next_power_of_2(taps - 1),
            SILU=activation == "silu",
            TOKENS=CONV_TOKENS,
            BLOCK=CONV_CHANNELS,
            SEVERAL=len(weight) if weight.dim() == 3 else 1,
        )


class GatedDelta:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.gated_delta`."""

    name = "gpu.gated_delta"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor,
        batch: AttentionBatch,
        states: StateBatch,
        scale: float,
        eps: float | None,
        tiled: bool,
        out: Tensor,
    ) -> None:
        given, index = (q, k, v, decay, beta), _index(batch, states)
        expect_on_device("gated_delta", *given, out, state, *index)
        heads, dim, width = state.shape[1:]
        rows = triton.next_power_of_2(dim)
        columns = min(max(STATE_NUMBERS // rows, 1), triton.next_power_of_2(width))
        run_kernel(
            delta_kernel,
            (batch.num_requests, heads, triton.cdiv(width, columns)),
            *given,
            out,
            state,
            *index,
            *(x.stride(axis) for x in given for axis in (0, 1)),
            state.stride(0),
            scale,
            eps or 0.0,
            HEADS=heads,
            KEY_HEADS=q.shape[1],
            DIM=dim,
            WIDTH=width,
            ROWS=rows,
            COLUMNS=columns,
            TILED=tiled,
            BY_ROW=decay.dim() == 3,
            NORMALIZED=eps is not None,
        )


class Rwkv:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.rwkv`."""

    name = "gpu.rwkv"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        r: Tensor,
        k: Tensor,
        v: Tensor,
        decay: Tensor,
        rate: Tensor,
        keys: RwkvKeys,
        first: tuple[Tensor, Tensor] | None,
        state: Tensor,
        batch: AttentionBatch,
        states: StateBatch,
        out: Tensor,
        own: Tensor,
    ) -> None:
        given, index = (r, k, v, decay, rate), _index(batch, states)
        of_keys = [x.contiguous() for x in (keys.norm, keys.mix, keys.read)]
        moved = (None, None) if first is None else first
        expect_on_device("rwkv", *given, *of_keys, *moved, out, own, state, *index)
        heads, dim = state.shape[1:3]
        rows = triton.next_power_of_2(dim)
        columns = min(max(STATE_NUMBERS // rows, 1), rows)
        run_kernel(
            rwkv_kernel,
            (batch.num_requests, heads, triton.cdiv(dim, columns)),
            *given,
            *of_keys,
            *moved,
            out,
            own,
            state,
            *index,
            *(x.stride(axis) for x in given for axis in (0, 1)),
            *(0 if x is None else x.stride(axis) for x in moved for axis in (0, 1)),
            state.stride(0),
            HEADS=heads,
            DIM=dim,
            ROWS=rows,
            COLUMNS=columns,
        )


class StateSpace:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.ssd`."""

    name = "gpu.ssd"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        states: StateBatch,
        out: Tensor,
    ) -> None:
        a, d = a.contiguous(), None if d is None else d.contiguous()
        index = _index(batch, states)
        expect_on_device("ssd", x, dt, a, b, c, d, out, state, *index)
        heads, width, size = state.shape[1:]
        columns = triton.next_power_of_2(size)
        rows = min(max(STATE_NUMBERS // columns, 1), triton.next_power_of_2(width))
        run_kernel(
            space_kernel,
            (batch.num_requests, heads, triton.cdiv(width, rows)),
            x,
            dt,
            a,
            b,
            c,
            d,
            out,
            state,
            *index,
            *(tensor.stride(axis) for tensor in (x, dt, b, c) for axis in (0, 1)),
            state.stride(0),
            HEADS=heads,
            GROUPS=b.shape[1],
            WIDTH=width,
            SIZE=size,
            ROWS=rows,
            COLUMNS=columns,
        )


class SelectiveScan:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.selective_scan`."""

    name = "gpu.selective_scan"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        x: Tensor,
        dt: Tensor,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        d: Tensor | None,
        state: Tensor,
        batch: AttentionBatch,
        states: StateBatch,
        out: Tensor,
    ) -> None:
        a, d = a.contiguous(), None if d is None else d.contiguous()
        index = _index(batch, states)
        expect_on_device("selective_scan", x, dt, a, b, c, d, out, state, *index)
        width, size = state.shape[1:]
        columns = triton.next_power_of_2(size)
        rows = min(max(STATE_NUMBERS // columns, 1), triton.next_power_of_2(width))
        run_kernel(
            scan_kernel,
            (batch.num_requests, triton.cdiv(width, rows)),
            x,
            dt,
            a,
            b,
            c,
            d,
            out,
            state,
            *index,
            *(tensor.stride(0) for tensor in (x, dt, b, c)),
            state.stride(0),
            WIDTH=width,
            SIZE=size,
            ROWS=rows,
            COLUMNS=columns,
        )


OPS: dict[str, tuple[Any, ...]] = {
    "causal_conv": (CausalConv(),),
    "gated_delta": (GatedDelta(),),
    "rwkv": (Rwkv(),),
    "ssd": (StateSpace(),),
    "selective_scan": (SelectiveScan(),),
    "rates": (Rates(),),
    "gated_norm": (GatedNorm(),),
}
