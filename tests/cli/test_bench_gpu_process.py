"""`embedlm bench gpu` around its rows: processes that hang or die, the budget, Ctrl-C, no card."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdk.cli import main
from sdk.cli.bench import gpu
from sdk.cli.bench.gpu import Measuring, Report, choose_rows, to_markdown, to_text
from sdk.cli.bench.gpu.rows import BY_NAME, LIMITS, ROWS, Finding, Row, ratio, share
from sdk.errors import RequestError
from sdk.kernels.gpu import available

Captured = pytest.CaptureFixture[str]
#: A machine that has little more than what the command says it needs.
BARE = """
import sys
for name in ("gguf", "matplotlib", "psutil", "accelerate", "tqdm.notebook", "sentencepiece",
             "pytest", "hypothesis", "google.protobuf"):
    sys.modules[name] = None
from triton.runtime import interpreter
_whole = interpreter._patch_lang_tensor
def _patched(tensor, *scope):  # numpy 2.4: see tests/gpu/conftest.py
    _whole(tensor, *scope)
    tensor.__index__ = lambda self: int(self.handle.data.item())
interpreter._patch_lang_tensor = _patched
"""


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Processes started from here interpret Triton and have little else installed."""
    (tmp_path / "sitecustomize.py").write_text(BARE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "1")


def test_without_a_gpu_it_is_one_line(capsys: Captured) -> None:
    assert main(["bench", "gpu"]) == 2
    assert capsys.readouterr().err == f"embedlm: bench gpu: {available('cuda')}\n"


def test_tuning_without_a_gpu_is_one_line(capsys: Captured) -> None:
    assert main(["tune"]) == 2
    assert capsys.readouterr().err == f"embedlm: tune: {available('cuda')}\n"


def test_an_unknown_row_is_refused_with_the_known_ones() -> None:
    with pytest.raises(RequestError, match=r"--rows: expected names of limits, w4, .*'nonsense'"):
        choose_rows(["w4", "nonsense"])


def test_the_limits_come_first_whatever_is_asked_for() -> None:
    assert [row.name for row in choose_rows(["fp8", "w4"])] == ["limits", "w4", "fp8"]
    assert choose_rows([]) == list(ROWS)


def test_the_command_writes_its_table_and_all_numbers(
    interpreted: None, tmp_path: Path, capsys: Captured
) -> None:
    data, text = tmp_path / "r.json", tmp_path / "r.md"
    argv = ["bench", "gpu", "--rows", "one-stream", "--json", str(data), "--markdown", str(text)]
    assert main([*argv, "--log", str(tmp_path / "log")]) == 0
    assert "this shows that everything runs, not how fast" in capsys.readouterr().out
    report = json.loads(data.read_text())
    assert report["interpreted"] is True
    assert list(report["rows"]) == ["limits", "one-stream"], (tmp_path / "log").read_text()
    (found,) = report["rows"]["one-stream"]
    assert found["value"] is not None, found["note"]
    assert "| one stream, Qwen3-0.6B shapes bf16 | copy bandwidth | runs |" in text.read_text()


def test_a_row_that_hangs_or_kills_its_process_is_a_row(interpreted: None) -> None:
    rows = [
        replace(LIMITS, seconds=60),
        replace(BY_NAME["w4"], seconds=0),
        Row("unknown to the worker", "limits", "measure_limits", 60),
        replace(BY_NAME["prefill"], seconds=60),
    ]
    with open(os.devnull, "w") as log:
        measuring = Measuring(rows, 300, log)
        assert [row.name for row in measuring.run()] == [row.name for row in rows]
    found = measuring.report.rows
    assert [f.note for f in found["w4"]] == ["took too long and was ended"]
    assert [f.note for f in found["unknown to the worker"]] == ["its process ended, exit code 1"]
    # in a new process, which was told the limits
    assert found["prefill"][0].value is not None
    assert found["prefill"][0].against == "bf16 product"


def test_what_there_is_no_time_for_says_so() -> None:
    with open(os.devnull, "w") as log:
        measuring = Measuring(ROWS, 0, log)
        assert len(list(measuring.run())) == len(ROWS)
    notes = {f.note for found in measuring.report.rows.values() for f in found}
    assert notes == {"no time left: 0 s of the budget"}


def test_what_was_measured_before_ctrl_c_is_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Captured
) -> None:
    def run(self: Measuring) -> Iterator[Row]:
        self.report.rows["limits"] = [Finding("copy bandwidth", "", 4.3, "TB/s")]
        yield LIMITS
        raise KeyboardInterrupt

    monkeypatch.setattr(Measuring, "run", run)
    assert main(["bench", "gpu", "--json", str(tmp_path / "r.json")]) == 130
    assert "copy bandwidth" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_text())["rows"]["limits"][0]["value"] == 4.3


@pytest.mark.parametrize(
    ("finding", "verdict"),
    [
        (share("a", "b", 0.61, (40, 60)), "goal"),
        (share("a", "b", 0.41, (40, 60)), "floor"),
        (ratio("a", "b", 1.9, (2.0, 2.9)), "below"),
        (ratio("a", "b", 1.9), ""),
        (Finding("idle", "", 2.0, "%", 10, 3, least=True), "goal"),
        (Finding("idle", "", 9.0, "%", 10, 3, least=True), "floor"),
        (Finding("idle", "", 11.0, "%", 10, 3, least=True), "below"),
        (Finding("idle", "", None, "%", 10, 3), ""),
    ],
)
def test_a_verdict_compares_with_floor_and_goal(finding: Finding, verdict: str) -> None:
    assert finding.verdict == verdict


def test_rows_without_a_value_say_why_in_both_tables() -> None:
    facts: dict[str, Any] = {"name": "NVIDIA Test", "torch": "2.11"}
    report = Report(facts, False, {"w4": [Finding("w4", "", None, note="its process ended")]})
    assert "its process ended" in to_text(report)
    assert "| w4 |  | - |  |  | its process ended |" in to_markdown(report)
    assert "name NVIDIA Test, torch 2.11" in to_text(report)


def test_the_budget_is_within_eight_minutes() -> None:
    assert gpu.BUDGET <= 480 - 20
