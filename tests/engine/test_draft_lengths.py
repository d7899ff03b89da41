"""How many drafts are verified, from measured step times and acceptance."""

from __future__ import annotations

import pytest

from sdk import SamplingParams
from sdk.engine.job import Job
from sdk.engine.pages.page_pool import PagePool
from sdk.engine.plan import SequenceSpec, StepRow
from sdk.engine.scheduling.decode_costs import DecodeCosts
from sdk.engine.scheduling.draft_lengths import Acceptance, DraftHistory, DraftLengths
from sdk.engine.scheduling.drafts import Drafter, Drafts
from sdk.engine.scheduling.request import Request


def lengths(seconds: dict[int, float]) -> DraftLengths:
    """``seconds``: by number of tokens. The smallest is that of a step without drafts."""
    made = DraftLengths()
    for size, value in seconds.items():
        made.costs.learn(min(seconds), size, value)
    return made


def test_step_times_between_measured_sizes_are_interpolated() -> None:
    costs = DecodeCosts()
    assert costs(1, 4) == 0.0
    costs.learn(1, 1, 10.0)
    assert costs(1, 1) == 10.0
    assert 10.0 < costs(1, 2) < 20.0  # a guess
    costs.learn(1, 9, 18.0)
    assert [costs(1, n) for n in (3, 5, 17)] == [12.0, 14.0, 26.0]
    costs.learn(1, 9, 1000.0)  # disturbed
    assert costs(1, 9) == pytest.approx(22.5)


def test_numbers_of_requests_are_measured_separately() -> None:
    """Four requests, and one with three drafts that a model had to make first."""
    costs = DecodeCosts()
    costs.learn(1, 1, 10.0)
    costs.learn(1, 4, 40.0)
    assert costs(4, 4) == 0.0, "a step without drafts must be measured"
    costs.learn(4, 4, 12.0)
    assert costs(4, 4) == 12.0
    assert costs(4, 7) == 42.0, "drafts take as long as for one request"
    costs.learn(4, 7, 20.0)
    assert costs(4, 7) == 20.0


def test_drafts_of_weights_take_the_same_time_each() -> None:
    costs = DecodeCosts()
    costs.learn(1, 1, 10.0)
    costs.learn(1, 3, 22.0, on_ranks=True)
    assert costs(1, 9, on_ranks=True) == 58.0
    assert costs(1, 1, on_ranks=True) == 10.0
    costs.learn(1, 5, 50.0, on_ranks=True)  # 10 for each draft
    assert costs(1, 3, on_ranks=True) == 24.0
    assert 10.0 < costs(1, 3) < 24.0, "a match costs no time to find"
    costs.learn(4, 4, 20.0)
    assert costs(4, 6, on_ranks=True) == 34.0, "as for one request"


def test_a_step_without_drafts_is_measured_again() -> None:
    costs = DecodeCosts()
    costs.learn(1, 1, 100.0)  # disturbed
    for _ in range(256):
        costs.learn(1, 9, 20.0)
        assert costs(1, 1)
    costs.learn(1, 9, 20.0)
    assert costs(1, 1) == 0.0
    costs.learn(1, 1, 10.0)
    assert costs(1, 1) == 77.5


def test_a_size_that_is_not_measured_any_more_is_forgotten() -> None:
    costs = DecodeCosts()
    costs.learn(1, 1, 10.0)
    costs.learn(1, 9, 500.0)
    costs.learn(2, 2, 10.0)
    for _ in range(2048):
        costs.learn(1, 1, 10.0)
    assert costs(1, 9) < 50.0
    assert costs(2, 2) == 0.0


def test_cheap_tokens_are_drafted_and_dear_ones_are_not() -> None:
    cheap, dear = {1: 10.0, 9: 11.0}, {1: 10.0, 9: 90.0}
    assert lengths(cheap).choose([0.9], [8], 1, 64) == [8]
    assert lengths(dear).choose([0.9], [8], 1, 64) == [0]
    assert lengths(cheap).choose([0.02], [8], 1, 64) == [0]
    few, many = (lengths({1: 10.0, 9: 20.0}).choose([x], [8], 1, 64)[0] for x in (0.5, 0.95))
    assert 0 < few < many


