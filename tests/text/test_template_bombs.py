"""What hostile chat templates may take of the process that renders them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.text.template_bombs import BOMBS, SECONDS

PROGRAM = Path(__file__).with_name("template_bombs.py")
MEMORY = 384 * 2**20  # of address space, beside what the child had before
MOST_SECONDS = 10.0 + SECONDS  # of CPU: half a second on a quiet machine; without a budget, minutes


@pytest.fixture(scope="module")
def rendered() -> dict[str, tuple[float, str]]:
    """Seconds of CPU time and the error of each bomb, in a child that can take little memory."""
    child = subprocess.run(
        [sys.executable, str(PROGRAM), str(MEMORY)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr[-2000:]
    rows = [json.loads(line) for line in child.stdout.splitlines()]
    return {name: (seconds, error) for name, seconds, error in rows}


@pytest.mark.quick_cases(76)
@pytest.mark.parametrize("name", BOMBS)
def test_a_hostile_template_ends_in_a_template_error_soon_and_within_its_memory(
    rendered: dict[str, tuple[float, str]], name: str
) -> None:
    seconds, error = rendered[name]
    assert error.startswith("TemplateError: ") and "MemoryError" not in error
    assert seconds < MOST_SECONDS
