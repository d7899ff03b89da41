"""``embedlm simulate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sdk.cli import main
from sdk.cluster.simulation.costs import StepCosts
from sdk.testing import tiny_model

SMALL = ("--requests", "60", "--rate", "1")


def simulate(*args: str) -> int:
    return main(["simulate", *args])


def test_policies_are_compared_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*SMALL, "--policy", "state,round_robin") == 0
    shown = capsys.readouterr().out
    assert "TTFT p50" in shown
    for policy in ("state", "round_robin"):
        assert sum(line.startswith(policy) for line in shown.splitlines()) >= 3


def test_the_json_has_all_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "found.json"
    assert simulate(*SMALL, "--json", str(path)) == 0
    found = json.loads(path.read_text())
    assert found["options"]["rate"] == 1
    for policy in ("state", "requests"):
        everything = found["policies"][policy]["classes"]["all"]
        assert everything["requests"] == 60
        assert 0 < everything["ttft"]["p50"] <= everything["ttft"]["p99"]


def test_a_trace_is_played(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"arrival": n, "input_length": 50, "output_length": 5} for n in range(9)]
    lines.append({"arrival": 9, "input_length": 50_000, "output_length": 5})
    path.write_text("\n".join(map(json.dumps, lines)))
    assert simulate("--trace", str(path), "--policy", "state") == 0
    shown = capsys.readouterr()
    assert "state" in shown.out
    assert "1 requests of" in shown.err
    assert "left out" in shown.err


def test_replicas_fail_become_slow_and_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    events = ("--fail", "0@5+10", "--straggler", "1x3@2", "--autoscale", "least=2,most=3")
    assert simulate(*SMALL, *events, "--startup", "1", "--policy", "state") == 0
    assert "rerouted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), "expected --rate, the sessions that begin per second, or --trace"),
        (("--rate", "-1"), "--rate: expected 1e-06 to 1e+06, found -1"),
        (("--rate", "nan"), "--rate: expected 1e-06 to 1e+06, found nan"),
        (("--rate", "1", "--requests", "0"), "--requests: expected 1 to 1e+08, found 0"),
        (("--rate", "1", "--burstiness", "0"), "--burstiness: expected 0.001 to inf, found 0"),
        ((*SMALL, "--replicas", "0"), "--replicas: expected 1 to 100000, found 0"),
        ((*SMALL, "--startup", "-2"), "--startup: expected 0 to 1e+09, found -2"),
        ((*SMALL, "--policy", "best"), "--policy: expected some of state, requests, round_robin"),
        ((*SMALL, "--mix", "chats=x"), "mix: expected shares of chats"),
        ((*SMALL, "--slo", "ttft"), "SLO: expected parts like"),
        ((*SMALL, "--fail", "0"), "--fail: expected REPLICA@TIME[+SECONDS], found '0'"),
        ((*SMALL, "--fail", "0@1.1.1"), "--fail: expected a number, found '1.1.1'"),
        ((*SMALL, "--fail", "7@1"), "failure: expected a replica from 0 to 1, found 7"),
        ((*SMALL, "--straggler", "0"), "--straggler: expected REPLICAxFACTOR[@TIME], found '0'"),
        ((*SMALL, "--autoscale", "most=2"), "autoscale: expected least and most"),
        (
            (*SMALL, "--costs", "/nowhere.json"),
            "--costs: expected a file with step costs, found",
        ),
        (("--trace", "/nowhere.jsonl"), "--trace: expected a file with one request a line"),
        ((*SMALL, "--json", "/nowhere/x.json"), "--json: expected a file that can be written"),
        (("--measure", "/tmp/x.json"), "--measure: expected --model too"),
    ],
)
def test_bad_input_is_one_line(
    args: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simulate(*args) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert message in shown.err
    assert shown.err.startswith("embedlm: ")
    assert len(shown.err.splitlines()) == 1


def test_a_speed_that_makes_no_sense_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"arrival": 0, "input_length": 5, "output_length": 5}\n')
    assert simulate("--trace", str(path), "--speed", "0") == 2
    assert "--speed: expected 1e-06 to 1e+06, found 0" in capsys.readouterr().err


def test_step_costs_are_measured_and_can_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, model = tmp_path / "costs.json", str(tiny_model(tmp_path))
    options = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--memory", "64MiB")
    assert simulate("--measure", str(path), "--model", model, *options) == 0
    assert "prompt tokens/s" in capsys.readouterr().out
    costs = StepCosts.read(path)
    assert costs.max_num_seqs == 4
    assert costs.max_num_batched_tokens == 16
    assert [rows for rows, _ in costs.decode] == [1, 2, 4]
    assert all(seconds > 0 for _, seconds in costs.decode)


def test_a_context_that_is_too_short_to_measure_is_rejected(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(tiny_model(tmp_path))
    options = ("--measure", str(tmp_path / "costs.json"), "--model", model)
    assert simulate(*options, "--max-model-len", "64", "--memory", "64MiB") == 2
    assert "expected max_model_len of at least 128, found 64" in capsys.readouterr().err
