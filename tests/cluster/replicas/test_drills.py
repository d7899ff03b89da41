"""210 drills: any process is killed or stopped at any moment, in every arrangement.

Every answer is right, or an error that says what happened; none takes longer than the limit, and no
process and no shared memory is left.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sdk import LLM, EngineDeadError, SamplingParams
from sdk.testing.tiny_models import tiny_model
from tests.cluster.replicas.conftest import LIMIT_S, children, hurt, replicas, wait_for

pytestmark = pytest.mark.slow

HOW = (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM)
OPTIONS: dict[str, Any] = {"max_model_len": 192, "num_threads": 2}
PARAMS = SamplingParams(temperature=1.0, seed=3, max_tokens=80, ignore_eos=True, logprobs=1)
PROMPTS = [
    {"prompt_token_ids": [3 + (seed * 37 + i * 11) % 360 for i in range(8 + 13 * seed)]}
    for seed in range(8)
]
REPLICAS: dict[str, dict[str, Any]] = {
    "replicas": {"data_parallel_size": 2},
    "lockstep": {"data_parallel_size": 2, "enable_expert_parallel": True},
    "apart": {"data_parallel_size": 2, "prefill_replicas": 1},
}
RANKS: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "stages": {"pipeline_parallel_size": 2},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts, so that it runs in all arrangements."""
    return tiny_model(tmp_path_factory.mktemp("drills"), "q8_0", "mixtral")


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    """With exact arithmetic every arrangement draws the tokens of one process."""
    with LLM(model, compute="exact", **OPTIONS) as llm:
        return tokens(llm)


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    processes = children()
    yield
    assert children() == processes
    assert not shared_memory(os.getpid()), "of ranks and stages"


def shared_memory(pid: int) -> list[Path]:
    """What a process has in the file system in memory: other tests may run now."""
    return list(Path("/dev/shm").glob(f"embedlm-{pid}-*"))


def tokens(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def disturbed(llm: LLM, delay: float, hit: Callable[[], None]) -> tuple[Any, float]:
    """The answers, or the error, and the seconds that they took after ``hit``, which is called
    after a ``delay``."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(tokens(llm))
        except EngineDeadError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(delay)
    hit()
    begin = time.monotonic()
    thread.join(LIMIT_S)
    assert found, "no answer and no error"
    return found[0], time.monotonic() - begin


@pytest.mark.parametrize(
    ("way", "seed"),
    [
        *(("replicas", seed) for seed in range(10)),
        *(("lockstep", seed) for seed in range(4)),
        *(("apart", seed) for seed in range(3)),
    ],
)
def test_ten_replicas_are_lost(
    model: Path, expected: list[list[int]], way: str, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their requests run again: no answer is lost."""
    chance, slowest = random.Random(seed), 0.0
    with LLM(model, compute="exact", **OPTIONS, **REPLICAS[way]) as llm:
        for _ in range(10):
            wait_for(lambda: llm._driver.processes.num_ready == 2, "two replicas")
            victim, how = replicas(llm)[chance.randrange(2)].pid, chance.choice(HOW)
            found, seconds = disturbed(
                llm, chance.random() * 0.2, lambda v=victim, h=how: hurt(v, h)
            )
            assert found == expected
            slowest = max(slowest, seconds)
        parent = llm._driver.processes.parent.pid
    assert not shared_memory(parent)
    with capsys.disabled():
        print(f" {way} {seed}: {slowest:.2f} s", end="")


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("way", RANKS)
def test_a_rank_is_lost(model: Path, expected: list[list[int]], way: str, seed: int) -> None:
    """All requests end with an error that names it, unless they had ended before."""
    chance = random.Random(seed)
    with LLM(model, compute="exact", **OPTIONS, **RANKS[way]) as llm:
        assert tokens(llm) == expected
        [worker] = psutil.Process().children()
        how = chance.choice(HOW)
        found, _ = disturbed(llm, chance.random() * 0.2, lambda: hurt(worker.pid, how))
        if isinstance(found, EngineDeadError):
            assert "rank 1" in str(found)
        else:
            assert found == expected
