"""What prompt lookup proposes, from which text, and what it keeps."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sdk import SamplingParams
from sdk.api.lora import KnownAdapter, LoRARequest
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling import prompt_lookup
from sdk.engine.scheduling.prompt_lookup import PromptLookup, RecentAnswers
from sdk.engine.scheduling.request import Request, RequestStatus
from sdk.engine.scheduling.suffix_automaton import SuffixAutomaton

MIB = 2**20


def lookup(least: int = 2, most: int | None = None, num_bytes: int = MIB) -> PromptLookup:
    return PromptLookup(least, most, num_bytes, shares=True)


def request(tokens: list[int], prompt: int | None = None, **more: Any) -> Request:
    """A request with these tokens; the first ``prompt`` of them are its prompt."""
    made = Request(Job(SequenceSpec("r", SamplingParams()), tuple(tokens), **more))
    made.num_prompt_tokens = len(tokens) if prompt is None else prompt
    return made


def proposed(drafter: PromptLookup, one: Request, most: int = 4) -> list[int]:
    return list(drafter.propose(one, most)) if drafter.match(one) else []


def end(drafter: PromptLookup, one: Request, status: RequestStatus = RequestStatus.STOP) -> None:
    one.status = status
    drafter.end(one)


def test_what_followed_the_last_tokens_is_proposed() -> None:
    one, drafter = request([1, 2, 3, 4, 5, 9, 2, 3]), lookup()
    assert drafter.match(one) == 2
    assert proposed(drafter, one, 3) == [4, 5, 9]
    one.token_ids += [4, 5]
    assert drafter.match(one) == 4
    assert proposed(drafter, one, 2) == [9, 2]
    one.token_ids.append(77)
    assert not drafter.match(one)


def test_a_text_that_repeats_itself_goes_on_repeating() -> None:
    assert proposed(lookup(), request([5, 6, 7, 6, 7, 6, 7]), 5) == [6, 7, 6, 7, 6]
    assert proposed(lookup(), request([3, 3, 3]), 4) == [3, 3, 3, 3]


def test_shorter_matches_than_the_least_are_not_used() -> None:
    tokens = [1, 2, 3, 8, 2, 3]
    assert proposed(lookup(2), request(tokens)) == [8, 2, 3, 8]
    assert proposed(lookup(3), request(tokens)) == []
    assert proposed(lookup(1), request([4, 6, 4])) == [6, 4, 6, 4]


def test_with_a_limit_the_last_tokens_decide() -> None:
    """The longest match is the first occurrence; of two tokens the last one."""
    tokens = [1, 2, 3, 60, 9, 2, 3, 70, 1, 2, 3]
    assert proposed(lookup(), request(tokens), 1) == [60]
    assert proposed(lookup(2, 2), request(tokens), 1) == [70]


def test_answers_of_other_requests_are_used_if_they_match_longer() -> None:
    drafter, first = lookup(), request([1, 2, 3, 20, 21, 22, 23], prompt=3)
    drafter.match(first)
    end(drafter, first)
    asked = request([1, 2, 3])
    assert proposed(drafter, asked) == [20, 21, 22, 23]
    asked.token_ids += [20, 21]
    assert proposed(drafter, asked) == [22, 23]  # and nothing of the next answer
    own = request([9, 1, 2, 3, 55, 9, 1, 2, 3])
    assert proposed(drafter, own, 1) == [55]  # four tokens match, in the answer three


def adapter(key: str) -> KnownAdapter:
    return KnownAdapter(LoRARequest(key, 1, key), key, 8, 0, 0, lambda: None)


@pytest.mark.parametrize(
    ("owner", "other"),
    [
        ({"cache_salt": "a"}, {"cache_salt": "b"}),
        ({"adapter": adapter("a")}, {"adapter": adapter("b")}),
    ],
)
def test_answers_are_not_shared_across_salts_and_adapters(
    owner: dict[str, Any], other: dict[str, Any]
) -> None:
    drafter, first = lookup(), request([1, 2, 3, 20, 21], prompt=3, **owner)
    drafter.match(first)
    end(drafter, first)
    assert proposed(drafter, request([1, 2, 3])) == []
    assert proposed(drafter, request([1, 2, 3], **owner)) == [20, 21]
    assert proposed(drafter, request([1, 2, 3], **other)) == []


def test_answers_are_not_shared_without_a_prefix_cache() -> None:
    drafter = PromptLookup(2, None, MIB, shares=False)
    first = request([1, 2, 3, 20, 21], prompt=3)
    drafter.match(first)
    end(drafter, first)
    assert proposed(drafter, request([1, 2, 3])) == []


@pytest.mark.parametrize("status", [RequestStatus.ABORT, RequestStatus.ERROR])
def test_answers_that_did_not_finish_are_not_kept(status: RequestStatus) -> None:
    drafter, first = lookup(), request([1, 2, 3, 20, 21], prompt=3)
    drafter.match(first)
    end(drafter, first, status)
    assert proposed(drafter, request([1, 2, 3])) == []


def test_a_reset_forgets_the_answers_also_for_running_requests() -> None:
    drafter, first = lookup(), request([1, 2, 3, 20, 21], prompt=3)
    drafter.match(first)
    end(drafter, first)
    running = request([1, 2, 3])
    assert proposed(drafter, running)
    drafter.reset()
    assert proposed(drafter, running) == []


def test_answers_take_a_bounded_number_of_states() -> None:
    """The last answers stay, and owners that have not added any for the longest time go first."""
    draws, kept = random.Random(1), RecentAnswers(400)
    answers = [[draws.randrange(1000) for _ in range(30)] for _ in range(40)]
    for tokens in answers:
        kept.add(("a", None), tokens)
        assert kept.num_states <= 400
        assert (found := kept.of(("a", None))) is not None
        assert found.tokens[-31:] == [*tokens, -1]
    assert found.tokens.count(-1) >= 2, "more than the last answer has room"
    kept.add(("b", None), answers[0])
    kept.add(("c", None), [draws.randrange(1000) for _ in range(500)])
    assert kept.num_states <= 400
    assert kept.of(("a", None)) is None
    assert kept.of(("c", None)) is not None


def test_a_request_reads_the_answers_anew_when_old_ones_were_dropped() -> None:
    drafter = lookup(num_bytes=SuffixAutomaton.STATE_BYTES * 600)
    running = request([1, 2, 3])
    assert proposed(drafter, running) == []
    for number in range(12):
        other = request([1, 2, 3, *range(100 * number + 100, 100 * number + 130)], prompt=3)
        drafter.match(other)
        end(drafter, other)
        assert proposed(drafter, running, 1) == [100 * number + 100]


def test_a_long_prompt_is_read_in_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_lookup, "_TOKENS_PER_STEP", 3)
    drafter, one = lookup(), request([1, 2, 3, 4, 5, 1, 2])
    assert [drafter.match(one) for _ in range(3)] == [0, 0, 2]


def test_requests_for_which_no_memory_is_left_wait_for_another_to_end() -> None:
    drafter = PromptLookup(2, None, SuffixAutomaton.STATE_BYTES * 100, shares=False)
    first, second = request([*range(40), 1, 2]), request([*range(50, 80), 51, 52])
    assert proposed(drafter, first, 1) == [3]
    assert proposed(drafter, second, 1) == []
    end(drafter, first)
    assert proposed(drafter, second, 1) == [53]
    end(drafter, second)
    assert proposed(drafter, request([*range(40), 1, 2]), 1) == [3]
