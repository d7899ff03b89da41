"""The operators of recurrent layers: ``native/recurrent.hpp`` and ``native/causal_conv.hpp``."""

from __future__ import annotations

from sdk.kernels.backend import Problem
from sdk.kernels.cpu.elementwise import GATE_KINDS, floats
from sdk.kernels.cpu.library import (
    ConvArgs,
    DeltaArgs,
    GatedNormArgs,
    OpKind,
    RatesArgs,
    SpaceArgs,
    StateRows,
)
from sdk.kernels.cpu.runtime import NativeRuntime
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.states import RwkvKeys, StateBatch

#: With the numbers of native/abi.hpp.
NORM_GATES = {"silu": 0, "sigmoid": 1}


class CausalConv:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.causal_conv`."""

    name = "cpu.causal_conv"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

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
        args = ConvArgs(
            _rows(state, batch, states),
            x.data_ptr(),
            _whole(weight, "causal_conv weight"),
            None if bias is None else _whole(bias, "causal_conv bias"),
            None if before is None else before.data_ptr(),
            None if after is None else after.data_ptr(),
            out.data_ptr(),
            x.stride(0),
            0 if before is None else before.stride(0),
            0 if after is None else after.stride(0),
            out.stride(0) if weight.dim() == 3 else 0,
            x.shape[1],
            taps=weight.shape[-1],
            silu=activation == "silu",
            several=len(weight) if weight.dim() == 3 else 1,
        )
        self._runtime.run(OpKind.CONV, args, batch.num_requests, "causal_conv")


class GatedDelta:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.gated_delta`."""

    name = "cpu.gated_delta"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

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
        args = DeltaArgs(
            _rows(state, batch, states),
            *(x.data_ptr() for x in (q, k, v, decay, beta, out)),
            *(x.stride(d) for x in (q, k, v, decay, beta) for d in (0, 1)),
            q.shape[1],
            *state.shape[1:],
            tiled,
            decay.dim() == 3,
            eps is not None,
            eps=eps or 0.0,
            scale=scale,
        )
        self._runtime.run(OpKind.DELTA, args, batch.num_requests, "gated_delta")


class Rwkv:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.rwkv`; natively a delta rule with
    more."""

    name = "cpu.rwkv"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

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
        heads, dim = state.shape[1:3]
        args = DeltaArgs(
            _rows(state, batch, states),
            *(x.data_ptr() for x in (r, k, v, decay)),
            None,
            out.data_ptr(),
            *(x.stride(d) for x in (r, k, v, decay) for d in (0, 1)),
            0,
            0,
            heads,
            heads,
            dim,
            dim,
            by_row=True,
            rate=rate.data_ptr(),
            key_norm=_whole(keys.norm, "rwkv norm of keys"),
            key_mix=_whole(keys.mix, "rwkv mix of keys"),
            key_read=_whole(keys.read, "rwkv read of keys"),
            own=own.data_ptr(),
            rate_token=rate.stride(0),
            rate_head=rate.stride(1),
        )
        if first is not None:
            args.first, args.mix = (x.data_ptr() for x in first)
            args.first_token, args.first_head, args.mix_token, args.mix_head = (
                x.stride(d) for x in first for d in (0, 1)
            )
        self._runtime.run(OpKind.DELTA, args, batch.num_requests, "rwkv")


class StateSpace:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.ssd`; with ``by_row``,
    ``selective_scan``, which is one head whose rows differ to the native code."""

    def __init__(self, runtime: NativeRuntime, *, by_row: bool = False) -> None:
        self._runtime, self._by_row = runtime, by_row
        self._op = "selective_scan" if by_row else "ssd"
        self.name = f"cpu.{self._op}"

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
        heads, groups = (1, 1) if self._by_row else (state.shape[1], b.shape[1])
        strides = [
            number
            for tensor in (x, dt, b, c)
            for number in (tensor.stride(0), 0 if self._by_row else tensor.stride(1))
        ]
        args = SpaceArgs(
            _rows(state, batch, states),
            x.data_ptr(),
            dt.data_ptr(),
            _whole(a, f"{self._op} a"),
            b.data_ptr(),
            c.data_ptr(),
            None if d is None else _whole(d, f"{self._op} d"),
            out.data_ptr(),
            *strides,
            heads,
            groups,
            *state.shape[-2:],
            by_row=self._by_row,
        )
        self._runtime.run(OpKind.SPACE, args, batch.num_requests, self._op)


class Rates:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.rates`."""

    name = "cpu.rates"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(
        self,
        x: Tensor,
        kind: str,
        bias: Tensor | None,
        factor: Tensor | None,
        limits: tuple[float, float] | None,
        out: Tensor,
    ) -> None:
        args = RatesArgs(
            x.data_ptr(),
            None if bias is None else _whole(bias, "rates bias"),
            None if factor is None else _whole(factor, "rates factor"),
            out.data_ptr(),
            x.stride(0),
            x.shape[1],
            0 if factor is None else factor.shape[0],
            GATE_KINDS[kind],
            limits is not None,
            *(limits or (0.0, 0.0)),
        )
        self._runtime.run(OpKind.RATES, args, x.shape[0], "rates")


class GatedNorm:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.gated_norm`."""

    name = "cpu.gated_norm"

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, gate: Tensor, norm: Norm, kind: str, first: bool, out: Tensor) -> None:
        tokens, heads, width = x.shape
        weight = norm.weight
        args = GatedNormArgs(
            x.data_ptr(),
            gate.data_ptr(),
            None if weight is None else _whole(weight, "gated_norm weight"),
            out.data_ptr(),
            width,
            heads,
            x.stride(0),
            x.stride(1),
            gate.stride(0),
            gate.stride(1),
            width if weight is not None and weight.dim() == 2 else 0,
            NORM_GATES[kind],
            first,
            norm.eps,
        )
        self._runtime.run(OpKind.GATED_NORM, args, tokens * heads, "gated_norm")


def _rows(state: Tensor, batch: AttentionBatch, states: StateBatch) -> StateRows:
    return StateRows(
        batch.query_start.data_ptr(),
        states.initial.data_ptr(),
        states.save_start.data_ptr(),
        states.save_token.data_ptr(),
        states.save_slot.data_ptr(),
        state.data_ptr(),
        state.shape[0],
        state.stride(0),
        batch.num_tokens,
        states.save_token.shape[0],
    )


def _whole(x: Tensor, what: str) -> int:
    """The address of a parameter, which outlives the call."""
    if not x.is_contiguous():
        raise KernelError(f"{what}: expected contiguous numbers, found strides {x.stride()}")
    return floats(x, what).data_ptr()
