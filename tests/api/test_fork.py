"""``LLM.fork``: engines of one process that share their weights."""

from __future__ import annotations

import gc
import json
import shutil
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import (
    LLM,
    EngineAsleepError,
    EngineClosedError,
    MemoryPool,
    OutOfMemoryError,
    RequestError,
    SamplingParams,
)
from sdk.api.options import EngineOptions
from sdk.loading.fork import FREE_OPTIONS
from sdk.quant.expert_weights import ExpertWeights
from sdk.quant.permuted import PermutedWeight
from sdk.quant.weight import PackedWeight, StackedWeight, Weight
from sdk.testing import tiny_model
from tests.scripts import run_python

GOLDEN = Path(__file__).parents[1] / "golden"
#: A file or a folder of every kind of weight: blocks, stacks, codes, tables, permuted columns,
#: 8-bit floats, floats, codes of activations; tied and separate heads.
MODELS = [
    "gguf-Q4_K_M/model.gguf",
    "gguf-Q4_1/model.gguf",
    "gguf-IQ3_S/model.gguf",
    "arch-gemma3/model.gguf",
    "arch-gemma3/hf",
    "arch-llama3/hf",
    "arch-qwen3/hf",
    "awq-gemm",
    "gptq-w4-g128-act",
    "bnb-nf4-double",
    "fp8-block",
    "ct-w8a8-int8",
    "ct-mxfp4a16",
]
PROMPTS = [{"prompt_token_ids": [5, 9, 30 + i, 77, 12]} for i in range(3)]
PARAMS = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)


def answers(llm: LLM, params: SamplingParams = PARAMS) -> list[Any]:
    """Tokens and their log-probabilities, which differ if a bit of a logit does."""
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        (one.outputs[0].token_ids, [list(row.items()) for row in one.outputs[0].logprobs or []])
        for one in found
    ]


def packed(weight: Weight) -> Iterator[Any]:
    """The objects that hold a weight's bytes."""
    if isinstance(weight, StackedWeight):
        for part in weight.parts:
            yield from packed(part)
    elif isinstance(weight, PermutedWeight):
        yield from packed(weight.inner)
    else:
        assert isinstance(weight, PackedWeight)
        yield weight.bound.packed


def matrices(llm: LLM) -> dict[str, list[int]]:
    model: Any = llm._served.model_runner().model
    found = {path: linear.weight for path, linear in model.linears()}
    found["embedding"] = model.embedding.weight
    return {path: [id(one) for one in packed(weight)] for path, weight in found.items()}


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", MODELS)
def test_answers_are_those_of_an_engine_with_its_own_weights(name: str) -> None:
    path = GOLDEN / name
    if not path.exists():
        pytest.fail(f"{path} is missing")
    with LLM(path, max_model_len=64, num_threads=2) as fresh:
        expected = answers(fresh)
    with LLM(path, max_model_len=128) as first, first.fork(max_model_len=64) as second:
        assert second.max_model_len == 64
        assert matrices(first) == matrices(second)
        assert answers(second) == expected
        assert answers(first) == expected
        assert second.memory_plan.weights == second.memory_plan.tokenizer == 0
        assert second.explain().splitlines()[-1] == first.explain().splitlines()[-1]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe", "phi3", "olmo2"])
@pytest.mark.parametrize("format", ["q4_k_m", "float16"])
def test_experts_and_other_architectures(tmp_path: Path, architecture: str, format: str) -> None:
    if (architecture, format) in {("mixtral", "q4_k_m"), ("olmo2", "q4_k_m")}:
        format = "q8_0"
    path = tiny_model(tmp_path, format, architecture)
    with LLM(path, max_model_len=64) as first:
        expected = answers(first)
        second = first.fork()
        model: Any = second._served.model_runner().model
        experts = [one for _, one in model.linears() if isinstance(one.weight, ExpertWeights)]
        assert bool(experts) == (architecture in {"mixtral", "qwen3_moe"})
        assert matrices(first) == matrices(second)
    assert answers(second) == expected
    second.close()


