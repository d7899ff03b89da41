"""`embedlm bench gpu` around its rows: processes that hang or die, the budget, Ctrl-C, no card."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sdk.api.errors import RequestError, SdkError
from sdk.bench import gpu
from sdk.bench.gpu import Measuring, Report, choose_rows, to_markdown, to_text
from sdk.bench.gpu.process import NoCard
from sdk.bench.gpu.rehearsal import Rehearsal
from sdk.bench.gpu.rows import BY_NAME, LIMITS, ROWS, Finding, Row, ratio, share
from sdk.cli import main
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
    usual = [row.name for row in choose_rows([])]
    assert usual == [row.name for row in ROWS if row.name not in ("generate-batch", "flex")]
    assert [row.name for row in choose_rows(["flex"])] == ["limits", "flex"]


@pytest.mark.slow
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
    assert "| one request, Qwen3-0.6B shapes bf16 | copy bandwidth | runs |" in text.read_text()


@pytest.mark.slow
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

    monkeypatch.setattr(Rehearsal, "run", lambda self: None)
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
    assert "| w4 |  | - |  |  |  |  | its process ended |" in to_markdown(report)
    assert "name NVIDIA Test, torch 2.11" in to_text(report)


def test_a_measurement_is_compared_with_its_prediction_and_failures_are_listed() -> None:
    name = "W4A16 g128 8192x16384, {} tokens"
    one, eight = name.format(1), name.format(8)  # predicted: 94.8 (86 to 96.3), 88.5 (72.7 to 94.3)
    found = [share(one, "copy bandwidth", 0.948), share(eight, "copy bandwidth", 0.50)]
    found.append(share("not predicted", "copy bandwidth", 0.5))
    report = Report({"name": "NVIDIA H100 80GB HBM3"}, False, {"w4": found})
    line = next(x for x in to_markdown(report).splitlines() if x.startswith(f"| {one} | copy"))
    assert line == f"| {one} | copy bandwidth | 94.8 % | 94.8 (86 to 96.3) | 1.00 |  |  |  |"
    text = to_text(report)
    assert text.endswith(
        "1 of 2 predictions failed:\n"
        f"  {eight}, copy bandwidth: measured 50, predicted 88.5 (72.7 to 94.3)"
    )
    assert f"- {eight}, copy bandwidth: measured 50" in to_markdown(report)
    assert report.to_json(1.0)["failed_predictions"] == [f"{eight}|copy bandwidth"]
    report.rows = {"w4": found[:1]}
    assert to_text(report).endswith("\n0 of 1 predictions failed.")
    for other in (Report({"name": "Some Card"}, False, {"w4": found}), Report({}, True, {})):
        assert "predictions failed" not in to_text(other) + to_markdown(other)


def test_a_card_that_is_gone_later_is_a_row_and_no_end() -> None:
    clock = Clock()
    seconds = {row.name: 1.0 for row in ROWS} | {"w4": 1e9}
    opened: list[FakeWorker] = []

    def open_worker(known: Any, log: Any) -> FakeWorker:
        opened.append(FakeWorker(clock, seconds))
        if len(opened) > 1:
            opened[-1].hello = gone  # type: ignore[method-assign]
        return opened[-1]

    def gone(seconds: float) -> dict[str, Any]:
        raise NoCard("bench gpu: there is no card")

    measuring = Measuring(ROWS[:4], 300, None, clock=clock, open_worker=open_worker)
    for _ in measuring.run():
        pass
    assert list(notes(measuring).values()) == [
        "",
        "took too long and was ended",
        *["bench gpu: there is no card"] * 2,
    ]


class Clock:
    """Time that passes when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeWorker:
    """A process that takes ``seconds[row]`` for a row, or hangs where that is more than it has."""

    def __init__(self, clock: Clock, seconds: dict[str, float], tiny: bool = False) -> None:
        self.clock, self.seconds, self.tiny = clock, seconds, tiny
        self.given: dict[str, float] = {}
        self.closed = 0

    def hello(self, seconds: float) -> dict[str, Any]:
        return {"device": {"name": "Some Card"}, "tiny": self.tiny}

    def answers(self, name: str, seconds: float) -> Iterator[dict[str, Any]]:
        self.given[name] = seconds
        self.clock.now += min(self.seconds[name], seconds)
        if self.seconds[name] > seconds:
            raise SdkError("took too long and was ended")
        yield {"finding": Finding(name, "", 1.0).to_json()}
        yield {"done": None, "lost": False}

    def kill(self) -> None:
        """Nothing runs."""

    def close(self) -> None:
        self.closed += 1