def test_requests_that_accept_more_get_more() -> None:
    found = lengths({2: 10.0, 18: 30.0}).choose([0.95, 0.4], [8, 8], 2, 64)
    assert found[0] > found[1]


def test_the_budget_is_shared() -> None:
    found = lengths({4: 10.0, 36: 11.0}).choose([0.99] * 4, [8, 8, 8, 8], 4, 10)
    assert found == [2, 2, 2, 2]
    assert lengths({3: 10.0, 36: 11.0}).choose([0.99] * 3, [8, 1, 8], 3, 1) == [1, 0, 0]


def test_nothing_is_drafted_before_a_plain_step_was_measured() -> None:
    assert lengths({}).choose([0.99], [8], 1, 64) == [0]


def test_acceptance_follows_the_request_and_the_length_of_the_match() -> None:
    history = DraftHistory(Acceptance.of_weights())
    short, long = (history.acceptance(match, on_ranks=False) for match in (2, 20))
    assert short < long
    history.learn(8, 0)  # a long match
    assert history.acceptance(20, on_ranks=False) < long
    assert history.acceptance(2, on_ranks=False) == short
    for count in range(1, 20):
        history.learn(8 + 4 * count, 4 * count)
    assert history.acceptance(2, on_ranks=False) > 0.9


def test_a_request_begins_with_what_weights_achieved_for_others() -> None:
    of_weights = Acceptance.of_weights()
    first = DraftHistory(of_weights)
    expected = first.acceptance(1, on_ranks=True)
    for count in range(1, 20):
        first.learn(4 * count, 4 * count)
    second = DraftHistory(of_weights)
    assert second.acceptance(1, on_ranks=True) > 0.9 > expected
    match = second.acceptance(20, on_ranks=False)
    second.learn(8, 0)  # a match that was wrong
    assert second.acceptance(20, on_ranks=False) < match
    assert second.acceptance(1, on_ranks=True) == DraftHistory(of_weights).acceptance(
        1, on_ranks=True
    )


class Wrong(Drafter):
    def propose(self, request: Request, most: int) -> list[int]:
        return [7] * most


def test_what_does_not_pay_off_is_tried_again_ever_more_rarely() -> None:
    """All drafts are rejected, and a step takes longer with them: at most 1 in 30 has any."""
    drafts = Drafts(Wrong(), 8, DraftLengths(), 64)
    pool = PagePool(100, 16, True)
    request = Request(Job(SequenceSpec("r", SamplingParams()), (1, 2, 3)))
    request.max_len, request.pages = 10**6, pool.acquire((), 20) or []
    verified = []
    for step in range(3000):
        count = 0
        if drafts.choose([request], 64, step):
            count = len(drafts.take(request, 64, pool))
        request.num_draft_tokens += count
        drafts.learn_step([StepRow("r", 1 + count)], 1 + count, 10.0 + count)
        verified.append(count)
    tried = [step for step, count in enumerate(verified) if count]
    assert sum(step >= 1000 for step in tried) in range(1, 9)
    assert len(tried) < 40
    assert sum(verified) / (10 * len(verified)) < 0.01, "the time that drafts took"


def test_a_repeated_batch_is_not_looked_at_before_it_is_due() -> None:
    class Nothing(Wrong):
        looks = 0

        def match(self, request: Request) -> int:
            self.looks += 1
            return 0

    drafter = Nothing()
    drafts = Drafts(drafter, 8, DraftLengths(), 64)
    request = Request(Job(SequenceSpec("r", SamplingParams()), (1, 2, 3)))
    request.max_len = 1000
    for step in range(400):
        assert not drafts.choose([request], 64, step, repeats=True)
    assert 100 <= drafter.looks < 130
