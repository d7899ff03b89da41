"""The public class: what its calls return, and what they refuse."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from sdk import (
    LLM,
    CheckpointError,
    EngineClosedError,
    LoadCancelled,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
)
from sdk.loaders.open import open_checkpoint
from sdk.quant.online import OnlineQuantizedCheckpoint, online_scheme

IDS = {"prompt_token_ids": [5, 6, 7, 8]}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_outputs_keep_the_order_of_the_prompts(tiny: LLM) -> None:
    prompts = [{"prompt_token_ids": [5 + i, 6, 7]} for i in range(20)]
    lengths = [
        SamplingParams(temperature=0, max_tokens=1 + i % 7, ignore_eos=True) for i in range(20)
    ]
    outputs = tiny.generate(prompts, lengths)
    assert [output.prompt_token_ids[0] for output in outputs] == list(range(5, 25))
    assert [len(output.outputs[0].token_ids) for output in outputs] == [
        1 + i % 7 for i in range(20)
    ]
    assert all(
        output.finished and output.outputs[0].finish_reason == "length" for output in outputs
    )


def test_every_way_of_writing_a_prompt_gives_the_same_answer(tiny: LLM) -> None:
    ids = tiny.get_tokenizer().encode("hello")
    answers = {
        tuple(tiny.generate(prompt, GREEDY)[0].outputs[0].token_ids)
        for prompt in (
            "hello",
            ["hello"],
            ids,
            [ids],
            {"prompt": "hello"},
            {"prompt_token_ids": ids},
            [{"prompt_token_ids": tuple(ids), "cache_salt": "tenant"}],
        )
    }
    assert len(answers) == 1
    assert tiny.generate([], GREEDY) == []


def test_a_stream_adds_up_to_the_answer(smol: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=24)
    whole = smol.generate("The capital of France is", params)[0].outputs[0]
    pieces = list(smol.stream("The capital of France is", params))
    assert "".join(piece.outputs[0].text for piece in pieces) == whole.text
    assert [t for piece in pieces for t in piece.outputs[0].token_ids] == list(whole.token_ids)
    assert len(pieces) > 10
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert "Paris" in whole.text


def test_a_chat_answers_and_ends_at_the_end_of_its_turn(smol: LLM) -> None:
    messages = [{"role": "user", "content": "Name the capital of France."}]
    [output] = smol.chat(messages, SamplingParams(temperature=0, max_tokens=64))
    answer = output.outputs[0]
    assert "Paris" in answer.text
    assert answer.finish_reason == "stop"
    assert "<|im_end|>" not in answer.text
    streamed = "".join(
        piece.outputs[0].text
        for piece in smol.stream(messages, SamplingParams(temperature=0, max_tokens=64))
    )
    assert streamed == answer.text


def test_stop_strings_end_an_answer_across_token_boundaries(smol: LLM) -> None:
    free = (
        smol.generate("1, 2, 3, 4,", SamplingParams(temperature=0, max_tokens=24))[0]
        .outputs[0]
        .text
    )
    stop = free[7:12]
    for include in (False, True):
        params = SamplingParams(
            temperature=0, max_tokens=24, stop=[stop], include_stop_str_in_output=include
        )
        answer = smol.generate("1, 2, 3, 4,", params)[0].outputs[0]
        at = free.index(stop)
        assert answer.text == free[: at + len(stop)] if include else free[:at]
        assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)


def test_n_answers_come_in_order_and_differ(smol: LLM) -> None:
    params = SamplingParams(n=3, best_of=4, temperature=1.0, seed=3, max_tokens=8)
    [output] = smol.generate("Once upon a time", params)
    assert [answer.index for answer in output.outputs] == [0, 1, 2]
    assert len({answer.text for answer in output.outputs}) == 3
    again = smol.generate("Once upon a time", params)[0]
    assert [a.text for a in again.outputs] == [a.text for a in output.outputs]


def test_logprobs_of_the_whole_vocabulary_sum_to_one(tiny: LLM) -> None:
    import math

    params = SamplingParams(
        temperature=0, max_tokens=2, logprobs=-1, prompt_logprobs=-1, ignore_eos=True
    )
    [output] = tiny.generate(IDS, params)
    steps = [*output.outputs[0].logprobs, *output.prompt_logprobs[1:]]
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == 4
    for step in steps:
        assert len(step) == tiny.model_config.vocab_size
        assert sum(math.exp(value.logprob) for value in step.values()) == pytest.approx(1, abs=1e-4)
        assert sorted(value.rank for value in step.values()) == list(range(1, len(step) + 1))


def test_metrics_and_explain_tell_what_happened(tiny: LLM) -> None:
    before = tiny.get_metrics()
    [output] = tiny.generate(IDS, GREEDY)
    after = tiny.get_metrics()
    assert after["num_generation_tokens"] - before["num_generation_tokens"] == 8
    assert (
        output.metrics.arrival_time <= output.metrics.first_token_ts <= output.metrics.last_token_ts
    )
    assert output.metrics.num_generation_tokens == 8
    text = tiny.explain()
    for expected in ("llama", "linear layers", "q8_0", "attention", "memory"):
        assert expected in text


def test_the_quant_report_counts_every_linear_layer_of_the_model(tiny: LLM) -> None:
    report = tiny.quant_report()
    config = tiny.model_config
    names = [layer.name for layer in report.layers]
    assert len(names) == len(set(names)) == 4 * config.num_layers + 1
    assert {layer.format for layer in report.layers} == {"q8_0"}
    assert {layer.kernel for layer in report.layers} == {"cpu.linear", "cpu.linear_a16"}
    assert report.bits_per_weight == pytest.approx(8.5, rel=0.01)
    assert report.nbytes == sum(layer.nbytes for layer in report.layers)
    assert report.to_dict()["layers"][0]["name"] == names[0]
    last = str(report).splitlines()[-1]
    assert last.startswith("all") and "bits" in last


def test_the_quant_report_says_that_scales_for_a_kv_cache_are_not_used(golden: Path) -> None:
    with LLM(golden / "ct-kv8", skip_tokenizer_init=True) as llm:
        report = llm.quant_report()
    assert report.kv_scales == report.to_dict()["kv_scales"] == 4
    assert str(report).splitlines()[-1].split(maxsplit=2)[2] == "4 scales in the file, not used"
    packed = OnlineQuantizedCheckpoint(open_checkpoint(golden / "ct-kv8"), online_scheme("int8"))
    assert len(packed.kv_scales) == 4


def test_embeddings_have_length_one_and_score_compares_them(smol: LLM) -> None:
    texts = ["A cat sat on the mat.", "A cat is sitting on a mat.", "Interest rates rose sharply."]
    embedded = smol.embed(texts)
    for output in embedded:
        assert len(output.embedding) == smol.model_config.hidden_size
        assert sum(x * x for x in output.embedding) == pytest.approx(1, abs=1e-5)
    near, far = smol.score(texts[0], texts[1:])
    assert near.score > far.score
    assert smol.score(texts[0], texts[0])[0].score == pytest.approx(1, abs=1e-5)
    with pytest.raises(RequestError, match="expected one text or 3"):
        smol.score(texts[:2], texts)


# ---- async and threads --------------------------------------------------------------------------


def test_async_twins_give_the_same_answers(tiny: LLM) -> None:
    import asyncio

    expected = tiny.generate([IDS, "hello"], GREEDY)

    async def run() -> None:
        outputs = await tiny.agenerate([IDS, "hello"], GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in expected
        ]
        pieces = [piece async for piece in tiny.astream("hello", GREEDY)]
        tokens = [token for piece in pieces for token in piece.outputs[0].token_ids]
        assert tokens == list(expected[1].outputs[0].token_ids)

        async def one(prompt: object) -> object:
            return (await tiny.agenerate(prompt, GREEDY))[0].outputs[0].token_ids

        found = await asyncio.gather(*(one(IDS) for _ in range(10)))
        assert found == [expected[0].outputs[0].token_ids] * 10

    asyncio.run(run())
    asyncio.run(run())  # a second event loop is as good as the first


def test_achat_answers_as_chat_does_and_refuses_what_it_refuses(smol: LLM) -> None:
    import asyncio

    talks = [[{"role": "user", "content": f"Name a {what}."}] for what in ("tree", "sea")]
    expected = smol.chat(talks, GREEDY)

    async def run() -> None:
        outputs = await smol.achat(talks, GREEDY)
        assert [o.outputs[0].token_ids for o in outputs] == [
            o.outputs[0].token_ids for o in expected
        ]
        [one] = await smol.achat(talks[1], GREEDY)
        assert one.outputs[0].text == expected[1].outputs[0].text
        with pytest.raises(RequestError, match="role"):
            await smol.achat([{"content": "no role"}], GREEDY)

    asyncio.run(run())


def test_cancelling_a_task_aborts_its_request(tiny: LLM) -> None:
    import asyncio

    async def run() -> None:
        long = SamplingParams(max_tokens=120, ignore_eos=True)
        task = asyncio.create_task(tiny.agenerate([IDS] * 8, long))
        stream = tiny.astream(IDS, long)
        await anext(stream)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()

    asyncio.run(run())
    _idle(tiny)


def _idle(llm: LLM) -> None:
    """Wait (bounded by the test's timeout) until nothing runs."""
    llm.generate({"prompt_token_ids": [9]}, SamplingParams(max_tokens=1))
    while llm.has_unfinished_requests:
        pass
    assert llm.get_metrics()["num_running"] == 0


def test_leaving_a_stream_early_aborts_it(tiny: LLM) -> None:
    for _ in tiny.stream(IDS, SamplingParams(max_tokens=120, ignore_eos=True)):
        break
    _idle(tiny)


def test_many_threads_share_one_engine(tiny: LLM) -> None:
    expected = tiny.generate(IDS, GREEDY)[0].outputs[0].token_ids
    found: list[object] = []

    def ask() -> None:
        for _ in range(5):
            found.append(tiny.generate(IDS, GREEDY)[0].outputs[0].token_ids)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 40


# ---- stepping by hand ----------------------------------------------------------------------------


def test_stepping_by_hand_starts_no_thread(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64) as llm:
        ids = llm.enqueue([IDS, IDS], GREEDY)
        threads = threading.active_count()
        finished = {}
        while llm.has_unfinished_requests:
            for output in llm.step():
                if output.finished:
                    finished[output.request_id] = output
        assert sorted(finished) == sorted(ids)
        assert threading.active_count() == threads
        assert llm.pump(5) == []
        llm.enqueue(IDS, GREEDY)
        outputs = []
        while llm.has_unfinished_requests:
            outputs += llm.pump(1)
        assert outputs[-1].finished
        assert llm.wait_for_completion() == []


def test_wait_for_completion_returns_everything_enqueued_in_order(tiny: LLM) -> None:
    first = tiny.enqueue([IDS, "hello"], GREEDY)
    second = tiny.enqueue({"prompt_token_ids": [9]}, GREEDY)
    assert [output.request_id for output in tiny.wait_for_completion()] == first + second


def test_abort_ends_a_request_in_the_middle_of_its_prefill(smollm2: Path) -> None:
    with LLM(smollm2, max_model_len=2048, max_num_batched_tokens=64) as llm:
        [request] = llm.enqueue("word " * 1500, GREEDY)
        llm.step()
        llm.step()
        llm.abort(request)
        [output] = llm.step()
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert not llm.has_unfinished_requests
        assert llm.generate("Hi", GREEDY)[0].finished


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "empty"),
        ({"prompt_token_ids": []}, "empty"),
        ({"prompt_token_ids": [448]}, r"ids in 0\.\.447, found 448"),
        ({"prompt_token_ids": [-1]}, "found -1"),
        ({"prompt_token_ids": [1.5]}, "list of integers"),
        ({"prompt_token_ids": "12"}, "list of integers"),
        ({"prompt": 3}, "expected a string, found int"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "either 'prompt' or 'prompt_token_ids'"),
        ({"text": "a"}, r"found the keys \['text'\]"),
        ({"prompt": "a", "cache_salt": 3}, "cache_salt: expected a non-empty string"),
        (
            {"prompt_token_ids": [1] * 128},
            "128 tokens, but the context holds 128 and 1 must be left",
        ),
        (7, "expected text, token ids"),
        (b"bytes", "expected text, token ids"),
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(
    tiny_path: Path, prompt: object, message: str
) -> None:
    with LLM(tiny_path, max_model_len=128, seed=1) as llm:
        if prompt in ("",):
            prompt = {"prompt_token_ids": []}
        with pytest.raises(RequestError, match=message):
            llm.generate([IDS, prompt] if not isinstance(prompt, (int, bytes)) else prompt, GREEDY)
        assert not llm.has_unfinished_requests


