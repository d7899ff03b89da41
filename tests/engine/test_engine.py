"""The engine: outputs, stop strings, several answers, failures."""

from __future__ import annotations

import pytest
from fake_runner import VOCAB, FakeRunner, expected_tokens

from sdk.api.errors import EngineClosedError, EngineDeadError, RequestError
from sdk.api.params import RequestOutputKind, SamplingParams
from sdk.engine.engine import Engine
from sdk.engine.job import Job
from sdk.engine.plan import SequenceSpec
from sdk.engine.scheduling.scheduler import Scheduler
from sdk.engine.scheduling.scheduler_config import SchedulerConfig
from sdk.sampling.uniform import child_seed

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


class WordTokenizer:
    """Every token is a word of its own, ``<17>``; token 0 is a control token."""

    bytewise = True
    strips_leading_space = False
    special_ids = frozenset({0})

    def id_to_bytes(self, token_id: int) -> bytes:
        if token_id == self.broken:
            raise LookupError("no such word")
        return f"<{token_id}>".encode()

    def decode(self, ids, skip_special_tokens=True) -> str:
        return "".join(f"<{i}>" for i in ids)

    broken = -1


class Rig:
    def __init__(self, tokenizer=None, **options) -> None:
        config = SchedulerConfig(
            **{"num_pages": 65, "page_size": 4, "max_model_len": 100, **options}
        )
        self.now = 100.0
        scheduler = Scheduler(config, clock=lambda: self.now)
        self.runner = FakeRunner(config.page_size, config.num_pages)
        self.engine = Engine(scheduler, self.runner, tokenizer, vocab_size=VOCAB)

    def add(self, request_id="a", prompt=PROMPT, prompt_text=None, kind="generate", **params):
        params = SamplingParams(**{"max_tokens": 6, "temperature": 0, **params})
        spec = SequenceSpec(request_id, params, kind)
        self.engine.add(Job(spec, tuple(prompt), prompt=prompt_text))

    def run(self) -> list:
        outputs = []
        for _ in range(500):
            if not self.engine.has_unfinished:
                return outputs
            self.now += 1.0
            outputs += self.engine.step()
            self.engine.scheduler.check()
        raise AssertionError("never finished")


WORDS = expected_tokens(PROMPT, 30)
TEXT = [f"<{token}>" for token in WORDS]


def test_cumulative_outputs_grow_and_never_change_once_handed_out():
    rig = Rig(WordTokenizer())
    rig.add(prompt_text="hello")
    outputs = rig.run()
    assert [len(o.outputs[0].token_ids) for o in outputs] == [1, 2, 3, 4, 5, 6]
    for count, output in enumerate(outputs, start=1):
        assert output.outputs[0].token_ids == WORDS[:count]
        assert output.outputs[0].text == "".join(TEXT[:count])
        assert (output.prompt, output.prompt_token_ids) == ("hello", PROMPT)
    assert [o.finished for o in outputs] == [False] * 5 + [True]
    assert outputs[-1].outputs[0].finish_reason == "length"
    with pytest.raises(AttributeError):
        outputs[0].finished = True


def test_deltas_add_up_to_the_whole():
    rig = Rig(WordTokenizer())
    rig.add(output_kind=RequestOutputKind.DELTA, logprobs=0)
    pieces = [o.outputs[0] for o in rig.run()]
    assert [token for p in pieces for token in p.token_ids] == WORDS[:6]
    assert "".join(p.text for p in pieces) == "".join(TEXT[:6])
    assert [len(p.logprobs) for p in pieces] == [1] * 6
    assert pieces[-1].cumulative_logprob == pytest.approx(-3.0)


def test_final_only_gives_one_output():
    rig = Rig(WordTokenizer())
    rig.add(output_kind=RequestOutputKind.FINAL_ONLY)
    [output] = rig.run()
    assert output.finished and output.outputs[0].token_ids == WORDS[:6]


