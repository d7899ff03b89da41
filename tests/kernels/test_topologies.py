"""Machines that are not here: more cores, cores of two kinds, cores that something else has."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sdk.kernels.system import SYSTEM

ROOT = Path(__file__).parents[2]
NATIVE = ROOT / "kernels" / "cpu" / "native"

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's files")


def test_slow_cores_delay_a_phase_by_one_task_with_1_to_16_threads(tmp_path: Path) -> None:
    """The pool alone, compiled with a program that makes some of its threads slow."""
    program = tmp_path / "pool"
    sources = [ROOT / "tests" / "native" / "pool_topologies.cpp", NATIVE / "pool.cpp"]
    sources.append(NATIVE / "system.cpp")
    compiler = os.environ.get("CXX", "c++")
    options = ["-std=c++17", "-O1", "-pthread", f"-I{NATIVE}", "-o", program]
    subprocess.run([compiler, *options, *sources], check=True, timeout=300)
    done = subprocess.run([program], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "pool: 1 to 16 threads\n"


@linux_only
@pytest.mark.parametrize(
    ("files", "kinds"),
    [
        # 6 performance cores with two threads each, 8 efficiency cores
        ({"cpu_core/cpus": "0-11\n", "cpu_atom/cpus": "12-19\n"}, (12, 8)),
        ({"cpu_core/cpus": "0,2,4-5\n", "cpu_atom/cpus": "1,3\n"}, (4, 2)),
        # a phone: one prime core, three large and four small ones
        (
            {
                f"system/cpu/cpu{cpu}/cpu_capacity": speed
                for cpu, speed in enumerate(["325\n"] * 4 + ["828\n"] * 3 + ["1024\n"])
            },
            (1, 3, 4),
        ),
        ({}, (8,)),
    ],
    ids=["hybrid", "mixed numbers", "phone", "alike"],
)
def test_kinds_of_cores_are_read_fastest_first(
    files: dict[str, str], kinds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    from sdk.kernels.system import linux

    given = {f"/sys/devices/{name}": text.strip() for name, text in files.items()}
    monkeypatch.setattr(linux, "_text", lambda path: given.get(str(path), ""))
    monkeypatch.setattr(linux.os, "cpu_count", lambda: 8)
    assert SYSTEM.core_kinds() == kinds
