"""Experts that are spread over ranks: who computes which row, and the sums over all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.groups import CollectiveGroup
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.route_rule import RouteRule
from sdk.kernels.operators.routes import RankExperts, RankTokens, Routes
from tests.kernels.test_exchange import Ranks

EXPERTS, K, WIDTH, INNER = 7, 3, 96, 64
#: The experts of each rank: uneven; with copies on all, or on some ranks; by size.
SPREAD = {
    "uneven": ([0, 2, 3, 6], [1, 4, 5]),
    "copies": ([0, 1, 2, 3, 4], [0, 3, 5, 6, 1]),
    "three": ([6, 0], [5, 4, 0], [1, 2, 3, 0]),
}


class NoGroup:
    """A group that is not used."""

    def all_reduce(self, x: Tensor) -> None:
        raise AssertionError

    def all_gather(self, x: Tensor) -> list[Tensor]:
        raise AssertionError


def spread(
    own: Sequence[Sequence[int]], rank: int, group: CollectiveGroup, count: int
) -> RankExperts:
    ranks = [[r for r, held in enumerate(own) if e in held] for e in range(count)]
    first = torch.tensor([0, *map(len, ranks)]).cumsum(0).int()
    local = torch.full((count,), -1, dtype=torch.int32)
    local[list(own[rank])] = torch.arange(len(own[rank]), dtype=torch.int32)
    flat = torch.tensor([r for each in ranks for r in each], dtype=torch.int32)
    load = torch.zeros(count, dtype=torch.int64)
    return RankExperts(rank, group, len(own[rank]), first, flat, local, load)


def logits_for(chosen: Sequence[Sequence[int]], count: int) -> Tensor:
    """Logits with which each token chooses these experts, in this order."""
    found = torch.full((len(chosen), count), -9.0)
    for token, experts in enumerate(chosen):
        for j, expert in enumerate(experts):
            found[token, expert] = 5.0 - j
    return found


@pytest.fixture(params=["cpu", "reference"])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=2, backends=[request.param])
    yield opened
    opened.close()


def routed(ops: Ops, chosen: Sequence[Sequence[int]], experts: RankExperts) -> Routes:
    count = experts.load.shape[0]
    logits = logits_for(chosen, count)
    return ops.moe.route(logits, len(chosen[0]), experts=experts)


def test_a_rank_places_the_rows_of_its_own_experts(ops: Ops) -> None:
    chosen = [[3, 0], [1, 2], [0, 1], [3, 2]]
    routes = routed(ops, chosen, spread([[2, 0], [1, 3]], 0, NoGroup(), 4))
    assert routes.places.tolist() == [[-1, 2], [-1, 0], [3, -1], [-1, 1]]
    assert routes.servers is not None
    assert routes.servers.tolist() == [[1, 0], [1, 0], [0, 1], [1, 0]]
    assert routes.starts.tolist() == [0, 2, 4]
    assert routes.tokens[:4].tolist() == [1, 3, 0, 2]
    assert routes.owners[:4].tolist() == [0, 0, 1, 1]  # as this rank numbers them
    assert routes.active.tolist() == [0, 1, 2]
    assert routes.used is not None and routes.used.tolist() == [4]


def test_copies_of_an_expert_take_turns_also_over_steps(ops: Ops) -> None:
    own = [[0, 1], [0, 2], [2, 1]]
    given = [spread(own, rank, NoGroup(), 3) for rank in range(3)]
    found = []
    for _ in range(3):
        steps = [routed(ops, [[0]], each) for each in given]
        assert all(torch.equal(step.servers, steps[0].servers) for step in steps)
        found.append(int(steps[0].servers))
    several = routed(ops, [[0], [2], [0], [2]], given[0])
    assert several.servers is not None
    assert found + several.servers.flatten().tolist() == [0, 1, 0, 1, 1, 0, 2]
    assert given[0].load.tolist() == [5, 0, 2]


@pytest.mark.parametrize("rank", [0, 1])
def test_one_rank_may_have_all_rows_and_another_none(ops: Ops, rank: int) -> None:
    routes = routed(ops, [[0, 1], [1, 0]], spread([[0, 1], [2, 3]], rank, NoGroup(), 4))
    assert routes.starts.tolist() == ([0, 2, 4] if rank == 0 else [0, 0, 0])
    assert int(routes.active[-1]) == (2 if rank == 0 else 0)
    assert bool((routes.places >= 0).all()) == (rank == 0)
    assert list(routes.parts(torch.zeros(2, 5), by_token=True)) == [] or rank == 0


def test_both_backends_place_rows_alike() -> None:
    generator = torch.Generator().manual_seed(3)
    logits = [torch.randn(n, EXPERTS, generator=generator) for n in (1, 40, 7)]
    found = []
    for backend in ("cpu", "reference"):
        ops = Ops("cpu", num_threads=2, backends=[backend])
        for rank in range(3):
            experts = spread(SPREAD["three"], rank, NoGroup(), EXPERTS)
            for given in logits:
                routes = ops.moe.route(given, K, RouteRule(normalized=False), experts=experts)
                assert routes.servers is not None and routes.used is not None
                used = int(routes.used)
                found.append(
                    [
                        *(routes.places, routes.servers, routes.starts),
                        *(routes.tokens[:used], routes.owners[:used]),
                        *(routes.active[: int(routes.active[-1])], experts.load.clone()),
                    ]
                )
        ops.close()
    half = len(found) // 2
    for ours, reference in zip(found[:half], found[half:], strict=True):
        for mine, other in zip(ours, reference, strict=True):
            assert torch.equal(mine, other)


def test_rows_without_values_are_left_alone(ops: Ops) -> None:
    routes = routed(ops, [[0, 1], [1, 2], [3, 1]], spread([[1, 2], [0, 3]], 0, NoGroup(), 4))
    x, bias = torch.zeros(6, 8), torch.tensor([[1.0], [2.0]]).expand(2, 8).contiguous()
    ops.moe.add_owners_bias(x, bias, routes)
    assert x[:, 0].tolist() == [1, 1, 1, 2, 0, 0]
    gated = ops.gated_activation(torch.ones(6, 8), "silu", routes.used)
    assert torch.equal(gated[:4], ops.gated_activation(torch.ones(4, 8), "silu"))


class Mixture:
    """A mixture of packed experts with biases: whole, or the part of one rank.

    A shared expert, which every rank has, is the input itself, with a gate.
    """

    def __init__(self, ops: Ops, cases: Any, own: Sequence[int]) -> None:
        self.ops = ops
        up = [cases.affine(2 * INNER, WIDTH, seed=seed) for seed in range(EXPERTS)]
        down = [cases.affine(WIDTH, INNER, seed=10 + seed) for seed in range(EXPERTS)]
        self.up = ops.moe.group([ops.linear(up[e]) for e in own])
        self.down = ops.moe.group([ops.linear(down[e]) for e in own])
        biases = torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(5))
        self.bias = biases[list(own)]
        self.gate = ops.linear(cases.dense(1, WIDTH, torch.float32, seed=9))

    def __call__(
        self, x: Tensor, logits: Tensor, k: int, experts: RankExperts | None = None
    ) -> Tensor:
        moe, shared, gate = self.ops.moe, x, self.gate.matmul(x)
        if experts is not None and experts.tokens is not None:
            x, logits = moe.gather(x, experts.tokens), moe.gather(logits, experts.tokens)
        routes = moe.route(logits, k, experts=experts)
        assert self.up is not None and self.down is not None
        hidden = self.up.matmul(x, routes, by_token=True)
        hidden = self.ops.gated_activation(hidden, "silu", routes.used)
        y = self.down.matmul(hidden, routes, by_token=False)
        return moe.combine(moe.add_owners_bias(y, self.bias, routes), routes, shared, gate)


@pytest.fixture(params=SPREAD)
def own(request: pytest.FixtureRequest) -> Sequence[Sequence[int]]:
    found: Sequence[Sequence[int]] = SPREAD[request.param]
    return found


class InPython:
    """A group without native operators."""

    def __init__(self, group: CollectiveGroup) -> None:
        self.all_reduce, self.all_gather = group.all_reduce, group.all_gather


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("recorded", [False, True], ids=["one by one", "recorded"])
@pytest.mark.parametrize("native", [False, True], ids=["in Python", "native"])
def test_ranks_with_whole_experts_give_the_bits_of_one(
    own: Sequence[Sequence[int]], native: bool, recorded: bool, k: int, cases: Any, tmp_path: Path
) -> None:
    """For any number of tokens, wherever the experts are, after any steps.

    Buffers of rows and of tokens have one size where k is 1: none may be written too soon.
    """
    generator = torch.Generator().manual_seed(1)
    steps = [40, 1, 5, 40, 33, 2]
    given = [
        (
            cases.activations(tokens, WIDTH, seed=tokens),
            3 * torch.randn(tokens, EXPERTS, generator=generator),
        )
        for tokens in steps
    ]
    given[2][1][:, :] = logits_for([[0, 1, 2]], EXPERTS)  # as many as possible for one rank
    alone = Ops("cpu", num_threads=2, backends=["cpu"])
    whole = Mixture(alone, cases, range(EXPERTS))
    expected = [whole(x, logits, k) for x, logits in given]
    ranks = Ranks(tmp_path, len(own), 2)

    def call(rank: int, group: CollectiveGroup, ops: Ops) -> list[Tensor]:
        mixture = Mixture(ops, cases, own[rank])
        experts = spread(own, rank, group if native else InPython(group), EXPERTS)
        if not recorded:
            return [mixture(x, logits, k, experts) for x, logits in given]
        inputs, scores = torch.empty(64, WIDTH), torch.empty(64, EXPERTS)
        graph = ops.recording.capture(
            lambda: mixture(inputs, scores, k, experts), tokens=64, outputs=1, requests=1
        )
        found = []
        for x, logits in given:
            inputs[: len(x)], scores[: len(x)] = x, logits
            graph.replay(tokens=len(x), outputs=1, requests=1)
            found.append(graph.result[: len(x)].clone())
        return found

    for found in ranks.do(call):
        for mine, wanted in zip(found, expected, strict=True):
            assert torch.equal(mine, wanted)
    ranks.close()
    alone.close()


#: The tokens of two ranks in some steps; the second one often has none.
OWN_TOKENS = [(40, 24), (1, 0), (0, 5), (33, 1), (64, 64), (2, 0)]


@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("way", ["one by one", "recorded", "reference"])
def test_ranks_with_tokens_of_their_own_give_the_bits_of_one(
    way: str, k: int, cases: Any, tmp_path: Path
) -> None:
    """Each rank has the weights of all experts, and computes some of them for all tokens."""
    own = SPREAD["copies"]
    generator = torch.Generator().manual_seed(2)
    given = [
        [
            (cases.activations(n, WIDTH, seed=n), torch.randn(n, EXPERTS, generator=generator))
            for n in counts
        ]
        for counts in OWN_TOKENS
    ]
    backend = "reference" if way == "reference" else "cpu"
    alone = Ops("cpu", num_threads=2, backends=[backend])
    whole = Mixture(alone, cases, range(EXPERTS))
    expected = [[whole(x, logits, k) for x, logits in step] for step in given]
    ranks = Ranks(tmp_path, 2, 2)

    def call(rank: int, group: CollectiveGroup, ops: Ops) -> list[Tensor]:
        if way == "reference":
            ops = Ops("cpu", num_threads=1, backends=["reference"])
        mixture = Mixture(ops, cases, range(EXPERTS))
        starts = torch.zeros(3, dtype=torch.int32)
        tokens = RankTokens(rank, group, starts, 2 * 64)
        part = spread(own, rank, group, EXPERTS)
        local = torch.where(part.local >= 0, torch.arange(EXPERTS), -1).int()
        experts = replace(part, count=EXPERTS, local=local, tokens=tokens)

        inputs, scores = torch.empty(64, WIDTH), torch.empty(64, EXPERTS)
        if way == "recorded":
            graph = ops.recording.capture(
                lambda: mixture(inputs, scores, k, experts), tokens=64, outputs=1, requests=1
            )
        found = []
        for step in given:
            starts[1:] = torch.tensor([len(x) for x, _ in step]).cumsum(0)
            x, logits = step[rank]
            if way != "recorded":
                found.append(mixture(x, logits, k, experts))
                continue
            inputs[: len(x)], scores[: len(x)] = x, logits
            graph.replay(tokens=len(x), outputs=min(len(x), 1), requests=min(len(x), 1))
            found.append(graph.result[: len(x)].clone())
        return found

    for rank, found in enumerate(ranks.do(call)):
        for mine, wanted in zip(found, expected, strict=True):
            assert torch.equal(mine, wanted[rank])
    ranks.close()
    alone.close()


def test_no_tokens_need_no_exchange(cases: Any, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, 1)

    def call(rank: int, group: CollectiveGroup, ops: Ops) -> Tensor:
        mixture = Mixture(ops, cases, SPREAD["uneven"][rank])
        experts = spread(SPREAD["uneven"], rank, group, EXPERTS)
        return mixture(torch.empty(0, WIDTH), torch.empty(0, EXPERTS), K, experts)

    assert [found.shape for found in ranks.do(call)] == [(0, WIDTH)] * 2
    ranks.close()


def test_what_does_not_fit_is_refused(ops: Ops) -> None:
    experts = spread([[0, 2], [1, 3]], 0, NoGroup(), 4)
    with pytest.raises(KernelError, match=r"route experts: expected torch\.int64 \[5\]"):
        ops.moe.route(torch.zeros(2, 5), 2, experts=experts)
