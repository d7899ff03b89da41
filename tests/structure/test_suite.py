"""The suite about itself: what is left out is said, what goes wrong in a worker is not lost."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = (
    "from tests.left_out import (pytest_collection_modifyitems, pytest_deselected,"
    " pytest_sessionfinish, pytest_terminal_summary, pytest_testnodedown)"
)
SUITE = """
import pytest

@pytest.mark.slow
@pytest.mark.parametrize("i", range({slow}))
def test_slow(i): pass

def test_fast(): pass
"""
CASES = """
import pytest

@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("i", [0, 1, 2, pytest.param(3, marks=pytest.mark.slow), 4])
def test_cases(i): pass
"""
WRONG = """
import os, time, pytest

def test_right(): pass

def test_crash(): os.abort()

@pytest.mark.timeout(1)
def test_hang(): time.sleep(60)

def test_right_too(): pass
"""
TIMEOUTS = """
import pytest

def timeout(request):
    marker = request.node.get_closest_marker("timeout")
    return marker and marker.args

@pytest.mark.slow
def test_slow(request): assert timeout(request) == (1200,)

@pytest.mark.slow
@pytest.mark.timeout(7)
def test_own(request): assert timeout(request) == (7,)

def test_quick(request): assert timeout(request) is None
"""
#: How many tests have which marker.
MARKED = ((1, "two_hosts"), (2, "peers"))
Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(files, *options)``: the exit status of pytest on them, and what it printed."""

    def call(files: dict[str, str], *options: str) -> tuple[int, str]:
        markers = "markers =\n slow\n quick_cases\n two_hosts\n peers\n"
        ini = f"[pytest]\npythonpath = {ROOT}\n{markers}addopts = --import-mode=importlib\n"
        for name, text in {"pytest.ini": ini, "conftest.py": CONFTEST, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
        return done.returncode, done.stdout + done.stderr

    return call


def test_a_slow_test_hangs_later_than_a_quick_one(run: Run) -> None:
    status, text = run({"areas/a/test_it.py": TIMEOUTS})
    assert status == 0 and "3 passed" in text, text


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="one process"),
        pytest.param(("-n", "2"), id="two workers", marks=pytest.mark.slow),
    ],
)
def test_a_run_without_slow_tests_counts_them_by_area_and_says_how_to_run_them(
    run: Run, workers: tuple[str, ...]
) -> None:
    files = {"areas/a/test_it.py": SUITE.format(slow=3), "areas/b/test_it.py": SUITE.format(slow=1)}
    status, text = run(files, *workers, "-m", "not slow")
    assert status == 0, text
    *_, said, last = text.splitlines()
    assert said.startswith("left out: 4 slow tests (areas/a 3, areas/b 1); `make test-all` runs")
    assert "make test-interop" in said and "make gpu" in said
    assert "2 passed" in last


def test_some_cases_of_a_test_are_quick_at_equal_distances(run: Run) -> None:
    status, text = run({"areas/a/test_it.py": CASES}, "-m", "not slow", "-vv")
    assert status == 0, text
    assert [i for i in range(5) if f"test_cases[{i}] PASSED" in text] == [0, 2]
    status, text = run({"areas/a/test_it.py": CASES})
    assert "5 passed" in text


@pytest.mark.parametrize(
    "workers",
    [
        pytest.param((), id="one process"),
        pytest.param(("-n", "2"), id="two workers", marks=pytest.mark.slow),
    ],
)
def test_tests_that_need_what_is_not_there_are_counted(
    run: Run, workers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")  # without `ip`
    monkeypatch.delenv("EMBEDLM_PEERS", raising=False)
    hosts, peers = (SUITE.format(slow=n).replace("slow", name) for n, name in MARKED)
    files = {"areas/a/test_it.py": hosts, "areas/b/test_it.py": peers}
    status, text = run(files, *workers)
    assert status == 0, text
    *_, first, second, last = text.splitlines()
    assert first == "left out: 1 tests of two hosts; they need root and `ip netns` (iproute2)"
    said = "left out: 2 tests of other engines; they need EMBEDLM_PEERS (CONTRIBUTING.md)"
    assert second == said
    assert "2 passed" in last


@pytest.mark.slow
def test_a_run_with_slow_tests_or_of_chosen_ones_left_nothing_out(run: Run) -> None:
    files = {"areas/a/test_it.py": SUITE.format(slow=2)}
    for options in ((), ("-k", "fast")):
        status, text = run(files, *options)
        assert status == 0, text
        assert "left out" not in text


@pytest.mark.slow
def test_a_worker_that_crashes_and_a_test_that_hangs_are_failures_and_the_others_run(
    run: Run,
) -> None:
    status, text = run({"areas/a/test_it.py": WRONG}, "-n", "2", "--dist", "worksteal")
    assert status == 1
    assert "crashed while running 'areas/a/test_it.py::test_crash'" in text
    assert "Timeout" in text
    assert {line.partition(" - ")[0] for line in text.splitlines() if line[:6] == "FAILED"} == {
        f"FAILED areas/a/test_it.py::test_{name}" for name in ("crash", "hang")
    }
    assert "2 failed, 2 passed" in text


def commands(*targets: str) -> str:
    """What make would run, if everything before it were there."""
    made = ["build", "models", "browser", ".venv/.embedlm-dev", ".venv/embedlm-constraints.txt"]
    old = [option for name in made for option in ("-o", name)]
    command = ["make", "-n", *old, "VENV=.venv", *targets]
    environment = {key: x for key, x in os.environ.items() if not key.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_make_test_and_ci_leave_slow_tests_out_and_make_test_all_does_not() -> None:
    some, all_of_them = commands("test"), commands("test-all")
    for run in (some, all_of_them):
        assert ".ci/tests.py --workers " in run
    assert '-m "not slow"' in some
    assert "not slow" not in all_of_them
    script = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in script if line.startswith("make")] == [
        *("make lint", "make docs", "make browser", "make test")
    ]


def is_slow(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Attribute) and n.attr == "slow" for n in ast.walk(node))


def has_a_fast_test(path: Path) -> bool:
    body = ast.parse(path.read_text()).body
    marks = [n for n in body if isinstance(n, ast.Assign) and "pytestmark" in ast.unparse(n)]
    if any(map(is_slow, marks)):
        return False
    tests = (n for n in body if isinstance(n, ast.FunctionDef) and n.name.startswith("test_"))
    return any(not any(map(is_slow, test.decorator_list)) for test in tests)


@pytest.mark.parametrize(
    "area",
    sorted(
        path.name
        for path in (ROOT / "tests").iterdir()
        if path.name not in ("card", "interop") and any(path.rglob("test_*.py"))
    ),
)
def test_no_area_is_left_out_as_a_whole(area: str) -> None:
    assert any(map(has_a_fast_test, (ROOT / "tests" / area).rglob("test_*.py")))
