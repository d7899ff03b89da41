"""sdk/integrations where the frameworks are installed, each in an environment of its own.

The drivers are tests of pytest, which run there on the package as a wheel has it.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.interop.conftest import HERE, ROOT, surroundings

#: Environment and driver.
DRIVERS = [
    ("langchain", "langchain_standard"),
    ("frameworks", "frameworks"),
    ("frameworks", "components"),
    ("dspy", "dspy_programs"),
    ("llm", "llm_plugin"),
    ("mcp", "mcp_tools"),
    ("instructor", "instructor_typed"),
    ("outlines", "outlines_typed"),
]


@pytest.mark.parametrize(("environment", "driver"), DRIVERS)
def test_frameworks_run_on_a_model_in_their_process(
    python: Callable[[str], Path],
    packaged: Path,
    environment: str,
    driver: str,
    smollm2: Path,
    minilm: Path,
    tmp_path: Path,
) -> None:
    drivers = HERE / "drivers"
    given = {
        "PYTHONPATH": f"{packaged}:{drivers}",
        "CHAT_MODEL": str(smollm2),
        "EMBEDDING_MODEL": str(minilm),
        "PAGE": str(ROOT / "docs" / "guides" / "frameworks.md"),
    }
    settings = tmp_path / "pytest.ini"  # not those of this checkout; pytest 9 refuses /dev/null
    settings.write_text("[pytest]\n")
    options = ["-q", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", "-c", str(settings)]
    options += ["--noconftest"]
    done = subprocess.run(
        [str(python(environment)), "-m", "pytest", *options, str(drivers / f"{driver}.py")],
        cwd=tmp_path,
        env={**surroundings(), **given},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.fail(done.stdout[-6000:] + done.stderr[-2000:])
    assert " passed" in done.stdout
