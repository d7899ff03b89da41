"""Several processes with one engine each, behind one ``LLM``."""

from __future__ import annotations

import asyncio
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from sdk import (
    LLM,
    AlignmentError,
    AsyncLLM,
    CheckpointError,
    EngineClosedError,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
)
from sdk.api.params import RequestOutputKind
from sdk.cluster.replicas.messages import Call
from sdk.testing import tiny_adapter, tiny_model
from tests.cluster.replicas.conftest import children, replicas

PROMPTS = [f"a prompt with the number {i}" for i in range(12)]
DRAWN = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, logprobs=1)


def descriptors() -> int:
    """How many files this process has open."""
    return len(list(Path("/proc/self/fd").iterdir()))


def answers(outputs: list[Any]) -> list[Any]:
    return [
        [(one.index, one.token_ids, one.text, one.cumulative_logprob) for one in output.outputs]
        for output in outputs
    ]


def test_answers_are_those_of_one_engine_bit_for_bit(one: LLM, two: LLM) -> None:
    """Also without a seed: it is drawn where the request is accepted, in the same order."""
    for params in (DRAWN, DRAWN.clone(n=3), DRAWN.clone(temperature=0, stop=["e"])):
        expected = one.generate(PROMPTS, params.clone(seed=5))
        assert answers(two.generate(PROMPTS, params.clone(seed=5))) == answers(expected)


@pytest.mark.slow
def test_unseeded_answers_are_those_of_one_engine(tiny_path: Path) -> None:
    found = []
    for size in (1, 2):
        with LLM(tiny_path, max_model_len=128, data_parallel_size=size, seed=3) as llm:
            found.append([answers(llm.generate(PROMPTS, DRAWN)) for _ in range(2)])
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


def test_both_replicas_run_requests_and_the_numbers_are_sums(two: LLM) -> None:
    before = two.get_metrics()
    two.generate(PROMPTS, DRAWN)
    after = two.get_metrics()
    assert after["num_finished"] - before["num_finished"] == len(PROMPTS)
    assert after["num_generation_tokens"] - before["num_generation_tokens"] == 12 * len(PROMPTS)
    assert after["num_replicas"] == 2
    steps = two._driver.call_all("", "get_metrics")
    assert all(part["num_finished"] > 0 for part in steps)
    stats = two.stats()
    assert stats.metrics["num_finished"] == sum(part["num_finished"] for part in steps)
    assert stats.requests.ttft.count == stats.requests.num_finished


def test_streams_chats_and_awaited_calls_work(one: LLM, two: LLM) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    pieces = [piece.outputs[0].text for piece in two.stream("once upon", greedy)]
    assert "".join(pieces) == one.generate("once upon", greedy)[0].outputs[0].text
    assert len(pieces) > 1

    async def both() -> tuple[Any, str]:
        made = two.agenerate(PROMPTS, greedy)
        text = ""
        async for piece in two.astream("once upon", greedy):
            text += piece.outputs[0].text
        return await made, text

    outputs, text = asyncio.run(both())
    assert text == "".join(pieces)
    assert answers(outputs) == answers(one.generate(PROMPTS, greedy))
    assert two.embed("a text")[0].embedding == one.embed("a text")[0].embedding


def test_enqueued_requests_can_be_stepped_pumped_and_aborted(two: LLM) -> None:
    params = SamplingParams(
        max_tokens=20, ignore_eos=True, output_kind=RequestOutputKind.FINAL_ONLY
    )
    names = two.enqueue(PROMPTS, params)
    found = []
    while two.has_unfinished_requests:
        found += two.step()
    assert sorted(output.request_id for output in found if output.finished) == sorted(names)
    two.enqueue(["x"], params.clone(max_tokens=100), request_id="long")
    two.abort("long")
    ended = []
    while two.has_unfinished_requests:
        ended += two.pump(50)
    assert [output.outputs[0].finish_reason for output in ended] == ["abort"]


