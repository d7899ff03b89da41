"""Slow tests that a run leaves out (``-m "not slow"``) are counted and named at its end.

Hooks of pytest, taken over by ``tests/conftest.py``. With pytest-xdist only the workers collect, so
they send their counts to the process that reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

_COUNTS = pytest.StashKey[Counter[str]]()
#: Areas with runs of their own, whatever is selected.
ELSEWHERE = "tests/interop needs `make test-interop`, tests/card a GPU and `make gpu`"


def area(node_id: str) -> str:
    """``tests/kernels`` of ``tests/kernels/test_graph.py::test_...``."""
    return "/".join(node_id.partition("::")[0].split("/")[:2])


def _counts(config: pytest.Config) -> Counter[str]:
    return config.stash.setdefault(_COUNTS, Counter())


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        if "slow" not in item.config.getoption("markexpr"):
            return  # by name, say: whoever asks for that knows what is left out
        if item.get_closest_marker("slow") is not None:
            _counts(item.config)[area(item.nodeid)] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["left_out"] = dict(_counts(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """All workers collect the same; one that crashed sends nothing."""
    sent = getattr(node, "workeroutput", {}).get("left_out", {})
    _counts(node.config).update(Counter(sent) - _counts(node.config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts = _counts(config)
    if counts:
        areas = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        said = f"left out: {counts.total()} slow tests ({areas}); `make test-all` runs them"
        terminalreporter.write_line(f"{said}. {ELSEWHERE}")
