"""The scheduler's rig of tests/engine."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest


@pytest.fixture
def rig():
    """Builds a Rig (tests/engine/conftest.py) from SchedulerConfig fields."""
    path = Path(__file__).parents[1] / "engine" / "conftest.py"
    spec = importlib.util.spec_from_file_location("tests_engine_rig", path)
    module = sys.modules.setdefault("tests_engine_rig", importlib.util.module_from_spec(spec))
    if not hasattr(module, "Rig"):
        spec.loader.exec_module(module)
    return module.Rig


@pytest.fixture
def documented() -> str:
    """docs/metrics.md."""
    path = Path(__file__).parents[2] / "docs" / "metrics.md"
    return path.read_text(encoding="utf-8")
