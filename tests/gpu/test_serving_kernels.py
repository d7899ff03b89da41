"""Nothing is compiled while an engine serves: kernels are specialized for numbers and addresses
(1, multiples of 16), and each of their kinds is met at load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("serving_kernels.py")
pytestmark = pytest.mark.slow


def listed(folder: Path, *arguments: str) -> dict[str, Any]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM, *arguments, folder / "model"],
        capture_output=True,
        text=True,
        env=environment | {"TRITON_CACHE_DIR": str(folder / "cache")},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    ("format", "vocabulary"),
    # rows of 397 logits do not begin at multiples of 16 bytes
    [("float16", "397"), ("q4_k_m", "384"), ("int4", "384")],
)
def test_no_kernel_is_first_launched_while_an_engine_serves(
    tmp_path: Path, format: str, vocabulary: str
) -> None:
    found = listed(tmp_path, format, vocabulary)
    assert found["warm"] > 15
    assert found["late"] == []


def test_an_engine_that_was_not_warmed_up_would_compile(tmp_path: Path) -> None:
    found = listed(tmp_path, "float16", "397", "--cold")
    late = {kernel["kernel"] for kernel in found["late"]}
    assert {"shape_kernel", "sample_kernel"} <= late
