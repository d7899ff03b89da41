"""Steps with recurrent states for tests: operators with their inputs, and rows of requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.states import RwkvKeys, StateBatch

Tensors = dict[str, Tensor]
SLOTS = 12


class Row(NamedTuple):
    """What a request of a step runs: its tokens, the slot that it begins with, and which states go
    where: (number of tokens in this row, slot)."""

    inputs: Tensors
    initial: int
    saves: Sequence[tuple[int, int]]


class Operator(NamedTuple):
    """``run(ops, inputs of all tokens, state, batch)``, for a state of one shape."""

    name: str
    state: tuple[int, ...]
    inputs: Callable[[int, int], Tensors]  # of this many tokens, by a seed
    run: Callable[[Ops, Tensors, Tensor, AttentionBatch], Tensor]

    def slots(self, fill: float = 7.5) -> Tensor:
        """Slots that are not next to each other, with numbers that nothing may read."""
        size = torch.Size(self.state).numel()
        return torch.full((SLOTS, size + 24), fill)[:, :size].view(SLOTS, *self.state)

    def step(self, ops: Ops, state: Tensor, rows: Sequence[Row]) -> list[Tensor]:
        """The results of each row."""
        counts = [len(next(iter(row.inputs.values()))) for row in rows]
        inputs = {name: torch.cat([row.inputs[name] for row in rows]) for name in rows[0].inputs}
        batch = batch_of(counts, [row.initial for row in rows], [row.saves for row in rows])
        return list(self.run(ops, inputs, state, batch).split(counts))

    def plain(
        self, ops: Ops, inputs: Tensors, begin: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """All tokens of one request in one step: the result, and the state after each token."""
        tokens = len(next(iter(inputs.values())))
        size = torch.Size(self.state).numel()
        state = torch.zeros(tokens + 1, size).view(tokens + 1, *self.state)
        if begin is not None:
            state[tokens] = begin
        saves = [(t + 1, t) for t in range(tokens)]
        initial = -1 if begin is None else tokens
        out = self.step(ops, state, [Row(inputs, initial, saves)])[0]
        return out, state[:tokens]


def batch_of(
    counts: Sequence[int], initial: Sequence[int], saves: Sequence[Sequence[tuple[int, int]]]
) -> AttentionBatch:
    """A step of requests with this many tokens each."""
    starts = torch.tensor([0, *torch.tensor(counts).cumsum(0)], dtype=torch.int32)
    total, requests = int(starts[-1]), len(counts)
    flat = [
        (start + count - 1, slot)
        for start, row in zip(starts.tolist(), saves, strict=False)
        for count, slot in row
    ]
    save_start = torch.tensor([0, *torch.tensor([len(row) for row in saves]).cumsum(0)])
    return AttentionBatch(
        positions=torch.zeros(total, dtype=torch.int64),
        query_start=starts,
        context_len=torch.tensor(counts, dtype=torch.int32),
        page_table=torch.zeros(requests, 1, dtype=torch.int32),
        slots=torch.zeros(total, dtype=torch.int64),
        page_size=16,
        max_query_len=max(counts, default=0),
        max_context_len=max(counts, default=0),
        states=StateBatch(
            torch.tensor(initial, dtype=torch.int32),
            save_start.to(torch.int32),
            torch.tensor([token for token, _ in flat], dtype=torch.int32),
            torch.tensor([slot for _, slot in flat], dtype=torch.int32),
        ),
    )


def conv(
    width: int = 40, taps: int = 4, *, gated: bool = False, activation: str | None = "silu"
) -> Operator:
    """``gated``: as in LFM2, of one projection's three parts."""
    random = torch.Generator().manual_seed(5)
    weight, bias = torch.randn(width, taps, generator=random), torch.randn(width, generator=random)

    def inputs(tokens: int, seed: int) -> Tensors:
        return {"x": torch.randn(tokens, 3 * width, generator=torch.Generator().manual_seed(seed))}

    def run(ops: Ops, given: Tensors, state: Tensor, batch: AttentionBatch) -> Tensor:
        x = given["x"]
        parts = x[:, :width], x[:, width : 2 * width], x[:, 2 * width :]
        if gated:
            before, after, x = parts
            return ops.states.causal_conv(x, weight, None, state, batch, before=before, after=after)
        return ops.states.causal_conv(parts[1], weight, bias, state, batch, activation=activation)

    return Operator(f"conv{taps}{'-gated' * gated}", (taps - 1, width), inputs, run)


