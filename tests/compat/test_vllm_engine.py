"""vLLM's other ways in: submodules, command lines, the engine stepped by hand, metrics."""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import RequestError
from sdk.compat import vllm
from sdk.compat.vllm import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    EngineArgs,
    LLMEngine,
    LoRARequest,
    PoolingParams,
    SamplingParams,
)
from sdk.compat.vllm._options import OPTIONS
from sdk.compat.vllm.utils import FlexibleArgumentParser, random_uuid
from sdk.compat.vllm.v1.metrics.reader import Counter, Gauge, Histogram, Metric

SHORT = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(golden: Path) -> str:
    return str(golden / "arch-llama3" / "hf")


@pytest.fixture(scope="module")
def llm(model: str) -> Iterator[LLM]:
    with LLM(model, max_model_len=64, num_threads=1) as made:
        yield made


@pytest.fixture
def engine(llm: LLM) -> LLMEngine:
    return LLMEngine(llm)


# ---- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        *("sampling_params:GuidedDecodingParams", "outputs:RequestOutput", "inputs:TokensPrompt"),
        *("engine.arg_utils:AsyncEngineArgs", "engine.async_llm_engine:AsyncLLMEngine"),
        *("v1.engine.async_llm:AsyncLLM", "v1.engine.llm_engine:LLMEngine", "logprobs:Logprob"),
        *("entrypoints.llm:LLM", "pooling_params:PoolingParams", "config:PoolerConfig"),
        *("lora.request:LoRARequest", "distributed:destroy_model_parallel"),
        *("utils:FlexibleArgumentParser", "utils.argparse_utils:FlexibleArgumentParser"),
    ],
)
def test_submodules_have_the_same_classes_as_the_package(place: str) -> None:
    module, _, name = place.partition(":")
    found = getattr(importlib.import_module(f"sdk.compat.vllm.{module}"), name)
    assert found is getattr(vllm, name, found)


def test_the_package_has_a_version_and_its_submodules() -> None:
    assert vllm.__version__.split(".") == [str(part) for part in vllm.__version_tuple__]
    assert vllm.utils.random_uuid is random_uuid
    assert len({random_uuid(), random_uuid()}) == 2
    vllm.distributed.cleanup_dist_env_and_memory()
    with pytest.raises(AttributeError, match="has no attribute 'ModelRegistry'"):
        _ = vllm.ModelRegistry


def test_small_helpers_are_there() -> None:
    assert vllm.logger.init_logger("mine") is logging.getLogger("mine")
    assert vllm.platforms.current_platform.is_cpu()
    assert not vllm.platforms.current_platform.is_cuda_alike()
    assert vllm.platforms.current_platform.get_device_name()
    hub = importlib.import_module("sdk.compat.vllm.transformers_utils.repo_utils").hf_api()
    assert callable(hub.snapshot_download)


def test_methods_that_are_not_there_say_what_to_do(llm: LLM) -> None:
    for owner, name, why in (
        (llm, "collective_rpc", "LLM.collective_rpc of vLLM is not supported: ranks run no code"),
        (llm, "init_weight_transfer_engine", "not supported: weights are not replaced"),
        (llm, "llm_engine", "LLM.llm_engine .*: use `LLMEngine.llm.`"),
        (LLMEngine(llm), "reset_mm_cache", "LLMEngine.reset_mm_cache .* models read text only"),
        (AsyncLLM(llm), "pause_generation", "AsyncLLMEngine.pause_generation .*: use `sleep`"),
        (llm, "colour", "'LLM' object has no attribute 'colour'"),
    ):
        assert not hasattr(owner, name)
        with pytest.raises(AttributeError, match=why):
            getattr(owner, name)


def test_vectors_are_printed_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    utils = importlib.import_module("sdk.compat.vllm.utils.print_utils")
    utils.print_embeddings([0.5] * 9, "V")
    utils.print_embeddings([0.5])
    assert capsys.readouterr().out == (
        "V: [0.5, 0.5, 0.5, 0.5, ...] (size=9)\nEmbeddings: [0.5] (size=1)\n"
    )


