"""Stages through the public class: the bits of one process, and no hang when one breaks."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from sdk import LLM, AlignmentError, EngineDeadError, RequestError, SamplingParams, UnsupportedError
from sdk.api.config import EngineConfig
from sdk.engine.plan import StepPlan
from sdk.kernels.system import SYSTEM
from sdk.memory.resolve import model_config, open_model
from sdk.memory.split import stage_layers
from sdk.memory.weights import costs
from sdk.testing import tiny_adapter, tiny_model
from tests.api.engines import LIMIT
from tests.models.test_rwkv import folder as rwkv

PROMPTS = [[5, 9, 30, 31, 200, 17, 8, 8, 1, 4], [44, 8], [7, 7, 7], [3, 1, 4, 1, 5, 9, 2, 6, 5] * 5]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, logprobs=2)
SAMPLED = SamplingParams(
    temperature=0.9, seed=3, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=1
)
#: Small steps: prompts run in chunks, next to requests that decode.
SMALL = {"max_model_len": 128, "max_num_batched_tokens": 24, "max_num_seqs": 8, "num_threads": 1}


def _children() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True)}


@pytest.fixture(autouse=True)
def nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """After every test: no process more than before, and no file in the place of shared memory."""
    shared = tmp_path_factory.mktemp("shared")
    monkeypatch.setattr(SYSTEM, "memory_folder", lambda: str(shared))
    monkeypatch.setattr("sdk.cluster.executors.groups._ENOUGH", 0)
    children = _children()
    yield
    assert _children() <= children
    assert list(shared.iterdir()) == []


def facts(output: Any) -> Any:
    """Tokens and log-probabilities, exact floats included."""

    def rows(found: Any) -> Any:
        return [row and sorted((t, x.logprob) for t, x in row.items()) for row in found or ()]

    answer = output.outputs[0]
    return answer.token_ids, rows(answer.logprobs), rows(output.prompt_logprobs)


def answers(
    model: Path | str, prompts: Any = PROMPTS, params: Any = (GREEDY, SAMPLED), **options: Any
) -> list[Any]:
    """Of all requests at once, with each of ``params``."""
    with LLM(model, **SMALL | options) as llm:
        found = []
        for one in params:
            found += map(facts, llm.generate(prompts, one, use_tqdm=False))
        return found


def test_two_stages_give_the_bits_of_one_process(tiny_path: Path) -> None:
    assert answers(tiny_path, pipeline_parallel_size=2) == answers(tiny_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gguf-Q4_K_M", "gptq-w4-g128-act", "awq-gemm", "ct-fp8-dynamic"])
def test_every_format_gives_the_bits_of_one_process(golden: Path, name: str) -> None:
    path = golden / name
    path = path / "model.gguf" if name.startswith("gguf") else path
    options = {"skip_tokenizer_init": True}
    found = answers(path, pipeline_parallel_size=2, **options)
    assert found == answers(path, **options)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["arch-gemma3/hf", "arch-qwen3/hf", "gptoss-mxfp4"])
def test_every_architecture_gives_the_bits_of_one_process(golden: Path, name: str) -> None:
    path, options = golden / name, {"skip_tokenizer_init": True}
    stages = [2, 3] if "gemma3" in name else [2]
    expected = answers(path, **options)
    for count in stages:
        assert answers(path, pipeline_parallel_size=count, **options) == expected


@pytest.mark.parametrize("eager", [False, True])
def test_values_of_the_first_layer_reach_all_stages(tmp_path: Path, eager: bool) -> None:
    """RWKV-7 in three stages of a layer each."""
    path, options = rwkv(tmp_path), {"skip_tokenizer_init": True, "enforce_eager": eager}
    prompts = [[token % 96 for token in ids] for ids in PROMPTS]
    found = answers(path, prompts, pipeline_parallel_size=3, **options)
    assert found == answers(path, prompts, **options)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "olmo2"])
def test_experts_and_steps_that_are_not_recorded_give_the_same_bits(
    tmp_path: Path, architecture: str
) -> None:
    path = tiny_model(tmp_path, "float16", architecture)
    options = {"enforce_eager": architecture == "qwen3_moe"}
    assert answers(path, pipeline_parallel_size=2, **options) == answers(path, **options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "stages"), [("arch-gemma3/hf", 3), ("arch-qwen3/hf", 2)])
def test_stages_of_two_ranks_give_the_tokens_of_one_process(
    golden: Path, name: str, stages: int
) -> None:
    options = {"skip_tokenizer_init": True, "compute": "exact"}
    ranks = {"tensor_parallel_size": 2, "pipeline_parallel_size": stages}
    one = answers(golden / name, params=[GREEDY], **options)
    many = answers(golden / name, params=[GREEDY], **options, **ranks)
    assert [tokens for tokens, *_ in many] == [tokens for tokens, *_ in one]
    # the stages change nothing: these are the bits of two ranks
    two = answers(golden / name, params=[GREEDY], **options, tensor_parallel_size=2)
    assert many == two


@pytest.mark.model
@pytest.mark.slow
def test_three_stages_of_a_real_model_give_the_bits_of_one_process(smollm2: Path) -> None:
    prompts = ["The capital of France is", "def fibonacci(n):", "Once upon a time, a small"]
    one = answers(smollm2, prompts, [GREEDY])
    assert answers(smollm2, prompts, [GREEDY], pipeline_parallel_size=3) == one


@pytest.mark.slow
def test_preempted_requests_give_the_same_bits(tiny_path: Path) -> None:
    long = GREEDY.clone(max_tokens=60)
    expected = answers(tiny_path, params=[long])
    options = {**SMALL, "pipeline_parallel_size": 2}
    with LLM(tiny_path, **options) as probe:
        nbytes = probe.memory_plan.page_bytes
    with LLM(tiny_path, **options, kv_cache_memory_bytes=9 * nbytes) as llm:
        found = [facts(output) for output in llm.generate(PROMPTS, long, use_tqdm=False)]
        assert llm.get_metrics()["num_preemptions"] > 0
    assert found == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {"kv_cache_dtype": "int4"},
        {"kv_cache_dtype": "int4:skip=1"},
        {"kv_policy": "float16>int8>int4"},
        {"quantization": "int8"},
        {"swap_space": "1MiB", "kv_cache_memory_bytes": "96KiB"},
    ],
    ids=str,
)
def test_options_that_concern_all_stages_give_the_same_bits(
    golden: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = golden / "arch-llama3" / "hf"
    options = {"skip_tokenizer_init": True, **options}
    prompts = [[1, 2, 3, 4] * 10, [5, 6, 7] * 8, [9, 8, 7, 9, 8, 7, 9]]
    expected = answers(path, prompts, **options)
    assert answers(path, prompts, pipeline_parallel_size=2, **options) == expected


@pytest.fixture(scope="module")
def staged(tiny_path: Path) -> Iterator[LLM]:
    options = {"enable_lora": True, "enable_prompt_embeds": True, "pipeline_parallel_size": 2}
    with LLM(tiny_path, **SMALL, **options) as llm:
        yield llm


@pytest.fixture(scope="module")
def alone(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, **SMALL, enable_lora=True, enable_prompt_embeds=True) as llm:
        yield llm


def test_structured_answers_are_the_same(staged: LLM, alone: LLM) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    params = SamplingParams(
        temperature=0.7, seed=1, max_tokens=40, structured_outputs=schema_of(schema)
    )
    both = [
        [out.outputs[0].text for out in llm.generate(PROMPTS, params, use_tqdm=False)]
        for llm in (staged, alone)
    ]
    assert both[0] == both[1]


def schema_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"json": schema}


def test_guidance_penalties_and_processors_are_the_same(staged: LLM, alone: LLM) -> None:
    def push(generated: Any, logits: Any) -> Any:
        logits[len(generated) % 7] += 3.0
        return logits

    each = [
        GREEDY.clone(guidance_scale=1.7),
        SAMPLED.clone(repetition_penalty=1.3, top_k=20),
        GREEDY.clone(logits_processors=[push]),
        SAMPLED.clone(n=2),
    ]
    for params in each:
        both = [
            [facts(out) for out in llm.generate(PROMPTS, params, use_tqdm=False)]
            for llm in (staged, alone)
        ]
        assert both[0] == both[1]


def test_embeddings_and_prompt_embeds_are_the_same(staged: LLM, alone: LLM) -> None:
    hidden = staged.model_config.hidden_size
    vectors = np.random.default_rng(5).standard_normal((30, hidden)).astype(np.float32)
    both = []
    for llm in (staged, alone):
        llm.reset_prefix_cache()
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        embedded = [one.embedding for one in llm.embed(prompts, use_tqdm=False)]
        [given] = llm.generate([{"prompt_embeds": vectors}], GREEDY, use_tqdm=False)
        both.append((embedded, facts(given)))
    assert both[0] == both[1]


def test_adapters_change_the_layers_of_every_stage(
    staged: LLM, alone: LLM, tiny_path: Path, tmp_path: Path
) -> None:
    everywhere = tiny_adapter(tmp_path / "all", tiny_path, rank=4, seed=1)
    both, sizes = [], []
    for llm in (staged, alone):
        llm.add_lora("all", everywhere)
        names = ["all", None, "all", None]
        both.append(
            [
                facts(out)
                for out in llm.generate(PROMPTS, GREEDY, lora_request=names, use_tqdm=False)
            ]
        )
        sizes.append(llm.get_metrics()["lora_bytes"])
        assert llm.remove_lora("all")
    assert both[0] == both[1]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)  # estimated for the other stages
    plain = [facts(out) for out in staged.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert both[0][0] != plain[0] and both[0][1] == plain[1]


def test_snapshots_are_those_of_one_process(staged: LLM, alone: LLM) -> None:
    prompt = [3 + 7 * i % 400 for i in range(70)]
    for llm in (staged, alone):
        llm.reset_prefix_cache()
    ours, theirs = staged.snapshot(prompt), alone.snapshot(prompt)
    for one, other in zip(ours.kv.layers, theirs.kv.layers, strict=True):
        assert np.array_equal(one.rows, other.rows)
    for llm, snapshot in ((staged, theirs), (alone, ours)):
        llm.reset_prefix_cache()
        assert llm.restore(snapshot) == 64
        [output] = llm.generate([prompt], GREEDY, use_tqdm=False)
        assert output.num_cached_tokens == 64


def test_reports_name_the_layers_of_all_stages_in_order(staged: LLM, alone: LLM) -> None:
    names = [[layer.name for layer in llm.quant_report().layers] for llm in (staged, alone)]
    assert sorted(names[0]) == sorted(names[1])
    assert [name for name in names[0] if name != "lm_head"] == [
        name for name in names[1] if name != "lm_head"
    ]
    assert not [text for text in staged.load_warnings if "unused" in text]
    assert "one recorded graph" in staged.explain()


def test_metrics_tell_how_long_each_stage_computes(staged: LLM, alone: LLM) -> None:
    staged.generate(PROMPTS, GREEDY, use_tqdm=False)
    found = staged.get_metrics()
    assert 0 < found["stage_0_seconds"] <= found["pipeline_seconds"]
    assert 0 < found["stage_1_seconds"] <= found["pipeline_seconds"]
    busy = found["stage_0_seconds"] + found["stage_1_seconds"]
    assert found["pipeline_bubble"] == pytest.approx(1 - busy / (2 * found["pipeline_seconds"]))
    time.sleep(0.05)
    assert staged.get_metrics()["pipeline_seconds"] == found["pipeline_seconds"]
    assert "pipeline_seconds" not in alone.get_metrics()


def planned(llm: LLM, prompts: list[list[int]]) -> list[StepPlan]:
    """The plans of a call of ``generate`` in which each request has one token."""
    scheduler, plans = llm._driver._engine.scheduler, []
    inner = scheduler.plan

    def plan(*args: Any) -> StepPlan | None:
        found = inner(*args)
        if found is not None and all(row.num_scheduled_tokens == 1 for row in found.rows):
            plans.append(found)
        return found

    scheduler.plan = plan  # type: ignore[method-assign]
    try:
        llm.generate(prompts, GREEDY, use_tqdm=False)
    finally:
        scheduler.plan = inner  # type: ignore[method-assign]
    return plans


def test_requests_are_divided_over_the_steps_in_flight(staged: LLM) -> None:
    rows = [len(plan.rows) for plan in planned(staged, [[i + 1, 2] for i in range(4)])]
    assert max(rows) == 2 and rows.count(2) >= 20


def test_the_steps_of_a_single_request_are_repeated(staged: LLM) -> None:
    """One plan is in flight then; asking for another one must not end the repetition."""
    plans = planned(staged, [[1, 2, 3]])
    assert sum(a.rows is b.rows for a, b in itertools.pairwise(plans)) >= 10


@pytest.mark.slow
def test_an_engine_that_slept_has_its_stages_and_adapters_again(
    tiny_path: Path, tmp_path: Path
) -> None:
    adapter = tiny_adapter(tmp_path / "all", tiny_path, rank=4, seed=1)
    with LLM(tiny_path, **SMALL, enable_lora=True, pipeline_parallel_size=2) as llm:
        llm.add_lora("all", adapter)
        one = llm.generate(PROMPTS, GREEDY, lora_request="all", use_tqdm=False)
        llm.sleep(level=2)
        llm.wake_up()
        again = llm.generate(PROMPTS, GREEDY, lora_request="all", use_tqdm=False)
    assert [facts(out) for out in again] == [facts(out) for out in one]


def test_the_plan_counts_every_stage(tiny_path: Path) -> None:
    one, two = (LLM.plan(tiny_path, **SMALL, pipeline_parallel_size=n) for n in (1, 2))
    tokens, hidden = SMALL["max_num_batched_tokens"], 128
    assert two.page_bytes == one.page_bytes and two.weights == one.weights
    link = 2 * tokens * hidden * 4
    assert two.workspace - one.workspace > link


def test_the_last_stage_has_fewer_layers_because_it_has_the_head(golden: Path) -> None:
    config = EngineConfig(model=str(golden / "arch-gemma3" / "hf"), pipeline_parallel_size=2)
    with closing(open_model(config)) as checkpoint:
        model = model_config(config, checkpoint)
        layers, head = costs(config, checkpoint, model)
        first, last = stage_layers(config, checkpoint, model)
    assert len(layers) == 6 and max(layers) < 1.1 * min(layers) and head > 0
    assert [*first, *last] == list(range(6)) and len(first) > len(last)


def test_options_that_stages_do_not_support_are_named(tiny_path: Path, tmp_path: Path) -> None:
    for options, text in (
        ({"device": "cuda", "cpu_offload": "auto"}, "cpu_offload: needs pipeline_parallel_size=1"),
        ({"disk_offload": "auto"}, "disk_offload='auto' needs pipeline_parallel_size=1"),
        ({"speculative_config": {"method": "self"}}, "needs pipeline_parallel_size=1, found 2"),
        ({"speculative_config": {"model": str(tiny_path)}}, "needs pipeline_parallel_size=1"),
    ):
        with pytest.raises(RequestError, match=text):
            LLM(tiny_path, pipeline_parallel_size=2, **options)
    with pytest.raises(RequestError, match=r"expected an integer in 1\.\.64, found 0"):
        LLM(tiny_path, pipeline_parallel_size=0)
    for make in (LLM, LLM.plan):
        with pytest.raises(AlignmentError, match="cannot split 2 layers over 3 stages"):
            make(tiny_path, pipeline_parallel_size=3)


def test_stages_without_shared_memory_are_refused(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.kernels.cpu.rank_group.why_not_shared", lambda: "no native module")
    for make in (LLM, LLM.plan):
        with pytest.raises(UnsupportedError, match=r"shared memory only.*no native module"):
            make(tiny_path, pipeline_parallel_size=2)


def _opened(model: Path, stages: int = 2, **options: Any) -> tuple[LLM, list[psutil.Process]]:
    before = _children()
    llm = LLM(model, **{**SMALL, "max_model_len": 512, **options}, pipeline_parallel_size=stages)
    return llm, [psutil.Process(pid) for pid in sorted(_children() - before)]


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("streams", [False, True])
def test_a_killed_stage_is_an_error_that_names_it(tiny_path: Path, streams: bool) -> None:
    llm, [worker] = _opened(tiny_path)
    raised: list[BaseException] = []
    long = SamplingParams(max_tokens=None, ignore_eos=True)

    def wait() -> None:
        try:
            if streams:
                list(llm.stream(PROMPTS[0], long))
            else:
                llm.generate(PROMPTS, long, use_tqdm=False)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not llm.get_metrics()["num_generation_tokens"]:
        time.sleep(0.005)
    worker.kill()
    thread.join(LIMIT)  # a collective waits for 300 s
    assert not thread.is_alive()
    [error] = raised
    assert isinstance(error, EngineDeadError)
    assert r"rank 1 (stage 0) was killed (SIGKILL" in str(error)
    with pytest.raises(EngineDeadError):
        llm.generate(PROMPTS, GREEDY)
    llm.close()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1, 2, 3, 4])
def test_any_rank_of_three_stages_that_is_killed_ends_the_engine(golden: Path, victim: int) -> None:
    options = {"skip_tokenizer_init": True, "tensor_parallel_size": 2}
    llm, workers = _opened(golden / "arch-gemma3" / "hf", 3, **options)
    llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    workers[victim].kill()
    with pytest.raises(EngineDeadError, match=rf"rank {victim + 1} \(stage \d\) was killed"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    llm.close()


@pytest.mark.slow
def test_a_stage_that_is_stopped_does_not_keep_the_engine_from_closing(tiny_path: Path) -> None:
    llm, [worker] = _opened(tiny_path)
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            llm.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True), use_tqdm=False)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    while not llm.get_metrics()["num_generation_tokens"]:
        time.sleep(0.005)
    worker.send_signal(signal.SIGSTOP)
    time.sleep(0.5)
    llm.close()
    thread.join(30)
    assert not thread.is_alive() and len(raised) == 1
