"""What needs no cluster of Ray."""

from __future__ import annotations

import asyncio
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from ray.serve.config import AutoscalingContext

import sdk
from sdk import LLM, SamplingParams
from sdk.api.errors import EngineClosedError, EngineDeadError, RequestError
from sdk.cluster.integrations.ray import Embed, Generate, LLMServer, llm_app
from sdk.cluster.integrations.ray.resources import with_resources
from sdk.cluster.integrations.ray.serve import replicas_for_wait
from sdk.testing import fault

TWO = {"tensor_parallel_size": 2, "num_threads": 2, "max_model_len": 256}
ON_RAY = {**TWO, "distributed_executor_backend": "ray"}


def test_without_a_connection_to_ray_an_llm_says_what_to_call(tiny: Path) -> None:
    assert not ray.is_initialized()
    with pytest.raises(RequestError, match=r"not connected to Ray; call ray\.init\(\) before"):
        LLM(tiny, **ON_RAY)
    assert not ray.is_initialized()


def test_one_rank_needs_no_ray_and_uni_is_one_rank(tiny: Path) -> None:
    with LLM(tiny, distributed_executor_backend="ray", max_model_len=256) as llm:
        assert len(llm.generate("the cat", use_tqdm=False)) == 1
    with pytest.raises(RequestError, match=r"'uni' has one rank: .*tensor_parallel_size=1 and"):
        LLM(tiny, **TWO, distributed_executor_backend="uni")
    with pytest.raises(RequestError, match=r"expected one of None, 'mp', 'uni', 'ray', found 'x'"):
        LLM(tiny, **TWO, distributed_executor_backend="x")


def test_without_the_package_an_llm_names_the_extra(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "sdk.cluster.executors.ray_ranks", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RequestError, match=r"pip install \"embedlm\[ray\]\""):
        LLM(tiny, **ON_RAY)


@pytest.fixture(scope="module")
def generate(tiny: Path) -> Iterator[Generate]:
    """Outside of Ray it is an ordinary object."""
    params = SamplingParams(temperature=0, max_tokens=4)
    made = Generate(str(tiny), params, max_model_len=64)
    yield made
    made.llm.close()


def cells(*values: object) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def test_texts_and_token_ids_as_ray_data_gives_them_are_prompts(generate: Generate) -> None:
    ids = generate.llm.get_tokenizer().encode("the cat")
    found = asyncio.run(generate({"prompt": cells("the cat", np.array(ids))}))
    assert found["generated_text"][0] == found["generated_text"][1]
    assert found["num_input_tokens"] == [len(ids)] * 2
    assert asyncio.run(generate({"prompt": cells()})).keys() == {"prompt"}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"text": cells("a")}, r"column='prompt': the data has the columns 'text'"),
        ([{"prompt": "a"}], r"batches as dicts of arrays \(batch_format='numpy'\), found a list"),
        ({"prompt": cells(["a", "b"])}, "expected one in each row, found a list of 2"),
        ({"prompt": cells(None)}, "prompt: expected text"),
        (
            {"prompt": cells("a"), "finish_reason": cells("stop")},
            "has a column 'finish_reason' already: pass another prefix than ''",
        ),
    ],
)
def test_what_ray_data_cannot_mean_is_named(
    generate: Generate, batch: object, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        asyncio.run(generate(batch))


def test_arguments_are_checked_before_a_model_is_loaded() -> None:
    with pytest.raises(RequestError, match=r"n: expected 1, found 2: a row has one answer"):
        Generate("nowhere", SamplingParams(n=2))
    with pytest.raises(RequestError, match=r"on_error: expected 'raise' or 'column', found 'x'"):
        Embed("nowhere", on_error="x")


def test_an_actor_whose_memory_is_too_small_for_python_and_torch_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Context:
        memory = 2.0**29

        def get_actor_id(self) -> str:
            return "an actor"

        def get_assigned_resources(self) -> dict[str, float]:
            return {"CPU": 3.0, "memory": self.memory}

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", Context)
    with pytest.raises(RequestError, match="memory=536870912 of the actor: expected more than"):
        with_resources({})
    Context.memory = 2.0**30
    assert with_resources({}) == {"num_threads": 3, "memory": 2**29}
    assert with_resources({"num_threads": 1, "memory": "1GiB"}) == {
        "num_threads": 1,
        "memory": "1GiB",
    }


def test_only_what_is_named_is_there() -> None:
    with pytest.raises(
        AttributeError, match=r"'sdk\.cluster\.integrations\.ray' has no attribute 'LLM'"
    ):
        sdk.cluster.integrations.ray.LLM  # noqa: B018


def test_a_dead_engine_is_no_error_of_a_row(tiny: Path) -> None:
    rows = Generate(str(tiny), on_error="column", max_model_len=64)
    rows.llm.close()
    with pytest.raises(EngineClosedError):
        asyncio.run(rows({"prompt": cells("a")}))


def context(**given: object) -> AutoscalingContext:
    """What Serve's autoscaler would give to a policy; only some fields matter."""
    fields = dict.fromkeys(inspect.signature(AutoscalingContext).parameters)
    return AutoscalingContext(**{**fields, "current_num_replicas": 2, **given})


def test_the_policy_adds_up_the_loads_and_keeps_the_number_without_reports() -> None:
    reported = {"load": {"a": 0.25, "b": 2.5}, "expected_wait": {"a": 0.0, "b": 5.0}}
    assert replicas_for_wait(context(aggregated_metrics=reported)) == (2.75, {})
    nothing = context(aggregated_metrics={}, target_num_replicas=3)
    assert replicas_for_wait(nothing) == (3, {})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"min_replicas": 2}, "min_replicas <= max_replicas .*found 2 and 1"),
        ({"min_replicas": 0, "max_replicas": 0}, "at least 1 as the most, found 0 and 0"),
        ({"target_wait": 0}, "target_wait: expected a number of seconds above 0, found 0"),
        ({"target_wait": "2"}, "target_wait: expected a number of seconds above 0, found '2'"),
    ],
)
def test_arguments_of_an_application_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        llm_app("nowhere", **given)


