"""Requests with adapters: each as if it ran alone, whatever runs beside it and wherever it came
from."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import (
    LLM,
    AsyncLLM,
    BeamSearchParams,
    CheckpointError,
    LoRARequest,
    RequestError,
    SamplingParams,
    UnsupportedError,
)
from sdk.testing import tiny_adapter

PROMPTS = [[5, 9, 30, 31, 200, 17, 8, 8, 1, 4], [44, 8], [7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5]]
PARAMS = SamplingParams(temperature=0.8, seed=2, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
OPTIONS: dict[str, Any] = {"max_model_len": 96, "enable_lora": True, "max_loras": 3}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def adapters(tiny_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Four adapters of different ranks and sizes for the tiny model."""
    folder = tmp_path_factory.mktemp("adapters")
    kinds: dict[str, dict[str, Any]] = {
        "a": {"rank": 4},
        "b": {"rank": 7, "targets": ("q_proj", "v_proj")},
        "c": {"rank": 1, "targets": ("down_proj",)},
        "d": {"rank": 16},
    }
    return {
        name: tiny_adapter(folder / name, tiny_path, seed=seed, **kind)
        for seed, (name, kind) in enumerate(kinds.items())
    }


@pytest.fixture(scope="module")
def lora(tiny_path: Path, adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(tiny_path, **OPTIONS) as llm:
        for name in "abc":
            llm.add_lora(name, adapters[name])
        yield llm


def answer(output: Any) -> Any:
    rows = output.prompt_logprobs or []
    return output.outputs[0].token_ids, [
        row and {k: v.logprob for k, v in row.items()} for row in rows
    ]


def alone(llm: LLM, prompt: list[int], name: Any, params: SamplingParams = PARAMS) -> Any:
    llm.reset_prefix_cache()
    [output] = llm.generate(prompt, params, lora_request=name, use_tqdm=False)
    return answer(output)


def test_adapters_of_one_step_give_the_bits_they_give_alone(lora: LLM) -> None:
    names = ["a", None, "b", "c"]
    apart = [alone(lora, prompt, name) for prompt, name in zip(PROMPTS, names, strict=True)]
    lora.reset_prefix_cache()
    together = lora.generate(PROMPTS, PARAMS, lora_request=names, use_tqdm=False)
    assert [answer(one) for one in together] == apart
    assert [one.lora_request and one.lora_request.lora_name for one in together] == names
    plain = [alone(lora, prompt, None) for prompt in PROMPTS]
    assert [x == y for x, y in zip(apart, plain, strict=True)] == [False, True, False, False]


def test_a_request_of_an_engine_with_adapters_is_that_of_one_without(lora: LLM, tiny: LLM) -> None:
    params = PARAMS.clone(max_tokens=8)
    assert alone(lora, PROMPTS[0], None, params) == alone(tiny, PROMPTS[0], None, params)


def test_structured_answers_of_adapters_follow_their_structures(lora: LLM) -> None:
    digits = PARAMS.clone(structured_outputs={"regex": "[0-9]{9}"}, max_tokens=20, ignore_eos=False)
    names = ["a", None, "b", "a"]
    params = [digits, digits, digits, PARAMS]
    apart = [alone(lora, p, n, s) for p, n, s in zip(PROMPTS, names, params, strict=True)]
    lora.reset_prefix_cache()
    together = lora.generate(PROMPTS, params, lora_request=names, use_tqdm=False)
    assert [answer(one) for one in together] == apart
    for one in together[:3]:
        text = one.outputs[0].text
        assert len(text) == 9 and text.isdecimal()
    assert alone(lora, PROMPTS[0], None, digits) != apart[0]


def test_prefixes_are_cached_for_each_adapter(lora: LLM) -> None:
    prompt = list(range(40))
    lora.reset_prefix_cache()
    cached = [
        lora.generate(prompt, GREEDY, lora_request=name, use_tqdm=False)[0].num_cached_tokens
        for name in ("a", "a", "b", None, None, "b")
    ]
    assert [count > 0 for count in cached if count is not None] == [
        *(False, True, False, False, True, True)
    ]


def test_pins_belong_to_an_adapter(lora: LLM) -> None:
    prompt = list(range(100, 140))
    lora.reset_prefix_cache()
    assert lora.pin(prompt, lora_request="a") == 32
    assert not lora.unpin(prompt)
    assert lora.unpin(prompt, lora_request="a")


def test_more_adapters_than_slots_take_turns(tiny_path: Path, adapters: dict[str, Path]) -> None:
    with LLM(tiny_path, **OPTIONS | {"max_loras": 1}) as llm:
        requests = {n: LoRARequest(n, i + 1, str(p)) for i, (n, p) in enumerate(adapters.items())}
        order = [requests[n] for n in "abcdabcd"]
        prompts = [PROMPTS[i % 4] for i in range(8)]
        together = llm.generate(prompts, PARAMS, lora_request=order, use_tqdm=False)
        apart = [alone(llm, p, r) for p, r in zip(prompts, order, strict=True)]
        assert [answer(one) for one in together] == apart
        assert len({json.dumps(one) for one in apart[:4]}) == 4
        loaded = [info.loaded for info in llm.list_loras()]
        assert loaded == [False, False, False, True]
        metrics = llm.get_metrics()
        assert metrics["num_loras"] == 1 and metrics["lora_loads"] >= 8


def test_an_answer_survives_a_preemption(tiny_path: Path, adapters: dict[str, Path]) -> None:
    params, names = GREEDY.clone(max_tokens=60), ["a", "b", "a", "b"]

    def answers(**options: Any) -> tuple[list[Any], LLM]:
        with LLM(tiny_path, **OPTIONS | options) as llm:
            for name in "ab":
                llm.add_lora(name, adapters[name])
            outputs = llm.generate(PROMPTS, params, lora_request=names, use_tqdm=False)
            preemptions = llm.get_metrics()["num_preemptions"]
            assert bool(preemptions) == bool(options)
            return [one.outputs[0].token_ids for one in outputs], llm

    expected, llm = answers()
    few = 8 * llm.memory_plan.page_bytes
    assert answers(kv_cache_memory_bytes=few)[0] == expected


@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": "ngram"},
        {"enforce_eager": True},
        {"kv_cache_dtype": "int8"},
        {"max_num_seqs": 4, "max_num_batched_tokens": 4},
    ],
    ids=lambda options: next(iter(options)),
)
def test_adapters_work_with(
    options: dict[str, Any], tiny_path: Path, adapters: dict[str, Path]
) -> None:
    with LLM(tiny_path, **OPTIONS | options) as llm:
        for name in "ab":
            llm.add_lora(name, adapters[name])
        names = ["a", None, "b", "a"]
        prompts = [prompt * 2 for prompt in PROMPTS]
        apart = [alone(llm, p, n, GREEDY) for p, n in zip(prompts, names, strict=True)]
        llm.reset_prefix_cache()
        together = llm.generate(prompts, GREEDY, lora_request=names, use_tqdm=False)
        assert [answer(one) for one in together] == apart


