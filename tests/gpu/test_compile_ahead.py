"""Kernels are compiled in threads before they are launched: in processes of their own, because this
one interprets them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from sdk.kernels.gpu.compile_ahead import can_compile_ahead

HERE = Path(__file__).parent


def printed_by(script: Path, *arguments: str, **environment: str) -> Any:
    env = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"} | environment
    command = [sys.executable, str(script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_kernels_are_compiled_in_threads_and_not_launched(tmp_path: Path) -> None:
    script = HERE / "aot" / "compile_in_threads.py"
    found = printed_by(script, TRITON_CACHE_DIR=str(tmp_path))
    assert found["can"] and not found["launched"]
    assert found["reports"] == [[1, 2], [2, 2]]  # the third launch is of the same kernel
    assert found["cubins"] == [True, True]
    assert found["threads"] and found["left"] == []
    assert found["cancelled"] and found["after"] == [False, True]
    assert found["beside the caller's"] is False


def test_the_interpreter_compiles_nothing() -> None:
    assert not can_compile_ahead()


@pytest.mark.slow
def test_an_engine_compiles_everything_before_the_first_launch(tmp_path: Path) -> None:
    found = printed_by(HERE / "serving_kernels.py", "F16", "512", str(tmp_path))
    assert found["ahead"] > 20 and found["warm"] == found["ahead"] and found["late"] == []