def delta(
    key_heads: int = 2,
    heads: int = 4,
    key_dim: int = 24,
    value_dim: int = 40,
    *,
    rows: bool = False,
    tiled: bool = False,
    eps: float | None = 1e-6,
) -> Operator:
    """``rows``: a decay for each row of the state (KDA)."""
    keys, values = key_heads * key_dim, heads * value_dim

    def inputs(tokens: int, seed: int) -> Tensors:
        random = torch.Generator().manual_seed(seed)
        decay = (tokens, heads, key_dim) if rows else (tokens, heads)
        return {
            "qkv": torch.randn(tokens, 2 * keys + values, generator=random),
            "decay": -torch.nn.functional.softplus(torch.randn(decay, generator=random)),
            "beta": torch.rand(tokens, heads, generator=random),
        }

    def run(ops: Ops, given: Tensors, state: Tensor, batch: AttentionBatch) -> Tensor:
        q, k, v = given["qkv"].split([keys, keys, values], 1)
        q, k = (x.unflatten(1, (key_heads, key_dim)) for x in (q, k))
        if eps is None:  # else states grow without bound
            q, k = (x / x.norm(dim=-1, keepdim=True) for x in (q, k))
        v = v.unflatten(1, (heads, value_dim))
        how = {"scale": key_dim**-0.5, "eps": eps, "tiled": tiled}
        return ops.states.gated_delta(q, k, v, given["decay"], given["beta"], state, batch, **how)

    name = f"delta{key_dim}x{value_dim}{'-rows' * rows}{'-tiled' * tiled}{'-plain' * (eps is None)}"
    return Operator(name, (heads, key_dim, value_dim), inputs, run)


def several(width: int = 40, taps: int = 2, number: int = 3) -> Operator:
    """Convolutions of the same inputs: their results side by side."""
    random = torch.Generator().manual_seed(8)
    weight = torch.randn(number, width, taps, generator=random)
    bias = torch.randn(number, width, generator=random)

    def inputs(tokens: int, seed: int) -> Tensors:
        return {"x": torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))}

    def run(ops: Ops, given: Tensors, state: Tensor, batch: AttentionBatch) -> Tensor:
        found = ops.states.causal_conv(given["x"], weight, bias, state, batch)
        return found.transpose(0, 1)

    return Operator(f"conv{taps}-several", (taps - 1, width), inputs, run)


def rwkv_keys(heads: int, dim: int) -> RwkvKeys:
    random = torch.Generator().manual_seed(9)
    return RwkvKeys(*torch.randn(3, heads, dim, generator=random))


def rwkv(heads: int = 3, dim: int = 40, *, first: bool = False) -> Operator:
    """``first``: values move towards others. Its two results are added."""
    width, keys = heads * dim, rwkv_keys(heads, dim)

    def inputs(tokens: int, seed: int) -> Tensors:
        random = torch.Generator().manual_seed(seed)
        shape = (tokens, heads, dim)
        return {
            "rkv": torch.randn(tokens, 4 * width, generator=random),
            "decay": -0.6 * torch.rand(shape, generator=random),
            "rate": torch.rand(shape, generator=random),
            "mix": torch.rand(shape, generator=random),
        }

    def run(ops: Ops, given: Tensors, state: Tensor, batch: AttentionBatch) -> Tensor:
        r, k, v, earlier = (x.unflatten(1, (heads, dim)) for x in given["rkv"].split(width, 1))
        decay, rate, mix = (given[name] for name in ("decay", "rate", "mix"))
        moved = (earlier, mix) if first else None
        out, own = ops.states.rwkv(r, k, v, decay, rate, keys, state, batch, first=moved)
        return ops.add(out, own)

    return Operator(f"rwkv{dim}{'-first' * first}", (heads, dim, dim), inputs, run)


def space(
    heads: int = 6, width: int = 20, groups: int = 2, size: int = 40, *, skip: bool = True
) -> Operator:
    """``skip``: with ``d``."""
    random = torch.Generator().manual_seed(6)
    a = -torch.rand(heads, generator=random) * 4 - 0.1
    d = torch.randn(heads, generator=random) if skip else None
    xs, bs = heads * width, groups * size

    def inputs(tokens: int, seed: int) -> Tensors:
        random = torch.Generator().manual_seed(seed)
        return {
            "xbc": torch.randn(tokens, xs + 2 * bs, generator=random),
            "dt": torch.nn.functional.softplus(torch.randn(tokens, heads, generator=random)),
        }

    def run(ops: Ops, given: Tensors, state: Tensor, batch: AttentionBatch) -> Tensor:
        x, b, c = given["xbc"].split([xs, bs, bs], 1)
        b, c = (part.unflatten(1, (groups, size)) for part in (b, c))
        x = x.unflatten(1, (heads, width))
        return ops.states.ssd(x, given["dt"], a, b, c, d, state, batch)

    return Operator(
        f"space{width}x{size}{'' if skip else '-plain'}", (heads, width, size), inputs, run
    )