def test_structured_answers_are_compiled_in_the_replicas(two: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    [output] = two.generate("a number:", SamplingParams(max_tokens=40), returns=schema)
    assert isinstance(output.parsed["n"], int)


def test_requests_that_come_together_run_in_one_step(two: LLM) -> None:
    before = two.get_metrics()["num_steps"]
    two.generate([f"one of many {i}" for i in range(40)], SamplingParams(max_tokens=1))
    assert two.get_metrics()["num_steps"] - before < 20


def test_outputs_share_the_list_of_the_prompt_and_nothing_is_kept(two: LLM) -> None:
    pieces = list(two.stream("once upon a time", SamplingParams(max_tokens=6, ignore_eos=True)))
    assert len({id(piece.prompt_token_ids) for piece in pieces}) == 1
    assert pieces[0].prompt_token_ids == two.get_tokenizer().encode("once upon a time")
    assert pieces[-1].prompt == "once upon a time"
    assert not two._driver._requests and not two._driver._calls


def test_an_abort_does_not_wait_for_calls(two: LLM) -> None:
    [name] = two.enqueue(["x"], SamplingParams(max_tokens=110, ignore_eos=True))
    for number in two._driver.alive()[1]:
        two._driver.processes.send(number, Call(-2, "calls", "pin", (None, None)))  # fails
    two.abort(name)
    ended = []
    while two.has_unfinished_requests:
        ended += two.step()
    assert ended[-1].finished


def test_requests_and_results_have_a_largest_size(
    two: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.cluster.replicas.messages._MOST_JOB", 500)
    with pytest.raises(RequestError, match="a request has at most 500 bytes, found"):
        two.generate([{"prompt_token_ids": [5] * 120}], SamplingParams(max_tokens=1))
    assert not two.has_unfinished_requests
    monkeypatch.setattr("sdk.cluster.wire.stream.MAX_FRAME", 500)
    with pytest.raises(RequestError, match="cross processes, at most"):
        two.snapshot("a prompt of some length that is sent to a replica " * 3)


def test_a_failed_sleep_leaves_it_awake(two: LLM) -> None:
    with pytest.raises(RequestError, match="expected level 1 or 2"):
        two.sleep(3)
    assert two.generate("x", DRAWN)[0].finished


def test_bad_requests_are_refused_and_others_go_on(two: LLM) -> None:
    with pytest.raises(RequestError, match="temperature"):
        two.generate("x", SamplingParams(temperature=-1))
    with pytest.raises(RequestError, match="must be picklable"):
        two.generate("x", SamplingParams(logits_processors=[lambda ids, logits: logits]))
    elsewhere = types.ModuleType("only_in_this_process")
    exec("def keep(ids, logits): return logits", elsewhere.__dict__)
    sys.modules[elsewhere.__name__] = elsewhere
    try:
        with pytest.raises(RequestError, match=r"cannot import .*ModuleNotFoundError.*only_in"):
            two.generate("x", SamplingParams(logits_processors=[elsewhere.keep]))
    finally:
        del sys.modules[elsewhere.__name__]
    with pytest.raises(RequestError, match="other processes; trace the same"):
        two.trace("trace.json")
    with pytest.raises(RequestError, match="data_parallel_size=1"):
        two._driver.wrap_executor(lambda executor: executor)
    with pytest.raises(RequestError, match="ranks are in other processes"):
        two._runner()
    assert two.generate("x", DRAWN)[0].finished


def test_prefixes_are_pinned_restored_and_forgotten_everywhere(two: LLM, one: LLM) -> None:
    prompt = "a long beginning that many requests have in common, kept for them all " * 2
    snapshot = one.snapshot(prompt)
    assert two.restore(snapshot) == len(snapshot.token_ids)
    assert two.snapshot(prompt).token_ids == snapshot.token_ids
    held = two.pin(prompt)
    assert held == len(snapshot.token_ids)
    parts = two._driver.call_all("", "get_metrics")
    assert all(part["num_pages_pinned"] > 0 for part in parts)
    assert two.unpin(prompt)
    assert two.reset_prefix_cache()


@pytest.mark.slow
def test_memory_is_one_budget_for_all_replicas(tiny_path: Path) -> None:
    plan = LLM.plan(tiny_path, data_parallel_size=2, memory="64MiB", max_model_len=128)
    alone = LLM.plan(tiny_path, memory="64MiB", max_model_len=128)
    assert plan.fits
    assert plan.total <= 64 * 2**20
    assert plan.total == alone.total - alone.kv_cache + plan.kv_cache + plan.serving - plan.weights
    assert "1 more of the same, which share the weights" in str(plan)
    with pytest.raises(OutOfMemoryError, match="each of 2 replicas"):
        LLM(tiny_path, data_parallel_size=2, memory="1MiB", max_model_len=128)
    tight = alone.fixed + alone.tokenizer + 2**17
    refused = LLM.plan(tiny_path, data_parallel_size=2, memory=tight, max_model_len=128)
    assert not refused.fits
    assert {"data_parallel_size": 1} in [one.options for one in refused.alternatives]
    again = LLM.plan(tiny_path, data_parallel_size=2, max_model_len=128)
    with LLM(plan=again) as planned:
        assert planned.memory_plan.num_pages == again.num_pages
    with LLM(tiny_path, data_parallel_size=2, memory="64MiB", max_model_len=128) as llm:
        for part in llm._driver.call_all("", "get_metrics"):
            assert part["num_pages"] == llm.memory_plan.num_pages
        smaller = llm.resize("62MiB")
        assert smaller.num_pages < plan.num_pages
        assert smaller.total <= 62 * 2**20
        with pytest.raises(OutOfMemoryError, match="no room for 2 replicas"):
            llm.resize("100KiB")
        llm.trim()
        llm.sleep(2)
        with pytest.raises(Exception, match="sleeps"):
            llm.generate("x", DRAWN)
        llm.wake_up()
        assert llm.generate("x", DRAWN)[0].finished


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"data_parallel_size": 0}, r"data_parallel_size: expected an integer in 1\.\.64"),
        ({"replica_routing": "x"}, "replica_routing: expected one of 'state'"),
        ({"data_parallel_size": 2, "device": "cuda"}, "one LLM for each GPU"),
        ({"data_parallel_size": 2, "disk_offload": "1MiB"}, "read by one replica only"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    tiny_path: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        LLM(tiny_path, **options)


def test_pools_and_policies_of_the_caller_are_refused(tiny_path: Path) -> None:
    from sdk import MemoryPool
    from sdk.api.scheduling_policy import make_policy

    with pytest.raises(RequestError, match="cannot share a MemoryPool"):
        LLM(tiny_path, data_parallel_size=2, memory=MemoryPool("1GiB"))
    with pytest.raises(RequestError, match="expected its name"):
        LLM(tiny_path, data_parallel_size=2, scheduling_policy=make_policy("fcfs", None))


@pytest.mark.slow
def test_what_ranks_refuse_is_raised_as_with_one_engine(tmp_path: Path) -> None:
    model = tiny_model(tmp_path)  # of blocks of 256 columns, which two ranks would cut
    before = children()
    with pytest.raises(AlignmentError, match="cut through a group"):
        LLM(model, data_parallel_size=2, tensor_parallel_size=2)
    assert children() == before


def test_a_missing_model_raises_what_one_engine_raises(tmp_path: Path) -> None:
    before = children()
    with pytest.raises(CheckpointError, match=r"none\.gguf"):
        LLM(tmp_path / "none.gguf", data_parallel_size=2)
    assert children() == before


@pytest.mark.slow
def test_close_ends_waiting_calls_and_leaves_nothing(tiny_path: Path) -> None:
    before = children(), descriptors(), threading.active_count()
    llm = LLM(tiny_path, max_model_len=128, data_parallel_size=2)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            while True:
                llm.generate(PROMPTS, DRAWN.clone(max_tokens=90))
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not llm.get_metrics()["num_steps"]:
        pass
    llm.close()
    llm.close()
    thread.join(30)
    assert [type(error) for error in errors] == [EngineClosedError]
    assert (children(), descriptors(), threading.active_count()) == before
    with pytest.raises(EngineClosedError):
        llm.generate("x", DRAWN)


@pytest.mark.slow
def test_adapters_are_loaded_by_every_replica(tiny_path: Path, tmp_path: Path) -> None:
    model = tiny_model(tmp_path)
    adapter = tiny_adapter(tmp_path / "adapter", model, scale=4.0)
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for size in (1, 2):
        with LLM(model, max_model_len=128, enable_lora=True, data_parallel_size=size) as llm:
            llm.add_lora("a", adapter)
            assert llm.list_loras()[0].loaded
            pair = [llm.generate(PROMPTS, greedy, lora_request=name) for name in ("a", None)]
            found.append([answers(part) for part in pair])
            assert llm.remove_lora("a")
    assert found[0] == found[1]
    assert found[0][0] != found[0][1]


@pytest.mark.slow
def test_an_async_llm_has_replicas_too(tiny_path: Path) -> None:
    async def run() -> int:
        async with AsyncLLM(tiny_path, max_model_len=128, data_parallel_size=2) as llm:
            count = 0
            async for _ in llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True)):
                count += 1
            return count

    assert asyncio.run(run()) > 1


@pytest.mark.slow
def test_replicas_with_two_ranks_each_give_the_tokens_of_one_process(tiny_path: Path) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    found = []
    for options in ({}, {"data_parallel_size": 2, "tensor_parallel_size": 2}):
        with LLM(tiny_path, max_model_len=128, compute="exact", **options) as llm:
            outputs = llm.generate(PROMPTS, greedy)
            found.append([output.outputs[0].token_ids for output in outputs])
            if options:
                assert len(replicas(llm)) == 2
    assert found[0] == found[1]
