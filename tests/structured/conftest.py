"""A tiny engine, and a compiler for a real vocabulary."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from sdk import LLM
from sdk.loaders.open import open_checkpoint
from sdk.structured.compiler import GrammarCompiler


@pytest.fixture(scope="session")
def tiny_path(golden: Path) -> Path:
    """A two-layer random llama of 448 tokens with an SPM tokenizer."""
    return golden / "gguf-Q8_0" / "model.gguf"


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, max_model_len=512, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture(scope="session")
def compiler(smollm2: Path) -> GrammarCompiler:
    """For the vocabulary of SmolLM2: 49,152 tokens."""
    checkpoint = open_checkpoint(smollm2)
    tokenizer = checkpoint.tokenizer
    assert tokenizer is not None
    return GrammarCompiler(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)
