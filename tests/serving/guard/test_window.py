"""The sliding window against an oracle that adds up all charges every time."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, strategies as st

from sdk.serving.guard.window import Entry, SlidingWindow

LIMIT = 20
#: Steps of whole and half seconds, so that many land exactly on the border of the window.
steps = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.5, 1.0, 5.0, 30.0, 60.0, 61.0]),
        st.integers(1, LIMIT + 2),
        st.one_of(st.none(), st.tuples(st.integers(0, 40), st.integers(0, LIMIT))),
    ),
    max_size=60,
)


@given(steps)
def test_a_charge_fits_exactly_if_the_last_minute_leaves_room(
    steps: list[tuple[float, int, tuple[int, int] | None]],
) -> None:
    window, now = SlidingWindow(60.0), 0.0
    charged: list[Entry] = []

    def used(at: float) -> int:
        return sum(e.amount for e in charged if at - 60 < e.at <= at)

    for passed, amount, correction in steps:
        now += passed
        wait = window.wait(amount, LIMIT, now)
        assert window.total == used(now)
        assert (wait == 0) == (used(now) + amount <= LIMIT)
        if wait == 0:
            charged.append(window.charge(amount, now))
        elif amount > LIMIT:
            assert wait == math.inf
        else:  # not a moment earlier, not a moment later
            assert used(now + wait) + amount <= LIMIT
            assert used(now + wait - 0.25) + amount > LIMIT
        if correction and charged:
            which, actual = correction
            entry = charged[which % len(charged)]
            if not entry.expired:  # a charge only shrinks
                window.correct(entry, min(actual, entry.amount))
            else:
                before = window.total
                window.correct(entry, 0)
                assert window.total == before
    assert window.reset_after(now + 120) == 0 and len(window) == 0 and window.total == 0


def test_reset_is_the_time_until_nothing_counts_any_more() -> None:
    window = SlidingWindow(60.0)
    window.charge(1, 10.0)
    window.charge(1, 40.0)
    assert window.reset_after(45.0) == 55.0
    assert window.reset_after(99.5) == 0.5
    assert window.reset_after(100.0) == 0.0


def test_the_log_forgets_what_is_old() -> None:
    window = SlidingWindow(60.0)
    for second in range(10_000):
        window.charge(1, float(second))
    assert len(window) == 60
    assert window.total == 60


@pytest.mark.parametrize("amount", [1, 7])
def test_a_charge_counts_until_its_age_is_the_window(amount: int) -> None:
    window = SlidingWindow(60.0)
    window.charge(amount, 0.0)
    assert window.wait(1, amount, 59.999) == pytest.approx(0.001)
    assert window.wait(1, amount, 60.0) == 0
