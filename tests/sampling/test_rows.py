"""Row arithmetic against the plain numpy that defines it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from sdk.sampling.rows import Scratch, largest

sizes = st.sampled_from([1, 2, 255, 256, 257, 1000, 8192, 9001, 70001])


def numbers(size: int, seed: int, distinct: int) -> np.ndarray:
    """``size`` floats of which at most ``distinct`` differ, zero among them."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, distinct, size).astype(np.float32) / np.float32(4)


@settings(max_examples=150, deadline=None)
@given(sizes, st.integers(0, 99), st.sampled_from([2, 30, 10**6]), st.data())
def test_the_largest_are_the_first_of_a_stable_descending_sort(size, seed, distinct, data) -> None:
    values = numbers(size, seed, distinct) - 1
    values[values == -1] = -np.inf
    count = data.draw(st.integers(1, min(size + 1, data.draw(st.sampled_from([9, 600, size])))))
    expected = np.sort(np.argsort(-values, kind="stable")[:count])
    assert np.array_equal(largest(values, count, Scratch(size)), expected)


@pytest.mark.parametrize("offset", range(4))
def test_results_do_not_depend_on_alignment(offset: int) -> None:
    values = np.abs(np.random.default_rng(1).standard_normal(33001)).astype(np.float32)
    room = np.empty(33001 + 16, np.float32)
    moved = room[offset : offset + 33001]
    moved[:] = values
    assert moved.sum(dtype=np.float64) == values.sum(dtype=np.float64)
    assert np.array_equal(np.exp(moved), np.exp(values))
