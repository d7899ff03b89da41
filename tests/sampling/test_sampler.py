"""The sampler's choices: distributions, truncations, determinism, bitwise invariance, errors."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from sdk.api.errors import RequestError
from sdk.api.logprobs import Sampled
from sdk.api.params import SamplingParams
from sdk.kernels.operators.ops import Ops
from sdk.sampling.draws import Draw
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import SamplerState
from sdk.sampling.uniform import TOKEN, XTC, child_seed, uniform

INF = float("inf")


def some_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def sample_one(
    ops: Ops, row: torch.Tensor, params: SamplingParams, **more: object
) -> Sampled | str:
    return Sampler(row.shape[-1], ops).sample(row[None], [drawn(params, **more)])[0]


def drawn(
    params: SamplingParams, prompt: Sequence[int] = (), output: Sequence[int] = (), **more: object
) -> Draw:
    resolved = more.pop("resolved", ResolvedParams())
    return Draw(SamplerState(params, resolved, prompt, output, **more))


def test_uniforms_are_flat_independent_and_fixed_for_ever() -> None:
    values = np.array([uniform(7, position) for position in range(20000)])
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=50, range=(0, 1))[0]
    assert ((counts - 400) ** 2 / 400).sum() < 85.4  # chi-square, 49 degrees of freedom, p = 0.001
    others = np.array([uniform(7, position, XTC) for position in range(20000)])
    assert abs(np.corrcoef(values, others)[0, 1]) < 0.025
    assert abs(np.corrcoef(values[1:], values[:-1])[0, 1]) < 0.025
    assert uniform(7, 3, TOKEN) == uniform(7 + 2**64, 3)
    assert uniform(0, 0) == 0.13870941014555416


def test_children_have_different_seeds_and_the_first_keeps_its_own() -> None:
    seeds = {child_seed(5, index) for index in range(64)} | {child_seed(6, i) for i in range(64)}
    assert len(seeds) == 128 and child_seed(5, 0) == 5


def test_mirostat_follows_its_definition_and_survives_a_preemption(ops: Ops) -> None:
    params = SamplingParams(mirostat_mode=2, mirostat_tau=3.0, mirostat_eta=0.2, seed=9)
    steps = [some_logits(1, 50, seed) for seed in range(12)]
    mu, expected, mus = 6.0, [], []
    for position, step in enumerate(steps):
        p = torch.softmax(step[0] - step[0].max(), -1).double()
        keep = (-p.log2() <= mu) | (p == p.max())
        q = torch.where(keep, p, 0.0) / p[keep].sum()
        token = int(torch.searchsorted(q.cumsum(0), uniform(9, position), right=True))
        mu -= 0.2 * (-math.log2(q[token]) - 3.0)
        expected.append(token)
        mus.append(mu)
    sampler = Sampler(50, ops)
    draw = drawn(params)
    got: list[int] = []
    for position, step in enumerate(steps):
        assert sampler.sample(step, [draw]) == sampler.sample(
            step, [draw]
        )  # asking does not commit
        [sampled] = sampler.sample(step, [draw])
        got.append(sampled.token_id)
        assert sampled.mirostat_mu == pytest.approx(mus[position])
        if position in (0, 6, 7):  # preempted before it heard of the token that it sampled
            draw = drawn(params, (), got, mirostat_mu=sampled.mirostat_mu)
        else:
            draw.state.append(got[-1:])
    assert got == expected


def test_a_tiny_temperature_is_exact_and_zero_is_greedy(ops: Ops) -> None:
    row = torch.tensor([1.0, 1.002, 1.0])
    tokens = {
        sample_one(ops, row, SamplingParams(temperature=0.005, seed=s)).token_id for s in range(50)
    }
    assert tokens == {0, 1, 2}  # the best is only e**0.4 times likelier
    for temperature in (0.0, 1e-45, 1e-8):
        chosen = {
            sample_one(ops, row, SamplingParams(temperature=temperature, seed=s)).token_id
            for s in range(20)
        }
        assert chosen == {1}


def test_the_lowest_id_wins_a_tie_everywhere(ops: Ops) -> None:
    row = torch.tensor([0.0, 2.0, 2.0, 2.0])
    assert sample_one(ops, row, SamplingParams(temperature=0)).token_id == 1
    scored = sample_one(ops, row, SamplingParams(temperature=0, logprobs=2))
    assert list(scored.top) == [1, 2] and scored.rank == 1


VARIANTS = [
    {"temperature": 0},
    {},
    {"temperature": 0, "logprobs": 5},
    {"temperature": 0.7, "top_k": 40, "logprobs": 3},
    {"top_p": 0.9, "min_p": 0.01},
    {"typical_p": 0.8},
    {"top_k": 3000, "top_p": 0.99, "logprobs": 700},
    {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "presence_penalty": 0.2},
    {"xtc_probability": 0.5, "xtc_threshold": 0.01, "no_repeat_ngram_size": 2},
    {"mirostat_mode": 2},
]


@pytest.mark.parametrize("vocab", [1009, pytest.param(33001, marks=pytest.mark.slow)])
def test_a_row_is_bitwise_the_same_alone_batched_shuffled_and_with_any_threads(
    ops: Ops, vocab: int
) -> None:
    logits = some_logits(12, vocab, seed=5)
    sampler = Sampler(vocab, ops)
    draws = [
        drawn(
            SamplingParams(seed=100 + i, **VARIANTS[i % len(VARIANTS)]), (1, 2, 3), tuple(range(i))
        )
        for i in range(12)
    ]
    order = list(range(12))
    random.Random(1).shuffle(order)
    before, outcomes = torch.get_num_threads(), []
    untouched = logits.clone()
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outcomes.append(sampler.sample(logits, draws))
            outcomes.append([sampler.sample(logits[i : i + 1], [draws[i]])[0] for i in range(12)])
            shuffled = sampler.sample(logits[order], [draws[i] for i in order])
            outcomes.append([shuffled[order.index(i)] for i in range(12)])
    finally:
        torch.set_num_threads(before)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    assert all(isinstance(result, Sampled) for result in outcomes[0])
    assert torch.equal(logits, untouched)


def test_a_resumed_request_goes_on_as_if_nothing_happened(ops: Ops) -> None:
    params = SamplingParams(seed=3, repetition_penalty=1.2, no_repeat_ngram_size=2, top_p=0.9)
    steps = some_logits(20, 30, seed=8)
    sampler, whole = Sampler(30, ops), drawn(params, (4, 5))
    output: list[int] = []
    for step in steps:
        expected = sampler.sample(step[None], [whole])[0]
        assert sampler.sample(step[None], [drawn(params, (4, 5), output)])[0] == expected
        output.append(expected.token_id)
        whole.state.append(output[-1:])


@pytest.mark.parametrize("values", [{}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}])
def test_draws_behind_drafts_are_those_behind_the_same_tokens(ops: Ops, values: dict) -> None:
    params = SamplingParams(seed=3, top_p=0.9, xtc_probability=0.5, xtc_threshold=0.1, **values)
    logits = some_logits(5, 30, seed=8)
    drafts = [7, 2, 7, 11]
    state = drawn(params, (4, 5), (9,)).state
    found = Sampler(30, ops).sample(logits, [Draw.behind(state, drafts[:n]) for n in range(5)])
    expected = [
        sample_one(ops, logits[n], params, prompt=(4, 5), output=(9, *drafts[:n])) for n in range(5)
    ]
    assert found == expected and state.output == [9]


def test_the_host_s_random_state_is_left_alone(ops: Ops) -> None:
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    sample_one(ops, some_logits(1, 50)[0], SamplingParams(seed=1, top_p=0.5))
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()
    assert (before[2] == np.random.get_state()[1]).all()


def test_the_host_s_numpy_error_settings_do_not_matter(ops: Ops) -> None:
    row = some_logits(1, 2000)[0]
    row[5], row[6] = -INF, -1e30
    for values in (*VARIANTS, {"temperature": 1e-30, "logprobs": 3}):
        expected = sample_one(ops, row, SamplingParams(seed=1, **values))
        with np.errstate(all="raise"):
            assert sample_one(ops, row, SamplingParams(seed=1, **values)) == expected


@pytest.mark.parametrize("values", [{"temperature": 0}, {"temperature": 1}, {"logprobs": 2}])
def test_a_row_that_is_not_finite_fails_alone(ops: Ops, values: dict) -> None:
    logits = some_logits(4, 20)
    logits[0, 3], logits[1, 4], logits[2] = float("nan"), INF, -INF
    params = SamplingParams(seed=1, **values)
    results = Sampler(20, ops).sample(logits, [drawn(params) for _ in range(4)])
    assert [isinstance(result, str) for result in results] == [True, True, True, False]
    assert all("not finite" in result for result in results[:3])


def test_logprobs_are_those_of_the_raw_distribution(ops: Ops) -> None:
    row = some_logits(1, 40)[0]
    reference = torch.log_softmax(row.double(), -1)
    order = reference.argsort(descending=True).tolist()
    params = SamplingParams(temperature=0.3, top_k=2, seed=2, logprobs=5, logit_bias={order[9]: 50})
    result = sample_one(ops, row, params)
    assert result.token_id == order[9] and result.rank == 10
    assert result.logprob == pytest.approx(reference[order[9]].item(), abs=1e-5)
    ranks = [(token, entry.rank) for token, entry in result.top.items()]
    assert ranks == [(t, i + 1) for i, t in enumerate(order[:5])] + [(order[9], 10)]
    for token, entry in result.top.items():
        assert entry.logprob == pytest.approx(reference[token].item(), abs=1e-5)


def test_ranks_agree_with_the_order_of_the_best_where_rounding_makes_logits_near(ops: Ops) -> None:
    row = torch.full((9000,), -50.0)
    row[7], row[8], row[20], row[30] = 1e-10, 2e-10, 10.0, 2e-10  # 10 - 1e-10 is 10
    result = sample_one(
        ops, row, SamplingParams(temperature=0, logprobs=4, logprob_token_ids=[0, 1])
    )
    assert list(result.top) == [20, 8, 30, 7, 0, 1]
    assert [entry.rank for entry in result.top.values()] == [1, 2, 3, 4, 5, 6]
    ranks = [
        sample_one(ops, row, SamplingParams(logprobs=0, seed=1, logit_bias={i: 100})).rank
        for i in (20, 8, 30, 7)
    ]
    assert ranks == [1, 2, 3, 4]


def test_logprobs_zero_none_all_and_given_ids(ops: Ops) -> None:
    row = some_logits(1, 40)[0]
    assert sample_one(ops, row, SamplingParams(temperature=0)).logprob is None
    none = sample_one(ops, row, SamplingParams(temperature=0, logprobs=0))
    assert list(none.top) == [none.token_id] and none.rank == 1
    everything = sample_one(ops, row, SamplingParams(temperature=0, logprobs=-1))
    assert [entry.rank for entry in everything.top.values()] == list(range(1, 41))
    asked = sample_one(
        ops, row, SamplingParams(temperature=0, logprobs=1, logprob_token_ids=[3, 7, 3])
    )
    assert set(list(asked.top)[1:]) == {3, 7} and len(asked.top) == 3
    assert all(everything.top[token] == entry for token, entry in asked.top.items())


def test_scoring_a_prompt_equals_scoring_its_rows_and_refuses_what_is_not_finite(ops: Ops) -> None:
    logits = some_logits(6, 33001)
    sampler = Sampler(33001, ops)
    scored = sampler.score(logits, range(6), 2)
    assert [entry.token_id for entry in scored] == list(range(6))
    assert scored[4] == sampler.score(logits[4:5], [4], 2)[0] and len(scored[0].top) == 3
    reference = torch.log_softmax(logits.double(), -1)
    assert scored[2].logprob == pytest.approx(reference[2, 2].item(), abs=1e-4)
    logits[3, 0] = float("nan")
    with pytest.raises(RequestError, match="not finite"):
        sampler.score(logits, range(6), 2)
