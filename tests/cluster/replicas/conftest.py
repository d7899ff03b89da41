"""A tiny model and an engine with two replicas of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from sdk import LLM

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def tiny_path(golden: Path) -> Path:
    """A two-layer random llama of 448 tokens with an SPM tokenizer."""
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.fixture(scope="module")
def two(tiny_path: Path) -> Iterator[LLM]:
    """Two replicas, shared by tests that lose none."""
    with LLM(tiny_path, max_model_len=128, data_parallel_size=2, num_threads=2) as llm:
        yield llm


@pytest.fixture(scope="module")
def one(tiny_path: Path) -> Iterator[LLM]:
    """The same model in this process."""
    with LLM(tiny_path, max_model_len=128, num_threads=2) as llm:
        yield llm


def replicas(llm: LLM) -> list[Any]:
    """The host's view of the replicas. Those that are connected have a process id: their parent
    tells it at about the time at which they are ready."""
    found = list(llm._driver.processes.replicas)
    wait_for(lambda: all(one.pid or one.channel is None for one in found), "process ids")
    return found


def wait_for(condition: Callable[[], bool], what: str) -> float:
    """Wait until it holds; the seconds that took."""
    begin = time.monotonic()
    while not condition():
        assert time.monotonic() - begin < LIMIT_S, f"waited in vain for: {what}"
        time.sleep(0.01)
    return time.monotonic() - begin


def hurt(pid: int, how: int = signal.SIGKILL) -> None:
    """Send a signal to a process that may have ended."""
    assert pid > 0, "0 would be this process and all around it"
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, how)


def children() -> set[int]:
    """All processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True)}
