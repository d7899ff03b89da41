"""One tiny engine and one real one for the tests of the public class."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdk import LLM


@pytest.fixture(scope="module")
def tiny_path(golden: Path) -> Path:
    """A two-layer random llama of 448 tokens with an SPM tokenizer."""
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, max_model_len=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def smol(smollm2: Path) -> Iterator[LLM]:
    with LLM(smollm2, max_model_len=1024) as llm:
        yield llm


@pytest.fixture
def llm(tiny_path: Path) -> Iterator[LLM]:
    """An engine of its own for tests that damage or close it."""
    with LLM(tiny_path, max_model_len=128) as llm:
        yield llm
