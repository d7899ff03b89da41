"""Engines that fill and use the cache of packed weights, for tests of it."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams
from sdk.engine.weight_cache.store import WeightStore
from sdk.loaders.folders.hf_folder import HfFolder
from sdk.loaders.gguf_files.checkpoint import GgufCheckpoint

GOLDEN = Path(__file__).parents[1] / "golden"


PROMPTS = [{"prompt_token_ids": [5, 9, 30 + i, 77, 12]} for i in range(2)]


PARAMS = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1)


LIMITS: dict[str, Any] = {"max_model_len": 128, "max_num_seqs": 2, "num_threads": 2}


def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the cache, of one test alone."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "embedlm" / "weights"


def store(llm: LLM) -> WeightStore:
    found = llm._runner().weights.weight_store
    assert found is not None
    return found


def answers(llm: LLM) -> list[Any]:
    """Tokens and their log-probabilities, which differ if a bit of a logit does."""
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [
        (one.outputs[0].token_ids, [list(row.items()) for row in one.outputs[0].logprobs or []])
        for one in found
    ]


def first(model: Path, **options: Any) -> list[Any]:
    """Answers of an engine that fills the cache."""
    with LLM(model, weight_cache=True, **LIMITS, **options) as llm:
        found = answers(llm)
        store(llm).wait()
        assert str(store(llm)) == "written"
    return found


@contextlib.contextmanager
def no_matrix_read() -> Iterator[None]:
    def fail(self: object, name: str) -> None:
        raise AssertionError(f"{name} is read from the model's file")

    with pytest.MonkeyPatch.context() as patch:
        for kind in (GgufCheckpoint, HfFolder):
            patch.setattr(kind, "weight", fail)
        yield


@contextlib.contextmanager
def mapped(model: Path, **options: Any) -> Iterator[LLM]:
    """An engine whose weights are all those of the cache."""
    with no_matrix_read(), LLM(model, weight_cache=True, **LIMITS, **options) as llm:
        assert "mapped from" in str(store(llm))
        yield llm


def file_of(weights: Path) -> Path:
    (found,) = weights.iterdir()
    assert found.suffix == ".weights"
    return found


def until(ready: Callable[[], bool]) -> None:
    """Wait for something that other processes do; the limit only ends what hangs."""
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def mappings() -> list[str]:
    """Lines of this process's mapped files of the cache."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if ".weights" in line]


@contextlib.contextmanager
def process(script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process of a script that has printed a line."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()