def scan(width: int = 42, size: int = 16, *, skip: bool = True) -> Operator:
    """``skip``: with ``d``."""
    random = torch.Generator().manual_seed(7)
    a = -torch.rand(width, size, generator=random) * 4 - 0.1
    d = torch.randn(width, generator=random) if skip else None

    def inputs(tokens: int, seed: int) -> Tensors:
        random = torch.Generator().manual_seed(seed)
        return {
            "xbc": torch.randn(tokens, width + 2 * size, generator=random),
            "dt": torch.nn.functional.softplus(torch.randn(tokens, width, generator=random)),
        }

    def run(ops: Ops, given: Tensors, state: Tensor, batch: AttentionBatch) -> Tensor:
        x, b, c = given["xbc"].split([width, size, size], 1)
        return ops.states.selective_scan(x, given["dt"], a, b, c, d, state, batch)

    return Operator(f"scan{width}x{size}{'' if skip else '-plain'}", (width, size), inputs, run)


#: One of each kind, of sizes that are no multiples of a vector's.
OPERATORS = [
    conv(),
    conv(23, 3, gated=True),
    conv(16, 2, activation=None),
    delta(),
    delta(1, 3, 16, 21, rows=True),
    delta(2, 4, 128, 128, tiled=True),
    delta(3, 3, 7, 5, eps=None),
    several(),
    rwkv(),
    rwkv(2, 64, first=True),
    rwkv(3, 7),
    space(),
    space(4, 64, 1, 128, skip=False),
    space(3, 5, 3, 7),
    scan(),
    scan(7, 5, skip=False),
    scan(64, 40),
]


# ---- the same in float64, one head and token at a time -------------------------------------------


def exact_delta(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, scale: float, *, tiled: bool
) -> tuple[Tensor, Tensor]:
    """The result and the last state; q and k divided by their lengths, decay by token and head."""
    q, k, v, decay, beta = (x.double() for x in (q, k, v, decay, beta))
    out = torch.empty_like(v)
    states = torch.zeros(v.shape[1], q.shape[2], v.shape[2], dtype=torch.float64)
    for head in range(v.shape[1]):
        of = head % q.shape[1] if tiled else head // (v.shape[1] // q.shape[1])
        s = states[head]
        for t in range(v.shape[0]):
            key, query = (x[t, of] / (x[t, of].square().sum() + 1e-6).sqrt() for x in (k, q))
            s *= decay[t, head].exp().unsqueeze(-1) if decay.dim() == 3 else decay[t, head].exp()
            s += torch.outer(key, beta[t, head] * (v[t, head] - key @ s))
            out[t, head] = scale * (query @ s)
    return out, states


def exact_rwkv(given: Tensors, heads: int, dim: int) -> tuple[Tensor, Tensor]:
    """Both results, added, and the last state: the formulas of the paper (arXiv 2503.14456, section
    4), whose state is the transpose of ours."""
    width = heads * dim
    r, k, v, earlier = (x.double().unflatten(1, (heads, dim)) for x in given["rkv"].split(width, 1))
    w, a, mix = (given[name].double() for name in ("decay", "rate", "mix"))
    keys = rwkv_keys(heads, dim)
    removal, replace, bonus = (x.double() for x in (keys.norm, keys.mix, keys.read))
    out, states = torch.empty_like(v), torch.zeros(heads, dim, dim, dtype=torch.float64)
    for head in range(heads):
        wkv = torch.zeros(dim, dim, dtype=torch.float64)  # [values, keys]
        for t in range(len(v)):
            kappa = k[t, head] * removal[head]
            kappa = kappa / kappa.norm()
            value = torch.lerp(v[t, head], earlier[t, head], mix[t, head])
            key = k[t, head] * torch.lerp(torch.ones(dim).double(), a[t, head], replace[head])
            change = torch.diag(w[t, head].exp()) - torch.outer(kappa, a[t, head] * kappa)
            wkv = wkv @ change + torch.outer(value, key)
            own = (r[t, head] * bonus[head] * key).sum() * value
            out[t, head] = wkv @ r[t, head] + own
        states[head] = wkv.t()
    return out, states


def exact_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """The result and the last state."""
    x, dt, a, b, c, d = (one.double() for one in (x, dt, a, b, c, d))
    out, s = torch.empty_like(x), torch.zeros_like(a)
    for t in range(len(x)):
        s = s * (dt[t, :, None] * a).exp() + torch.outer(dt[t] * x[t], b[t])
        out[t] = s @ c[t] + d * x[t]
    return out, s


def exact_space(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor
) -> tuple[Tensor, Tensor]:
    """The result and the last state."""
    x, dt, a, b, c, d = (one.double() for one in (x, dt, a, b, c, d))
    out = torch.empty_like(x)
    states = torch.zeros(x.shape[1], x.shape[2], b.shape[2], dtype=torch.float64)
    for head in range(x.shape[1]):
        s, group = states[head], head // (x.shape[1] // b.shape[1])
        for t in range(x.shape[0]):
            s *= (dt[t, head] * a[head]).exp()
            s += torch.outer(dt[t, head] * x[t, head], b[t, group])
            out[t, head] = s @ c[t, group] + d[head] * x[t, head]
    return out, states
