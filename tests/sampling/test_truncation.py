"""What truncation leaves of a row: against transformers, its definition, and the other device."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.generation import logits_process as hf

from sdk.params import SamplingParams
from sdk.sampling import candidates, truncation
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.rows import Scratch
from sdk.sampling.sampler import Sampler
from sdk.sampling.state import RequestState
from sdk.sampling.uniform import XTC, uniform

INF = float("inf")


def some_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def kept(row: torch.Tensor, **values: object) -> set[int]:
    """Ids that survive truncation of logits ``row`` on a CPU."""
    state = RequestState(SamplingParams(**values), ResolvedParams(), (), ())
    result = candidates.truncate(row.numpy(), state, Scratch(len(row)))
    ids = np.arange(len(row)) if result.ids is None else result.ids
    assert (np.diff(ids) > 0).all()
    return set(ids[np.isfinite(result.scaled)].tolist())


def kept_on_accelerators(row: torch.Tensor, **values: object) -> set[int]:
    """The same by the operations an accelerator runs."""
    state = RequestState(SamplingParams(**values), ResolvedParams(), (), ())
    result = truncation.truncate((row - row.max())[None] / state.temperature, [state])
    return set(torch.isfinite(result[0]).nonzero()[:, 0].tolist())


on_both = pytest.mark.parametrize("kept", [kept, kept_on_accelerators])


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0, "top_k": 6},
        {"top_p": 0.8},
        {"min_p": 0.1, "top_p": 0.95},
    ],
)
def test_sampled_frequencies_follow_the_truncated_distribution(values: dict) -> None:
    row = some_logits(1, 12, seed=3)[0] / 2
    sampler = Sampler(12)
    sampler.add("a", SamplingParams(seed=11, **values))
    counts = np.zeros(12)
    draws = 5000
    for _ in range(draws):
        result = sampler.sample(row[None], ["a"])[0]
        counts[result.token_id] += 1
        sampler.append("a", (result.token_id,))
    survivors = sorted(kept(row, **values))
    weights = np.exp(row.double().numpy() / values.get("temperature", 1.0))[survivors]
    expected = weights / weights.sum() * draws
    assert counts.sum() == counts[survivors].sum()
    frequent = expected >= 5
    chi = ((counts[survivors] - expected) ** 2 / expected)[frequent].sum()
    assert chi < 31.3  # 11 degrees of freedom at most, p = 0.001


WARPERS = [
    ({"top_k": 7}, lambda: [hf.TopKLogitsWarper(7)]),
    ({"top_p": 0.7}, lambda: [hf.TopPLogitsWarper(0.7)]),
    ({"min_p": 0.05}, lambda: [hf.MinPLogitsWarper(0.05)]),
    ({"typical_p": 0.6}, lambda: [hf.TypicalLogitsWarper(0.6)]),
    (
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
        lambda: [
            hf.TemperatureLogitsWarper(0.7),
            hf.TopKLogitsWarper(20),
            hf.TopPLogitsWarper(0.8),
        ],
    ),
    (
        {"min_p": 0.02, "top_p": 0.9},
        lambda: [hf.MinPLogitsWarper(0.02), hf.TopPLogitsWarper(0.9)],
    ),
]


@on_both
@pytest.mark.parametrize(("values", "warpers"), WARPERS)
@pytest.mark.parametrize("seed", range(5))
def test_truncation_keeps_what_transformers_keeps(kept, values: dict, warpers, seed: int) -> None:
    row = some_logits(1, 200, seed)[0]
    scores = row[None]
    for warper in warpers():
        scores = warper(None, scores)
    assert kept(row, **values) == set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40)


@on_both
def test_of_equal_logits_the_lowest_ids_stay(kept) -> None:
    row = torch.tensor([0.0, 2.0, 2.0, 2.0])
    assert kept(row, top_k=2) == kept(row, top_p=0.5) == {1, 2}


@on_both
@settings(max_examples=150, deadline=None)
@given(rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_its_mass(kept, values, top_p: float) -> None:
    row = torch.tensor(values)
    survivors = kept(row, top_p=top_p)
    probabilities = torch.softmax(row - row.max(), -1).double().tolist()
    mass, total = sum(probabilities[i] for i in survivors), sum(probabilities)
    assert mass >= top_p * total - 1e-9
    assert mass - min(probabilities[i] for i in survivors) < top_p * total + 1e-9
    dropped = [p for i, p in enumerate(probabilities) if i not in survivors]
    assert min(probabilities[i] for i in survivors) >= max(dropped, default=0)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(-3, 3), min_size=1, max_size=30), st.data())
def test_keep_first_is_a_stable_descending_sort(values: list, data) -> None:
    count = data.draw(st.integers(1, len(values)))
    mask = truncation.keep_first(
        torch.tensor([values], dtype=torch.float32), torch.tensor([[count]])
    )
    order = sorted(range(len(values)), key=lambda i: (-values[i], i))[:count]
    assert set(mask[0].nonzero()[:, 0].tolist()) == set(order)


@on_both
def test_xtc_leaves_only_the_least_of_the_likely_and_only_as_often_as_asked(kept) -> None:
    row = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    assert kept(row, xtc_probability=1.0, xtc_threshold=0.12) == {2, 3, 4}
    assert kept(row, xtc_probability=1.0, xtc_threshold=0.35) == {0, 1, 2, 3, 4}
    applied = sum(
        kept(row, xtc_probability=0.3, xtc_threshold=0.12, seed=s) == {2, 3, 4}
        for s in range(1, 1001)
    )
    assert applied == sum(uniform(s, 0, XTC) < 0.3 for s in range(1, 1001)) and 250 < applied < 350


@on_both
def test_xtc_with_threshold_zero_leaves_the_least_likely_token_that_can_be_drawn(kept) -> None:
    row = torch.tensor([0.0, -INF, -3.0, -200.0, -1.0])
    assert 2 in kept(row, xtc_probability=1.0, xtc_threshold=0.0)
    assert not {0, 4} & kept(row, xtc_probability=1.0, xtc_threshold=0.0)
    params = SamplingParams(xtc_probability=1.0, xtc_threshold=0.0, top_k=4)
    state = RequestState(params, ResolvedParams(), (), ())
    assert candidates.draw(row.numpy(), state, Scratch(5)) == 2
    assert truncation.draw(row[None], [state]) == [2]


def test_mirostat_keeps_the_best_however_little_surprise_it_may_bring() -> None:
    row = some_logits(1, 300, 6)[0]
    row[[40, 90]] = row.max() + 1
    assert kept(row, mirostat_mode=2, mirostat_tau=0.0) == {40, 90}


COMBINED = [
    {"top_p": 0.9},
    {"temperature": 3.0, "top_p": 0.999},
    {"top_k": 1},
    {"top_k": 50, "top_p": 0.7},
    {"top_k": 3000},
    {"min_p": 0.001, "top_k": 60, "typical_p": 0.9, "top_p": 0.8},
    {"typical_p": 0.3},
    {"typical_p": 0.999, "temperature": 0.4},
    {"xtc_probability": 1.0, "xtc_threshold": 0.004, "top_p": 0.95},
    {"mirostat_mode": 2, "mirostat_tau": 2.0},
]


@pytest.mark.parametrize("values", COMBINED)
@pytest.mark.parametrize("vocab", [40, 9001])
def test_a_cpu_keeps_and_draws_what_an_accelerator_does(values: dict, vocab: int) -> None:
    for seed in range(3):
        row = some_logits(1, vocab, seed)[0]
        row[::7] = -INF
        row[1::5] = (row[1::5] * 4).round() / 4  # many ties
        if not values.get("mirostat_mode"):
            allowed = set(row.isfinite().nonzero()[:, 0].tolist())
            assert kept(row, **values) & allowed == kept_on_accelerators(row, **values)
        state = RequestState(SamplingParams(seed=seed, **values), ResolvedParams(), (), ())
        token, mu = truncation.draw(row[None], [state])[0], state.next_mu
        assert candidates.draw(row.numpy(), state, Scratch(vocab)) == token
        assert state.next_mu == pytest.approx(mu, abs=1e-5)


@pytest.mark.parametrize("mass", [1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-6, 1 - 1e-12, 1 - 2**-53])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
def test_top_p_of_a_whole_vocabulary_is_its_definition(mass: float, spread: float) -> None:
    row = some_logits(1, 20001, 4)[0].numpy() * np.float32(spread)
    weights = np.exp(row - row.max())
    order = np.lexsort((np.arange(len(row)), -weights))
    cumulative = weights[order].astype(np.float64).cumsum()
    count = int((cumulative < mass * cumulative[-1]).sum()) + 1
    survivors = kept(torch.from_numpy(row), top_p=mass)
    if mass < 1 - 1e-9:
        assert survivors == set(order[:count].tolist())
    else:  # how many of the last 1e-9 stay is a matter of rounding
        assert weights[list(survivors)].sum(dtype=np.float64) >= (1 - 1e-9) * cumulative[-1]


def test_an_accelerator_s_rows_together_are_its_rows_one_by_one() -> None:
    logits = some_logits(len(COMBINED), 777, seed=2)
    states = [
        RequestState(SamplingParams(seed=i, **v), ResolvedParams(), (), ())
        for i, v in enumerate(COMBINED)
    ]
    alone = [truncation.draw(logits[i : i + 1], [state])[0] for i, state in enumerate(states)]
    assert truncation.draw(logits, states) == alone
