"""FakeLLM: scripted answers, everything else as in LLM."""

from __future__ import annotations

import asyncio
import inspect
import json
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from sdk import (
    LLM,
    AsyncLLM,
    EngineClosedError,
    EngineDeadError,
    LoRARequest,
    OutOfMemoryError,
    QueueFullError,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from sdk.testing import FakeAnswer, FakeLLM, ManualClock, contract_check

ROOT = Path(__file__).parents[2]
ASK = [{"role": "user", "content": "How are you?"}]


def text(outputs: list[Any]) -> str:
    return str(outputs[0].outputs[0].text)


def test_it_is_an_llm_and_has_few_methods_of_its_own() -> None:
    with FakeLLM() as llm:
        assert isinstance(llm, LLM)
    own = {name for name in vars(FakeLLM) if not name.startswith("_")}
    assert own == {"requests", "plan", "quantize"}
    for name in ("plan", "quantize"):
        assert inspect.signature(getattr(FakeLLM, name)) == inspect.signature(getattr(LLM, name))


def test_attributes_of_llm_exist(tiny_llm: Any) -> None:
    real = {name for name in vars(tiny_llm()) if not name.startswith("_")}
    fake = {name for name in dir(FakeLLM()) if not name.startswith("_")}
    assert real - fake == set()


def test_it_keeps_the_contract() -> None:
    assert len(contract_check(FakeLLM("one two three four five six seven eight"))) == 11


def test_it_imports_neither_torch_nor_a_tokenizer() -> None:
    code = (
        "import json, sys\nfrom sdk.testing import FakeLLM\n"
        "with FakeLLM('yes') as llm:\n"
        "    llm.chat([{'role': 'user', 'content': 'hi'}]); llm.score('a', 'b')\n"
        "print(json.dumps([*sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    loaded = json.loads(done.stdout)
    modules = {name.partition(".")[0] for name in loaded}
    assert modules & {"torch", "transformers", "tokenizers", "pytest", "llguidance"} == set()
    parts = ("sdk.engine.rank.runner", "sdk.loading.load", "sdk.memory.", "sdk.models.decoder")
    assert [name for name in loaded if name.startswith((*parts, "sdk.kernels.cpu"))] == []


def test_a_list_is_answered_in_order_and_ends_loudly() -> None:
    with FakeLLM(["first", "second", "third"]) as llm:
        outputs = llm.generate(["a", "b"])
        assert [output.outputs[0].text for output in outputs] == ["first", "second"]
        assert text(llm.chat(ASK)) == "third"
        with pytest.raises(AssertionError, match=r"3 were given, and this is request 4: 'c'"):
            llm.generate("c")
        assert llm.get_metrics()["num_running"] == 0


def test_a_dict_is_read_by_prompt_or_last_message() -> None:
    with FakeLLM({"How are you?": "Fine.", "2+2": "4"}) as llm:
        assert text(llm.chat(ASK)) == "Fine."
        assert text(llm.generate("2+2")) == "4"
        with pytest.raises(AssertionError, match=r"no answer to 'else'; known prompts"):
            llm.generate("else")
    with FakeLLM(defaultdict(lambda: "anything", {"x": "y"})) as llm:
        assert [text(llm.generate(prompt)) for prompt in "xz"] == ["y", "anything"]


def test_a_function_gets_the_text_or_the_messages() -> None:
    asked: list[Any] = []

    def answer(prompt: Any) -> str:
        asked.append(prompt)
        return f"answer {len(asked)}"

    with FakeLLM(answer) as llm:
        ids = llm.get_tokenizer().encode("as tokens")
        llm.generate(["plain", {"prompt_token_ids": ids}])
        assert text(llm.chat(ASK)) == "answer 3"
    assert asked == ["plain", "as tokens", ASK]


def test_requests_are_recorded_as_they_were_when_they_came() -> None:
    with FakeLLM("Hi.") as llm:
        messages = [{"role": "user", "content": "Hello"}]
        messages.append({"role": "assistant", "content": text(llm.chat(messages))})
        messages[0]["content"] = "Bye"
        assert llm.requests[0].prompt == [{"role": "user", "content": "Hello"}]
        assert llm.requests[0].sampling_params.max_tokens is None


def test_what_is_no_answer_is_rejected() -> None:
    with pytest.raises(RequestError, match="answers: expected a text, a list"):
        FakeLLM(7)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="errors: expected exceptions"):
        FakeLLM(errors={"x": ValueError()})  # type: ignore[dict-item]
    with pytest.raises(RequestError, match="seconds_per_token: expected at least 0"):
        FakeLLM(seconds_per_token=-1)
    llm = FakeLLM(lambda prompt: 7)  # type: ignore[arg-type, return-value]
    with llm, pytest.raises(AssertionError, match="for request 1, found 7"):
        llm.generate("x")
    for wrong in ({"text": 1}, {"finish_reason": "abort"}, {"finish_reason": "length"}):
        with pytest.raises(RequestError, match="FakeAnswer"):
            FakeAnswer(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "written",
    ["", "Hello, world!", "  two\n\nlines \t", "héllo wörld 😀 日本語", "<|end|> is text"],
)
def test_texts_come_back_unchanged_and_pieces_add_up(written: str) -> None:
    with FakeLLM(written) as llm:
        assert text(llm.generate("x")) == written
        assert "".join(piece.outputs[0].text for piece in llm.stream("x")) == written


def test_a_stream_has_a_piece_for_each_word() -> None:
    with FakeLLM("one two three.") as llm:
        pieces = [piece.outputs[0] for piece in llm.stream("x")]
    assert [piece.text for piece in pieces] == ["one", " two", " three", ".", ""]
    assert [piece.finish_reason for piece in pieces] == [None] * 4 + ["stop"]


def test_parameters_that_stop_an_answer_work() -> None:
    with FakeLLM("one two three four") as llm:
        [short] = llm.generate("x", SamplingParams(max_tokens=2))
        assert (short.outputs[0].text, short.outputs[0].finish_reason) == ("one two", "length")
        [stopped] = llm.generate("x", SamplingParams(stop="three"))
        assert stopped.outputs[0].text == "one two "
        assert stopped.outputs[0].stop_reason == "three"
        [longer] = llm.generate("x", SamplingParams(min_tokens=6, max_tokens=6))
        assert len(longer.outputs[0].token_ids) == 6
        [on] = llm.generate("x", SamplingParams(ignore_eos=True, max_tokens=9))
        assert len(on.outputs[0].token_ids) == 9


def test_several_answers_take_several_items() -> None:
    with FakeLLM(["a", "b c", "d"]) as llm:
        outputs = llm.generate(["x", "y"], [SamplingParams(n=2), SamplingParams()])
        assert [one.text for output in outputs for one in output.outputs] == ["a", "b c", "d"]


def test_finish_reasons_usage_and_logprobs() -> None:
    cut = FakeAnswer("cut off here", finish_reason="length")
    with FakeLLM([cut, cut]) as llm:
        [output] = llm.generate("a b c", SamplingParams(logprobs=1, prompt_logprobs=0))
        one = output.outputs[0]
        assert (one.text, one.finish_reason) == ("cut off here", "length")
        assert (len(output.prompt_token_ids), len(one.token_ids)) == (3, 3)
        assert one.cumulative_logprob == 0.0
        assert one.logprobs is not None and output.prompt_logprobs is not None
        assert [next(iter(entry)) for entry in one.logprobs] == one.token_ids
        assert len(output.prompt_logprobs) == 3
        [twice] = llm.generate("x", SamplingParams(max_tokens=2))
        assert len(twice.outputs[0].token_ids) == 2


def test_answers_of_different_lengths_cannot_all_end_by_length() -> None:
    answers = [FakeAnswer("one two", finish_reason="length"), "one"]
    with FakeLLM(answers) as llm, pytest.raises(AssertionError, match=r"found \[1, 2\]"):
        llm.generate("x", SamplingParams(n=2))


@pytest.mark.parametrize("error", [RequestError("too long"), OutOfMemoryError("no page left")])
def test_an_error_is_raised_by_its_call_before_anything_runs(error: Exception) -> None:
    with FakeLLM("fine", errors={1: error}) as llm:
        assert text(llm.generate("x")) == "fine"
        before = llm.get_metrics()["num_steps"]
        with pytest.raises(type(error), match=str(error)):
            llm.generate(["y", "z"])
        assert llm.get_metrics()["num_steps"] == before
        assert text(llm.generate("x")) == "fine"


def test_errors_reach_streams_and_async_calls() -> None:
    with FakeLLM(errors={0: RequestError("first"), 1: RequestError("second")}) as llm:
        with pytest.raises(RequestError, match="first"):
            llm.stream("x")
        with pytest.raises(RequestError, match="second"):
            asyncio.run(llm.agenerate("x"))


def test_a_failing_request_ends_with_its_text_and_others_continue() -> None:
    with FakeLLM([FakeAnswer("half an", error=ValueError("NaN")), "whole answer"]) as llm:
        failed, fine = llm.generate(["a", "b"])
        assert failed.outputs[0].text == "half an"
        assert (failed.outputs[0].finish_reason, failed.outputs[0].stop_reason) == ("error", "NaN")
        assert fine.outputs[0].text == "whole answer"


def test_a_dead_engine_fails_all_requests() -> None:
    with FakeLLM({"dies": FakeAnswer("a b", error=EngineDeadError("rank 1")), "x": "y"}) as llm:
        pieces = []
        with pytest.raises(EngineDeadError, match="rank 1"):
            for piece in llm.stream("dies"):
                pieces.append(piece.outputs[0].text)
        assert pieces == ["a", " b"]
        with pytest.raises(EngineDeadError, match="rank 1"):
            llm.generate("x")


def test_time_is_that_of_the_given_clock() -> None:
    clock = ManualClock()
    how: dict[str, Any] = {"clock": clock, "sleep": clock.sleep}
    with FakeLLM("a b c", seconds_per_token=2, seconds_to_first_token=10, **how) as llm:
        [output] = llm.generate("x")
        metrics = output.metrics
        assert metrics is not None and metrics.first_token_ts is not None
        assert metrics.first_token_ts - metrics.arrival_time == 12
        assert clock() == 18  # with EOS
        [late] = llm.generate("x", SamplingParams(deadline=13))
        assert (late.outputs[0].finish_reason, late.outputs[0].text) == ("deadline", "a b")
        [several] = llm.generate("x", SamplingParams(n=2))
        assert several.metrics is not None and several.metrics.scheduled_ts == 32


def test_closing_ends_a_wait_for_a_slow_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdk.requests.driving.driver._CLOSE_TIMEOUT_S", 0.05)
    llm = FakeLLM("a b", seconds_to_first_token=3600)
    found: list[BaseException] = []

    def ask() -> None:
        try:
            llm.generate("x")
        except EngineClosedError as error:
            found.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not llm.get_metrics()["num_running"]:
        time.sleep(0.001)
    llm.close()
    thread.join(60)
    assert not thread.is_alive() and len(found) == 1


def test_an_aborted_request_keeps_its_text() -> None:
    with FakeLLM("a b c d e f") as llm:
        llm.enqueue("x", request_id="mine")
        llm.step()
        llm.step()
        llm.abort("mine")
        [output] = llm.wait_for_completion()
        assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("a b", "abort")


def test_a_prefix_is_cached_as_in_an_engine() -> None:
    with FakeLLM() as llm:
        prompt = "word " * 40
        first, again = llm.generate(prompt), llm.generate(prompt)
        assert first[0].num_cached_tokens == 0
        assert again[0].num_cached_tokens == 32
        llm.reset_prefix_cache()
        assert llm.generate(prompt)[0].num_cached_tokens == 0


def test_a_structure_needs_no_grammar_and_is_recorded() -> None:
    banned = SamplingParams(banned_strings=["answer"])
    with FakeLLM("an answer") as llm:
        assert text(llm.chat(ASK, banned)) == "an answer"
        assert llm.requests[0].sampling_params.banned_strings == ("answer",)
    structured = SamplingParams(structured_outputs={"json": {"type": "object"}})
    with FakeLLM('{"a": 1}') as llm:
        assert json.loads(text(llm.chat(ASK, structured))) == {"a": 1}
        [request] = llm.requests
        assert request.prompt == ASK
        assert request.sampling_params.structure is not None


def test_typed_results_and_tool_calls_are_read_from_the_script() -> None:
    def add(a: int, b: int) -> int:
        """Add two numbers."""
        return a + b

    with FakeLLM("[1, 2]") as llm:
        assert llm.generate("x", returns=list[int])[0].outputs[0].parsed == [1, 2]
    call = FakeAnswer("Let me see.", tool_calls=[("add", {"a": 2, "b": 3})])
    for run in (FakeLLM.run_tools, lambda *args: asyncio.run(FakeLLM.arun_tools(*args))):
        with FakeLLM([call, "It is 5."]) as llm:
            done = run(llm, [{"role": "user", "content": "2+3?"}], [add])
            assert done.output.content == "It is 5."
            assert [m["role"] for m in llm.requests[1].prompt] == ["user", "assistant", "tool"]
            assert llm.requests[1].prompt[-1]["content"] == "5"


def test_guidance_runs_a_negative_prompt_too() -> None:
    with FakeLLM("one two") as llm:
        prompt = {"prompt": "x", "negative_prompt": "y"}
        assert text(llm.generate(prompt, SamplingParams(guidance_scale=2.0))) == "one two"


def test_embeddings_are_similar_for_the_same_words_or_as_given() -> None:
    with FakeLLM() as llm:
        near, far = llm.score("the cat sat", ["The cat sat down", "stocks fell"])
        assert near.score > 0.6 > far.score
        best = llm.rerank("cats", ["dogs", "cats", "birds"], top_n=1)
        assert best[0].document == "cats"
        assert llm.requests[0].kind == "embed"
        shape = llm.encode("a b c", pooling="token")[0].outputs.data.shape
        assert tuple(shape) == (3, 32)
    with FakeLLM(embeddings=lambda prompt: [float(len(prompt)), 0.0]) as llm:
        assert llm.embed("abc")[0].embedding == [1.0, 0.0]


def test_sleep_rejects_requests_until_it_wakes_up() -> None:
    with FakeLLM() as llm:
        with pytest.raises(RequestError, match="expected level 1 or 2, found 3"):
            llm.sleep(3)
        llm.enqueue("x")
        with pytest.raises(RequestError, match="requests are unfinished"):
            llm.sleep()
        llm.wait_for_completion()
        llm.sleep()
        with pytest.raises(RequestError, match="sleeps"):
            llm.generate("x")
        llm.wake_up()
        llm.trim()
        assert text(llm.generate("x"))


def test_methods_that_need_weights_say_so() -> None:
    with FakeLLM() as llm:
        calls = [
            lambda: llm.plan("x"),
            lambda: llm.memory_plan,
            lambda: llm.model_config,
            lambda: llm.quantize("x"),
            lambda: llm.beam_search("x", None),  # type: ignore[arg-type]
            lambda: llm.snapshot("x"),
            lambda: llm.restore("x"),
            lambda: llm.pin("x"),
            lambda: llm.unpin("x"),
            lambda: llm.snapshot(request_id="x"),
            lambda: llm.resize(1),
            llm.fork,
            llm._runner,
            llm.explain,
            llm.quant_report,
        ]
        for call in calls:
            with pytest.raises(UnsupportedError, match=r"needs a model; use LLM\(tiny_model"):
                call()
        with pytest.raises(RequestError, match="no classification head"):
            llm.classify("x")
        for call in (llm.expert_load, llm.rebalance_experts):
            with pytest.raises(RequestError, match="a fake model has no experts"):
                call()
        assert "<td" in llm._repr_html_()


def test_many_threads_and_tasks_share_one_fake() -> None:
    with FakeLLM(lambda prompt: f"answer to {prompt}") as llm:

        async def many() -> list[Any]:
            return await asyncio.gather(*(llm.agenerate(f"p{i}") for i in range(20)))

        answers = [text(outputs) for outputs in asyncio.run(many())]
        assert answers == [f"answer to p{i}" for i in range(20)]


def test_async_llm_runs_on_a_fake() -> None:
    async def run() -> list[str]:
        async with AsyncLLM(llm) as shared:
            return [piece.outputs[0].text async for piece in shared.generate("x")]

    with FakeLLM("one two") as llm:
        assert asyncio.run(run()) == ["one", "one two", "one two"]
        assert text(llm.generate("x")) == "one two"  # its owner closes it


def test_a_full_vocabulary_falls_back_to_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdk.testing.fake_tokenizer.VOCAB_SIZE", 262)
    with FakeLLM("one two three") as llm:
        [output] = llm.generate("x")
        assert output.outputs[0].text == "one two three"
        assert len(output.outputs[0].token_ids) == 1 + 4 + 6 + 1


def test_a_full_queue_and_tenants_work_as_in_an_engine() -> None:
    options = {"max_num_seqs": 1, "max_waiting": 1, "scheduling_policy": "fair"}
    with FakeLLM("one two three", tenant_weights={"a": 3}, **options) as llm:
        names = llm.enqueue(["x", "y"], SamplingParams(tenant="a"))
        with pytest.raises(QueueFullError, match="at most 2 are allowed"):
            llm.enqueue("z", SamplingParams(tenant="a"))
        llm.set_tenant_weight("b", 4)
        assert [output.request_id for output in llm.wait_for_completion()] == names
        assert llm.estimate("x").num_prompt_tokens == 1
    with FakeLLM() as llm, pytest.raises(RequestError, match="need scheduling_policy='fair'"):
        llm.set_tenant_weight("a", 2)


def test_prompts_that_are_too_long_are_rejected() -> None:
    with FakeLLM(max_model_len=16) as llm:
        with pytest.raises(RequestError, match="the context holds 16"):
            llm.generate("word " * 17)
        [output] = llm.generate("word " * 10)
        assert output.outputs[0].finish_reason == "length"


def test_a_request_may_name_an_adapter_without_files() -> None:
    adapter = LoRARequest("sql", 1, "nowhere")
    with FakeLLM("yes") as llm:
        [output] = llm.generate("x", lora_request=adapter)
        assert output.lora_request == adapter == llm.requests[0].lora_request
        llm.add_lora("style", "nowhere else")
        outputs = llm.generate(["x", "y"], lora_request=["style", None])
        assert [one.lora_request and one.lora_request.name for one in outputs] == ["style", None]
        assert [known.name for known in llm.list_loras()] == ["sql", "style"]
        assert llm.pin_lora("sql") and llm.remove_lora("sql") and not llm.remove_lora("sql")
        with pytest.raises(RequestError, match="no adapter is called 'sql'"):
            llm.generate("x", lora_request="sql")