def test_every_call_takes_an_adapter(lora: LLM, tiny_path: Path) -> None:
    ids, chat = PROMPTS[0], [{"role": "user", "content": "Hello"}]
    [first] = lora.generate(ids, GREEDY, lora_request="a", use_tqdm=False)
    tokens = first.outputs[0].token_ids
    assert tokens != lora.generate(ids, GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    streamed = [
        t
        for piece in lora.stream(ids, GREEDY, lora_request="a")
        for t in piece.outputs[0].token_ids
    ]
    assert streamed == tokens
    lora.enqueue([ids, ids], GREEDY, lora_request=["a", None])
    queued = lora.wait_for_completion()
    assert queued[0].outputs[0].token_ids == tokens != queued[1].outputs[0].token_ids
    several = lora.generate(ids, GREEDY.clone(n=2), lora_request="a", use_tqdm=False)
    assert [one.token_ids for one in several[0].outputs] == [tokens, tokens]
    beams = [lora.beam_search(ids, BeamSearchParams(2, 4), lora_request=n) for n in ("a", None)]
    assert beams[0][0].sequences[0].tokens != beams[1][0].sequences[0].tokens
    for call in (lora.embed, lora.encode):
        states = [
            call([ids, ids], lora_request=names, use_tqdm=False) for names in ("a", [None, "a"])
        ]
        vectors = [
            [list(getattr(x, "embedding", None) or x.outputs.data) for x in found]
            for found in states
        ]
        assert vectors[0][0] == vectors[0][1] == vectors[1][1] != vectors[1][0]
    scores = [lora.score("one", "two", lora_request=name)[0].score for name in ("a", None)]
    assert scores[0] != scores[1]

    async def run() -> None:
        [output] = await lora.agenerate(ids, GREEDY, lora_request="a")
        assert output.outputs[0].token_ids == tokens
        stream = lora.astream(ids, GREEDY, lora_request="a")
        assert [t async for piece in stream for t in piece.outputs[0].token_ids] == tokens
        engine = AsyncLLM(lora)
        last = [piece async for piece in engine.generate(ids, GREEDY, lora_request="a")][-1]
        assert last.outputs[0].token_ids == tokens and last.lora_request is not None
        [one] = await engine.embed(ids, lora_request="a")
        assert one.embedding == lora.embed(ids, lora_request="a")[0].embedding
        assert [info.name for info in await engine.list_loras()] == ["a", "b", "c"]

    asyncio.run(run())
    if lora.get_tokenizer().chat_template:
        lora.chat(chat, GREEDY, lora_request="a", use_tqdm=False)


def test_guidance_runs_both_sequences_with_the_adapter(lora: LLM) -> None:
    params = GREEDY.clone(guidance_scale=1.5)
    names = ["a", None, "b"]
    apart = [alone(lora, PROMPTS[0], name, params) for name in names]
    lora.reset_prefix_cache()
    found = lora.generate([PROMPTS[0]] * 3, params, lora_request=names, use_tqdm=False)
    assert [answer(one) for one in found] == apart


def test_an_adapter_can_be_scaled(lora: LLM, adapters: dict[str, Path]) -> None:
    plain = alone(lora, PROMPTS[0], None)
    none = LoRARequest("none", 90, str(adapters["d"]), lora_scale=0.0)
    half = LoRARequest("half", 91, str(adapters["d"]), lora_scale=0.5)
    whole = LoRARequest("whole", 92, str(adapters["d"]))
    try:
        found = [alone(lora, PROMPTS[0], request) for request in (none, half, whole)]
    finally:
        for request in (none, half, whole):
            lora.remove_lora(request)
    assert found[0] == plain
    assert found[1] not in (plain, found[2])


# ---- what is wrong -------------------------------------------------------------------------------


def test_without_enable_lora_a_request_with_an_adapter_says_what_to_do(
    tiny: LLM, adapters: dict[str, Path]
) -> None:
    for call in (
        lambda: tiny.generate("x", lora_request="a"),
        lambda: tiny.generate("x", lora_request=LoRARequest("a", 1, str(adapters["a"]))),
        lambda: tiny.add_lora("a", adapters["a"]),
        lambda: tiny.pin_lora("a"),
    ):
        with pytest.raises(RequestError, match=r"load it with enable_lora=True"):
            call()
    assert tiny.list_loras() == [] and not tiny.remove_lora("a")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("z", r"no adapter is called 'z'; there are 'a', 'b', 'c'"),
        (7, r"expected a LoRARequest or a name"),
        (["a"], r"one for each prompt \(2\), found 1"),
        (LoRARequest("new", 50), r"'new' has no lora_path"),
        (LoRARequest("a", 51, "elsewhere"), r"has the name or the number of an adapter"),
        (LoRARequest("other", 1, "elsewhere"), r"has the name or the number of an adapter"),
    ],
    ids=str,
)
def test_a_bad_lora_request_is_rejected(lora: LLM, given: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        lora.generate(["x", "y"], lora_request=given)
    assert len(lora.list_loras()) == 3


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (("", 1), "lora_name: expected a string of 1 to 256"),
        (("a", 0), "lora_int_id: expected an integer > 0, found 0"),
        (("a", True), "lora_int_id"),
        (("a", 1, 5), "lora_path: expected a path"),
        (("a", 1, "x", None, False, float("nan")), "lora_scale: expected a number"),
    ],
)
def test_a_bad_field_of_a_lora_request_is_rejected(fields: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        LoRARequest(*fields)


def test_a_bad_adapter_is_an_error_of_its_call_only(lora: LLM, tmp_path: Path) -> None:
    for path, error in ((tmp_path / "none", CheckpointError), (tmp_path, CheckpointError)):
        with pytest.raises(error):
            lora.generate("x", lora_request=LoRARequest("bad", 60, str(path)))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4}')
    (tmp_path / "adapter_model.bin").write_bytes(b"\x80")
    with pytest.raises(UnsupportedError, match=r"a pickle.*not opened.*save_pretrained"):
        lora.add_lora("bad", tmp_path)
    assert [info.name for info in lora.list_loras()] == ["a", "b", "c"]


