"""Tests that a run leaves out are counted and named at its end: slow ones (``-m "not slow"``), and
those of two hosts where no network namespace can be made.

Hooks of pytest, taken over by ``tests/conftest.py``. With pytest-xdist only the workers collect, so
they send their counts to the process that reports.
"""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

_COUNTS = pytest.StashKey[Counter[str]]()
_NO_HOSTS = pytest.StashKey[int]()
#: Areas with runs of their own, whatever is selected.
ELSEWHERE = "tests/interop needs `make test-interop`, tests/card a GPU and `make gpu`"


def area(node_id: str) -> str:
    """``tests/kernels`` of ``tests/kernels/test_graph.py::test_...``."""
    return "/".join(node_id.partition("::")[0].split("/")[:2])


def _counts(config: pytest.Config) -> Counter[str]:
    return config.stash.setdefault(_COUNTS, Counter())


def can_make_hosts() -> bool:
    """Whether network namespaces can be made here: two of them are two hosts."""
    try:
        for action in ("add", "delete"):
            command = ["ip", "netns", action, f"embedlm-{os.getpid()}"]
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("two_hosts") is not None]
    if marked and not can_make_hosts():
        config.stash[_NO_HOSTS] = len(marked)
        items[:] = [item for item in items if item not in marked]


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
        output["no_hosts"] = session.config.stash.get(_NO_HOSTS, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """All workers collect the same; one that crashed sends nothing."""
    output = getattr(node, "workeroutput", {})
    node.config.stash[_NO_HOSTS] = output.get("no_hosts", 0)
    sent = output.get("left_out", {})
    _counts(node.config).update(Counter(sent) - _counts(node.config))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    counts, no_hosts = _counts(config), config.stash.get(_NO_HOSTS, 0)
    if no_hosts:
        terminalreporter.write_line(
            f"left out: {no_hosts} tests of two hosts; they need root and `ip netns` (iproute2)"
        )
    if counts:
        areas = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        said = f"left out: {counts.total()} slow tests ({areas}); `make test-all` runs them"
        terminalreporter.write_line(f"{said}. {ELSEWHERE}")
