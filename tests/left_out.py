"""Tests that a run leaves out are counted and named at its end: slow ones (``-m "not slow"``), and
those of a marker that needs what this machine lacks.

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
_LACKING = pytest.StashKey[Counter[str]]()
#: Areas with runs of their own, whatever is selected.
ELSEWHERE = "tests/interop needs `make test-interop`, tests/card a GPU and `make gpu`"


def area(node_id: str) -> str:
    """``tests/kernels`` of ``tests/kernels/test_graph.py::test_...``."""
    return "/".join(node_id.partition("::")[0].split("/")[:2])


def _counts(config: pytest.Config) -> Counter[str]:
    return config.stash.setdefault(_COUNTS, Counter())


def _lacking(config: pytest.Config) -> Counter[str]:
    return config.stash.setdefault(_LACKING, Counter())


def can_make_hosts() -> bool:
    """Whether network namespaces can be made here: two of them are two hosts."""
    try:
        for action in ("add", "delete"):
            command = ["ip", "netns", action, f"embedlm-{os.getpid()}"]
            subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


#: Marker -> what the tests are and need, and whether it is there.
NEEDS = {
    "two_hosts": ("tests of two hosts; they need root and `ip netns` (iproute2)", can_make_hosts),
    "peers": (
        "tests of other engines; they need EMBEDLM_PEERS (CONTRIBUTING.md)",
        lambda: bool(os.environ.get("EMBEDLM_PEERS")),
    ),
}


def spread(count: int, kept: int) -> set[int]:
    """``kept`` of ``count`` places at equal distances, the first among them."""
    return {i * count // kept for i in range(kept)}


def mark_all_but_some_slow(items: Sequence[pytest.Item]) -> None:
    """``@pytest.mark.quick_cases(3)``: of a test's cases that are not slow three stay quick."""
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        marker = item.get_closest_marker("quick_cases")
        if marker is not None and item.get_closest_marker("slow") is None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for some in cases.values():
        (kept,) = some[0].get_closest_marker("quick_cases").args  # type: ignore[union-attr]
        quick = spread(len(some), min(kept, len(some)))
        for i, item in enumerate(some):
            if i not in quick:
                item.add_marker("slow")


#: When a slow test counts as hanging. It takes up to two minutes alone, on a busy machine several
#: times as long.
SLOW_SECONDS = 1200


@pytest.hookimpl(tryfirst=True)  # before pytest selects by markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_all_but_some_slow(items)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(SLOW_SECONDS))
    for marker, (_, there) in NEEDS.items():
        marked = [item for item in items if item.get_closest_marker(marker) is not None]
        if marked and not there():
            _lacking(config)[marker] = len(marked)
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
        output["lacking"] = dict(_lacking(session.config))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """All workers collect the same; one that crashed sends nothing."""
    output = getattr(node, "workeroutput", {})
    for name, counts in (("left_out", _counts(node.config)), ("lacking", _lacking(node.config))):
        counts.update(Counter(output.get(name, {})) - counts)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    for marker, count in _lacking(config).items():
        terminalreporter.write_line(f"left out: {count} {NEEDS[marker][0]}")
    if counts := _counts(config):
        areas = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        said = f"left out: {counts.total()} slow tests ({areas}); `make test-all` runs them"
        terminalreporter.write_line(f"{said}. {ELSEWHERE}")