def notes(measuring: Measuring) -> dict[str, str]:
    return {name: found[-1].note for name, found in measuring.report.rows.items()}


def measured(seconds: dict[str, float], budget: float = gpu.BUDGET) -> tuple[Measuring, FakeWorker]:
    clock = Clock()
    worker = FakeWorker(clock, seconds)
    open_worker: Any = lambda known, log: worker  # noqa: E731
    measuring = Measuring(ROWS, budget, None, clock=clock, open_worker=open_worker)
    assert [row.name for row in measuring.run()] == [row.name for row in ROWS]
    assert clock.now <= 100 + budget + 1e-6
    return measuring, worker


def test_all_rows_and_the_rehearsal_fit_into_a_call_of_ten_minutes() -> None:
    rows = sum(row.seconds for row in choose_rows([]))
    assert rows + gpu.REHEARSAL <= gpu.BUDGET <= 600 - 40


def test_every_row_gets_its_turn_though_all_hang() -> None:
    measuring, worker = measured({row.name: 1e9 for row in ROWS})
    assert list(worker.given) == [row.name for row in ROWS]
    for row in ROWS:
        assert worker.given[row.name] >= row.seconds
    assert set(notes(measuring).values()) == {"took too long and was ended"}


def test_what_a_row_leaves_is_for_those_after_it() -> None:
    seconds = {row.name: 1.0 for row in ROWS}
    measuring, worker = measured({**seconds, "flex": 300.0})
    assert set(notes(measuring).values()) == {""}
    assert worker.given["flex"] > 300
    assert worker.closed == 1


def test_in_a_short_time_the_first_rows_have_theirs_and_the_last_say_that_there_is_none() -> None:
    measuring, worker = measured({row.name: 1e9 for row in ROWS}, budget=135)
    given = {row.name: row.seconds for row in ROWS[:5]} | {"requests": 5}
    assert worker.given == pytest.approx(given)
    late = {name: note for name, note in notes(measuring).items() if name not in given}
    assert set(late.values()) == {"no time left: 0 s of the budget"} and len(late) == len(ROWS) - 6


class Rehearsed:
    """Workers of a rehearsal, which work at the same time."""

    def __init__(self, seconds: dict[str, float], *, tiny: bool = False) -> None:
        self.seconds, self.tiny = seconds, tiny
        self.clock = Clock()
        self.workers: list[FakeWorker] = []

    def __call__(self, known: Any, log: Any, *, rehearsing: bool) -> FakeWorker:
        assert rehearsing
        self.workers.append(FakeWorker(self.clock, self.seconds, self.tiny))
        return self.workers[-1]

    def run(self, seconds: float) -> dict[str, str]:
        made = Rehearsal(ROWS, seconds, None, clock=self.clock, open_worker=self)
        made.run()
        assert all(worker.closed for worker in self.workers)
        return made.left_out

    @property
    def rows(self) -> list[str]:
        return sorted(name for worker in self.workers for name in worker.given)


COMPILING = [row.name for row in ROWS if row.rehearsed]


def test_a_rehearsal_runs_each_row_with_kernels_of_its_own_once() -> None:
    rehearsed = Rehearsed(dict.fromkeys(COMPILING, 1.0))
    assert rehearsed.run(130) == {}
    assert rehearsed.rows == sorted(COMPILING)
    assert "limits" not in COMPILING and "requests" in COMPILING


def test_a_rehearsal_ends_in_time_and_says_what_it_left_out() -> None:
    rehearsed = Rehearsed(dict.fromkeys(COMPILING, 1.0) | {"requests": 1e9})
    left_out = rehearsed.run(130)
    assert rehearsed.clock.now <= 230 + len(COMPILING)
    assert left_out["requests"] == "took too long and was ended"
    assert set(left_out.values()) <= {"took too long and was ended", "no time to rehearse it"}
    assert Rehearsed({}).run(0) == dict.fromkeys(COMPILING, "no time to rehearse it")


def test_the_interpreter_has_nothing_to_compile() -> None:
    rehearsed = Rehearsed({}, tiny=True)
    assert rehearsed.run(130) == {}
    assert rehearsed.rows == []
