"""Histograms: buckets, quantiles, differences, what Prometheus gets."""

from __future__ import annotations

import math
from bisect import bisect_left
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from sdk.metrics.histogram import (
    REQUEST_TIME_BOUNDS,
    SECONDS,
    TOKEN_BOUNDS,
    TOKEN_TIME_BOUNDS,
    TOKENS,
    TTFT_BOUNDS,
    Histogram,
)


def filled(values, bounds=SECONDS):
    histogram = Histogram(bounds)
    for value in values:
        histogram.add(value)
    return histogram.read()


@pytest.mark.parametrize("bounds", [SECONDS, TOKENS])
def test_buckets_are_sorted_and_at_most_an_eighth_wide(bounds):
    assert list(bounds) == sorted(set(bounds))
    widest = max(high / low for low, high in pairwise(bounds))
    assert widest < 1.1234


def test_the_exported_bounds_are_bounds_so_that_their_counts_are_exact():
    for bounds in (TTFT_BOUNDS, TOKEN_TIME_BOUNDS, REQUEST_TIME_BOUNDS):
        assert set(bounds) <= set(SECONDS)
    assert set(TOKEN_BOUNDS) <= set(TOKENS)


def test_a_value_on_a_bound_counts_as_at_most_that():
    data = filled([0.5, 0.5000001, 0.25])
    assert data.cumulative([0.25, 0.5, 0.75]) == [(0.25, 1), (0.5, 2), (0.75, 3), (math.inf, 3)]


def test_values_above_all_bounds_are_counted_and_not_lost():
    data = filled([1e9, 1.0])
    assert data.count == 2 and data.sum == 1e9 + 1
    assert data.cumulative([1.0])[-1] == (math.inf, 2)
    assert data.p99 == SECONDS[-1]


def test_several_times_the_same_value():
    histogram = Histogram()
    histogram.add(0.02, 31)
    histogram.add(0.03)
    data = histogram.read()
    assert data.count == 32 and data.sum == pytest.approx(0.65)
    assert data.mean == pytest.approx(0.65 / 32)


def test_nothing_has_no_mean_and_no_quantile():
    data = Histogram().read()
    assert math.isnan(data.mean) and math.isnan(data.p50)
    with pytest.raises(ValueError, match="from 0 to 1, found 95"):
        data.quantile(95)


@given(st.lists(st.floats(1e-5, 1e4), min_size=1, max_size=200), st.floats(0, 1))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(values, share):
    data, ordered = filled(values), sorted(values)
    true = ordered[max(math.ceil(share * len(values)) - 1, 0)]
    index = bisect_left(SECONDS, true)
    low = SECONDS[index - 1] if index else 0.0
    assert low <= data.quantile(share) <= SECONDS[index]


def test_two_snapshots_have_the_values_in_between_and_two_histograms_add_up():
    histogram = Histogram()
    histogram.add(1.0)
    before = histogram.read()
    histogram.add(2.0, 2)
    later = histogram.read()
    between = later - before
    assert (between.count, between.sum) == (2, 4.0)
    assert between + before == later
    with pytest.raises(ValueError, match="different bounds"):
        later + Histogram(TOKENS).read()
    with pytest.raises(ValueError, match="different bounds"):
        later - Histogram(TOKENS).read()


def test_a_snapshot_does_not_change():
    histogram = Histogram()
    data = histogram.read()
    histogram.add(1.0)
    assert data.count == 0 and sum(data.counts) == 0
