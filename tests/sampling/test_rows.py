"""Row arithmetic against the plain numpy that defines it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdk.sampling.rows import RunningSum, Scratch, ascending, largest

sizes = st.sampled_from([1, 2, 255, 256, 257, 1000, 8192, 9001, 70001])


def numbers(size: int, seed: int, distinct: int) -> np.ndarray:
    """``size`` floats of which at most ``distinct`` differ, zero among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, distinct, size).astype(np.float32) / np.float32(4)


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(0, 99), st.sampled_from([2, 30, 10**6]), st.floats(0, 1))
def test_a_running_sum_finds_what_a_cumsum_does(size, seed, distinct, share: float) -> None:
    # Multiples of 1/4 add without rounding, so that every order of adding gives the same sums.
    weights = numbers(size, seed, distinct)
    weights[seed % size] = 1.0
    cumulative = weights.astype(np.float64).cumsum()
    sums = RunningSum(weights)
    assert sums.total == cumulative[-1]
    for goal in (np.floor(share * sums.total * 4) / 4, share * sums.total):
        expected = min(np.searchsorted(cumulative, goal, "left"), size - 1)
        assert sums.find(goal, "left") == expected
        if goal < sums.total:
            index = sums.find(goal, "right")
            assert index == np.searchsorted(cumulative, goal, "right") and weights[index] > 0


def test_a_goal_lost_to_rounding_is_found_at_the_last_number_that_counts() -> None:
    weights = np.zeros(300, np.float32)
    weights[[3, 270, 280]] = 1.0
    assert RunningSum(weights).find(3.5, "left") == RunningSum(weights).find(3.0, "right") == 280


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(0, 99), st.sampled_from([2, 30, 10**6]), st.data())
def test_the_largest_are_the_first_of_a_stable_descending_sort(size, seed, distinct, data) -> None:
    values = numbers(size, seed, distinct) - 1
    values[values == -1] = -np.inf
    count = data.draw(st.integers(1, min(size + 1, data.draw(st.sampled_from([9, 600, size])))))
    expected = np.sort(np.argsort(-values, kind="stable")[:count])
    assert np.array_equal(largest(values, count, Scratch(size)), expected)


@settings(max_examples=80, deadline=None)
@given(sizes, st.integers(0, 99), st.sampled_from([2, 30, 10**6]))
def test_ascending_is_a_stable_sort(size, seed, distinct) -> None:
    values = numbers(size, seed, distinct)
    values[::9] = np.inf
    values[1::9] = 1e-44  # subnormal
    order = ascending(values, Scratch(size + 5))
    assert np.array_equal(order, np.argsort(values, kind="stable"))


@pytest.mark.parametrize("offset", range(4))
def test_results_do_not_depend_on_alignment(offset: int) -> None:
    values = np.abs(np.random.default_rng(1).standard_normal(33001)).astype(np.float32)
    room = np.empty(33001 + 16, np.float32)
    moved = room[offset : offset + 33001]
    moved[:] = values
    assert RunningSum(moved).total == RunningSum(values).total
    assert moved.sum(dtype=np.float64) == values.sum(dtype=np.float64)
    assert np.array_equal(np.exp(moved), np.exp(values))
