"""Known-answer cases of operators with recurrent states: see ``cases.py``.

Two requests: one begins with a state, leaves one in the middle, and replaces its own; the other
begins with zeros.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.known_answers.place import Case, Found, Place
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.states import RwkvKeys, StateBatch

_COUNTS = (5, 2)
_TOKENS = sum(_COUNTS)


def _step(place: Place) -> tuple[AttentionBatch, StateBatch]:
    def integers(*values: int) -> Tensor:
        return place.integers(values, torch.int32)

    states = StateBatch(integers(1, -1), integers(0, 2, 3), integers(1, 4, 6), integers(2, 1, 3))
    wide = place.integers([0] * _TOKENS, torch.int64)
    batch = AttentionBatch(
        positions=wide,
        query_start=integers(0, _COUNTS[0], _TOKENS),
        context_len=integers(*_COUNTS),
        page_table=integers(0, 0).view(2, 1),
        slots=wide,
        page_size=16,
        max_query_len=_COUNTS[0],
        max_context_len=_COUNTS[0],
        states=states,
    )
    return batch, states


def _state(place: Place, like: Tensor) -> Tensor:
    """Slots of NaN; the one that is read has numbers."""
    state = place.nan(4, *like.shape[1:])
    state[1] = place.floats(*like.shape[1:], seed=31) * 0.5
    return state


def _found(name: str, place: Place, out: Tensor, state: Tensor) -> Found:
    # states are sums of products of numbers that are exact, in float32
    states = state[1:].flatten(1)
    return [(name, out, place.limit(place.rounded)), ("the states", states, 2.0**-11)]


def _conv(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    x, weight, bias, state, activation, before, after = like
    width, (batch, states) = x.shape[1], _step(place)
    given = place.rows(_TOKENS, width, seed=1)
    taps = place.floats(*weight.shape, seed=2)
    bias = None if bias is None else place.floats(*weight.shape[:-1], seed=3)
    gates = [
        None if one is None else place.rows(_TOKENS, width, seed=4 + i)
        for i, one in enumerate((before, after))
    ]
    several = weight.shape[:-2]
    slots, out = _state(place, state), place.nan(*several, _TOKENS, width, dtype=place.short)
    kernel.run(given, taps, bias, slots, batch, states, activation, *gates, out)
    return _found("the convolution", place, out, slots)


def _delta(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    q, _, v, decay, state, eps, tiled = like
    batch, states = _step(place)
    heads = (place.rows(_TOKENS, *x.shape[1:], seed=i) for i, x in enumerate((q, q, v)))
    if eps is None:  # a long key would let the state grow; a power of two is exact
        heads = (x * 2.0 ** -math.ceil(math.log2(q.shape[2]) / 2) for x in heads)
    rate = -place.floats(_TOKENS, *decay.shape[1:], seed=4).abs()
    beta = place.floats(_TOKENS, v.shape[1], seed=5).sigmoid()
    slots = _state(place, state)
    out = place.nan(_TOKENS, *v.shape[1:], dtype=place.short)
    kernel.run(*heads, rate, beta, slots, batch, states, 1.0, eps, tiled, out)
    return _found("the delta rule", place, out, slots)


def _rwkv(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    *_, first, state = like
    batch, states = _step(place)
    shape = _TOKENS, *state.shape[1:3]
    r, k, v, earlier = (place.rows(*shape, seed=1 + i) for i in range(4))
    decay = -place.floats(*shape, seed=5).abs()
    rate, mix = (place.floats(*shape, seed=6 + i).sigmoid() for i in range(2))
    keys = RwkvKeys(*(place.floats(*shape[1:], seed=8 + i, mean=1.0) for i in range(3)))
    moved = None if first is None else (earlier, mix)
    slots = _state(place, state)
    out, own = (place.nan(*shape, dtype=place.short) for _ in range(2))
    kernel.run(r, k, v, decay, rate, keys, moved, slots, batch, states, out, own)
    limit = place.limit(place.rounded)
    return [*_found("RWKV-7's states", place, out, slots), ("the tokens' own parts", own, limit)]


def _space(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    x, b, d, state = like
    batch, states = _step(place)
    given = place.rows(_TOKENS, *x.shape[1:], seed=1)
    into, read = (place.rows(_TOKENS, *b.shape[1:], seed=2 + i) for i in range(2))
    dt = place.floats(_TOKENS, x.shape[1], seed=4).abs()
    a = -place.floats(x.shape[1], seed=5).abs()
    d = None if d is None else place.floats(x.shape[1], seed=6)
    slots = _state(place, state)
    out = place.nan(_TOKENS, *x.shape[1:], dtype=place.short)
    kernel.run(given, dt, a, into, read, d, slots, batch, states, out)
    return _found("the state space", place, out, slots)


def _scan(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    *_, d, state = like
    batch, states = _step(place)
    width, size = state.shape[1:]
    given = place.rows(_TOKENS, width, seed=1)
    into, read = (place.rows(_TOKENS, size, seed=2 + i) for i in range(2))
    dt = place.floats(_TOKENS, width, seed=4).abs()
    a = -place.floats(width, size, seed=5).abs()
    d = None if d is None else place.floats(width, seed=6)
    slots = _state(place, state)
    out = place.nan(_TOKENS, width, dtype=place.short)
    kernel.run(given, dt, a, into, read, d, slots, batch, states, out)
    return _found("the selective scan", place, out, slots)


def _rates(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    x, kind, bias, factor, limits = like
    given = place.rows(_TOKENS, x.shape[1], seed=1) * 2
    bias = None if bias is None else place.floats(x.shape[1], seed=2)
    factor = None if factor is None else place.floats(factor.shape[0], seed=3, mean=3.0)
    out = place.nan(_TOKENS, x.shape[1])
    kernel.run(given, kind, bias, factor, limits, out)
    return [(f"rates by {kind}", out, place.limit(torch.float32))]


def _gated_norm(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    x, _, norm, kind, first = like
    given, gate = (place.rows(_TOKENS, *x.shape[1:], seed=1 + i) for i in range(2))
    weight = norm.weight
    weight = None if weight is None else place.floats(*weight.shape, seed=3, mean=1.0)
    out = place.nan(_TOKENS, *x.shape[1:], dtype=place.short)
    kernel.run(given, gate, Norm(weight, norm.eps), kind, first, out)
    return [("the gated norm", out, place.limit(place.rounded))]


STATE_CASES: dict[str, Case] = {
    "causal_conv": _conv,
    "gated_delta": _delta,
    "rwkv": _rwkv,
    "ssd": _space,
    "selective_scan": _scan,
    "rates": _rates,
    "gated_norm": _gated_norm,
}