def test_limits_are_named(tiny_path: Path, adapters: dict[str, Path]) -> None:
    with LLM(tiny_path, **OPTIONS | {"max_lora_rank": 8, "lora_memory": 40_000}) as llm:
        assert llm.memory_plan.adapters == 40_000
        with pytest.raises(RequestError, match=r"rank 16 exceeds max_lora_rank=8"):
            llm.add_lora("d", adapters["d"])
        with pytest.raises(RequestError, match=r"'a' needs .* lora_memory has 39.1 KiB"):
            llm.add_lora("a", adapters["a"])
        llm.add_lora("c", adapters["c"])
        assert llm.get_metrics()["lora_bytes"] <= 40_000


def test_files_that_change_end_only_the_requests_that_need_them(
    tiny_path: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    own = shutil.copytree(adapters["a"], tmp_path / "own")
    with LLM(tiny_path, **OPTIONS | {"max_loras": 1}) as llm:
        llm.add_lora("own", own)
        llm.add_lora("b", adapters["b"])  # takes the slot
        before = alone(llm, PROMPTS[0], "b", GREEDY)
        shutil.rmtree(own)
        names = ["b", "own", None]
        found = llm.generate([PROMPTS[0]] * 3, GREEDY, lora_request=names, use_tqdm=False)
        assert [one.outputs[0].finish_reason for one in found] == ["length", "error", "length"]
        assert "adapter_config.json" in str(found[1].outputs[0].stop_reason)
        assert answer(found[0]) == before
        shutil.copytree(adapters["d"], own)  # another one in its place
        [output] = llm.generate(PROMPTS[0], GREEDY, lora_request="own", use_tqdm=False)
        assert "have changed since it was added" in str(output.outputs[0].stop_reason)
        llm.remove_lora("own")
        llm.add_lora("own", own)
        assert alone(llm, PROMPTS[0], "own", GREEDY) != before


def test_an_adapter_is_replaced_in_place(
    tiny_path: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Its cached prefixes are not used any more."""
    own = shutil.copytree(adapters["a"], tmp_path / "own")
    prompt = list(range(50))
    with LLM(tiny_path, **OPTIONS) as llm:
        request = LoRARequest("own", 1, str(own))
        [old] = llm.generate(prompt, GREEDY, lora_request=request, use_tqdm=False)
        shutil.rmtree(own)
        shutil.copytree(adapters["d"], own)
        again = LoRARequest("own", 1, str(own), load_inplace=True)
        [new] = llm.generate(prompt, GREEDY, lora_request=again, use_tqdm=False)
        assert new.num_cached_tokens == 0 and new.outputs[0].token_ids != old.outputs[0].token_ids
        assert [info.rank for info in llm.list_loras()] == [16]


# ---- coming and going ----------------------------------------------------------------------------


def test_adapters_come_and_go_while_requests_run(
    tiny_path: Path, adapters: dict[str, Path]
) -> None:
    params = GREEDY.clone(max_tokens=60)
    with LLM(tiny_path, **OPTIONS | {"max_loras": 2}) as llm:
        llm.add_lora("a", adapters["a"])
        expected = alone(llm, PROMPTS[0], "a", params)[0]
        llm.reset_prefix_cache()
        stream = llm.stream(PROMPTS[0], params, lora_request="a")
        tokens = list(next(stream).outputs[0].token_ids)
        for name in "bcd":
            llm.add_lora(name, adapters[name])
            llm.generate(PROMPTS[1], GREEDY, lora_request=name, use_tqdm=False)
            assert llm.remove_lora(name)
        assert llm.remove_lora("a") and not llm.remove_lora("a")
        with pytest.raises(RequestError, match="no adapter is called 'a'"):
            llm.generate("x", lora_request="a")
        tokens += [token for piece in stream for token in piece.outputs[0].token_ids]
        assert tokens == expected
        assert llm.get_metrics()["lora_bytes"] == 0


def test_a_pinned_adapter_stays_and_blocks_what_finds_no_room(
    tiny_path: Path, adapters: dict[str, Path]
) -> None:
    with LLM(tiny_path, **OPTIONS | {"max_loras": 1}) as llm:
        llm.add_lora("b", adapters["b"])
        llm.add_lora("a", adapters["a"], pin=True)
        assert [(one.name, one.loaded, one.pinned) for one in llm.list_loras()] == [
            ("b", False, False),
            ("a", True, True),
        ]
        with pytest.raises(RequestError, match=r"'b' cannot be loaded: 'a' are pinned"):
            llm.generate("x", lora_request="b")
        llm.remove_lora("a")
        assert llm.pin_lora("b")


def test_a_sleep_that_frees_the_weights_loads_adapters_again(
    tiny_path: Path, adapters: dict[str, Path]
) -> None:
    with LLM(tiny_path, **OPTIONS) as llm:
        llm.add_lora("a", adapters["a"])
        llm.add_lora("b", adapters["b"], pin=True)
        expected = [alone(llm, PROMPTS[0], name) for name in "ab"]
        for level in (1, 2):
            llm.sleep(level)
            with pytest.raises(RequestError, match="sleeps"):
                llm.generate("x", lora_request="a")
            llm.wake_up()
            assert [alone(llm, PROMPTS[0], name) for name in "ab"] == expected


def test_a_snapshot_of_a_request_with_an_adapter_is_refused(lora: LLM) -> None:
    lora.enqueue(list(range(40)), GREEDY, request_id="r", lora_request="a")
    lora.step()
    with pytest.raises(RequestError, match="'r': it runs with an adapter"):
        lora.snapshot(request_id="r")
    lora.abort("r")
    lora.wait_for_completion()


def test_an_aborted_request_that_waits_for_its_adapter_leaves_nothing(
    tiny_path: Path, adapters: dict[str, Path]
) -> None:
    with LLM(tiny_path, **OPTIONS) as llm:
        request = LoRARequest("a", 1, str(adapters["a"]))
        [name] = llm.enqueue(PROMPTS[0], GREEDY, lora_request=request)
        llm.abort(name)
        [output] = llm.wait_for_completion()
        assert output.outputs[0].finish_reason == "abort"
        assert llm.list_loras()[0].num_requests == 0
        llm.generate(PROMPTS[0], GREEDY, lora_request=request, use_tqdm=False)


def test_the_plan_has_room_for_adapters(tiny_path: Path) -> None:
    without, one, four = (
        LLM.plan(tiny_path, max_model_len=96, **options)
        for options in ({}, {"enable_lora": True}, {"enable_lora": True, "max_loras": 4})
    )
    assert without.adapters == 0 < one.adapters < four.adapters
    assert four.total - without.total == four.adapters
    assert "adapters" in str(four) and "adapters" not in str(without)
    tight = LLM.plan(tiny_path, memory=without.fixed + 2**20, enable_lora=True, max_loras=4096)
    assert not tight.fits and "adapters" in tight.problem


@pytest.mark.slow
def test_ranks_in_other_processes_have_the_adapters_too(
    tiny_path: Path, adapters: dict[str, Path]
) -> None:
    options = OPTIONS | {"compute": "exact", "max_loras": 2}
    names = ["a", None, "b", "d"]

    def answers(**more: Any) -> list[Any]:
        with LLM(tiny_path, **options, **more) as llm:
            llm.add_lora("a", adapters["a"])
            for index, name in enumerate("bd"):
                llm.add_lora(LoRARequest(name, index + 5, str(adapters[name])))
            found = llm.generate(PROMPTS, GREEDY, lora_request=names, use_tqdm=False)
            assert llm.remove_lora("a")
            return [output.outputs[0].token_ids for output in found]

    assert answers(tensor_parallel_size=2) == answers()


GOLDEN = Path(__file__).parents[1] / "golden"
FORMATS = sorted(
    path.parent.name
    for path in GOLDEN.glob("*/origin.json")
    if not path.parent.name.startswith(("arch-", "gptoss"))
)


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_runs_adapters(name: str, golden: Path, tmp_path: Path) -> None:
    """As far as bits go; tests/models compares with merged weights."""
    opened = json.loads((golden / name / "origin.json").read_text())["paths"][-1]
    path = golden / name / opened
    options = OPTIONS | {"max_model_len": 64, "skip_tokenizer_init": True}
    with LLM(path, **options) as llm:
        for index, adapter in enumerate("ab"):
            llm.add_lora(adapter, tiny_adapter(tmp_path / adapter, path, rank=5, seed=index))
        names = ["a", None, "b"]
        apart = [alone(llm, PROMPTS[0], one) for one in names]
        llm.reset_prefix_cache()
        together = llm.generate([PROMPTS[0]] * 3, PARAMS, lora_request=names, use_tqdm=False)
        assert [answer(one) for one in together] == apart
        assert len({json.dumps(one) for one in apart}) == 3


@pytest.mark.slow
def test_many_loads_leave_memory_as_it_was(
    tiny_path: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    import psutil

    paths = [tiny_adapter(tmp_path / str(i), tiny_path, rank=16, seed=i) for i in range(6)]
    draw, process = random.Random(3), psutil.Process()
    with LLM(tiny_path, **OPTIONS) as llm:

        def churn(count: int) -> int:
            for _ in range(count):
                name = str(draw.randrange(6))
                known = [info.name for info in llm.list_loras()]
                if name in known and draw.random() < 0.5:
                    llm.remove_lora(name)
                    continue
                if name not in known:
                    llm.add_lora(name, paths[int(name)])
                llm.generate(PROMPTS[1], GREEDY, lora_request=name, use_tqdm=False)
            for info in llm.list_loras():
                llm.remove_lora(info.name)
            assert llm.get_metrics()["lora_bytes"] == llm.get_metrics()["num_loras"] == 0
            return process.memory_info().rss

        before = churn(60)
        after = churn(200)
    one = paths[0].joinpath("adapter_model.safetensors").stat().st_size
    assert after - before < 2 * one + 2**21  # 200 of them would be 100 times as much


def test_requests_with_int8_adapters_are_answered_as_if_alone(
    tiny_path: Path, adapters: dict[str, Path], lora: LLM
) -> None:
    with LLM(tiny_path, **OPTIONS, lora_dtype="int8") as llm:
        for name in "abc":
            llm.add_lora(name, adapters[name])
        names = ["a", "b", "c", None]
        together = llm.generate(PROMPTS, PARAMS, lora_request=names, use_tqdm=False)
        for prompt, name, output in zip(PROMPTS, names, together, strict=True):
            assert answer(output) == alone(llm, prompt, name)
        sizes = {one.name: one.nbytes for one in llm.list_loras()}
    plain = {one.name: one.nbytes for one in lora.list_loras()}
    assert all(sizes[name] < 0.75 * plain[name] for name in "ab")
    plans = [LLM.plan(tiny_path, **OPTIONS, lora_dtype=dtype) for dtype in ("auto", "int8")]
    assert plans[1].adapters < plans[0].adapters


def test_int8_adapters_change_the_model_as_others_do_within_rounding(
    tiny_path: Path, adapters: dict[str, Path]
) -> None:
    """Rounding both factors to 1/254 of their largest changes an update by about 1 %."""
    found = []
    params = SamplingParams(max_tokens=1, prompt_logprobs=300, temperature=0)
    for dtype in ("auto", "int8"):
        with LLM(tiny_path, **OPTIONS, lora_dtype=dtype, compute="exact") as llm:
            llm.add_lora("d", adapters["d"])
            for name in ("d", None):
                found.append(_by_place(alone(llm, PROMPTS[0], name, params)[1]))
    wide, base, int8, again = found
    assert again == base
    assert 0 < _error(int8, wide) < 0.03**2 * _error(base, wide)


def _by_place(rows: list[Any]) -> dict[tuple[int, int], float]:
    return {(i, key): value for i, row in enumerate(rows) for key, value in (row or {}).items()}


def _error(a: dict[tuple[int, int], float], b: dict[tuple[int, int], float]) -> float:
    """The mean square of the differences."""
    common = a.keys() & b.keys()
    return sum((a[place] - b[place]) ** 2 for place in common) / len(common)


def test_an_adapter_may_have_a_rank_above_64(tiny_path: Path, tmp_path: Path) -> None:
    path = tiny_adapter(tmp_path / "wide", tiny_path, rank=100)
    with LLM(tiny_path, **OPTIONS | {"max_lora_rank": 100}) as llm:
        llm.add_lora("wide", path)
        assert alone(llm, PROMPTS[0], "wide") != alone(llm, PROMPTS[0], None)
