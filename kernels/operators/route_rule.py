"""How a router chooses the experts of a token and weighs them, as one value."""

from __future__ import annotations

from typing import Literal, NamedTuple

#: What makes scores of a router's logits. ``sqrt_softplus``: ``sqrt(log(1 + exp(x)))``.
#: ``sparse_mixer``: see :class:`RouteRule`.
Gate = Literal["softmax", "sigmoid", "sqrt_softplus", "sparse_mixer"]
#: In the order of the native library's numbers.
GATES: tuple[Gate, ...] = ("softmax", "sigmoid", "sqrt_softplus", "sparse_mixer")
#: The most experts where scores of all of them are kept while one token is routed.
MAX_SCORED = 1024


class RouteRule(NamedTuple):
    """How a router chooses: scores are ``gate`` of the logits; the best k experts are chosen.

    The first of equal experts wins, here and of groups. Weights of the chosen experts are their
    scores. ``normalized``: divided by ``max(sum + epsilon, least)``, where the sum is that of the
    k. ``scale`` multiplies them then.

    A bias of the router is added to the scores for the choice alone (DeepSeek-AI, "DeepSeek-V3
    Technical Report", 2.1.2). ``groups``: the number of groups of equal size, in order of experts;
    only those of the best ``groups_used`` can be chosen; a group is as good as the sum of its
    ``group_best`` best scores (DeepSeek V3: 2, V2: 1).

    ``sparse_mixer`` (Liu et al., "GRIN", 2024): every weight is the softmax over the logits that
    the j-th expert's ``s`` exceeds by no more than ``2 * jitter * max(|x|, s)``, without the
    experts before it. It knows no bias and no groups.
    """

    gate: Gate = "softmax"
    normalized: bool = True
    epsilon: float = 0.0
    least: float = 0.0
    scale: float = 1.0
    groups: int = 1
    groups_used: int = 1
    group_best: int = 2
    jitter: float = 0.0


#: A softmax over the chosen logits.
SOFTMAX = RouteRule()
