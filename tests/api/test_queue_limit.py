"""max_waiting: a call beyond the limit is refused at once, and nothing of it runs."""

from __future__ import annotations

import asyncio
import pickle
import threading
from pathlib import Path

import pytest

from sdk import LLM, AsyncLLM, QueueFullError, RequestError, SamplingParams, SdkError
from tests.api.engines import Gate

ONE = SamplingParams(max_tokens=1, temperature=0)
LONG = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)


def ids(seed: int, count: int = 5) -> dict:
    return {"prompt_token_ids": [(seed * 31 + i * 7) % 90 + 5 for i in range(count)]}


@pytest.fixture
def small(tiny_path: Path):
    """Two slots, and three requests may wait."""
    with LLM(tiny_path, max_model_len=64, max_num_seqs=2, max_waiting=3) as llm:
        yield llm


def test_the_limit_is_exact_and_a_refused_call_leaves_nothing(small: LLM) -> None:
    names = [small.enqueue(ids(i), ONE)[0] for i in range(5)]
    for call in (
        lambda: small.enqueue(ids(9), ONE),
        lambda: small.generate(ids(9), ONE),
        lambda: small.stream(ids(9), ONE),
        lambda: small.embed(ids(9)),
        lambda: asyncio.run(small.agenerate(ids(9), ONE)),
    ):
        with pytest.raises(QueueFullError, match=r"take 5 slots, and at most 5 are allowed") as hit:
            call()
        assert 0 < hit.value.expected_wait < 60
    assert [output.request_id for output in small.wait_for_completion()] == names
    assert small.get_metrics()["num_finished"] == 5
    assert small.generate(ids(9), ONE)


def test_a_large_batch_is_accepted_as_a_whole_when_there_is_room(small: LLM) -> None:
    assert len(small.generate([ids(i) for i in range(40)], ONE, use_tqdm=False)) == 40
    small.enqueue([ids(i) for i in range(4)], ONE)
    small.enqueue([ids(i) for i in range(9)], ONE)
    with pytest.raises(QueueFullError, match="take 13 slots"):
        small.enqueue([ids(i) for i in range(2)], ONE)
    assert len(small.wait_for_completion()) == 13


def test_answers_and_negative_prompts_count_by_their_slots(small: LLM) -> None:
    small.enqueue(ids(0), ONE.clone(n=3, temperature=1))
    small.enqueue(ids(1), ONE.clone(guidance_scale=1.5))
    with pytest.raises(QueueFullError, match="take 5 slots"):
        small.enqueue(ids(2), ONE)
    small.wait_for_completion()


def test_it_holds_when_many_threads_call_at_once(small: LLM) -> None:
    accepted: list[str] = []
    refused: list[float] = []
    start = threading.Barrier(40)

    def call(seed: int) -> None:
        start.wait()
        try:
            accepted.extend(small.enqueue(ids(seed), ONE))
        except QueueFullError as error:
            refused.append(error.expected_wait)

    threads = [threading.Thread(target=call, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(accepted), len(refused)) == (5, 35)
    assert len(small.wait_for_completion()) == 5


def test_without_waiting_only_free_slots_count(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, max_num_seqs=2, max_waiting=0) as llm:
        gate = Gate()  # so that both still run when the third one comes, however fast they are
        first = llm.stream(ids(0), LONG.clone(logits_processors=[gate]))
        second = llm.stream(ids(1), LONG)
        with pytest.raises(QueueFullError):
            llm.generate(ids(2), ONE)
        gate.open()
        first.close()
        list(second)
        assert llm.generate(ids(2), ONE)


def test_a_request_that_is_being_aborted_takes_no_slot(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, max_num_seqs=1, max_waiting=0) as llm:
        gate = Gate()
        first = llm.stream(ids(0), LONG.clone(logits_processors=[gate]))
        with pytest.raises(QueueFullError):
            llm.enqueue(ids(1), ONE)
        first.close()  # it is still in its step
        second = llm.enqueue(ids(1), ONE)
        gate.open()
        assert [output.request_id for output in llm.wait_for_completion()] == second


def test_a_tenant_that_uses_less_than_its_share_is_accepted_beside_a_full_queue(
    tiny_path: Path,
) -> None:
    options = {"max_model_len": 64, "max_num_seqs": 2, "max_waiting": 6}
    with LLM(tiny_path, **options, scheduling_policy="fair", tenant_weights={"chat": 3}) as llm:
        llm.enqueue([ids(i) for i in range(50)], ONE.clone(tenant="batch"))
        with pytest.raises(QueueFullError):
            llm.enqueue(ids(99), ONE.clone(tenant="batch"))
        chat = [llm.enqueue(ids(60 + i), ONE.clone(tenant="chat")) for i in range(6)]
        with pytest.raises(QueueFullError, match="take 56 slots"):
            llm.enqueue(ids(70), ONE.clone(tenant="chat"))
        assert len(chat) == 6  # three quarters of the eight places
        llm.wait_for_completion()


def test_the_stages_of_one_call_are_not_refused_half_way(small: LLM) -> None:
    from sdk import BeamSearchParams

    others = [small.enqueue(ids(i), LONG) for i in range(4)]
    [found] = small.beam_search(ids(9), BeamSearchParams(beam_width=3, max_tokens=4))
    assert len(found.sequences) == 3 and len(others) == 4
    small.wait_for_completion()


def test_an_async_stream_is_refused_at_its_first_piece(small: LLM) -> None:
    names = small.enqueue([ids(i) for i in range(5)], ONE)

    async def first_piece() -> None:
        stream = AsyncLLM(small).generate(ids(9), ONE, "mine")
        with pytest.raises(QueueFullError):
            await stream.__anext__()

    asyncio.run(first_piece())
    assert len(small.wait_for_completion()) == len(names)


def test_the_expected_wait_follows_how_fast_requests_end(small: LLM) -> None:
    small.enqueue([ids(i) for i in range(5)], ONE)
    with pytest.raises(QueueFullError) as early:
        small.enqueue(ids(9), ONE)
    small.wait_for_completion()
    small.enqueue([ids(i) for i in range(5)], LONG)
    for _ in range(100):
        small.step()
        if small.get_metrics()["num_finished"] >= 9:
            break
    small.enqueue([ids(i) for i in range(9)], ONE)
    with pytest.raises(QueueFullError) as later:
        small.enqueue(ids(9), ONE)
    assert early.value.expected_wait >= 1.0 > later.value.expected_wait >= 0.05
    small.wait_for_completion()


def test_the_error_is_no_error_of_the_request_and_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(QueueFullError("full", 2.5)))
    assert str(error) == "full" and error.expected_wait == 2.5
    assert isinstance(error, SdkError) and not isinstance(error, RequestError)


@pytest.mark.parametrize("value", [-1, 1.5, "3", True])
def test_a_bad_limit_is_refused(value: object) -> None:
    with pytest.raises(RequestError, match="max_waiting: expected an integer in 0"):
        LLM("model", max_waiting=value)
