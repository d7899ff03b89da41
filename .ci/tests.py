"""Run the tests, and each test that failed once more by itself.

    python .ci/tests.py [--workers N] [arguments of pytest]

Triton decides for a whole process whether it interprets, so tests/gpu is a run of its own. It
follows failures of the first run, but not Ctrl-C. A test that fails beside others and passes alone
is flaky: the table at the end names it, and the run counts as passed. The table should be empty.
Exit status: pytest's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

RUNS = ("tests", "tests/gpu")
#: Of a run with more failures none is tried again: then it is not chance.
MOST = 12
#: Statuses of pytest: some tests failed, Ctrl-C or an error while tests were collected.
FAILED, INTERRUPTED = 1, 2


def run_pytest(arguments: Sequence[str]) -> tuple[int, list[str]]:
    """The status of a run, and the tests that failed in it."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "failed.json"
        environment = {**os.environ, "EMBEDLM_TEST_FAILURES": str(names)}
        # Some hundred processes of the tests import the library: 0.7 s each if none may keep the
        # compiled modules, 0.3 s with them.
        environment.pop("PYTHONDONTWRITEBYTECODE", None)
        command = [sys.executable, "-m", "pytest", "-p", "tests.failed_tests", *arguments]
        process = subprocess.Popen(command, env=environment)
        try:
            status = process.wait()
        except KeyboardInterrupt:  # pytest gets it too, and says what it has done
            status = process.wait()
        return status, json.loads(names.read_text()) if names.is_file() else []


def run_with_second_try(
    tests: str, workers: str, arguments: Sequence[str]
) -> tuple[int, list[str]]:
    """The status of a run of a folder, and the tests that passed when they ran alone."""
    parallel = ["-n", workers, "--dist", "worksteal"]
    status, failed = run_pytest([*arguments, *parallel, tests])
    if status != FAILED or not 0 < len(failed) <= MOST:
        return status, []
    flaky = []
    for name in failed:
        print(f"== once more, by itself: {name}", flush=True)
        again, _ = run_pytest([*arguments, name])
        if again == INTERRUPTED:
            return INTERRUPTED, flaky
        if again == 0:
            flaky.append(name)
    return (0 if len(flaky) == len(failed) else FAILED), flaky


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", default="0", help="processes that test at the same time")
    parser.add_argument("--runs", nargs="+", default=RUNS, help="folders, a run for each")
    options, arguments = parser.parse_known_args()
    worst, flaky = 0, []
    for tests in options.runs:
        status, passed_alone = run_with_second_try(tests, options.workers, arguments)
        flaky += passed_alone
        worst = worst or status
        if status == INTERRUPTED:
            break
    if flaky:
        rows = [
            "| flaky: failed beside others, passed alone |",
            "|---|",
            *(f"| {x} |" for x in flaky),
        ]
        print("\n".join(rows), flush=True)
    return worst


if __name__ == "__main__":
    sys.exit(main())
