"""Two tiny engines for the tests of hand-overs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdk import LLM
from tests.cluster.transfer.pairs import Pair, shared_memory


@pytest.fixture(scope="session")
def tiny_path(golden: Path) -> Path:
    """A two-layer random llama of 448 tokens."""
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.fixture(scope="module")
def engines(tiny_path: Path) -> Iterator[tuple[LLM, LLM]]:
    with LLM(tiny_path, max_model_len=128) as a, LLM(tiny_path, max_model_len=128) as b:
        yield a, b


@pytest.fixture
def two(engines: tuple[LLM, LLM]) -> Iterator[Pair]:
    """Empty caches, and shared memory between the two."""
    for llm in engines:
        llm.reset_prefix_cache()
    made = Pair(*engines, *shared_memory())
    yield made
    made.close()
