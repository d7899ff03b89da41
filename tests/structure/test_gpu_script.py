"""``.ci/gpu.sh`` without a GPU: an interpreter that only notes what it was asked to run."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "gpu.sh"
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then  # is a module there?
  [[ " $MISSING " != *" ${2#import } "* ]]
  exit
fi
echo "$CARD_TESTS_SHARE $*" >>"$NOTED"
[ -d "$(dirname "$TRITON_CACHE_DIR")" ] || exit 9
[[ "$*" != *"${FAILING:-nothing fails}"* ]]
"""
Run = Callable[..., tuple[int, list[str], str]]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """``run(*parts, **environment)``: exit status, the commands, and what was printed."""
    python, noted = tmp_path / "python", tmp_path / "noted"
    python.write_text(PYTHON)
    python.chmod(0o755)

    def call(*parts: str, **environment: str) -> tuple[int, list[str], str]:
        noted.unlink(missing_ok=True)
        inherited = {key: value for key, value in os.environ.items() if key != "PARTS"}
        own = {"PYTHON": str(python), "NOTED": str(noted), "OUT": str(tmp_path / "out")}
        cache = {"TRITON_CACHE_DIR": str(tmp_path / "triton")}
        done = subprocess.run(
            [SCRIPT, *parts],
            env={**inherited, **own, **cache, "MISSING": "", **environment},
            capture_output=True,
            text=True,
        )
        commands = noted.read_text().splitlines() if noted.exists() else []
        return done.returncode, commands, done.stdout + done.stderr

    return call


def kinds(commands: list[str]) -> list[str]:
    """Without repetitions: tests run in a process for each core."""
    words = {"tests/card": "tests", " --rows limits": "limits", " --markdown ": "bench"}
    words[" tune "] = "tune"
    found = [kind for line in commands for word, kind in words.items() if word in line]
    return list(dict.fromkeys(found))


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, ["tests", "limits", "bench", "tune"]),
        ({"PARTS": "bench"}, ["bench"]),
        ({"PARTS": "tune tests"}, ["tune", "tests", "limits"]),
        ({"PARTS": ""}, ["tests", "limits", "bench", "tune"]),
    ],
    ids=str,
)
def test_parts_select_what_a_call_runs(run: Run, given: dict[str, str], chosen: list[str]) -> None:
    status, commands, _ = run(**given)
    assert (status, kinds(commands)) == (0, chosen)


def test_arguments_go_before_parts_of_the_environment(run: Run) -> None:
    status, commands, _ = run("tests", PARTS="bench")
    assert (status, kinds(commands)) == (0, ["tests", "limits"])


def test_an_unknown_part_is_refused_before_anything_runs(run: Run) -> None:
    status, commands, text = run(PARTS="tests nonsense")
    assert (status, commands) == (2, [])
    assert "expected tests, bench or tune, found nonsense" in text


def test_a_part_that_fails_does_not_keep_the_next_from_running_and_is_named(run: Run) -> None:
    status, commands, text = run(FAILING="--markdown")
    assert (status, kinds(commands)) == (1, ["tests", "limits", "bench", "tune"])
    assert text.endswith("== failed: bench (exit code 1)\n")


def test_tests_run_in_a_process_for_each_core_and_each_has_its_share(run: Run) -> None:
    _, commands, text = run("tests", FAILING=" tests/card")
    count = min(12, os.cpu_count() or 1, len(os.sched_getaffinity(0)))
    shares = sorted(line.split()[0] for line in commands if "tests/card" in line)
    assert shares == sorted(f"{i}/{count}" for i in range(count))
    assert all(f"tests-{i} (exit code 1)" in text for i in range(count))
    assert kinds(commands) == ["tests", "limits"]


def test_tuning_goes_on_after_a_process_was_lost_and_gives_up_at_last(run: Run) -> None:
    status, commands, text = run("tune", FAILING=" tune ")
    assert (status, len(commands)) == (1, 4)
    assert [f"tune-{i} (exit code 1)" in text for i in (1, 2, 3, 4, 5)] == [True] * 4 + [False]
    status, commands, _ = run("tune")
    assert (status, len(commands)) == (0, 1)


def test_without_pytest_the_limits_are_measured_all_the_same(run: Run) -> None:
    _, commands, text = run("tests", "bench", MISSING="pytest")
    assert kinds(commands) == ["limits", "bench"]
    assert text.endswith("== failed: tests (no pytest)\n")


def run_share(folder: Path, **environment: str) -> tuple[int, str]:
    """Seven tests of a fifth of a second under the hooks of tests/card."""
    source = (SCRIPT.parents[1] / "tests" / "card" / "conftest.py").read_text()
    (folder / "conftest.py").write_text(source)
    (folder / "test_them.py").write_text(
        "import time, pytest\n"
        "@pytest.mark.parametrize('n', range(7))\n"
        "def test_n(n):\n    time.sleep(0.2)\n    assert n != 4\n"
    )
    inherited = {**os.environ, "TRITON_INTERPRET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, folder],
        env=inherited,
        cwd=folder,
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout


@pytest.mark.slow
def test_shares_have_every_test_once_and_end_in_time(tmp_path: Path) -> None:
    found = [run_share(tmp_path, CARD_TESTS_SHARE=f"{i}/3") for i in range(3)]
    seen = [
        line.split()[0] for _, text in found for line in text.splitlines() if "::test_n[" in line
    ]
    ran = [name for name in seen if not name.startswith("FAILED")]
    assert len([name for name in ran if "[" in name]) == len(set(ran)) == 7
    assert [code for code, _ in found] == [0, 1, 0]
    code, text = run_share(tmp_path, CARD_TESTS_SECONDS="0")
    assert code == 2
    assert "the time is over before test_them.py::test_n[1]" in text
