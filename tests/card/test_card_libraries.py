"""Kernels of libraries on a card: what `embedlm tune` would enter is right, also in a graph."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sdk.bench.gpu.card import Card
from sdk.bench.gpu.weights import affine, float8
from sdk.bench.tune.cases import single_case
from sdk.bench.tune.libraries import Contest, contests_of, cudnn_contest, grouped_contest
from sdk.kernels.gpu.humming import installed

pytestmark = pytest.mark.gpu


@pytest.fixture
def card() -> Iterator[Card]:
    made = Card({})
    yield made
    made.close()


def expect_right(card: Card, contest: Contest, tokens: int) -> None:
    """Its check; and that both run, the library's also in a graph if an engine records it."""
    contest.check()
    ours, theirs = contest.calls(tokens)
    for calls in (ours, theirs):
        calls[0]()
    if card.tiny or not contest.graph:
        return
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        theirs[0]()
    graph.replay()
    torch.cuda.synchronize()


def test_experts_of_prompts(card: Card) -> None:
    expect_right(card, grouped_contest(card, 8, 2, 256, 512), 48)


if torch.cuda.is_available():  # cuDNN has nothing for a CPU

    def test_attention_of_prompts(card: Card) -> None:
        for dtype, head_dim in (("float16", 128), ("bfloat16", 128), ("float16", 64)):
            expect_right(card, cudnn_contest(card, dtype, head_dim), 1024)


def test_fp8(card: Card) -> None:
    case = single_case(card, lambda n, k: float8(card, n, k), 256, 512)
    (contest,) = contests_of(card, case, lambda: card.tuning)
    expect_right(card, contest, 64)


if installed():

    def test_weights_of_four_bits(card: Card) -> None:
        case = single_case(card, lambda n, k: affine(card, n, k, 4, 128), 256, 512)
        (contest,) = contests_of(card, case, lambda: card.tuning)
        expect_right(card, contest, 64)