@pytest.mark.parametrize("end", ["length", "abort", "stop token", "shown stop token"])
def test_the_text_of_an_answer_that_only_its_end_shows_is_made_at_its_end(end):
    class Counting(WordTokenizer):
        read = 0

        def id_to_bytes(self, token_id):
            self.read += 1
            return super().id_to_bytes(token_id)

    rig = Rig(tokenizer := Counting())
    stop = [WORDS[4]] if "token" in end else None
    shown = end == "shown stop token"
    kind = RequestOutputKind.FINAL_ONLY
    rig.add(output_kind=kind, stop_token_ids=stop, include_stop_str_in_output=shown)
    for _ in range(4):
        assert rig.engine.step() == []
    assert tokenizer.read == 0
    [output] = rig.engine.abort(["a"]) if end == "abort" else rig.run()
    tokens = {"length": 6, "abort": 4}.get(end, 5)
    assert output.outputs[0].token_ids == WORDS[:tokens]
    assert output.outputs[0].text == "".join(TEXT[: tokens - (end == "stop token")])


def test_an_answer_that_only_its_end_shows_still_stops_at_a_stop_string():
    rig = Rig(WordTokenizer())
    rig.add(output_kind=RequestOutputKind.FINAL_ONLY, stop=[TEXT[2]], max_tokens=30)
    [output] = rig.run()
    assert output.outputs[0].text == "".join(TEXT[:2])
    assert output.outputs[0].token_ids == WORDS[:3]


def test_an_exception_while_making_the_text_of_the_end_ends_that_request_only():
    tokenizer = WordTokenizer()
    tokenizer.broken = WORDS[1]
    rig = Rig(tokenizer)
    rig.add("bad", output_kind=RequestOutputKind.FINAL_ONLY)
    rig.add("good", prompt=[8, 9], output_kind=RequestOutputKind.FINAL_ONLY)
    last = {o.request_id: o.outputs[0] for o in rig.run()}
    assert (last["bad"].finish_reason, last["bad"].token_ids) == ("error", WORDS[:6])
    assert last["bad"].stop_reason == "LookupError: no such word"
    assert last["good"].token_ids == expected_tokens([8, 9], 6)


def test_outputs_do_not_share_lists_with_the_engine():
    rig = Rig(WordTokenizer())
    prompt = list(PROMPT)
    rig.add(prompt=prompt)
    outputs = rig.engine.step()
    prompt.clear()
    outputs[0].prompt_token_ids.clear()
    outputs[0].outputs[0].token_ids.clear()
    assert rig.run()[-1].outputs[0].token_ids == WORDS[:6]


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_ends_the_answer_and_the_request(include):
    rig = Rig(WordTokenizer())
    stop = TEXT[2][-2:] + TEXT[3][:2]
    rig.add(stop=[stop], max_tokens=30, include_stop_str_in_output=include)
    outputs = rig.run()
    last = outputs[-1].outputs[0]
    shown = "".join(TEXT[:4])
    end = shown.index(stop) + (len(stop) if include else 0)
    assert last.text == shown[:end]
    assert (last.finish_reason, last.stop_reason) == ("stop", stop)
    assert last.token_ids == WORDS[:4]
    assert all(last.text.startswith(o.outputs[0].text) for o in outputs)
    assert rig.engine.scheduler.pool.num_available == 64


def test_a_stop_string_counts_only_after_min_tokens():
    rig = Rig(WordTokenizer())
    rig.add(stop=[TEXT[1], TEXT[4]], min_tokens=4, max_tokens=30)
    last = rig.run()[-1].outputs[0]
    assert last.stop_reason == TEXT[4] and last.text == "".join(TEXT[:4])


def test_text_held_back_for_a_stop_string_comes_out_in_the_end():
    rig = Rig(WordTokenizer())
    rig.add(stop=[TEXT[2] + "never"], max_tokens=3)
    outputs = rig.run()
    assert outputs[-1].outputs[0].text == "".join(TEXT[:3])
    assert outputs[-1].outputs[0].finish_reason == "length"


def test_the_text_of_eos_and_stop_tokens_is_left_out():
    rig = Rig(WordTokenizer(), eos_token_ids=frozenset({WORDS[2]}))
    rig.add("eos")
    rig.add("stop", stop_token_ids=[WORDS[1]])
    rig.add("shown", stop_token_ids=[WORDS[1]], include_stop_str_in_output=True)
    last = {o.request_id: o.outputs[0] for o in rig.run()}
    assert last["eos"].text == "".join(TEXT[:2]) and last["eos"].token_ids == WORDS[:3]
    assert last["stop"].text == TEXT[0] and last["stop"].stop_reason == WORDS[1]
    assert last["shown"].text == TEXT[0] + TEXT[1]


