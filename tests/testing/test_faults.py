"""Injected faults: what each does to a real engine, a fake one, and their memory."""

from __future__ import annotations

from typing import Any

import pytest

from sdk import LLM, EngineDeadError, MemoryPool, RequestError, SamplingParams
from sdk.api.errors import OutOfMemoryError
from sdk.testing import FakeLLM, fault, slow_consumer

PARAMS = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPTS = ["the cat", "the dog", "hello"]


@pytest.fixture(params=["fake", "tiny"])
def llm(request: pytest.FixtureRequest, fake_llm: Any, tiny_llm: Any) -> Any:
    if request.param == "fake":
        return fake_llm("one two three")
    return tiny_llm(max_model_len=128, num_threads=1)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_out_of_memory_fails_every_request_and_the_engine_is_dead(llm: Any) -> None:
    pieces = []
    dead = pytest.raises(EngineDeadError, match="OutOfMemoryError")
    with fault(llm, "out_of_memory", at_step=3) as found, dead as raised:
        for piece in llm.stream(PROMPTS[0], PARAMS):
            pieces.append(piece)
    assert isinstance(raised.value.__cause__, OutOfMemoryError)
    assert found.happened and len(pieces) == 3
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS[1], PARAMS)
    llm.close()


def test_nan_logits_end_one_request_and_leave_the_cache_clean(llm: Any) -> None:
    long = "world of cats and dogs on a mat, because this text has to fill a few pages " * 2
    alone = tokens(llm.generate([long, *PROMPTS], PARAMS, use_tqdm=False))
    llm.reset_prefix_cache()
    with fault(llm, "nan_logits", at_step=2) as found:
        failed, *others = llm.generate([long, *PROMPTS], PARAMS, use_tqdm=False)
    assert found.request_id == failed.request_id
    assert failed.outputs[0].finish_reason == "error"
    assert "not finite" in failed.outputs[0].stop_reason
    assert 0 < len(failed.outputs[0].token_ids) < 8
    assert tokens(others) == alone[1:]
    [again] = llm.generate(long, PARAMS)
    assert again.num_cached_tokens == 0  # pages of the failed request were not kept
    assert tokens([again]) == alone[:1]


def test_nan_logits_hit_the_named_request(llm: Any) -> None:
    llm.enqueue(PROMPTS, PARAMS, request_id=["a", "b", "c"])
    with fault(llm, "nan_logits", request_id="b"):
        outputs = llm.wait_for_completion()
    reasons = [output.outputs[0].finish_reason for output in outputs]
    assert reasons == ["length", "error", "length"]


def test_a_slow_step_changes_no_answer(llm: Any) -> None:
    expected = tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    waits: list[float] = []
    with fault(llm, "slow_step", at_step=1, seconds=9, sleep=waits.append):
        found = tokens(llm.generate(PROMPTS, PARAMS, use_tqdm=False))
    assert (found, waits) == (expected, [9])


def test_after_the_block_nothing_is_left_of_a_fault(llm: Any) -> None:
    executor = llm._driver._engine._executor
    with fault(llm, "slow_step", seconds=0), fault(llm, "nan_logits"):
        llm.generate(PROMPTS[0], PARAMS)
    assert llm._driver._engine._executor is executor


def test_a_fault_that_did_not_happen_fails_the_test(llm: Any) -> None:
    missed = pytest.raises(AssertionError, match=r"at step 100 did not happen: \d steps ran")
    with missed, fault(llm, "out_of_memory", at_step=100):
        llm.generate(PROMPTS[0], PARAMS.clone(max_tokens=2))
    assert llm.generate(PROMPTS[0], PARAMS)[0].finished


def test_an_exception_in_the_block_is_not_replaced(llm: Any) -> None:
    with pytest.raises(ZeroDivisionError), fault(llm, "slow_step"):
        _ = 1 / 0


def test_a_dead_engine_gives_its_memory_back(tiny_llm: Any) -> None:
    pool = MemoryPool("64MiB")
    llm = tiny_llm(max_model_len=128, memory=pool)
    assert pool.used > 0
    with fault(llm, "out_of_memory"), pytest.raises(EngineDeadError):
        llm.generate(PROMPTS[0], PARAMS)
    llm.close()
    assert pool.used == 0


def test_a_killed_worker_ends_the_engine(tiny_llm: Any) -> None:
    llm: LLM = tiny_llm("q8_0", max_model_len=64, num_threads=2, tensor_parallel_size=2)
    killed = pytest.raises(EngineDeadError, match=r"rank 1 was killed \(SIGKILL")
    with fault(llm, "worker_died", at_step=2) as found, killed:
        llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    assert found.happened
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS[0], PARAMS)


def test_wrong_arguments_are_named(llm: Any) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"kind": "earthquake"}, "expected one of out_of_memory, .*, found 'earthquake'"),
        ({"kind": "slow_step", "at_step": -1}, "at_step: expected an integer of at least 0"),
        ({"kind": "slow_step", "seconds": -1}, "seconds: expected at least 0, found -1"),
        ({"kind": "worker_died"}, "tensor_parallel_size of at least 2"),
    ]
    for arguments, message in wrong:
        with pytest.raises(RequestError, match=message), fault(llm, **arguments):
            pass
    assert llm.generate(PROMPTS[0], PARAMS)[0].finished


def test_a_slow_consumer_gets_every_piece_and_delays_no_other_request(llm: Any) -> None:
    whole = llm.generate(PROMPTS[0], PARAMS)[0].outputs[0].text
    others = []

    def wait(seconds: float) -> None:  # before each piece another request runs to its end
        others.append(llm.generate(PROMPTS[1], PARAMS)[0].finished)

    pieces = list(slow_consumer(llm.stream(PROMPTS[0], PARAMS), sleep=wait))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole
    assert len(others) == len(pieces) and all(others)


def test_a_fault_in_a_fake_engine_that_died_is_no_second_error() -> None:
    with FakeLLM("a b c") as llm:
        with fault(llm, "out_of_memory"), pytest.raises(EngineDeadError):
            llm.generate("x")
        with pytest.raises(EngineDeadError), fault(llm, "slow_step"):
            pass
