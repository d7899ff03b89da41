"""Real engines whose other ranks are ``embedlm worker`` on loopback, and programs of torchrun."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import sdk
from sdk import LLM, LoRARequest, RemoteWorkers, RequestError, SamplingParams, launched_llm
from sdk.api.config import EngineConfig
from sdk.api.errors import EngineDeadError
from sdk.memory.resolve import available_to, hosts_of, ranks_here
from sdk.testing import tiny_adapter

HERE = Path(__file__).parent
ROOT = Path(sdk.__file__).parent.parent
PROGRAMS = HERE / "remote_programs.py"
TOKEN = "0123456789abcdef-of-these-tests"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
OPTIONS = {"tensor_parallel_size": 2, "num_threads": 1, "max_model_len": 64}


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(f"{TOKEN}\n")
    return path


class Workers:
    """Processes of ``embedlm worker``."""

    def __init__(self, port: int, token_file: Path) -> None:
        self.port, self._token_file = port, token_file
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, model: Path, *options: str, count: int = 1) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sdk", "worker", str(model)]
        command += ["--connect", f"127.0.0.1:{self.port}", "--token-file", str(self._token_file)]
        command += ["--num-threads", "1", *options]
        for _ in range(count):
            process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
            self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


@pytest.fixture
def workers(remote: ModuleType, token_file: Path) -> Iterator[Workers]:
    made = Workers(remote.free_port(), token_file)
    yield made
    made.close()


def at(workers: Workers, **options) -> RemoteWorkers:
    return RemoteWorkers(
        listen=f"127.0.0.1:{workers.port}", token=TOKEN, **{"timeout": 60, **options}
    )


def tokens_of(llm: LLM) -> list[list[int]]:
    prompts = [{"prompt_token_ids": ids} for ids in ([3, 4, 5, 6, 7, 8, 9], [7, 300, 12])]
    return [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY)]


@pytest.mark.slow
def test_an_engine_with_a_worker_answers_as_with_local_ranks(
    golden: Path, workers: Workers, tmp_path: Path
) -> None:
    """Also after a sleep that frees the weights, with an adapter, and with a saved prefix; steps
    are recorded, or run operator by operator."""
    model = golden / "gguf-Q4_0" / "model.gguf"
    tiny_adapter(tmp_path / "adapter", model, rank=4, scale=0.5)
    adapter = LoRARequest("one", 1, str(tmp_path / "adapter"))
    prompt = {"prompt_token_ids": list(range(3, 40))}
    found = []
    worker = workers.start(model)
    remote = {"remote_workers": at(workers)}
    for more in ({}, remote, {**remote, "enforce_eager": True}):
        with LLM(str(model), enable_lora=True, max_lora_rank=4, **OPTIONS, **more) as llm:
            assert ("one recorded graph" in llm.explain()) == ("enforce_eager" not in more)
            plain = tokens_of(llm)
            (adapted,) = llm.generate([prompt], GREEDY, lora_request=adapter)
            saved = llm.snapshot(prompt)
            llm.trim()
            assert llm.restore(saved) == 32
            (again,) = llm.generate([prompt], GREEDY)
            llm.sleep(level=2)
            llm.wake_up()
            assert tokens_of(llm) == plain
            ids = [list(out.outputs[0].token_ids) for out in (adapted, again)]
            found.append((plain, ids))
    assert found[0] == found[1] == found[2]
    assert worker.poll() is None


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_of_a_safetensors_model_answer_as_local_ones(
    golden: Path, workers: Workers, size: int
) -> None:
    model = golden / "arch-llama3" / "hf"
    workers.start(model, "--once", count=size - 1)
    options = {**OPTIONS, "tensor_parallel_size": size, "skip_tokenizer_init": True}
    with LLM(str(model), **options) as llm:
        expected = tokens_of(llm)
    with LLM(str(model), **options, remote_workers=at(workers)) as llm:
        assert tokens_of(llm) == expected
    assert [process.wait(60) for process in workers.processes] == [0] * (size - 1)


@pytest.mark.slow
def test_another_model_file_is_an_error_on_both_hosts(golden: Path, workers: Workers) -> None:
    worker = workers.start(golden / "gguf-Q4_1" / "model.gguf")
    with pytest.raises(EngineDeadError, match=r"the hosts differ: model files: \w{32} on rank 1"):
        LLM(str(golden / "gguf-Q4_0" / "model.gguf"), **OPTIONS, remote_workers=at(workers))
    assert worker.wait(60) == 2
    assert "refuses this worker: the hosts differ: model files: " in worker.communicate()[1]


@pytest.mark.slow
def test_a_worker_killed_while_requests_run_fails_them_and_leaves_nothing(
    golden: Path, workers: Workers
) -> None:
    model = golden / "gguf-Q4_0" / "model.gguf"
    worker = workers.start(model)
    before = threading.active_count()
    with LLM(str(model), **OPTIONS, remote_workers=at(workers)) as llm:
        stream = llm.stream({"prompt_token_ids": [3, 4, 5]}, SamplingParams(max_tokens=50))
        next(stream)
        worker.kill()
        with pytest.raises(EngineDeadError, match=r"lost rank 1 on .* \(127\.0\.0\.1:\d+\): it "):
            for _ in stream:
                pass
    assert threading.active_count() == before


@pytest.mark.slow
@pytest.mark.usefixtures("ctrl_c")
def test_a_worker_that_ctrl_c_ends_says_nothing_more(golden: Path, workers: Workers) -> None:
    worker = workers.start(golden / "gguf-Q4_0" / "model.gguf")
    assert worker.stderr is not None
    assert worker.stderr.readline().startswith("embedlm: waiting for an engine at 127.0.0.1:")
    worker.send_signal(signal.SIGINT)
    assert worker.communicate(timeout=60)[1] == ""
    assert worker.returncode == 130


def run(command: list[str], environment: dict[str, str] | None = None) -> list[dict]:
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", ["gguf-Q4_0/model.gguf"])
def test_one_program_under_torchrun_is_an_engine_and_its_workers(
    golden: Path, remote: ModuleType, checkpoint: str
) -> None:
    given = {"model": str(golden / checkpoint), "token": TOKEN}
    port = remote.free_port()
    said = run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--nnodes=1"),
            *("--master-addr=127.0.0.1", f"--master-port={port}", str(PROGRAMS)),
            *("launched", json.dumps(given)),
        ]
    )
    assert sorted(next(iter(line)) for line in said) == ["served", "tokens"]
    (found,) = [line["tokens"] for line in said if "tokens" in line]
    with LLM(given["model"], **OPTIONS, skip_tokenizer_init=True) as llm:
        prompts = [{"prompt_token_ids": ids} for ids in ([*range(3, 12)], [7, 300, 12])]
        expected = [list(out.outputs[0].token_ids) for out in llm.generate(prompts, GREEDY)]
    assert found == expected


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({}, "RANK: expected a number from 0 on, found ''; start this with torchrun"),
        ({"RANK": "x"}, "RANK: expected a number from 0 on, found 'x'"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE: expected a number from 1 on"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR is not set"),
        (
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "::1"},
            "MASTER_PORT: expected a number from 1 on",
        ),
    ],
)
def test_a_program_without_a_launcher_is_told(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], why: str
) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RequestError, match=why):
        launched_llm("model.gguf", token=TOKEN)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"listen": "10.0.0.1"}, r"listen: expected host:port, .* found '10\.0\.0\.1'"),
        ({"listen": "::1:80"}, "listen: expected host:port"),
        ({"listen": "a:0"}, "listen: expected host:port"),
        ({"listen": 29500}, "listen: expected host:port"),
        ({"token": None}, "expected a token or a token_file, and not both"),
        ({"token_file": "x"}, "expected a token or a token_file, and not both"),
        ({"token": "short"}, "expected at least 16 characters"),
        (
            {"token": None, "token_file": "/nowhere/token"},
            "token_file: expected a file with a token, found .*No such",
        ),
        ({"timeout": 0}, "timeout: expected seconds, found 0"),
        ({"timeout": float("nan")}, "timeout: expected seconds, found nan"),
        ({"tensor_address": "1:2"}, "tensor_address: expected"),
    ],
)
def test_an_invalid_value_of_remote_workers_is_named(options: dict, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        RemoteWorkers(**{"listen": "127.0.0.1:29500", "token": TOKEN, **options})


def test_the_token_is_in_no_text() -> None:
    assert TOKEN not in repr(RemoteWorkers(listen="[::1]:29500", token=TOKEN))
    assert RemoteWorkers(listen="[::1]:29500", token=TOKEN).address == ("::1", 29500)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"remote_workers": "10.0.0.1:29500"}, "expected RemoteWorkers"),
        ({"remote_workers": {"tokens": TOKEN}}, "expected listen, .* found 'tokens'"),
        ({"remote_workers": {"token": TOKEN}}, "listen is missing"),
        ({"remote_workers": {"listen": "127.0.0.1:29500", "token": 7}}, "at least 16 characters"),
        (
            {"tensor_parallel_size": 1, "remote_workers": ...},
            "remote_workers needs a tensor_parallel_size of at least 2",
        ),
    ],
)
def test_an_engine_names_options_that_do_not_fit(golden: Path, options: dict, why: str) -> None:
    if options["remote_workers"] is ...:
        workers = RemoteWorkers(listen="127.0.0.1:29500", token=TOKEN)
        options = {**options, "remote_workers": workers}
    with pytest.raises(RequestError, match=why):
        LLM(str(golden / "gguf-Q4_0" / "model.gguf"), **options)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"num_threads": 0}, "num_threads: expected a number, found 0"),
        ({"rank": 0}, "rank: expected 1 or more, found 0"),
        ({"connect": "here"}, "connect: expected host:port"),
        ({"timeout": -1}, "timeout: expected seconds, found -1"),
    ],
)
def test_an_invalid_option_of_a_worker_is_named(options: dict, why: str) -> None:
    with pytest.raises(RequestError, match=why):
        sdk.run_worker("m", **{"connect": "127.0.0.1:29500", "token": TOKEN, **options})


def test_remote_workers_may_be_a_json_object() -> None:
    given = {"listen": "127.0.0.1:29500", "token": TOKEN, "timeout": 5}
    config = EngineConfig(model="m", tensor_parallel_size=2, remote_workers=given)
    assert config.remote_workers == RemoteWorkers(**given)


def test_the_plan_counts_the_memory_of_all_hosts(golden: Path) -> None:
    workers = RemoteWorkers(listen="127.0.0.1:29500", token=TOKEN)
    config = EngineConfig(model="m", tensor_parallel_size=3, remote_workers=workers)
    local = EngineConfig(model="m", tensor_parallel_size=3)
    assert (hosts_of(config), ranks_here(config)) == (3, 1)
    assert (hosts_of(local), ranks_here(local)) == (1, 3)
    assert available_to(config) > 2 * available_to(local)
