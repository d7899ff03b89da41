"""Tests of the Triton kernels on a real GPU: ``pytest -m gpu`` runs them, and they alone.

Where there is no GPU they are not collected: nothing is skipped, nothing counts as passed. Those of
several GPUs need two. With ``TRITON_INTERPRET=1`` the kernels' tests run on a CPU, slowly, and with
``CARD_TESTS_ENGINES=cpu`` those of engines do, with the CPU's kernels: to see that the tests can.

With ``CARD_TESTS_LISTED=1`` they run for their launches alone, with the card's shapes on tensors of
the CPU where nothing is computed: ``tests/gpu/aot/cache_listing.py`` compiles what they launch.

``.ci/gpu.py`` runs several processes: ``CARD_TESTS_SHARE=2/12`` runs the third of twelve shares.
After ``CARD_TESTS_SECONDS`` no further test begins, which counts as a failure of the run.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.kernels import gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
LISTED = os.environ.get("CARD_TESTS_LISTED") == "1"
ENGINES_ON_CPU = os.environ.get("CARD_TESTS_ENGINES") == "cpu"
if not (INTERPRETED or LISTED or ENGINES_ON_CPU or torch.cuda.is_available()):
    collect_ignore_glob = ["test_*.py"]
elif torch.cuda.device_count() < 2:
    collect_ignore_glob = ["test_card_ranks.py"]
    if LISTED:  # it launches what rows of the benchmark launch, which are listed too
        collect_ignore_glob.append("test_card_libraries.py")
if INTERPRETED:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_and_index(tensor: Any, *scope: Any) -> None:  # see tests/gpu/conftest.py
        _patch_tensor(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_and_index


_END = time.monotonic() + float(os.environ.get("CARD_TESTS_SECONDS", "inf"))


def pytest_collection_modifyitems(items: list[Any]) -> None:
    number, _, count = os.environ.get("CARD_TESTS_SHARE", "0/1").partition("/")
    if INTERPRETED or ENGINES_ON_CPU:  # an interpreted engine takes minutes for a token
        items[:] = [i for i in items if ("engine_device" in i.fixturenames) == ENGINES_ON_CPU]
    items[:] = items[int(number) :: int(count)]


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is not None and time.monotonic() > _END:
        item.session.shouldstop = f"the time is over before {nextitem.nodeid}"


def load(name: str, path: Path) -> Any:
    """A module of another folder of tests."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def cases() -> Any:
    """Weights of every layout: the CPU's kernel tests have the same."""
    return load("kernel_cases", TESTS / "kernels" / "conftest.py").Cases


@pytest.fixture(scope="session")
def steps() -> Any:
    """Steps of paged attention and what they should give: the interpreter's tests have the same."""
    return load("attention_steps", TESTS / "gpu" / "test_attention.py")


@pytest.fixture(scope="session")
def device() -> str:
    """Where the tensors of operators are."""
    return "cpu" if INTERPRETED or LISTED else "cuda"


@pytest.fixture(scope="session")
def engine_device() -> str:
    """Where engines are; without a card the CPU, whose operators they then have."""
    return "cpu" if ENGINES_ON_CPU else "cuda"


@pytest.fixture(scope="session")
def size() -> Callable[[int, int], int]:
    """A dimension: the first number on a card, the second without one."""
    return lambda real, tiny: tiny if INTERPRETED or ENGINES_ON_CPU else real


@pytest.fixture(scope="session", autouse=True)
def _settled_keys() -> None:
    """Kernels that were compiled ahead are found whichever tests of a process come first."""
    for module in pkgutil.iter_modules(gpu.__path__, "sdk.kernels.gpu."):
        importlib.import_module(module.name)
    importlib.import_module("sdk.kernels.gpu.cache_keys").settle_cache_keys()
