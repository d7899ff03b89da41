"""Routers of published models, and what they choose: a token at a time, in Python's numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from sdk.kernels.operators.route_rule import RouteRule

#: Rules and whether they have a bias.
RULES: dict[str, tuple[RouteRule, bool]] = {
    "mixtral": (RouteRule(), False),
    "olmoe": (RouteRule(normalized=False), False),
    "scaled softmax": (RouteRule(scale=2.5), False),
    "ernie": (RouteRule(least=1e-12), True),
    "deepseek v3": (
        RouteRule("sigmoid", epsilon=1e-20, scale=2.5, groups=4, groups_used=2),
        True,
    ),
    "deepseek v2": (
        RouteRule(normalized=False, scale=16.0, groups=4, groups_used=1, group_best=1),
        False,
    ),
    "minimax": (RouteRule("sigmoid"), True),
    "cohere": (RouteRule("sigmoid", normalized=False), False),
    "deepseek v4": (RouteRule("sqrt_softplus", scale=1.5), True),
    "phimoe": (RouteRule("sparse_mixer", normalized=False, jitter=0.1), False),
}


def routed(
    logits: Sequence[float], k: int, rule: RouteRule, bias: Sequence[float] | None
) -> tuple[list[int], list[float]]:
    """The experts of one token, best first, and their weights."""
    experts = range(len(logits))
    if rule.gate == "sparse_mixer":
        return _sparse(list(logits), k, rule)
    scores = [_score(x, logits, rule) for x in logits]
    values = [score + (0.0 if bias is None else bias[e]) for e, score in enumerate(scores)]
    size = len(logits) // rule.groups
    sums = [
        sum(sorted(values[g * size : (g + 1) * size])[-rule.group_best :])
        for g in range(rule.groups)
    ]
    groups = sorted(range(rule.groups), key=lambda g: (-sums[g], g))[: rule.groups_used]
    open_ = [e for e in experts if rule.groups == 1 or e // size in groups]
    chosen = sorted(open_, key=lambda e: (-values[e], e))[:k]
    weights = [scores[e] for e in chosen]
    if rule.normalized:
        total = max(sum(weights) + rule.epsilon, rule.least)
        weights = [weight / total for weight in weights]
    return chosen, [weight * rule.scale for weight in weights]


def _score(x: float, logits: Sequence[float], rule: RouteRule) -> float:
    if rule.gate == "softmax":
        return math.exp(x - max(logits)) / sum(math.exp(y - max(logits)) for y in logits)
    return 1 / (1 + math.exp(-x)) if rule.gate == "sigmoid" else math.sqrt(math.log1p(math.exp(x)))


def _sparse(logits: list[float], k: int, rule: RouteRule) -> tuple[list[int], list[float]]:
    left, chosen, weights = set(range(len(logits))), [], []
    for _ in range(k):
        expert = min(left, key=lambda e: (-logits[e], e))
        own = logits[expert]
        near = [e for e in left if (own - logits[e]) / max(abs(logits[e]), own) <= 2 * rule.jitter]
        chosen.append(expert)
        weights.append(1 / sum(math.exp(logits[e] - own) for e in near))
        left.remove(expert)
    return chosen, weights


def case(
    name: str, tokens: int, experts: int, k: int
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Logits, the bias, and what the rule ``name`` makes of them: experts and weights."""
    rule, biased = RULES[name]
    generator = torch.Generator().manual_seed(tokens + experts)
    logits = 2.0 * torch.randn(tokens, experts, generator=generator)
    bias = 0.3 * torch.randn(experts, generator=generator) if biased else None
    each = None if bias is None else bias.tolist()
    found = [routed(row, k, rule, each) for row in logits.tolist()]
    chosen = torch.tensor([one for one, _ in found], dtype=torch.int32)
    return logits, bias, chosen, torch.tensor([weights for _, weights in found])
