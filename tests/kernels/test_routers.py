"""The choice of experts and their weights, by the routers of published models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.route_rule import MAX_SCORED, RouteRule
from tests.routers import RULES, case

EXPERTS, K = 12, 3


@pytest.fixture(scope="module", params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=3, backends=[request.param])
    yield opened
    opened.close()


@pytest.mark.parametrize("name", RULES)
def test_experts_and_weights_are_those_of_the_rule(ops: Ops, name: str) -> None:
    """And those of a token alone: on native kernels bit for bit."""
    logits, bias, chosen, weights = case(name, 70, EXPERTS, K)
    routes = ops.moe.route(logits, K, RULES[name][0], bias=bias)
    assert torch.equal(routes.owners[routes.places.long()], chosen)
    torch.testing.assert_close(routes.weights, weights, rtol=2e-6, atol=0)
    if ops.context.backends[0].name != "cpu":
        return
    for token in (0, 69):
        alone = ops.moe.route(logits[token : token + 1], K, RULES[name][0], bias=bias)
        assert torch.equal(alone.weights[0], routes.weights[token])


@pytest.mark.parametrize("name", RULES)
def test_factors_multiply_the_weights_of_their_experts(ops: Ops, name: str) -> None:
    """And choose nothing."""
    logits, bias, chosen, weights = case(name, 70, EXPERTS, K)
    factors = torch.linspace(-1.0, 3.0, EXPERTS)
    routes = ops.moe.route(logits, K, RULES[name][0], bias=bias, factors=factors)
    assert torch.equal(routes.owners[routes.places.long()], chosen)
    wanted = weights * factors[chosen.long()]
    torch.testing.assert_close(routes.weights, wanted, rtol=2e-6, atol=0)


def test_factors_of_another_number_of_experts_are_refused(ops: Ops) -> None:
    with pytest.raises(KernelError, match="route factors"):
        ops.moe.route(torch.zeros(2, EXPERTS), K, factors=torch.ones(EXPERTS - 1))


@pytest.mark.parametrize("name", RULES)
def test_the_first_of_equals_is_chosen_and_the_first_of_equal_groups(ops: Ops, name: str) -> None:
    rule, biased = RULES[name]
    bias = torch.zeros(EXPERTS) if biased else None
    routes = ops.moe.route(torch.full((1, EXPERTS), 0.25), K, rule, bias=bias)
    assert routes.owners.tolist() == [0, 1, 2]
    logits = torch.full((1, EXPERTS), -1.0)
    logits[0, [5, 8]] = 2.0  # of groups of three: the second and the third
    found = ops.moe.route(logits, K, rule, bias=bias).owners.tolist()
    groups = {1: [3, 4, 5], 2: [3, 5, 8]}
    assert found == (groups[rule.groups_used] if rule.groups > 1 else [0, 5, 8])


def test_a_bias_is_of_the_choice_alone(ops: Ops) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    bias = torch.tensor([-5.0, 0.0, 0.0, 5.0])
    routes = ops.moe.route(logits, 2, RouteRule("sigmoid", normalized=False), bias=bias)
    assert routes.owners.tolist() == [1, 3]
    assert torch.allclose(routes.weights, logits[:, [3, 1]].sigmoid())


@pytest.mark.parametrize("name", RULES)
def test_logits_that_are_no_numbers_choose_different_experts_that_exist(
    ops: Ops, name: str
) -> None:
    logits, bias, _, _ = case(name, 4, EXPERTS, K)
    logits[1], logits[2], logits[3, :5] = float("nan"), float("-inf"), float("inf")
    routes = ops.moe.route(logits, K, RULES[name][0], bias=bias)
    chosen = routes.owners[routes.places.long()]
    assert bool(((chosen >= 0) & (chosen < EXPERTS)).all())
    assert [len(set(row)) for row in chosen.tolist()] == [K] * 4
    alone = ops.moe.route(logits[:1], K, RULES[name][0], bias=bias)
    torch.testing.assert_close(routes.weights[0], alone.weights[0], rtol=1e-6, atol=0)


def test_weights_stay_exact_where_scores_are_tiny_or_saturate(ops: Ops) -> None:
    logits = torch.tensor([[-30.0, -40.0, -50.0], [30.0, 60.0, 90.0]])
    tiny = ops.moe.route(logits[:1], 1, RouteRule("sqrt_softplus", normalized=False)).weights
    assert tiny.item() == pytest.approx(torch.tensor(-15.0).exp().item(), rel=1e-6)
    large = ops.moe.route(logits, 1, RouteRule("sqrt_softplus", normalized=False))
    assert large.weights[1].item() == pytest.approx(90.0**0.5)
    # sigmoids of 30 and of 90 are both 1: logits decide
    assert ops.moe.route(logits[1:], 1, RouteRule("sigmoid")).owners.tolist() == [2]


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added_last(ops: Ops, gated: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(9, EXPERTS, generator=generator)
    routes = ops.moe.route(logits, K)
    x, shared = torch.randn(27, 40, generator=generator), torch.randn(9, 40, generator=generator)
    gate = torch.randn(9, 1, generator=generator) if gated else None
    found = ops.moe.combine(x, routes, shared, gate).clone()
    part = 1.0 if gate is None else gate.double().sigmoid()
    wanted = ops.moe.combine(x, routes).double() + part * shared.double()
    torch.testing.assert_close(found.double(), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("rule", "biased", "message"),
    [
        (RouteRule("tanh"), False, r"gate: expected one of .* found 'tanh'"),  # type: ignore[arg-type]
        (RouteRule("sparse_mixer"), True, "sparse_mixer: expected neither a bias nor groups"),
        (RouteRule(groups=5, groups_used=2), False, "groups: expected a divisor of 12, found 5"),
        (
            RouteRule(groups=6, groups_used=1),
            False,
            "groups_used: expected 1 to 6 groups of 2 experts with 3 together, found 1",
        ),
        (
            RouteRule(groups=3, groups_used=2, group_best=5),
            False,
            "group_best: expected 1 to 4 experts of a group, found 5",
        ),
    ],
)
def test_rules_that_do_not_fit_are_refused(
    ops: Ops, rule: RouteRule, biased: bool, message: str
) -> None:
    bias = torch.zeros(EXPERTS) if biased else None
    with pytest.raises(KernelError, match=message):
        ops.moe.route(torch.zeros(2, EXPERTS), K, rule, bias=bias)


def test_scores_of_more_experts_than_there_is_room_for_are_refused(ops: Ops) -> None:
    many = torch.zeros(1, MAX_SCORED + 1)
    assert ops.moe.route(many, 2).owners.tolist() == [0, 1]
    with pytest.raises(KernelError, match=r"at most 1024 experts with a gate, .* found 1025"):
        ops.moe.route(many, 2, RouteRule("sigmoid"))
    with pytest.raises(KernelError, match=r"route bias: expected torch\.float32 \[12\]"):
        ops.moe.route(torch.zeros(2, EXPERTS), K, bias=torch.zeros(3))
    routes = ops.moe.route(torch.zeros(2, EXPERTS), K)
    with pytest.raises(KernelError, match=r"combine shared: expected torch\.float32 \[2, 40\]"):
        ops.moe.combine(torch.zeros(6, 40), routes, torch.zeros(3, 40))
    with pytest.raises(KernelError, match=r"combine gate: expected torch\.float32 \[2, 1\]"):
        ops.moe.combine(torch.zeros(6, 40), routes, torch.zeros(2, 40), torch.zeros(2, 2))