def test_a_long_prompt_can_be_cut_from_the_left(tiny: LLM) -> None:
    ids = [5 + i % 100 for i in range(300)]
    [output] = tiny.generate([ids], GREEDY.clone(truncate_prompt_tokens=10))
    assert list(output.prompt_token_ids) == ids[-10:]
    [output] = tiny.generate([ids], SamplingParams(max_tokens=1, truncate_prompt_tokens=-1))
    assert list(output.prompt_token_ids) == ids[-127:]


def test_without_a_tokenizer_token_ids_still_work(tiny_path: Path) -> None:
    with LLM(tiny_path, skip_tokenizer_init=True, max_model_len=64) as llm:
        [output] = llm.generate(IDS, GREEDY)
        assert len(output.outputs[0].token_ids) == 8 and output.outputs[0].text == ""
        with pytest.raises(RequestError, match="skip_tokenizer_init"):
            llm.generate("hello", GREEDY)
        with pytest.raises(RequestError, match="has no tokenizer"):
            llm.get_tokenizer()


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"max_model_length": 3}, TypeError, "did you mean 'max_model_len'"),
        ({"qqq": 3}, TypeError, "unknown option 'qqq'"),
        ({"max_model_len": 0}, RequestError, r"max_model_len: expected an integer in 1\.\."),
        ({"max_model_len": 10**9}, RequestError, "max_model_len"),
        ({"num_threads": True}, RequestError, "num_threads"),
        ({"block_size": 24}, RequestError, "power of two"),
        ({"memory": "2 apples"}, RequestError, "memory"),
        ({"memory": -1}, RequestError, "memory"),
        ({"kv_cache_dtype": "int3"}, RequestError, "kv_cache_dtype: expected float32, float16"),
        ({"kv_cache_dtype": 8}, RequestError, "kv_cache_dtype: .* found 8"),
        ({"kv_cache_dtype": "int4:skip=2"}, RequestError, "skips layer 2 of 2"),
        (
            {"kv_cache_dtype": "int16", "device": "cuda"},
            RequestError,
            "kv_cache_dtype: int16 is not supported on a GPU, .* use float16",
        ),
        (
            {"kv_policy": "int16>int8"},
            RequestError,
            "kv_policy: expected fp16>int8>int4, .*, found 'int16>int8'",
        ),
        ({"compute": "fast"}, RequestError, "compute"),
        ({"device": "tpu"}, RequestError, "device"),
        ({"gpu_memory_utilization": 1.5}, RequestError, "share"),
        ({"enable_lora": 1}, RequestError, "enable_lora: expected True or False, found 1"),
        ({"lora_memory": "1GiB"}, RequestError, "lora_memory needs enable_lora=True"),
        ({"lora_dtype": "int8"}, RequestError, "lora_dtype needs enable_lora=True"),
        (
            {"lora_dtype": "int8", "enable_lora": True, "device": "cuda"},
            RequestError,
            "lora_dtype: with device='cuda' expected 'auto'",
        ),
        ({"lora_dtype": "int4", "enable_lora": True}, RequestError, "lora_dtype: expected one of"),
        ({"max_loras": 0}, RequestError, r"max_loras: expected an integer in 1\.\."),
        (
            {"enable_lora": True, "max_loras": 3, "max_cpu_loras": 2},
            RequestError,
            r"max_cpu_loras \(2\) must be at least max_loras \(3\)",
        ),
        ({"speculative_config": {}}, RequestError, "method is missing"),
        ({"trust_remote_code": True}, RequestError, "never run"),
        ({"on_progress": 3}, RequestError, "callable"),
        (
            {"max_num_seqs": 300, "max_num_batched_tokens": 256},
            RequestError,
            r"max_num_batched_tokens \(256\) must be at least max_num_seqs \(300\)",
        ),
        (
            {"enable_chunked_prefill": False, "max_num_batched_tokens": 64, "max_num_seqs": 4},
            RequestError,
            r"without chunked prefill max_num_batched_tokens \(64\) must be at least",
        ),
    ],
)
def test_a_bad_option_is_refused_by_name(
    tiny_path: Path, options: dict[str, object], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        LLM(tiny_path, **options)


def test_a_gpu_that_is_not_there_is_refused(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RequestError, match="device='cuda': torch finds no GPU"):
        LLM(tiny_path, device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    message = "expected 4 GPUs, one for each rank .*, found 3; use fewer ranks, or .*CUDA_VISIBLE"
    with pytest.raises(RequestError, match=message):
        LLM(tiny_path, device="cuda", tensor_parallel_size=2, pipeline_parallel_size=2)


def test_a_missing_model_and_a_pickle_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf"):
        LLM(tmp_path / "nowhere.gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"found only pickles \(pytorch_model\.bin\)"):
        LLM(tmp_path)


def test_a_model_that_does_not_fit_is_refused_with_the_sums(smollm2: Path) -> None:
    with pytest.raises(OutOfMemoryError) as error:
        LLM(smollm2, memory="90MB")
    text = str(error.value)
    for part in ("weights", "KV", "budget", "max_model_len"):
        assert part in text


def test_a_memory_budget_shrinks_the_cache_and_is_kept(smollm2: Path) -> None:
    plan = LLM.plan(smollm2, memory="256MiB")
    with LLM(smollm2, memory="256MiB") as llm:
        assert llm.memory_plan == plan
        assert plan.total <= 256 * 2**20
        assert llm.generate("Hi", GREEDY)[0].finished


def test_loading_reports_progress_and_can_be_cancelled(smollm2: Path) -> None:
    seen: list[tuple[str, int, int]] = []

    def follow(stage: str, done: int, total: int) -> None:
        seen.append((stage, done, total))

    with LLM(smollm2, max_model_len=64, on_progress=follow):
        pass
    done = [entry[1] for entry in seen]
    assert {entry[0] for entry in seen} == {"load"} and done == sorted(done) and len(done) > 100
    assert seen[-1][1] == seen[-1][2]

    threads = threading.active_count()
    with pytest.raises(LoadCancelled, match="cancelled by on_progress"):
        LLM(smollm2, on_progress=lambda stage, done, total: done < total / 2)
    with pytest.raises(ZeroDivisionError):
        LLM(smollm2, on_progress=lambda stage, done, total: 1 / 0)
    assert threading.active_count() == threads


def test_an_exception_in_a_logits_processor_ends_that_request_only(tiny: LLM) -> None:
    def broken(tokens: object, logits: object) -> object:
        raise ValueError("my processor is broken")

    good, bad = tiny.generate([IDS, IDS], [GREEDY, GREEDY.clone(logits_processors=[broken])])
    assert good.outputs[0].finish_reason == "length"
    assert bad.outputs[0].finish_reason == "error"


def test_close_during_work_ends_the_waiting_calls(tiny_path: Path) -> None:
    llm = LLM(tiny_path, max_model_len=128)
    started, errors = threading.Event(), []

    def ask() -> None:
        try:
            for _ in llm.stream(IDS, SamplingParams(max_tokens=100, ignore_eos=True)):
                started.set()
            errors.append(None)
        except EngineClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    assert started.wait(30)
    llm.close()
    thread.join(30)
    assert not thread.is_alive() and len(errors) == 1


def test_ctrl_c_aborts_only_that_call(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from sdk.requests.driving import mailboxes

    stream = tiny.stream(IDS, SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    next(stream)
    real = mailboxes.Mailbox.get
    calls = iter([KeyboardInterrupt])

    def interrupted(self: mailboxes.Mailbox, *given: object) -> object:
        if next(calls, None):
            raise KeyboardInterrupt
        return real(self, *given)

    with monkeypatch.context() as patch:
        patch.setattr(mailboxes.Mailbox, "get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tiny.generate([IDS] * 4, SamplingParams(max_tokens=100, ignore_eos=True))
    assert len(list(stream)) == 59  # the other call went on
    _idle(tiny)


def test_a_request_that_can_never_fit_is_rejected_while_others_run(tiny_path: Path) -> None:
    with LLM(tiny_path, kv_cache_memory_bytes="64KiB") as llm:
        assert llm.max_model_len == 64  # the model's own context is 512
        with pytest.raises(RequestError, match="the context holds 64"):
            llm.generate({"prompt_token_ids": [1] * 120}, GREEDY)
        assert llm.generate(IDS, GREEDY)[0].finished


def test_default_parameters_come_from_the_checkpoint(smol: LLM) -> None:
    params = smol.get_default_sampling_params()
    assert isinstance(params, SamplingParams) and params.max_tokens is None
