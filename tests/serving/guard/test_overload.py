"""A thousand real connections on loopback: who is served, who is refused, and the memory."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "tests.serving.guard.overload"]


@pytest.fixture
def server() -> Iterator[tuple[int, int]]:
    """The process and the port of a server with a fake model and room for 64 requests."""
    with subprocess.Popen([*COMMAND, "0"], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        process.wait(30)


def load(port: int, *options: str) -> dict[str, Any]:
    done = subprocess.run(
        [*COMMAND, str(port), *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def resident_mib(process: int) -> float:
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{process}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


@pytest.mark.slow
def test_a_thousand_connections_are_served_or_refused_and_memory_stays_flat(
    server: tuple[int, int],
) -> None:
    process, port = server
    options = ("--connections", "1000", "--seconds", "6")
    first = load(port, *options)
    before = resident_mib(process)
    second = load(port, *options)
    after = resident_mib(process)
    for result in (first, second):
        assert result["errors"] == {}
        assert set(result["status"]) == {"200", "429"}
        # Refusals do not stop the work: several rounds of 64 answers were complete.
        assert result["status"]["200"] > 3 * 64
        assert result["status"]["429"] >= 1000 - 64
        assert result["refused_ms"]["p50"] < result["whole_ms"]["p50"]
    assert after < before + 16, f"{before:.0f} MiB, then {after:.0f} MiB"
