"""Fixtures every area shares: the golden checkpoints and the two real models.

The real models are put into the user's cache by ``make models`` (see ``sdk.demo``). A test that
needs one asks for its fixture; without the file the test fails, because a silently skipped test
proves nothing. Set ``EMBEDLM_TEST_MODELS`` to a folder that holds both files to use other copies.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from tests.left_out import (  # noqa: F401  (hooks, found by name)
    pytest_collection_modifyitems,
    pytest_deselected,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)

if TYPE_CHECKING:
    from tests.drafting_heads import TinyHeads
    from tests.next_token import NextToken

# Workers of pytest-xdist share the cores, and so do the processes they start: torch's threads, one
# for each core in every process, would spin for each other's. The engines' own threads sleep.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# By default an example fails that takes more than 0.2 s, which depends on the machine and its load.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

GOLDEN = Path(__file__).parent / "golden"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests are collected without looking for garbage, and are none afterwards: a
    full run has some million objects of them, and a search among all takes half a second. Engines
    search when they are opened, captured or given back, hundreds of times in a run."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden checkpoints (tests/golden/README.md says what is in them)."""
    return GOLDEN


@pytest.fixture(scope="session")
def tiny_heads(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> TinyHeads:
    """A tiny model of eight layers, with heads that draft for it."""
    from tests.drafting_heads import write_tiny_heads  # imports transformers

    return write_tiny_heads(tmp_path_factory.mktemp("heads"), golden / "arch-llama3" / "hf")


@pytest.fixture(scope="session")
def tiny_next_token(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> NextToken:
    """A tiny GLM-4.5 with a block of multi-token prediction."""
    from tests.next_token import write_next_token  # imports transformers

    folder = tmp_path_factory.mktemp("next_token")
    return write_next_token(folder, tokenizer=golden / "arch-llama3" / "hf")


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """Python's own SIGINT handler, here and in children started meanwhile.

    Under nohup and in some CI systems SIGINT is ignored, and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def _model(name: str) -> Path:
    folder = os.environ.get("EMBEDLM_TEST_MODELS")
    if folder:
        path = Path(folder) / name
    else:
        from sdk.api.machine import cache_folder

        path = cache_folder() / name
    assert path.exists(), f"{path} is missing: run `make models`"
    return path


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1 GGUF (a real model, 98 MB)."""
    return _model("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2, a folder of sentence-transformers (a real encoder, 91 MB)."""
    return _model("all-MiniLM-L6-v2")


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Gemma-3-270M, Q4_K_M GGUF (a real model with k-quants, 253 MB)."""
    return _model("gemma-3-270m-q4_k_m.gguf")