@pytest.mark.parametrize(
    "options",
    [
        {"kv_cache_dtype": "int8"},
        {"kv_policy": "fp16>int8>int4", "max_model_len": 256},
        {"num_threads": 1},
        {"max_num_seqs": 2, "max_num_batched_tokens": 16, "block_size": 32},
        {"enforce_eager": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"swap_space": "1MiB", "enable_prefix_caching": True},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_are_those_of_a_fresh_engine(tiny_path: Path, options: dict[str, Any]) -> None:
    options.setdefault("max_model_len", 128)
    with LLM(tiny_path, **options) as fresh:
        expected = answers(fresh)
    with LLM(tiny_path, max_model_len=64) as first, first.fork(**options) as second:
        assert answers(second) == expected
        for name, value in options.items():
            if name != "speculative_config":
                assert getattr(second.config, name) == getattr(fresh.config, name), value


def test_without_a_limit_it_has_as_much_kv_cache(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64, memory="40MiB", seed=5) as first:
        with first.fork() as second:
            assert second.memory_plan.kv_cache == first.memory_plan.kv_cache
            assert second.memory_plan.budget is None
            assert (second.config.seed, second.max_model_len) == (5, 64)
        with first.fork(memory="30MiB") as third:
            assert third.memory_plan.total <= 30 * 2**20
            assert third.memory_plan.budget == 30 * 2**20
        with pytest.raises(OutOfMemoryError, match=r"fork: .*\n(.*\n)*.*workspace"):
            first.fork(memory="1MiB")


def test_both_generate_at_once(tiny_path: Path) -> None:
    long = PARAMS.clone(max_tokens=60)
    with LLM(tiny_path, max_model_len=128) as first, first.fork(num_threads=2) as second:
        expected = answers(first, long)
        found: dict[int, list[Any]] = {}
        errors: list[BaseException] = []

        def run(index: int, llm: LLM) -> None:
            try:
                found[index] = [answers(llm, long) for _ in range(3)]
            except BaseException as error:
                errors.append(error)

        threads = [
            threading.Thread(target=run, args=pair) for pair in enumerate((first, second, first))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []
        assert [found[index] for index in range(3)] == [[expected] * 3] * 3


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_each_can_be_closed_first_and_the_last_frees_the_weights(
    tiny_path: Path, order: tuple[int, ...]
) -> None:
    first = LLM(tiny_path, max_model_len=64)
    expected = answers(first)
    second = first.fork()
    engines = [first, second, second.fork()]  # a fork of a fork
    model: Any = first._served.model_runner().model
    held = [
        weakref.ref(part.codes.numpy().base)
        for _, linear in model.linears()
        for part in packed(linear.weight)
    ]
    del model, first, second
    assert held
    for number in order:
        engines[number].close()
        gc.collect()
        for other in order[order.index(number) + 1 :]:
            assert answers(engines[other]) == expected
    with pytest.raises(EngineClosedError):
        engines[order[0]].fork()
    engines.clear()
    gc.collect()
    assert [ref() for ref in held if ref() is not None] == []


def test_the_first_may_sleep_while_its_fork_runs(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64) as first, first.fork() as second:
        expected = answers(first)
        for level in (1, 2):
            first.sleep(level)
            assert answers(second) == expected
            with pytest.raises(EngineAsleepError):
                first.fork()
            first.wake_up()
            assert answers(first) == expected
        second.sleep(1)
        second.wake_up()
        assert answers(second) == expected
        with pytest.raises(RequestError, match="no weights of its own to give back: use level 1"):
            second.sleep(2)
        assert answers(second) == expected


def test_a_fork_has_requests_and_prefixes_of_its_own(tiny_path: Path) -> None:
    with LLM(tiny_path, max_model_len=64) as first, first.fork() as second:
        answers(first)
        assert second.get_metrics()["num_prompt_tokens"] == 0
        first.abort(first.enqueue(PROMPTS[0], PARAMS)[0])
        assert not second.has_unfinished_requests


# ---- what it costs -------------------------------------------------------------------------------

MEASURE = """
import gc, json, sys
from pathlib import Path
from sdk import LLM, SamplingParams
from sdk.kernels.system import SYSTEM

def anonymous():
    gc.collect()
    SYSTEM.trim_heap()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024

def ask(llm):
    llm.generate("The capital of France is", params, use_tqdm=False)

params = SamplingParams(temperature=0, max_tokens=8)
options = {"max_model_len": 256, "max_num_seqs": 2}
with LLM(sys.argv[1], **options) as warm, warm.fork() as other:  # code and caches of libraries
    ask(warm), ask(other)
del warm, other
before = anonymous()
first = LLM(sys.argv[1], **options)
ask(first)
one = anonymous()
second = first.fork()
loaded = anonymous()
ask(second)
two = anonymous()
weights = first.memory_plan.weights
first.close()
ask(second)
second.close()
del first, second
print(json.dumps({"weights": weights, "fork": loaded - one, "used": two - one,
    "left": anonymous() - before}))
"""


@pytest.mark.slow
def test_a_fork_adds_less_than_5_percent_of_the_weights(smollm2: Path) -> None:
    """Its KV cache and workspace included; all of it is given back."""
    found = json.loads(run_python(MEASURE, smollm2).splitlines()[-1])
    assert found["weights"] > 90 * 2**20
    assert found["used"] < 0.05 * found["weights"], found
    assert found["left"] < 0.05 * found["weights"], found


# ---- errors --------------------------------------------------------------------------------------

BAD: dict[str, Any] = {
    "model": "other.gguf",
    "quantization": "int4",
    "compute": "exact",
    "tensor_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "data_parallel_size": 2,
    "device": "cuda",
    "hf_overrides": {"rope_theta": 5.0},
    "skip_tokenizer_init": True,
    "disk_offload": "1MiB",
}


@pytest.mark.parametrize("name", BAD)
def test_an_option_that_needs_other_weights_is_rejected(tiny: LLM, name: str) -> None:
    with pytest.raises(RequestError, match=f"fork: {name}=.* {name} would change them"):
        tiny.fork(**{name: BAD[name]})


def test_bad_options_are_the_errors_of_llm(tiny: LLM) -> None:
    with pytest.raises(TypeError, match="unknown option 'max_seqs'"):
        tiny.fork(max_seqs=4)  # type: ignore[call-arg]
    with pytest.raises(RequestError, match="kv_cache_dtype"):
        tiny.fork(kv_cache_dtype="int5")
    with pytest.raises(RequestError, match="memory: expected bytes, found a memory pool"):
        tiny.fork(memory=MemoryPool("1GiB"))
    with pytest.raises(RequestError, match="weights that draft are not shared"):
        tiny.fork(speculative_config={"method": "self", "num_speculative_tokens": 2})
    with pytest.raises(RequestError, match="max_model_len"):
        tiny.fork(max_model_len=10**9)


def test_the_same_value_of_a_fixed_option_may_be_repeated(tiny: LLM) -> None:
    tiny.fork(compute="auto", tensor_parallel_size=1).close()


def test_every_option_is_free_or_fixed() -> None:
    assert set(EngineOptions.__annotations__) >= FREE_OPTIONS


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disk_offload": "100KiB"}, "offloaded"),
        ({"tensor_parallel_size": 2}, "in other processes too"),
        ({"data_parallel_size": 2}, "data_parallel_size > 1"),
        ({"memory": "pool"}, "counts weights once for each model"),
    ],
)
def test_an_engine_that_cannot_share_says_why(
    tiny_path: Path, options: dict[str, Any], reason: str
) -> None:
    if options.get("memory") == "pool":
        options = {"memory": MemoryPool("200MiB")}
    with LLM(tiny_path, max_model_len=64, **options) as llm:
        with pytest.raises(RequestError, match=f"fork: .*{reason}"):
            llm.fork()
        assert answers(llm)


def test_a_model_of_transformers_cannot_share(tmp_path: Path) -> None:
    from transformers import PersimmonConfig, PersimmonForCausalLM

    config = PersimmonConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    PersimmonForCausalLM(config).save_pretrained(tmp_path)
    with (
        LLM(tmp_path, max_model_len=32, skip_tokenizer_init=True) as llm,
        pytest.raises(RequestError, match="transformers' code runs it"),
    ):
        llm.fork()


def test_no_file_is_read(tiny_path: Path, tmp_path: Path) -> None:
    """The file changed and is gone; snapshots know that the weights are the same."""
    path = tmp_path / "model.gguf"
    shutil.copy(tiny_path, path)
    with LLM(path, max_model_len=128) as first:
        expected = answers(first)
        snapshot = first.snapshot({"prompt_token_ids": list(range(40, 80))})
        shutil.copy(GOLDEN / "gguf-Q4_1" / "model.gguf", path)
        with first.fork() as second:
            assert answers(second) == expected
        path.unlink()
        with first.fork(max_model_len=64) as third:
            assert third.restore(snapshot) > 0
            assert answers(third) == expected
