"""The known-answer check of the product of a layer's experts: see ``check.py``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from sdk.kernels.context import Answers
from sdk.kernels.known_answers.file import FAILED, Answer
from sdk.kernels.known_answers.place import Place, empty_routes, routes_on
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.reference.linear import slice_rows
from sdk.kernels.reference.moe import GroupByExpert
from sdk.kernels.self_check import LIMITS, away_from, ends_of
from sdk.kernels.weights.bound import BoundExperts, BoundLinear
from sdk.kernels.weights.layouts import inputs_of

#: Tokens of a step: one token, several, and, of few experts, so many that weights are dequantized.
_TOKENS = (1, 37)
_DENSE_ROWS, _FEW_EXPERTS = 256, 16


def experts_reason(
    answers: Answers, experts: Sequence[BoundLinear], bound: BoundExperts
) -> str | None:
    """Why the kernel must not multiply these weights as one; ``None`` if it is right."""
    kind = replace(experts[0].problem, in_features=0, out_features=0)
    about = " ".join(f"{f.name}={getattr(kind, f.name)}" for f in fields(kind))
    name = f"{bound.implementation.name} of {len(experts)} experts {about}"
    return answers.ask(name, str(bound.implementation.name), lambda: _check(experts, bound))


def _check(experts: Sequence[BoundLinear], bound: BoundExperts) -> Answer:
    count, most = len(experts), 0.0
    tokens = [*_TOKENS]
    if count <= _FEW_EXPERTS:
        tokens.append(_DENSE_ROWS * count // min(2, count) + 3)
    for number in tokens:
        away = _distance(experts, bound, number)
        limit = LIMITS[experts[0].problem.compute]
        if not away <= limit:
            many = "1 token" if number == 1 else f"{number} tokens"
            why = f"{FAILED}: {away:.3g} of the norm from the reference for {many} of experts"
            return Answer(away, why)
        most = max(most, away)
    return Answer(most)


def _distance(experts: Sequence[BoundLinear], bound: BoundExperts, tokens: int) -> float:
    """Of the rows of the first, the last and another expert, at both ends of the weights."""
    context, count = bound.context, len(experts)
    place = Place(context.device, context.activations, context.activations)
    k = min(2, count)
    every = torch.arange(tokens)[:, None]
    chosen = ((every + torch.arange(k) * (count - 1)) % count).int().contiguous()
    routes = empty_routes(place.on_host(), tokens, count, k)
    GroupByExpert().run(chosen, routes)
    x = place.rows(tokens, bound.shape[1], seed=1)
    width = bound.shape[0]
    out = place.nan(tokens * k, width, dtype=context.activations)
    given = routes_on(place.device, routes)
    bound.implementation.matmul_routed(bound.packed, x, given, True, out)
    found, seen = out.cpu(), x.float().cpu()
    most = 0.0
    for expert in sorted({0, count // 2, count - 1}):
        rows = slice(*routes.starts[expert : expert + 2].tolist())
        if rows.start == rows.stop:
            continue
        layout = experts[expert].layout()
        own = seen[routes.tokens[rows].long()]
        if experts[expert].problem.inputs:
            scheme = inputs_of(layout)
            assert scheme is not None
            own = fake_quantize(own, scheme)
        for end in ends_of(width):
            weight: Tensor = decode(slice_rows(layout, end.start, end.stop)).cpu()
            away = away_from(found[rows, end], own, weight)
            most = away if math.isnan(away) else max(most, away)
    return most
