"""Runs four kernels once under a profiler: ``ncu --profile-from-start off python -m ...``.

A product of one token and one of 64, attention of decode steps and of a prompt, in the shapes of
their rows. Everything is compiled and run before the profiler is told to begin, so it sees these
launches alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from sdk.bench.gpu.attention import make_case
from sdk.bench.gpu.card import Card, no_card
from sdk.bench.gpu.products import GROUP, product_shape
from sdk.bench.gpu.weights import affine
from sdk.kernels.backend import Problem
from sdk.kernels.registry import linear_problem


def four(card: Card) -> dict[str, Callable[[], Any]]:
    """The launches, by name."""
    n, k = product_shape(card)
    weight = affine(card, n, k, 4, GROUP)
    product = card.choose(linear_problem(weight, "auto", 8))
    packed = product.pack(weight)

    def multiply(tokens: int) -> Callable[[], Any]:
        x, out = card.normal(tokens, k), card.normal(tokens, n)
        return lambda: product.matmul(packed, x, out)

    def attend(requests: int, context: int, queries: int) -> Callable[[], Any]:
        case = make_case(card, "bfloat16", requests, context, queries)
        problem = Problem("attention", head_dim=case.q.shape[2], kv_dtype=case.pages.dtype)
        kernel = card.choose(problem)
        out = torch.empty_like(case.q.flatten(1))
        return lambda: case.run(kernel, out)

    prompt = card.size(4096, 48)
    return {
        "product of 1 token": multiply(1),
        "product of 64 tokens": multiply(card.size(64, 3)),
        "decode attention": attend(card.size(64, 2), card.size(4096, 64), 1),
        "prefill attention": attend(1, prompt, prompt),
    }


def main() -> int:
    why = no_card()
    if why is not None:
        print(why, file=sys.stderr)
        return 2
    card = Card({})
    launches = four(card)
    for launch in launches.values():
        launch()
    card.synchronize()
    if not card.tiny:
        torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    for name, launch in launches.items():
        print(f"launched: {name}", flush=True)
        launch()
        card.synchronize()
    if not card.tiny:
        torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]
    card.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
