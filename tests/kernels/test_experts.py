"""Routing tokens to experts, and products in which every expert has rows of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu import CpuBackend
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.route_rule import RouteRule
from sdk.kernels.operators.routes import Routes
from sdk.kernels.weights.layouts import Layout
from tests.kernels.plain_kernels import plain_kernels

EXPERTS, K, WIDTH, OUT = 7, 3, 96, 72


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=3, backends=[request.param])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[Ops]:
    opened = Ops("cpu", backends=["reference"])
    yield opened
    opened.close()


def logits(tokens: int, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    return 3.0 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def layouts_of(cases: Any) -> dict[str, list[Layout]]:
    """Weights of every way to multiply: integers, a table, blocks, 8-bit and plain floats."""
    seeds = range(EXPERTS)
    return {
        "affine": [cases.affine(OUT, WIDTH, 4, 32, seed=seed) for seed in seeds],
        "table": [cases.table(OUT, WIDTH, 4, 32, seed=seed) for seed in seeds],
        "q4_0": [cases.blocks(OUT, WIDTH, "q4_0", seed=seed) for seed in seeds],
        "float8": [cases.float8(OUT, WIDTH, (1, WIDTH), seed=seed) for seed in seeds],
        "bfloat16": [cases.dense(OUT, WIDTH, torch.bfloat16, seed=seed) for seed in seeds],
    }


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("k", [1, K, EXPERTS])
def test_the_best_experts_get_their_share_of_the_softmax(
    ops: Ops, k: int, normalized: bool
) -> None:
    given = logits(50)
    routes = ops.moe.route(given, k, RouteRule(normalized=normalized))
    best, chosen = given.double().topk(k, dim=1)
    parts = best.softmax(dim=1) if normalized else given.double().softmax(dim=1).gather(1, chosen)
    assert torch.allclose(routes.weights.double(), parts, rtol=1e-6, atol=0)
    assert torch.equal(routes.owners[routes.places.long()], chosen.int())
    own = torch.arange(50, dtype=torch.int32).unsqueeze(1).expand(50, k)
    assert torch.equal(routes.tokens[routes.places.long()], own)


def test_rows_lie_by_expert_and_within_one_by_token(ops: Ops) -> None:
    routes = ops.moe.route(logits(20), 2)
    counts = torch.bincount(routes.owners, minlength=EXPERTS)
    assert routes.starts.tolist() == [0, *counts.cumsum(0).tolist()]
    used = counts.nonzero().flatten().tolist()
    assert routes.active[: int(routes.active[-1])].tolist() == used
    order = routes.owners * 20 + routes.tokens
    assert torch.equal(order, order.sort().values)


def test_the_first_of_equal_experts_is_chosen(ops: Ops) -> None:
    given = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 1.0, 2.0]])
    assert ops.moe.route(given, K).owners.tolist() == [1, 2, 4]


def test_logits_that_are_no_numbers_still_choose_experts_that_exist(ops: Ops) -> None:
    given = logits(3)
    given[1] = float("nan")
    given[2, :4] = float("-inf")
    routes = ops.moe.route(given, K)
    assert bool(((routes.owners >= 0) & (routes.owners < EXPERTS)).all())
    assert routes.weights.isfinite().all(dim=1).tolist() == [True, False, True]
    alone = ops.moe.route(given[:1], K)
    assert torch.equal(routes.weights[0], alone.weights[0])


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("kind", ["affine", "table", "q4_0", "float8", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 2, 60])
def test_an_expert_gives_its_rows_the_bits_of_its_own_product(
    backend: CpuBackend, reference: Ops, cases: Any, kind: str, tokens: int
) -> None:
    routes = reference.moe.route(logits(tokens, seed=tokens), K)
    rows = routes.owners.shape[0]
    for linear in plain_kernels(backend, "linear"):
        packed = [linear.pack(layout) for layout in layouts_of(cases)[kind]]
        group = linear.group(packed)
        for by_token in (True, False):
            x = cases.activations(tokens if by_token else rows, WIDTH)
            found = torch.full((rows, OUT), 7.0)
            linear.matmul_routed(group, x, routes, by_token, found)
            for expert in range(EXPERTS):
                own = routes.owners == expert
                given = x[routes.tokens[own].long()] if by_token else x[own]
                expected = torch.empty(len(given), OUT)
                if len(given):
                    linear.matmul(packed[expert], given, expected)
                assert torch.equal(found[own], expected)


def mixture(ops: Ops, weights: list[Layout], bias: Tensor, x: Tensor, k: int) -> Tensor:
    bound = ops.moe.group([ops.linear(layout) for layout in weights])
    assert bound is not None
    routes = ops.moe.route(x[:, :EXPERTS].contiguous(), k)
    y = ops.moe.add_owners_bias(bound.matmul(x, routes, by_token=True), bias, routes)
    return ops.moe.combine(y, routes)


@pytest.mark.parametrize("k", [1, K])
def test_a_mixture_is_the_weighted_sum_of_its_experts(ops: Ops, cases: Any, k: int) -> None:
    weights = [cases.dense(OUT, WIDTH, torch.float32, seed=seed) for seed in range(EXPERTS)]
    bias, x = torch.randn(EXPERTS, OUT), torch.randn(33, WIDTH)
    found = mixture(ops, weights, bias, x, k)
    best, chosen = x[:, :EXPERTS].double().topk(k, dim=1)
    expected = torch.zeros(33, OUT, dtype=torch.float64)
    for token in range(33):
        for weight, expert in zip(best[token].softmax(0), chosen[token].tolist(), strict=True):
            values = weights[expert].values.double() @ x[token].double() + bias[expert].double()
            expected[token] += weight * values
    assert cases.nmse(found, expected) < 1e-12


def test_a_token_has_the_same_bits_in_every_batch(ops: Ops, cases: Any) -> None:
    weights = layouts_of(cases)["affine"]
    bias, x = torch.randn(EXPERTS, OUT), cases.activations(40, WIDTH)
    whole = mixture(ops, weights, bias, x, K)
    for part in (slice(0, 1), slice(7, 9), slice(20, 40)):
        assert torch.equal(mixture(ops, weights, bias, x[part], K), whole[part])
    assert mixture(ops, weights, bias, x[:0], K).shape == (0, OUT)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_recorded_mixture_has_the_bits_of_an_eager_one(cases: Any, k: int, threads: int) -> None:
    """Buffers of rows and of tokens have one size where k is 1: none may be written too soon."""
    ops = Ops("cpu", num_threads=threads)
    up = ops.moe.group([ops.linear(cases.affine(2 * WIDTH, WIDTH, seed=s)) for s in range(EXPERTS)])
    down = ops.moe.group([ops.linear(cases.affine(WIDTH, WIDTH, seed=s)) for s in range(EXPERTS)])
    router = ops.linear(cases.dense(EXPERTS, WIDTH, torch.float32))
    bias, norm, inputs = torch.randn(EXPERTS, WIDTH), torch.rand(WIDTH), torch.empty(64, WIDTH)
    assert up is not None and down is not None

    def forward(tokens: int = 64) -> Tensor:
        x = ops.norm(inputs[:tokens], Norm(norm, 1e-5))
        residual = ops.zeros(tokens, WIDTH)
        for _ in range(3):
            routes = ops.moe.route(router.matmul(x), k, RouteRule(normalized=False))
            hidden = ops.gated_activation(up.matmul(x, routes, by_token=True), "clamped_swiglu")
            y = down.matmul(hidden, routes, by_token=False)
            delta = ops.moe.combine(ops.moe.add_owners_bias(y, bias, routes), routes)
            x, residual = ops.add_norm(delta, residual, Norm(norm, 1e-5))
        return x

    graph = ops.recording.capture(forward, tokens=64, outputs=1, requests=1)
    for tokens in (64, 1, 5, 64, 33):
        inputs.normal_()
        expected = forward(tokens).clone()
        graph.replay(tokens=tokens, outputs=1, requests=1)
        assert torch.equal(graph.result[:tokens], expected)
    ops.close()


def test_weights_that_are_not_of_one_kind_are_not_grouped(ops: Ops, cases: Any) -> None:
    unlike = [cases.affine(OUT, WIDTH, 4), cases.affine(OUT, WIDTH, 5)]
    assert ops.moe.group([ops.linear(layout) for layout in unlike]) is None


def test_what_does_not_fit_is_refused_by_name(ops: Ops, cases: Any) -> None:
    with pytest.raises(KernelError, match="route: expected 1 to 7 experts per token, found 8"):
        ops.moe.route(logits(2), 8)
    with pytest.raises(KernelError, match=r"route logits: expected torch\.float32"):
        ops.moe.route(logits(2).double(), 2)
    routes: Routes = ops.moe.route(logits(4), 2)
    bound = ops.moe.group([ops.linear(layout) for layout in layouts_of(cases)["affine"]])
    assert bound is not None
    with pytest.raises(KernelError, match=r"experts x: expected torch\.float32 \[4, 96\]"):
        bound.matmul(torch.zeros(8, WIDTH), routes, by_token=True)
    with pytest.raises(KernelError, match=r"experts x: expected torch\.float32 \[8, 96\]"):
        bound.matmul(torch.zeros(4, WIDTH), routes, by_token=False)
    with pytest.raises(KernelError, match=r"experts starts: expected torch\.int32 \[8\]"):
        bound.matmul(torch.zeros(4, WIDTH), ops.moe.route(logits(4, 9), 2), by_token=True)
    with pytest.raises(KernelError, match=r"add_owners_bias bias: expected .* \[7, 72\]"):
        ops.moe.add_owners_bias(torch.zeros(8, OUT), torch.zeros(6, OUT), routes)
    with pytest.raises(KernelError, match=r"combine x: expected torch\.float32 \[8, any\]"):
        ops.moe.combine(torch.zeros(4, OUT), routes)