def test_several_answers_share_the_prompt_through_the_cache():
    rig = Rig(WordTokenizer())
    rig.add(n=3, seed=7, prompt_logprobs=0)
    outputs = rig.run()
    final = outputs[-1]
    assert final.finished and [o.index for o in final.outputs] == [0, 1, 2]
    assert all(o.token_ids == WORDS[:6] for o in final.outputs)
    assert not any(o.finished for o in outputs[:-1])
    starts = [s for plan in rig.runner.plans for s in plan.started]
    assert [s.num_computed for s in starts] == [0, 9, 9]
    assert [s.spec.params.seed for s in starts] == [child_seed(7, index) for index in range(3)]
    assert [s.spec.params.prompt_logprobs for s in starts] == [0, None, None]
    assert final.metrics.num_generation_tokens == 18
    assert len(final.prompt_logprobs) == len(PROMPT)


def test_best_of_returns_the_answers_with_the_highest_probability():
    rig = Rig(WordTokenizer(), eos_token_ids=frozenset())
    rig.add(n=1, best_of=3)
    rig.runner.errors = {"a#0": "bad luck"}
    [output] = rig.run()
    assert [o.index for o in output.outputs] == [0]
    assert output.outputs[0].finish_reason == "length"
    assert output.outputs[0].logprobs is None


def test_logprobs_of_prompt_and_output_are_collected():
    rig = Rig(WordTokenizer())
    rig.add(logprobs=1, prompt_logprobs=1, max_tokens=2)
    output = rig.run()[-1]
    rows = output.prompt_logprobs
    assert rows[0] is None and [list(row) for row in rows[1:]] == [[t] for t in PROMPT[1:]]
    chosen = output.outputs[0].logprobs[1][WORDS[1]]
    assert (chosen.logprob, chosen.rank, chosen.decoded_token) == (-0.5, 1, TEXT[1])


def test_requests_without_a_seed_get_different_ones_and_the_same_next_time():
    seeds = []
    for _ in range(2):
        rig = Rig()
        rig.add("a")
        rig.add("b")
        rig.run()
        seeds.append([s.spec.params.seed for plan in rig.runner.plans for s in plan.started])
    assert seeds[0] == seeds[1] and len(set(seeds[0])) == 2 and None not in seeds[0]


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_an_abort_returns_what_there_is_and_frees_the_id(steps):
    rig = Rig(WordTokenizer())
    rig.add(max_tokens=30)
    for _ in range(steps):
        rig.engine.step()
    [output] = rig.engine.abort(["a", "unknown"])
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == WORDS[:steps]
    assert not rig.engine.has_unfinished and rig.engine.abort(["a"]) == []
    rig.add()
    assert rig.run()[-1].outputs[0].token_ids == WORDS[:6]


def test_an_embedding_comes_as_an_embedding_and_its_failure_as_a_reason():
    rig = Rig()
    rig.add("good", kind="embed")
    rig.add("bad", kind="embed")
    rig.runner.errors = {"bad": "NaN"}
    good, bad = sorted(rig.run(), key=lambda o: o.request_id, reverse=True)
    assert len(good.embedding) == len(PROMPT) and good.finished
    assert (bad.outputs[0].finish_reason, bad.outputs[0].stop_reason) == ("error", "NaN")


@pytest.mark.parametrize("at", [0, 3])
def test_an_exception_while_making_text_ends_that_request_only(at):
    tokenizer = WordTokenizer()
    tokenizer.broken = WORDS[at]
    rig = Rig(tokenizer)
    rig.add("bad")
    rig.add("good", prompt=[8, 9])
    last = {o.request_id: o.outputs[0] for o in rig.run()}
    assert last["bad"].finish_reason == "error"
    assert last["bad"].stop_reason == "LookupError: no such word"
    assert last["good"].token_ids == expected_tokens([8, 9], 6)