# ---- command lines -------------------------------------------------------------------------------


def parsed(*args: str) -> Any:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return parser.parse_args(list(args))


def test_a_command_line_has_every_option_with_its_default() -> None:
    found = vars(parsed())
    assert found.keys() == {"model", *OPTIONS} - {"chat_template"}
    for name, value in found.items():
        assert name == "model" or value == OPTIONS[name].default, name


def test_a_command_line_becomes_options() -> None:
    found = parsed(
        *("--model", "m", "--max_model_len=4k", "--max-num-batched-tokens", "2K", "-tp", "2"),
        *("--no-enable-prefix-caching", "--enforce-eager", "--gpu-memory-utilization", "0.5"),
        *("--hf-overrides", '{"a": 1}', "--served-model-name", "x", "y", "--seed", "7"),
        *("--pooler-config.pooling_type", "MEAN", "--pooler_config.use_activation=false"),
        *("--kv-cache-memory-bytes", "1.5m", "--hf-token", "--dtype", "float32"),
    )
    args = EngineArgs.from_cli_args(found)
    assert (args.model, args.max_model_len, args.max_num_batched_tokens) == ("m", 4000, 2048)
    assert (args.tensor_parallel_size, args.seed, args.dtype) == (2, 7, "float32")
    assert args.enable_prefix_caching is False
    assert args.enforce_eager is True
    assert args.hf_token is True
    assert args.gpu_memory_utilization == 0.5
    assert args.kv_cache_memory_bytes == 1_500_000
    assert args.hf_overrides == {"a": 1}
    assert args.served_model_name == ["x", "y"]
    assert args.pooler_config == {"pooling_type": "MEAN", "use_activation": False}
    assert parsed("--max-model-len", "auto").max_model_len is None


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--max-model-len", "4 k"], "expected an integer like 4096, 4k .* found '4 k'"),
        (["--max-num-seqs", "1.5"], "expected an integer like"),
        (["--hf-overrides", "[1]"], "expected a JSON object, found '\\[1\\]'"),
        (["--hf-overrides", "{"], "expected JSON, found '{'"),
        (["--config", "a.yaml"], "--config: files of options are not read"),
        (["--enforce-eagerly"], "unrecognized arguments: --enforce-eagerly"),
    ],
)
def test_bad_arguments_end_the_program(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parsed(*args)
    assert re.search(message, capsys.readouterr().err)


def test_a_parser_reads_lists_and_leaves_what_follows_two_dashes() -> None:
    parser = FlexibleArgumentParser(description="mine")
    parser.add_argument("--my-config", type=json.loads)
    parser.add_argument("rest", nargs="*")
    found = parser.parse_args(
        ["--my_config.a.b+", "1", "--my_config.a.b+=x,y", "--", "--max_model_len"]
    )
    assert found.my_config == {"a": {"b": [1, "x", "y"]}}
    assert found.rest == ["--max_model_len"]


def test_options_go_into_a_group_and_async_ones_are_added() -> None:
    parser = FlexibleArgumentParser()
    AsyncEngineArgs.add_cli_args(parser.add_argument_group("engine"))
    found = AsyncEngineArgs.from_cli_args(parser.parse_args(["--enable-log-requests"]))
    assert found.enable_log_requests is True
    only = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser(), async_args_only=True)
    assert vars(only.parse_args([])) == {"enable_log_requests": False}
    assert "not supported: use scheduling_policy" in " ".join(parser.format_help().split())


# ---- the engine ----------------------------------------------------------------------------------


def finished(engine: LLMEngine) -> dict[str, Any]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output
    return found


