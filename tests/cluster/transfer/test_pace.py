"""How much a receiver writes between two steps."""

from __future__ import annotations

import time

from sdk import LLM
from sdk.cluster.transfer import EnginePages
from sdk.cluster.transfer.intake import Pace
from tests.cluster.transfer.pairs import LIMIT, PARAMS, PREFILL, PROMPT, Pair, answer, facts, tcp


def test_without_requests_everything_is_written_at_once(engines: tuple[LLM, LLM]) -> None:
    pace = Pace(EnginePages.of(engines[0]), 0.1)
    pace.wait()  # for nothing
    assert pace.write(100, 0.0, lambda count: count) == 100


def test_while_requests_run_a_share_of_the_time_of_a_step_is_used(
    engines: tuple[LLM, LLM],
) -> None:
    llm = engines[0]
    pace = Pace(EnginePages.of(llm), 0.1)
    llm.enqueue([PROMPT], PARAMS)
    llm.step()
    assert pace.write(100, 0.0, lambda count: count) == 1  # it is not known yet what one takes
    begin = time.monotonic()
    pace.wait()  # the host does not step: it goes on after a while
    assert time.monotonic() - begin < LIMIT
    assert pace.write(100, 0.0, lambda count: count) == 1  # no step since
    llm.step()
    pace._page_seconds = 1e-9
    assert pace.write(100, 0.0, lambda count: count) == 100
    for page, received in ((1e9, 0.0), (1e-9, 1e9)):  # writing or receiving takes too long
        llm.step()
        pace._page_seconds = page
        assert pace.write(100, received, lambda count: count) == 1
    llm.wait_for_completion()


def test_a_running_request_gets_its_tokens_while_a_prompt_arrives(two: Pair) -> None:
    """Page after page between its steps, with the answers of both as they are alone."""
    prompt = [9 + i for i in range(20)]
    alone, expected = facts(answer(two.b, prompt)), facts(answer(two.b))
    two.b.reset_prefix_cache()
    answer(two.a, PROMPT, PREFILL)
    two.b.enqueue([prompt], PARAMS)
    two.b.step()
    steps = two.b._driver.engine.scheduler.num_steps
    transfer_id = two.begin()
    while not two.receiver.result(transfer_id).done():
        two.b.step()
        time.sleep(0.001)
    assert two.end(transfer_id).num_tokens == 64
    assert two.b._driver.engine.scheduler.num_steps > steps
    [output] = two.b.wait_for_completion()
    assert facts(output) == alone
    output = answer(two.b)
    assert output.num_cached_tokens == 64 and facts(output) == expected


def test_hand_overs_to_one_receiver_take_turns(engines: tuple[LLM, LLM]) -> None:
    """Several at a time; each is as good as alone."""
    a, b = engines
    for llm in engines:
        llm.reset_prefix_cache()
    two = Pair(a, b, *tcp(), max_active=2)
    prompts = [[3 + (seed * 37 + i * 11) % 400 for i in range(70)] for seed in range(6)]
    a.generate(prompts, PREFILL)
    names = [two.begin(prompt) for prompt in prompts]
    assert [two.end(name).num_tokens for name in names] == [64] * 6
    two.close()
