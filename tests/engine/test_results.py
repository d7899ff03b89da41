"""Log-probabilities take memory and time of a step: both are bounded, and who asks for none waits
for nobody.
"""

from __future__ import annotations

import pytest

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.engine.scheduling.results import ResultBudget, ResultReservation

MIB = 2**20


def test_a_request_whose_results_have_no_room_waits_and_lets_others_pass(rig) -> None:
    busy = rig(max_result_bytes=100)
    rooms = {name: ResultReservation(nbytes) for name, nbytes in (("a", 60), ("b", 60), ("c", 30))}
    for name in ("a", "b", "c", "plain"):
        busy.add(name, [1, 2, 3], max_tokens=4).results = rooms.get(name)
    busy.step()
    running = {name for name, one in busy.requests.items() if one.status.value == "running"}
    assert running == {"a", "plain"}  # c would fit, but came after b
    while busy.scheduler.queues.num_running:
        busy.step()
    assert busy.requests["b"].status.value == "waiting"  # the caller of a has not got its results
    busy.scheduler.admission.release_results(rooms["a"])
    busy.run()
    assert all(room.active for name, room in rooms.items() if name != "a")
    busy.assert_answers()


def test_answers_of_one_call_share_their_room_and_a_preempted_one_keeps_it(rig) -> None:
    small = rig(max_result_bytes=100, num_pages=9, max_num_batched_tokens=64)
    room = ResultReservation(100)
    for first in (1, 2):
        small.add(f"{first}", [first, 2, 3, 4, 5, 6, 7], max_tokens=14).results = room
    small.run()
    assert (
        small.scheduler.queues.num_preemptions and small.scheduler.admission.reserved_bytes == 100
    )
    small.assert_answers()


@pytest.mark.parametrize("num_scoring", [1, 3])
def test_a_step_in_which_others_decode_scores_a_part_of_a_prompt(rig, num_scoring: int) -> None:
    mixed = rig(max_scored_tokens=8)
    mixed.add("stream", [1, 2], max_tokens=40)
    mixed.step()
    for index in range(num_scoring):
        mixed.add(f"scored {index}", list(range(1, 31)), prompt_logprobs=1, max_tokens=1)
    mixed.add("prompt", list(range(40, 90)), max_tokens=2)
    most = 0
    while mixed.scheduler.queues.num_running:
        plan, _ = mixed.step()
        counts = {row.request_id: row.num_scheduled_tokens for row in plan.rows}
        if "stream" in counts:
            scored = [num for name, num in counts.items() if name.startswith("scored")]
            most = max(most, sum(num for num in scored if num > 1))  # one is a decode's
    assert most == 8
    assert all(one.num_prompt_scored == 29 for n, one in mixed.requests.items() if "scored" in n)
    mixed.assert_answers()


def test_prompts_are_scored_at_full_speed_where_nobody_decodes(rig) -> None:
    alone = rig(max_scored_tokens=8)
    alone.add("scored", list(range(1, 61)), prompt_logprobs=1, max_tokens=1)
    plan, _ = alone.step()
    assert {row.request_id: row.num_scheduled_tokens for row in plan.rows} == {"scored": 60}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"prompt_logprobs": -1}, ["prompt_logprobs=-1", "399 prompt tokens", "for 85 tokens;"]),
        ({"logprobs": -1, "n": 16}, ["logprobs=-1", "16000 tokens of answers", "for 85 tokens;"]),
        ({"logprobs": 1024, "n": 2}, ["logprobs=1024", "2000 tokens", "for 1310 tokens;"]),
        ({"logprobs": 0, "logprob_token_ids": range(4096)}, ["4096 logprob_token_ids"]),
        ({"logprobs": -1, "prompt_logprobs": 600, "max_tokens": 75}, ["together need"]),
    ],
)
def test_results_beyond_the_limit_are_refused_with_what_would_fit(values, words) -> None:
    limit = ResultBudget.for_plan(100 * MIB, 49_152)
    with pytest.raises(RequestError) as caught:
        limit.required_bytes(SamplingParams(**values), 400, 1400)
    for word in [*words, "16.0 MiB"] if "max_tokens" not in values else words:
        assert word in str(caught.value)


def test_what_fits_is_counted_and_short_rows_are_free() -> None:
    limit = ResultBudget.for_plan(800 * MIB, 49_152)
    assert (
        limit.required_bytes(SamplingParams(logprobs=20, prompt_logprobs=20, n=64), 10, 100_000)
        == 0
    )
    whole = limit.required_bytes(SamplingParams(logprobs=-1, max_tokens=10, n=2), 10, 8192)
    assert 20 * 4 * 49_152 <= whole <= 20 * 4 * 50_000
    assert limit.required_bytes(SamplingParams(), 8192, 8192) == 0
    assert (
        ResultBudget.for_plan(800 * MIB, 15).required_bytes(
            SamplingParams(logprobs=-1), 10, 100_000
        )
        == 0
    )
