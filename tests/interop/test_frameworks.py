"""sdk/integrations where the frameworks are installed: LangChain's standard tests, and frameworks
with openai's clients."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.interop.conftest import HERE, ROOT, surroundings


@pytest.mark.parametrize(
    ("environment", "driver"), [("langchain", "langchain_standard"), ("frameworks", "frameworks")]
)
def test_frameworks_run_on_a_model_in_their_process(
    python: Callable[[str], Path],
    environment: str,
    driver: str,
    smollm2: Path,
    minilm: Path,
    tmp_path: Path,
) -> None:
    interpreter = python(environment)
    [packages] = (interpreter.parents[1] / "lib").glob("python3*/site-packages")
    own = packages / "sdk" / "kernels" / "cpu"  # the kernels are those of this environment
    own.mkdir(parents=True, exist_ok=True)
    native = find_spec("sdk.kernels.cpu._native")
    assert native is not None and native.origin is not None
    shutil.copy(native.origin, own)
    given = {
        "CHAT_MODEL": str(smollm2),
        "EMBEDDING_MODEL": str(minilm),
        "PAGE": str(ROOT / "docs" / "guides" / "frameworks.md"),
    }
    options = ["-q", "-o", "asyncio_mode=auto", "-p", "no:cacheprovider", "-c", "/dev/null"]
    done = subprocess.run(
        [str(interpreter), "-m", "pytest", *options, str(HERE / "drivers" / f"{driver}.py")],
        cwd=tmp_path,
        env={**surroundings(), **given},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        pytest.fail(done.stdout[-6000:])
    assert " passed" in done.stdout