def test_a_dead_executor_is_an_error_on_every_request_and_never_a_hang():
    rig = Rig()
    rig.add("a")
    rig.add("b", n=2)
    rig.engine.step()
    rig.runner.failure = OSError("worker 1 is gone")
    outputs = rig.engine.step()
    assert {o.request_id for o in outputs} == {"a", "b"}
    for output in outputs:
        assert output.finished and output.outputs[0].finish_reason == "error"
        assert output.outputs[0].stop_reason == "the executor failed: OSError: worker 1 is gone"
    assert not rig.engine.has_unfinished
    assert isinstance(rig.engine.dead, EngineDeadError)
    assert isinstance(rig.engine.dead.__cause__, OSError)
    with pytest.raises(EngineDeadError, match="worker 1 is gone"):
        rig.add("c")
    with pytest.raises(EngineDeadError, match="worker 1 is gone"):
        rig.engine.step()


def test_an_answer_to_another_step_kills_the_engine():
    rig = Rig()
    rig.add()
    result = rig.runner.result
    rig.runner.result = lambda: result()._replace(step_id=99)
    with pytest.raises(RuntimeError, match="result of step 99; expected 1"):
        rig.engine.step()
    assert isinstance(rig.engine.dead, EngineDeadError)


def test_an_interrupted_step_is_repeated():
    rig = Rig()
    rig.add()
    rig.engine.step()
    rig.runner.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    assert rig.run()[-1].outputs[0].token_ids == WORDS[:6]


def test_metrics_tell_when_and_how_much():
    rig = Rig()
    rig.add(max_tokens=3)
    output = rig.run()[-1]
    metrics = output.metrics
    assert (metrics.arrival_time, metrics.queued_ts, metrics.scheduled_ts) == (100.0, 100.0, 101.0)
    assert (metrics.first_token_ts, metrics.last_token_ts) == (101.0, 103.0)
    assert (metrics.num_generation_tokens, metrics.num_preemptions) == (3, 0)
    assert output.num_cached_tokens == 0
    rig.add("again", max_tokens=3)
    assert rig.run()[-1].num_cached_tokens == 8
    engine = rig.engine.get_metrics()
    assert engine["num_generation_tokens"] == 6 and engine["num_prompt_tokens"] == 12
    assert (engine["prefix_queries"], engine["prefix_hits"]) == (4, 2)
    assert engine["cache_hit_rate"] == 0.5 and engine["num_finished"] == 2
    assert engine["num_running"] == engine["num_waiting"] == engine["num_pages_used"] == 0
    assert engine["num_steps"] == 6 and engine["plan_seconds"] == 0  # this clock stands still
    assert rig.engine.reset_prefix_cache() and rig.engine.get_metrics()["num_pages_cached"] == 0


def test_metrics_say_what_rank_0_spent_in_native_calls():
    rig = Rig()
    rig.runner.native_seconds = 0.75
    assert rig.engine.get_metrics()["native_seconds"] == 0.75


def test_a_refused_request_leaves_nothing_behind():
    rig = Rig()
    rig.add("a")
    for kwargs, message in [
        ({"request_id": "a"}, "'a' is already in use"),
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": [1, VOCAB]}, r"token id 1000 is outside the vocabulary \[0, 1000\)"),
        ({"prompt": [-1]}, "token id -1 is outside"),
        ({"prompt": [1] * 100, "n": 3}, "100 tokens; max_model_len is 100"),
        ({"stop": "x"}, "need a tokenizer"),
    ]:
        with pytest.raises(RequestError, match=message):
            rig.add(**{"request_id": "b", **kwargs})
    rig.add("x#1")
    with pytest.raises(RequestError, match="already in use \\(as 'x#1'\\)"):
        rig.add("x", n=2)
    assert {o.request_id for o in rig.run()} == {"a", "x#1"}


def test_a_closed_engine_refuses_everything():
    rig = Rig()
    rig.add()
    rig.engine.step()
    rig.engine.close()
    rig.engine.close()
    assert rig.runner.closed == 1
    assert rig.engine.scheduler.pool.num_available == 64
    with pytest.raises(EngineClosedError):
        rig.add("b")
    with pytest.raises(EngineClosedError):
        rig.engine.step()
