"""Which rank gets which experts: balanced by load, with copies of the busiest."""

from __future__ import annotations

from collections import Counter
from itertools import chain

import pytest
from hypothesis import given, strategies as st

from sdk.models.experts.placement import Placement, busiest, place_experts, rebalanced
from sdk.quant.errors import AlignmentError


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """Loads, ranks, redundant experts, and the first rank with one more."""
    ranks = draw(st.integers(1, 6))
    count = draw(st.integers(ranks, 12))
    loads = draw(st.lists(st.integers(0, 1000), min_size=count, max_size=count))
    return loads, ranks, draw(st.integers(0, count * (ranks - 1))), draw(st.integers(0, 7))


def check(placement: Placement, count: int, ranks: int, redundant: int) -> None:
    assert len(placement) == ranks
    copies = Counter(chain(*placement))
    assert set(copies) == set(range(count)) and copies.total() == count + redundant
    for own in placement:
        assert sorted(set(own)) == list(own)
    sizes = {len(own) for own in placement}
    assert max(sizes) - min(sizes) <= 1 and min(sizes) >= 1


@given(problems())
def test_every_expert_has_a_rank_and_ranks_have_equal_numbers(
    problem: tuple[list[int], int, int, int],
) -> None:
    loads, ranks, redundant, turn = problem
    placement = place_experts(loads, ranks, redundant, turn)
    check(placement, len(loads), ranks, redundant)
    assert placement == place_experts(list(loads), ranks, redundant, turn)
    first = turn % ranks
    assert len(placement[first]) == max(map(len, placement))


@given(problems(), st.randoms(use_true_random=False))
def test_a_new_balance_is_never_worse_and_keeps_the_numbers_of_experts(
    problem: tuple[list[int], int, int, int], random: object
) -> None:
    loads, ranks, redundant, turn = problem
    before = place_experts([0] * len(loads), ranks, redundant, turn)
    after = rebalanced(before, loads, redundant, turn)
    check(after, len(loads), ranks, redundant)
    assert list(map(len, after)) == list(map(len, before))
    assert busiest(after, loads) <= busiest(before, loads)
    assert rebalanced(after, loads, redundant, turn) == after


def test_without_a_load_experts_are_dealt_out_in_turn() -> None:
    assert place_experts([0] * 5, 2) == ((0, 2, 4), (1, 3))
    assert place_experts([0] * 5, 2, turn=1) == ((1, 3), (0, 2, 4))


def test_the_busiest_experts_get_the_copies() -> None:
    placement = place_experts([100, 5, 60, 5], 2, redundant=2)
    copies = Counter(chain(*placement))
    assert copies == {0: 2, 2: 2, 1: 1, 3: 1}
    assert busiest(placement, [100, 5, 60, 5]) == 85


def test_a_busy_expert_is_alone_with_those_that_have_little_to_do() -> None:
    loads = [9, 1, 1, 9, 2, 2]
    assert place_experts(loads, 2) == ((0, 1, 4), (2, 3, 5))
    assert busiest(place_experts(loads, 2), loads) == 12


def test_a_rank_keeps_its_experts_where_it_can() -> None:
    """The balance of these loads swaps what two of the three ranks have: they keep theirs."""
    before = ((4, 5), (0, 1), (2, 3))
    after = rebalanced(before, [5, 1, 5, 1, 5, 1], redundant=0)
    assert after == before  # no rank would have less to do
    loads = [9, 1, 8, 2, 9, 6]
    after = rebalanced(before, loads, redundant=0)
    assert busiest(after, loads) < busiest(before, loads)
    assert sum(len(set(a) & set(b)) for a, b in zip(before, after, strict=True)) >= 3


def test_a_place_is_made_for_a_copy_that_no_free_rank_can_take() -> None:
    """Every expert on every rank: the last ones only fit after a swap, whatever the loads."""
    for loads in ([1, 50, 7, 3], [0, 0, 0, 9], [4, 4, 4, 4]):
        assert place_experts(loads, 3, redundant=8) == ((0, 1, 2, 3),) * 3
        check(place_experts(loads, 3, redundant=7), 4, 3, 7)


def test_a_rank_without_an_expert_is_refused() -> None:
    with pytest.raises(AlignmentError, match="cannot spread 2 experts over 3 ranks: expected at"):
        place_experts([0, 0], 3)


def test_more_copies_than_ranks_are_refused() -> None:
    with pytest.raises(AlignmentError, match=r"expected at most 4 \(4 experts on each of 2 ranks"):
        place_experts([0] * 4, 2, redundant=5)
