"""The weights of all experts of a layer as one, of one kind or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import CaptureError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.permuted import PermutedWeight
from sdk.quant.weight import DenseWeight, StackedWeight, Weight

EXPERTS, OUT, WIDTH, TOKENS = 4, 24, 32, 11


@pytest.fixture
def ops() -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=2)
    yield opened
    opened.close()


def dense(seed: int, dtype: torch.dtype = torch.float32, rows: int = OUT) -> Weight:
    values = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    return DenseWeight(Dense(values.to(dtype)))


def permuted(seed: int) -> Weight:
    order = torch.randperm(WIDTH, generator=torch.Generator().manual_seed(seed)).int()
    return PermutedWeight(dense(seed), order)


def stacked(seed: int) -> Weight:
    return StackedWeight([dense(seed, rows=8), dense(seed, torch.float16, 16)])


KINDS: dict[str, Callable[[int], Weight]] = {
    "alike": dense,
    "unlike": lambda seed: dense(seed, (torch.float32, torch.bfloat16)[seed % 2]),
    "permuted": permuted,
    "stacked": stacked,
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_token_meets_the_matrices_of_its_experts(kind: str, ops: Ops) -> None:
    parts = [KINDS[kind](seed) for seed in range(EXPERTS)]
    whole = ExpertWeights(parts)
    values = torch.stack([weight.dequantize() for weight in parts])
    assert whole.shape == (EXPERTS * OUT, WIDTH)
    whole.bind(ops)
    x = torch.randn(TOKENS, WIDTH)
    routes = ops.moe.route(torch.randn(TOKENS, EXPERTS), 2)

    def expected(rows: Tensor) -> Tensor:
        return torch.einsum("rk,rnk->rn", rows, values[routes.owners.long()])

    found = whole.matmul_routed(x, routes, by_token=True)
    assert torch.allclose(found, expected(x[routes.tokens.long()]), atol=1e-4)
    x = torch.randn(2 * TOKENS, WIDTH)
    found = whole.matmul_routed(x, routes, by_token=False)
    assert torch.allclose(found, expected(x), atol=1e-4)
    assert whole.nbytes == sum(weight.nbytes for weight in parts)


def test_only_experts_of_one_kind_can_be_recorded(ops: Ops) -> None:
    x, logits = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 2)
    for alike in (True, False):
        whole = ExpertWeights([dense(0), dense(1, torch.float32 if alike else torch.float16)])
        whole.bind(ops)

        def forward(weights: ExpertWeights = whole) -> Tensor:
            routes = ops.moe.route(logits, 1)
            return ops.moe.combine(weights.matmul_routed(x, routes, by_token=True), routes)

        counts = {"tokens": TOKENS, "outputs": 1, "requests": 1}
        if alike:
            ops.recording.capture(forward, **counts).replay(**counts)
        else:
            with pytest.raises(CaptureError, match="cannot be recorded"):
                ops.recording.capture(forward, **counts)


@pytest.mark.parametrize("kind", ["alike", "permuted"])
def test_an_expert_can_be_exchanged_for_another(kind: str, ops: Ops) -> None:
    whole = ExpertWeights([KINDS[kind](seed) for seed in range(EXPERTS)])
    whole.bind(ops)
    other = KINDS[kind](9)
    values = torch.stack([weight.dequantize() for weight in whole.parts])
    values[2] = other.dequantize()
    other.bind(ops)
    whole.replace(2, other)
    x = torch.randn(TOKENS, WIDTH)
    routes = ops.moe.route(torch.randn(TOKENS, EXPERTS), 3)
    found = whole.matmul_routed(x, routes, by_token=True)
    rows, owners = x[routes.tokens.long()], routes.owners.long()
    assert torch.allclose(found, torch.einsum("rk,rnk->rn", rows, values[owners]), atol=1e-4)
