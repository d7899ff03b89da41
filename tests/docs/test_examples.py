"""The programs of docs/examples run, with a real model, and type checkers accept them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.serving.serving import running

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "docs" / "examples"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # classes look their annotations up there
    spec.loader.exec_module(module)
    return module


def test_a_host_serves_its_own_route_and_openai_s(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MODEL", str(smollm2))
    with running(load("host").app) as client:
        found = client.post("/summary", {"text": "It rained all day, so we stayed at home."})
        assert found.status == 200 and found.json["summary"]
        assert client.post("/summary", {}).status == 422  # the host's own shape
        messages = [{"role": "user", "content": "Say hello."}]
        asked = {"model": "assistant", "messages": messages, "max_tokens": 4, "temperature": 0}
        whole = client.post("/v1/chat/completions", asked).json["choices"][0]["message"]["content"]
        events = client.post("/v1/chat/completions", {**asked, "stream": True}).events
        pieces = [event["choices"][0]["delta"].get("content", "") for event in events[:-1]]
        assert whole and "".join(pieces) == whole


@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "basedpyright"])
def test_a_type_checker_accepts_the_examples(checker: str, tmp_path: Path) -> None:
    options = {
        "mypy": ["--strict", "--cache-dir", str(tmp_path)],
        "basedpyright": ["--level", "error"],
    }
    command = [sys.executable, "-m", checker, *options[checker], "docs/examples"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = EXAMPLES.joinpath("gui.py").read_text().replace("memory=", "memmory=")
    (tmp_path / "wrong.py").write_text(wrong)
    command[-1] = str(tmp_path / "wrong.py")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0 and "memmory" in done.stdout