def test_an_application_reserves_the_cpus_of_its_ranks_and_takes_options_of_serve() -> None:
    alone = llm_app("m", num_threads=3, max_replicas=4)._bound_deployment
    assert alone.ray_actor_options["num_cpus"] == 3
    scaling = alone._deployment_config.autoscaling_config
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert scaling.policy.policy_function.endswith("replicas_for_wait")
    given = {"name": "own", "autoscaling_config": {"upscale_delay_s": 7}}
    made = llm_app("m", deployment=given, **{**ON_RAY, "num_threads": 6})._bound_deployment
    assert made.name == "own"
    assert made._replica_config.placement_group_bundles == [{"CPU": 3}, {"CPU": 3}]
    assert made._deployment_config.autoscaling_config.upscale_delay_s == 7
    assert not ray.is_initialized()


@pytest.fixture(scope="module")
def server(tiny: Path) -> Iterator[LLMServer]:
    made = LLMServer(str(tiny), max_model_len=2048, max_num_seqs=1, target_wait=0.001)
    yield made
    made.llm.close()


def test_a_replica_reports_the_work_that_waits(server: LLMServer) -> None:
    assert server.record_autoscaling_stats() == {
        "expected_wait": 0.0,
        "uncached_tokens": 0.0,
        "load": 0.0,
    }
    params = SamplingParams(temperature=0, max_tokens=2000, ignore_eos=True)
    server.llm.generate("the cat", SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
    first = server.llm.stream("the cat", params)
    next(first)
    second = server.llm.stream("the dog said hello", params)
    while not (found := server.record_autoscaling_stats())["expected_wait"]:
        assert next(first, None) is not None  # the engine has not taken the second request yet
    tokens = len(server.llm.get_tokenizer().encode("the dog said hello"))
    assert found["uncached_tokens"] == tokens
    assert found["load"] == max(found["expected_wait"] / 0.001, 2.0)
    first.close()
    second.close()


def test_a_replica_is_healthy_while_it_works_or_sleeps_and_not_when_it_is_dead(
    tiny: Path,
) -> None:
    server = LLMServer(str(tiny), max_model_len=128)
    server.check_health()
    server.llm.sleep()
    server.check_health()
    assert server.record_autoscaling_stats()["load"] == 0
    server.llm.wake_up()
    with fault(server.llm, "out_of_memory"), pytest.raises(EngineDeadError):
        server.llm.generate("the cat", use_tqdm=False)
    with pytest.raises(EngineDeadError):
        server.check_health()
    server.__del__()  # as Serve ends a replica
    with pytest.raises(EngineClosedError):
        server.llm.generate("the cat", use_tqdm=False)
    LLMServer.__new__(LLMServer).__del__()  # whose constructor failed
