"""``.ci/tests.py``: a test that fails beside others and passes alone is named, not counted."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Fails in a run with others. Alone it passes.
FLAKY = """
from pathlib import Path

def test_flaky():
    seen = Path("seen")
    before = seen.exists()
    seen.touch()
    assert before

def test_right():
    pass
"""
WRONG = "def test_wrong():\n    assert False\n"
SLOW = "import pytest\n\n@pytest.mark.slow\ndef test_slow():\n    assert False\n"


def run(folder: Path, files: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, ROOT / ".ci" / "tests.py", "-q", "-p", "no:cacheprovider"]
    left = {"PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS", "EMBEDLM_TEST_FAILURES"}
    environment = {key: value for key, value in os.environ.items() if key not in left}
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )


def test_a_test_that_passes_alone_is_in_the_table_and_the_run_passes(tmp_path: Path) -> None:
    done = run(tmp_path, {"one/test_a.py": FLAKY}, "--runs", "one", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "== once more, by itself: one/test_a.py::test_flaky" in done.stdout
    assert done.stdout.endswith("|---|\n| one/test_a.py::test_flaky |\n")


@pytest.mark.slow
def test_a_test_that_fails_twice_fails_the_run_and_the_next_run_follows(tmp_path: Path) -> None:
    files = {"one/test_a.py": FLAKY, "one/test_b.py": WRONG, "two/test_c.py": WRONG}
    done = run(tmp_path, files, "--runs", "one", "two")
    assert done.returncode == 1
    assert done.stdout.count("== once more") == 3
    assert done.stdout.endswith("|---|\n| one/test_a.py::test_flaky |\n")


@pytest.mark.slow  # a pytest takes a second and more to start
def test_many_failures_are_not_tried_again(tmp_path: Path) -> None:
    many = "".join(f"def test_{i}():\n    assert False\n" for i in range(13))
    done = run(tmp_path, {"one/test_a.py": many}, "--runs", "one")
    assert done.returncode == 1
    assert "== once more" not in done.stdout


@pytest.mark.slow
def test_after_an_error_of_collection_as_after_ctrl_c_no_run_follows(tmp_path: Path) -> None:
    files = {"one/test_a.py": "import nothing_of_this_name\n", "two/test_c.py": WRONG}
    done = run(tmp_path, files, "--runs", "one", "two")
    assert done.returncode == 2
    assert "== once more" not in done.stdout
    assert "test_wrong" not in done.stdout


@pytest.mark.slow
def test_a_run_that_passes_has_no_table_and_arguments_reach_it(tmp_path: Path) -> None:
    files = {"one/test_a.py": SLOW + "\ndef test_quick():\n    pass\n"}
    done = run(tmp_path, files, "--runs", "one", "-m", "not slow")
    assert done.returncode == 0
    assert "flaky" not in done.stdout
    assert "1 passed, 1 deselected" in done.stdout
