"""Writes the names of the tests that failed into the file ``EMBEDLM_TEST_FAILURES`` names: a plugin
of pytest that ``.ci/tests.py`` loads, which tries them again."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


class Failures:
    """The tests that failed in any phase, in order and once each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._names: dict[str, None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._names[report.nodeid] = None

    def pytest_sessionfinish(self) -> None:
        self._path.write_text(json.dumps(list(self._names)))


def pytest_configure(config: pytest.Config) -> None:
    """Workers of pytest-xdist send their reports to the process that starts them."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        config.pluginmanager.register(Failures(Path(os.environ["EMBEDLM_TEST_FAILURES"])))
