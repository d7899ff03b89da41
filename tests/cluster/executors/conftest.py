from __future__ import annotations

import importlib
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).parent


def _loaded(name: str, folder: Path = HERE) -> ModuleType:
    """tests/ has no packages: a module is loaded by path, once, under a name of its own."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_loaded("decoding")
_loaded("fake_cuda", HERE.parents[1] / "engine")
_loaded("fake_card", HERE.parents[1] / "engine")


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the fake runner, importable here and (through sys.path) in the workers."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("rank_runner")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """What stands in for NCCL, importable here and in the workers."""
    monkeypatch.syspath_prepend(str(HERE))
    return importlib.import_module("nccl_stand_ins")


@pytest.fixture
def remote(ranks: ModuleType) -> Iterator[ModuleType]:
    """The module of fake workers on other hosts; those of this test end with it."""
    module = importlib.import_module("remote_fakes")
    yield module
    while module.WorkerProcess.running:
        module.WorkerProcess.running.pop().close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], bool]:
    """Polls until true; the bound only keeps a broken program from hanging the tests."""

    def poll(condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + 30
        while not condition():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    return poll
