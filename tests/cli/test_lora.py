"""Adapters on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdk.cli import main
from sdk.testing import tiny_adapter


@pytest.fixture
def model(golden: Path) -> str:
    return str(golden / "gguf-Q8_0" / "model.gguf")


def test_run_answers_with_the_first_adapter(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (tiny_adapter(tmp_path / name, model, rank=8, seed=i) for i, name in enumerate("ab"))
    command = ["run", model, "--raw", "-p", "the cat", "--max-tokens", "8", "--temperature", "0"]
    answers = []
    for more in ([], ["--lora", str(a)], ["--lora", f"x={b}", "--lora", f"y={a}"]):
        assert main([*command, "--max-model-len", "64", *more]) == 0
        answers.append(capsys.readouterr().out)
    assert len(set(answers)) == 3


@pytest.mark.parametrize("given", ["=x", "a=", "off=x"])
def test_a_bad_adapter_of_run_is_named(
    model: str, given: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", model, "--raw", "-p", "x", "--lora", given]) != 0
    assert "--lora: expected NAME=PATH" in capsys.readouterr().err


@pytest.mark.slow
def test_bench_compares_adapters_with_none(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", model, "--suite", "lora", "--streams", "2", "--rounds", "1"]
    assert main([*command, "--output-len", "8", "--lora", "random:4", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["lora"]
    assert [row["adapters"] for row in rows] == ["beside", "one", "different"]
    assert all(row["median"]["share"] > 0 for row in rows)
    assert main([*command, "--lora", "random:x"]) != 0
    assert "expected random:RANK or a path" in capsys.readouterr().err
