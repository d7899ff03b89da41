"""``.ci/gpu.sh`` without a GPU: an interpreter that only notes what it was asked to run."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / ".ci" / "gpu.sh"
PYTHON = """#!/usr/bin/env bash
if [ "$1" = -c ]; then  # is a module there?
  [[ " $MISSING " != *" ${2#import } "* ]]
  exit
fi
echo "$*" >>"$NOTED"
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
    words = {"tests/card": "tests", " bench gpu ": "bench", " tune ": "tune"}
    return [kind for line in commands for word, kind in words.items() if word in line]


@pytest.mark.parametrize(
    ("given", "chosen"),
    [
        ({}, ["tests", "bench", "tune"]),
        ({"PARTS": "bench"}, ["bench"]),
        ({"PARTS": "tune tests"}, ["tune", "tests"]),
        ({"PARTS": ""}, ["tests", "bench", "tune"]),
    ],
    ids=str,
)
def test_parts_select_what_a_call_runs(run: Run, given: dict[str, str], chosen: list[str]) -> None:
    status, commands, _ = run(**given)
    assert (status, kinds(commands)) == (0, chosen)


def test_arguments_go_before_parts_of_the_environment(run: Run) -> None:
    status, commands, _ = run("tests", PARTS="bench")
    assert (status, kinds(commands)) == (0, ["tests"])


def test_an_unknown_part_is_refused_before_anything_runs(run: Run) -> None:
    status, commands, text = run(PARTS="tests nonsense")
    assert (status, commands) == (2, [])
    assert "expected tests, bench or tune, found nonsense" in text


def test_a_part_that_fails_does_not_keep_the_next_from_running_and_is_named(run: Run) -> None:
    status, commands, text = run(FAILING="bench gpu")
    assert (status, kinds(commands)) == (1, ["tests", "bench", "tune"])
    assert text.endswith("== failed: bench (exit code 1)\n")


def test_tests_run_side_by_side_only_where_that_is_installed(run: Run) -> None:
    _, (command,), text = run("tests", MISSING="xdist")
    assert " -n " not in command
    assert "pytest-xdist would run them side by side" in text
    _, commands, text = run("tests", "bench", MISSING="pytest")
    assert kinds(commands) == ["bench"]
    assert text.endswith("== failed: tests (no pytest)\n")
    if len(os.sched_getaffinity(0)) > 1:
        assert " -n " in run("tests")[1][0]
