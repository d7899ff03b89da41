"""Ray Serve: replicas with OpenAI's API."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray import serve
from ray.cluster_utils import Cluster

from sdk import LLM, SamplingParams
from sdk.cluster.integrations.ray import llm_app

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def port(cluster: Cluster, free_port: int) -> Iterator[int]:
    """Serve, at a port that is free."""
    serve.start(http_options={"host": "127.0.0.1", "port": free_port})
    yield free_port
    serve.shutdown()


@pytest.fixture(autouse=True)
def no_application_stays(port: int) -> Iterator[None]:
    """All of them answer at "/": one that a failed test left would fail the tests after it."""
    yield
    for name in serve.status().applications:
        serve.delete(name)


def post(port: int, path: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{path}",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    return urllib.request.urlopen(request, timeout=60)


def test_a_replica_answers_like_the_llm_whole_and_as_a_stream(port: int, tiny: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(tiny, max_model_len=256) as llm:
        [expected] = llm.generate("the cat sat on", params, use_tqdm=False)
    serve.run(llm_app(str(tiny), model_name="tiny", max_model_len=256), name="one")
    body = {"model": "tiny", "prompt": "the cat sat on", "temperature": 0, "max_tokens": 12}
    found = json.load(post(port, "/v1/completions", body))
    assert found["choices"][0]["text"] == expected.outputs[0].text
    with post(port, "/v1/completions", {**body, "stream": True}) as response:
        lines = [line.decode() for line in response if line.startswith(b"data: ")]
    assert lines[-1].strip() == "data: [DONE]" and len(lines) > 3
    texts = [json.loads(line[6:])["choices"][0]["text"] for line in lines[:-1]]
    assert "".join(texts) == expected.outputs[0].text
    other = json.load(post(port, "/v1/completions", {**body, "model": "other"}))
    assert other["choices"] == found["choices"]  # with one model, any name means it
    with pytest.raises(urllib.error.HTTPError) as refused:
        post(port, "/v1/completions", {**body, "temperature": -1})
    assert refused.value.code == 400


def replicas(name: str) -> dict[str, int]:
    """The replicas of an application by state."""
    found = serve.status().applications[name].deployments["LLM"].replica_states
    return {str(getattr(state, "value", state)): count for state, count in found.items()}


def eventually(condition: Callable[[], bool], seconds: float = 90) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


def processes(name: str) -> list[psutil.Process]:
    found = psutil.Process().children(recursive=True)
    return [one for one in found if one.is_running() and one.name().startswith(name)]


def test_a_replica_whose_engine_is_dead_is_replaced(port: int, tiny: Path) -> None:
    app = llm_app(
        str(tiny),
        model_name="tiny",
        max_model_len=256,
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        deployment={"health_check_period_s": 1.0},
    )
    serve.run(app, name="two")
    body = {"prompt": "the cat sat on", "temperature": 0, "max_tokens": 12}
    expected = json.load(post(port, "/v1/completions", body))["choices"][0]["text"]
    [rank] = processes("ray::RankActor")
    rank.kill()
    with pytest.raises(urllib.error.HTTPError) as failed:
        post(port, "/v1/completions", body)
    assert failed.value.code in (500, 503)

    def answers() -> bool:
        try:
            return json.load(post(port, "/v1/completions", body))["choices"][0]["text"] == expected
        except urllib.error.HTTPError:
            return False

    assert eventually(answers)
    assert [one.pid for one in processes("ray::RankActor")] != [rank.pid]
    serve.delete("two")
    assert eventually(lambda: processes("ray::RankActor") == [])


def test_answers_that_are_being_written_end_before_their_replica(port: int, tiny: Path) -> None:
    serve.run(llm_app(str(tiny), model_name="tiny", max_model_len=2048), name="three")
    body = {"prompt": "the", "ignore_eos": True, "max_tokens": 1500, "stream": True}
    with post(port, "/v1/completions", body) as response, ThreadPoolExecutor() as pool:
        first = response.readline()
        deleted = pool.submit(serve.delete, "three")
        lines = [line for line in response if line.startswith(b"data: ")]
        deleted.result(60)
    assert first.startswith(b"data: ") and lines[-1].strip() == b"data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


def test_replicas_come_with_the_expected_wait_and_go(port: int, tiny: Path) -> None:
    app = llm_app(
        str(tiny),
        model_name="tiny",
        max_replicas=2,
        max_model_len=2048,
        max_num_seqs=1,
        deployment={
            "autoscaling_config": {
                "upscale_delay_s": 0,
                "downscale_delay_s": 1,
                "look_back_period_s": 5,
            }
        },
    )
    serve.run(app, name="four")
    body = {"prompt": "the", "ignore_eos": True, "max_tokens": 1500}
    assert replicas("four") == {"RUNNING": 1}
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            post(port, "/v1/completions", body).read()

    with ThreadPoolExecutor(6) as pool:
        asking = [pool.submit(ask) for _ in range(6)]
        try:
            assert eventually(lambda: replicas("four").get("RUNNING") == 2)
        finally:
            stop.set()
        for one in asking:
            one.result(60)
    assert eventually(lambda: replicas("four") == {"RUNNING": 1})
    serve.delete("four")


def test_a_real_model_chats(port: int, smollm2: Path) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(smollm2, max_model_len=256, num_threads=2) as llm:
        [expected] = llm.chat(messages, params, use_tqdm=False)
    app = llm_app(str(smollm2), max_model_len=256, num_threads=2)
    serve.run(app, name="five")
    body = {"messages": messages, "temperature": 0, "max_tokens": 12}
    found = json.load(post(port, "/v1/chat/completions", body))
    assert found["model"] == smollm2.stem
    assert found["choices"][0]["message"]["content"] == expected.outputs[0].text
    serve.delete("five")