def test_an_engine_of_a_command_line_answers_step_by_step(model: str) -> None:
    args = EngineArgs.from_cli_args(parsed("--model", model, "--max-model-len", "64"))
    engine = LLMEngine.from_engine_args(args)
    try:
        assert engine.add_request("a", "the cat sat", SHORT) == "a"
        engine.add_request("b", "a dog", SamplingParams(n=2, max_tokens=2, seed=1))
        engine.add_request("c", {"prompt_token_ids": [1, 2], "prompt": "told"}, SHORT)
        assert engine.get_num_unfinished_requests() == 3
        found = finished(engine)
        assert found.keys() == {"a", "b", "c"}
        assert [len(found[name].outputs) for name in "abc"] == [1, 2, 1]
        assert found["c"].prompt == "told"
        assert engine.get_num_unfinished_requests() == 0
        assert engine.step() == []
        assert found["a"].outputs[0].text == engine.tokenizer.decode(
            found["a"].outputs[0].token_ids
        )
    finally:
        engine.close()


def test_steps_answer_like_a_batch_and_embed(llm: LLM, engine: LLMEngine) -> None:
    engine.add_request("a", "the cat sat", SHORT)
    engine.add_request("v", "the cat sat", PoolingParams(task="embed"))
    assert engine.get_num_unfinished_requests() == 2
    found = finished(engine)
    [expected] = llm.generate("the cat sat", SHORT, use_tqdm=False)
    assert found["a"].outputs == expected.outputs
    [vector] = llm.embed("the cat sat", use_tqdm=False)
    assert found["v"].outputs.data.tolist() == vector.outputs.embedding


def test_aborted_requests_have_no_output(engine: LLMEngine) -> None:
    long = SamplingParams(max_tokens=50, ignore_eos=True)
    for name in ("a", "b"):
        engine.add_request(name, "the cat", long)
    engine.add_request("v", "the cat", PoolingParams(task="embed"))
    engine.step()
    engine.abort_request(["a", "v", "unknown"])
    assert finished(engine).keys() == {"b"}
    engine.add_request("a", "the cat", SHORT)
    assert finished(engine).keys() == {"a"}


def test_bad_requests_are_errors(engine: LLMEngine) -> None:
    with pytest.raises(TypeError, match="request_id: expected text, found int"):
        engine.add_request(1, "the cat", SHORT)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"tokenization_kwargs=.* is not supported"):
        engine.add_request("a", "the cat", SHORT, tokenization_kwargs={"truncation": True})
    engine.add_request("a", "the cat", SHORT)
    with pytest.raises(RequestError, match="request_id: 'a' belongs to an unfinished request"):
        engine.add_request("a", "the cat", SHORT)
    engine.abort_request("a")
    assert not engine.has_unfinished_requests()


def test_an_engine_sleeps_and_has_adapters_and_a_cache(engine: LLMEngine) -> None:
    engine.sleep()
    assert engine.is_sleeping()
    engine.wake_up()
    assert not engine.is_sleeping()
    assert engine.reset_prefix_cache() in (True, False)
    engine.do_log_stats()
    with pytest.raises(RequestError, match="enable_lora"):
        engine.add_lora(LoRARequest("a", 1, "nowhere"))


# ---- metrics -------------------------------------------------------------------------------------


def named(metrics: list[Metric], name: str) -> list[Metric]:
    return [one for one in metrics if one.name == f"vllm:{name}"]


def test_metrics_are_objects_with_vllm_s_names(llm: LLM, engine: LLMEngine) -> None:
    before = llm.get_metrics()
    llm.generate("the cat", SHORT, use_tqdm=False)
    after = engine.get_metrics()
    [running] = named(after, "num_requests_running")
    assert isinstance(running, Gauge)
    assert running.value == 0
    assert running.labels["engine"] == "0"
    [old], [new] = (named(one, "generation_tokens") for one in (before, after))
    assert isinstance(old, Counter)
    assert isinstance(new, Counter)
    assert new.value - old.value == 3
    [times] = named(after, "time_to_first_token_seconds")
    assert isinstance(times, Histogram)
    assert times.count == times.buckets["+Inf"] > 0
    assert times.sum > 0
    counts = list(times.buckets.values())
    assert counts == sorted(counts)
    endings = named(after, "request_success")
    assert {one.labels["finished_reason"] for one in endings} >= {"length"}
