"""Frameworks that import vllm or llama_cpp themselves get ours, on request."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sdk import RequestError
from sdk.compat import install

_FRAMEWORK = """
import sys
from sdk.compat import install
from sdk.compat.vllm.sampling_params import SamplingParams as Ours
assert "vllm" not in sys.modules
with install("vllm"), install("llama_cpp"):
    import vllm, llama_cpp
    import vllm.v1.metrics.reader as reader
    from vllm import LLM
    from vllm.sampling_params import SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.generate.beam_search.utils import BeamSearchOutput
    from llama_cpp.llama_types import ChatCompletion
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter
    import importlib.util
    assert SamplingParams is Ours
    assert importlib.util.find_spec("vllm") is not None
    assert reader is sys.modules["sdk.compat.vllm.v1.metrics.reader"]
    try:
        import vllm.model_executor
    except ModuleNotFoundError as error:
        assert "vllm.model_executor" in str(error)
    else:
        raise SystemExit("found")
    again = install("vllm")
    again.undo()
    assert "vllm" not in sys.modules
assert not [name for name in sys.modules if name.partition(".")[0] in ("vllm", "llama_cpp")]
"""


def test_a_framework_gets_ours_until_it_is_undone() -> None:
    subprocess.run([sys.executable, "-c", _FRAMEWORK], check=True, timeout=120)


def test_a_package_that_was_imported_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "llama_cpp.py").write_text("real = True\n", encoding="utf-8")
    code = (
        "import llama_cpp; from sdk.compat import install\n"
        "try: install('llama_cpp')\n"
        "except ValueError as error: print(error)\n"
        "assert llama_cpp.real"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=120
    )
    assert f"llama_cpp has been imported already, from {tmp_path}" in done.stdout
    assert "call install('llama_cpp') before" in done.stdout


def test_only_two_packages_can_be_installed() -> None:
    with pytest.raises(RequestError, match="expected one of vllm, llama_cpp, found 'openai'"):
        install("openai")
