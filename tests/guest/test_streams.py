"""Hosts without a usable standard error: daemons, windows, closed descriptors; and notebooks."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

import sdk
from sdk import LLM, SamplingParams
from sdk.api import load_progress as progress

ROOT = Path(__file__).parents[2]
SHORT = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


class WindowLog:
    """What programs with windows put in the place of standard error."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


class Broken(WindowLog):
    def isatty(self) -> bool:
        raise OSError("no such device")


def closed() -> Any:
    stream = io.StringIO()
    stream.close()
    return stream


STREAMS = {"None": lambda: None, "no isatty": WindowLog, "isatty fails": Broken, "closed": closed}


@pytest.mark.parametrize("make", STREAMS.values(), ids=STREAMS.keys())
def test_loading_generating_and_quantizing_need_no_standard_error(
    make: Any, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = make()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", stream)
        patch.setattr(sys, "stdout", stream)
        with LLM(golden / "gguf-Q8_0" / "model.gguf", max_model_len=64) as llm:
            [output] = llm.generate("hello", SHORT, use_tqdm=True)
        made = sdk.quantize(golden / "arch-llama3" / "model.gguf", tmp_path / "made.gguf", "q8_0")
    assert len(output.outputs[0].token_ids) == 4 and made.is_file()
    assert getattr(stream, "text", "") == ""


def command(line: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    embedlm = 'exec "$1" -m sdk "${@:2}"'
    return subprocess.run(
        ["bash", "-c", f"{embedlm} {line}", "bash", sys.executable, *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
    )


@pytest.mark.slow
def test_the_command_works_with_closed_descriptors(golden: Path, tmp_path: Path) -> None:
    model = golden / "gguf-Q8_0" / "model.gguf"
    answer = ["run", model, "--prompt", "hello", "--raw", "--max-tokens", 4, "--temperature", 0]
    expected = command("", *answer)
    assert expected.returncode == 0 and expected.stdout.strip()
    assert command("2>&- <&-", *answer).stdout == expected.stdout
    done = command("<&- >&- 2>&-", "quantize", model, tmp_path / "made.gguf", "--scheme", "f16")
    assert done.returncode == 0 and (tmp_path / "made.gguf").is_file()
    missing = command("2>&-", "inspect", tmp_path / "missing.gguf")
    assert (missing.returncode, missing.stdout) == (2, ""), "an error is not a result"
    nothing = command("<&-", *answer[:2])
    assert nothing.returncode == 2 and "expected a prompt, found nothing" in nothing.stderr


BARS = """
import time
from sdk.api.load_progress import reporting
for stage, seconds in (("slow", 1.2), ("quick", 0.0)):
    with reporting(stage, "layer", None) as report:
        report(1, 3)
        time.sleep(seconds)
        report(2, 3)
"""


@pytest.mark.slow
def test_a_notebook_shows_a_bar_under_the_cell_once_work_takes_a_second(tmp_path: Path) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(BARS)])
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    client = NotebookClient(notebook, timeout=280, kernel_name="python3")
    client.execute(cwd=str(tmp_path), env=environment)
    found = "".join(str(output) for output in notebook.cells[0].outputs)
    assert "slow" in found and "2/3" in found
    assert "quick" not in found and "Warning" not in found


def test_a_notebook_with_widgets_gets_the_widget(monkeypatch: pytest.MonkeyPatch) -> None:
    class OutStream(io.StringIO):
        __module__ = "ipykernel.iostream"

    monkeypatch.setattr(sys, "stderr", OutStream())
    without = progress._bar()
    assert without is not None and without.__module__ == "tqdm.std"
    monkeypatch.setattr(progress, "find_spec", lambda name: object())
    assert progress._bar().__module__ == "tqdm.notebook"
