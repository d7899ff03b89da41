"""The operators of recurrent layers in plain torch, token by token; fp32.

Sums are over products, never matrix products: their shapes do not depend on the step, and a GPU
cannot round them to fewer bits. Functions of all tokens are in float64: in float32 torch gives an
element other bits at the end of a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.states import RwkvKeys, StateBatch


class CausalConv:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.causal_conv`."""

    name = "reference.causal_conv"

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
        x = x.float() if before is None else x.float() * before.float()
        taps = weight.transpose(-1, -2).contiguous()
        for tokens, inputs, saves in _requests("causal_conv", state, batch, states):
            for t in tokens:
                inputs = torch.cat([inputs, x[t : t + 1]])
                y = (inputs * taps).sum(-2)
                inputs = inputs[1:]
                y = y if bias is None else y + bias
                y = torch.nn.functional.silu(y) if activation == "silu" else y
                out[..., t, :] = y if after is None else y * after[t].float()
                _save(state, inputs, saves.get(t, ()))


class GatedDelta:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.gated_delta`."""

    name = "reference.gated_delta"

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
        heads, of = v.shape[1], torch.arange(v.shape[1], device=v.device)
        of = of % q.shape[1] if tiled else of // (heads // q.shape[1])
        v, decay = v.float(), decay.double().exp().float()
        decay = decay.unsqueeze(2) if decay.dim() == 2 else decay
        for tokens, s, saves in _requests("gated_delta", state, batch, states):
            for t in tokens:
                key, query = (_unit(x[t].float(), eps)[of].unsqueeze(2) for x in (k, q))
                s = s * decay[t].unsqueeze(2)
                change = (v[t] - (s * key).sum(1)) * beta[t].unsqueeze(1)
                s = s + key * change.unsqueeze(1)
                out[t] = (s * query).sum(1) * scale
                _save(state, s, saves.get(t, ()))


def _unit(x: Tensor, eps: float | None) -> Tensor:
    return x if eps is None else x * torch.rsqrt((x * x).sum(-1, keepdim=True) + eps)


class Rwkv:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.rwkv`."""

    name = "reference.rwkv"

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
        r, k, v, decay = r.float(), k.float(), v.float(), decay.double().exp().float()
        if first is not None:
            v = v + (first[0].float() - v) * first[1]
        unit = k * keys.norm
        unit = unit / (unit * unit).sum(-1, keepdim=True).sqrt().clamp(min=1e-12)
        k = k + k * (rate - 1) * keys.mix
        own.copy_((r * keys.read * k).sum(-1, keepdim=True) * v)
        for tokens, s, saves in _requests("rwkv", state, batch, states):
            for t in tokens:
                seen = (s * unit[t].unsqueeze(2)).sum(1, keepdim=True)
                s = s * decay[t].unsqueeze(2) - (unit[t] * rate[t]).unsqueeze(2) * seen
                s = s + k[t].unsqueeze(2) * v[t].unsqueeze(1)
                out[t] = (s * r[t].unsqueeze(2)).sum(1)
                _save(state, s, saves.get(t, ()))


class StateSpace:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.ssd`."""

    name = "reference.ssd"

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
        heads = x.shape[1]
        of = torch.arange(heads, device=x.device) // (heads // b.shape[1])
        x, decay = x.float(), (dt * a).double().exp().float()
        for tokens, s, saves in _requests("ssd", state, batch, states):
            for t in tokens:
                row, read = b[t].float()[of].unsqueeze(1), c[t].float()[of].unsqueeze(1)
                change = x[t] * dt[t].unsqueeze(1)
                s = s * decay[t].view(-1, 1, 1) + change.unsqueeze(2) * row
                y = (s * read).sum(2)
                out[t] = y if d is None else y + d.unsqueeze(1) * x[t]
                _save(state, s, saves.get(t, ()))


class SelectiveScan:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.selective_scan`."""

    name = "reference.selective_scan"

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
        x = x.float()
        for tokens, s, saves in _requests("selective_scan", state, batch, states):
            for t in tokens:
                decay = (dt[t].unsqueeze(1) * a).double().exp().float()
                s = s * decay + (x[t] * dt[t]).unsqueeze(1) * b[t].float()
                y = (s * c[t].float()).sum(1)
                out[t] = y if d is None else y + d * x[t]
                _save(state, s, saves.get(t, ()))


class Rates:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.rates`."""

    name = "reference.rates"

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
        x = x.double() if bias is None else x.double() + bias
        if kind == "softplus":
            y = torch.nn.functional.softplus(x)
        else:
            y = torch.sigmoid(x) if kind == "sigmoid" else torch.tanh(x)
        y = y if limits is None else y.clamp(*limits)
        if factor is not None:
            y = y * factor.repeat_interleave(y.shape[1] // len(factor))
        out.copy_(y)


class GatedNorm:
    """See :meth:`sdk.kernels.operators.state_ops.StateOps.gated_norm`."""

    name = "reference.gated_norm"

    def reject(self, problem: Problem) -> str | None:
        return None

    def run(self, x: Tensor, gate: Tensor, norm: Norm, kind: str, first: bool, out: Tensor) -> None:
        factor = torch.sigmoid(gate.double())
        factor = factor * gate.double() if kind == "silu" else factor
        x = x.double() * factor if first else x.double()
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.eps)
        x = x if norm.weight is None else x * norm.weight
        out.copy_(x if first else x * factor)


def _requests(
    op: str, state: Tensor, batch: AttentionBatch, states: StateBatch
) -> Iterator[tuple[range, Tensor, dict[int, list[int]]]]:
    """For each request its tokens, the state it begins with, and the slots of states by token."""
    starts, first = batch.query_start.tolist(), states.save_start.tolist()
    token, slot = states.save_token.tolist(), states.save_slot.tolist()
    for r, initial in enumerate(states.initial.tolist()):
        tokens = range(starts[r], starts[r + 1])
        if not tokens:
            continue
        saves: dict[int, list[int]] = {}
        for i in range(first[r], first[r + 1]):
            saves.setdefault(token[i], []).append(slot[i])
        used = [initial, *(one for slots in saves.values() for one in slots)]
        fits = -1 <= initial < len(state) and min(used[1:], default=0) >= 0
        if not fits or max(used) >= len(state) or not saves.keys() <= set(tokens):
            raise KernelError(
                f"{op}: a state's slot or token lies outside: expected slots below {len(state)} "
                f"and tokens in {tokens}, found slots {used} and tokens {sorted(saves)}"
            )
        begin = state[initial].clone() if initial >= 0 else torch.zeros_like(state[0])
        yield tokens, begin, saves


def _save(state: Tensor, value: Tensor, slots: list[int] | tuple[()]) -> None:
    for slot in slots:
        state[slot] = value
