"""What truncation leaves of a row: the reference against transformers and the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers.generation import logits_process as hf

from sdk.api.params import SamplingParams
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import Draws, join_draws
from sdk.kernels.reference.sampling import keep_first, truncate
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.state import SamplerState
from sdk.sampling.uniform import XTC, uniform

INF = float("inf")


def some_logits(rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 3


def draw_of(values: dict, uniform: float = 0.0) -> Draws:
    state = SamplerState(SamplingParams(**values), ResolvedParams(), (), ())
    return join_draws([state.draw()], [uniform])


def kept(row: torch.Tensor, **values: object) -> set[int]:
    """Ids that survive the truncation of logits ``row``."""
    gaps = (row.max() - row) / max(values.get("temperature", 1.0), 1e-30)
    result = truncate(gaps[None], draw_of(values))
    return set(torch.isfinite(result[0]).nonzero()[:, 0].tolist())


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
def test_sampled_frequencies_follow_the_truncated_distribution(ops: Ops, values: dict) -> None:
    row = some_logits(1, 12, seed=3)[0] / 2
    draws = 5000
    numbers = [uniform(11, position) for position in range(draws)]
    all_draws = np.repeat(draw_of(values), draws)
    all_draws["uniform"] = numbers
    tokens = ops.sampling.sample(row.expand(draws, -1), all_draws).tokens
    counts = np.bincount(tokens, minlength=12)
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


@pytest.mark.parametrize(("values", "warpers"), WARPERS)
@pytest.mark.parametrize("seed", range(5))
def test_truncation_keeps_what_transformers_keeps(values: dict, warpers, seed: int) -> None:
    row = some_logits(1, 200, seed)[0]
    scores = row[None]
    for warper in warpers():
        scores = warper(None, scores)
    assert kept(row, **values) == set(torch.isfinite(scores[0]).nonzero()[:, 0].tolist())


rows = st.lists(st.floats(-8, 8, width=32), min_size=2, max_size=40)


def test_of_equal_logits_the_lowest_ids_stay() -> None:
    row = torch.tensor([0.0, 2.0, 2.0, 2.0])
    assert kept(row, top_k=2) == kept(row, top_p=0.5) == {1, 2}


@settings(max_examples=150, deadline=None)
@given(rows, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_set_that_reaches_its_mass(values, top_p: float) -> None:
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
def test_keep_first_is_a_stable_sort(values: list, data) -> None:
    count = data.draw(st.integers(1, len(values)))
    mask = keep_first(torch.tensor([values], dtype=torch.float32), torch.tensor([[count]]))
    order = sorted(range(len(values)), key=lambda i: (values[i], i))[:count]
    assert set(mask[0].nonzero()[:, 0].tolist()) == set(order)


def test_xtc_leaves_only_the_least_of_the_likely_and_only_as_often_as_asked() -> None:
    row = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05]).log()
    assert kept(row, xtc_probability=1.0, xtc_threshold=0.12) == {2, 3, 4}
    assert kept(row, xtc_probability=1.0, xtc_threshold=0.35) == {0, 1, 2, 3, 4}
    applied = sum(
        kept(row, xtc_probability=0.3, xtc_threshold=0.12, seed=s) == {2, 3, 4}
        for s in range(1, 1001)
    )
    assert applied == sum(uniform(s, 0, XTC) < 0.3 for s in range(1, 1001)) and 250 < applied < 350


def test_xtc_with_threshold_zero_leaves_the_least_likely_token_that_can_be_drawn(ops: Ops) -> None:
    row = torch.tensor([0.0, -INF, -3.0, -200.0, -1.0])
    values = {"xtc_probability": 1.0, "xtc_threshold": 0.0}
    assert 2 in kept(row, **values)
    assert not {0, 4} & kept(row, **values)
    for number in (0.0, 0.5, 1 - 2**-52):
        assert ops.sampling.sample(row[None], draw_of({**values, "top_k": 4}, number)).tokens == [2]


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


@pytest.mark.parametrize("mass", [1e-9, 0.1, 0.5, 0.9, 0.99, 1 - 1e-6, 1 - 1e-12, 1 - 2**-53])
@pytest.mark.parametrize("spread", [0.0, 0.01, 1.0, 30.0])
def test_top_p_of_a_whole_vocabulary_is_its_definition(mass: float, spread: float) -> None:
    row = some_logits(1, 20001, 4)[0].numpy() * np.float32(spread)
    below = row - row.max()
    weights = np.exp(below.astype(np.float64))
    order = np.lexsort((np.arange(len(row)), -below))
    cumulative = weights[order].cumsum()
    count = int((cumulative < mass * cumulative[-1]).sum()) + 1
    survivors = kept(torch.from_numpy(row), top_p=mass)
    if mass < 1 - 1e-9:
        assert survivors == set(order[:count].tolist())
    else:  # how many of the last 1e-9 stay is a matter of rounding
        assert weights[list(survivors)].sum() >= (1 - 1e-9) * cumulative[-1]


def test_rows_together_are_the_rows_one_by_one(ops: Ops) -> None:
    logits = some_logits(len(COMBINED), 777, seed=2)
    draws = np.concatenate([draw_of(values, 0.6) for values in COMBINED])
    together = ops.sampling.sample(logits, draws)
    for i in range(len(COMBINED)):
        alone = ops.sampling.sample(logits[i : i + 1], draws[i : i + 1])
        assert [column[0] for column in alone] == [column[i] for column in together]
