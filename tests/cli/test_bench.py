"""``embedlm bench``: loads, medians, the peer's protocol, and one real measurement."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from sdk.cli import bench, build_parser, main
from sdk.cli.bench_engines import Engines, Load, PeerEngine, Sample
from sdk.errors import RequestError, SdkError

Captured = pytest.CaptureFixture[str]


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *argv])


@pytest.mark.parametrize("text", ["", "0", "1,", "a", "-1", "257"])
def test_bad_numbers_of_streams_are_refused(text: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        parse(f"--streams={text}")
    assert left.value.code == 2
    assert "expected numbers in 1..256" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--threads", "--prompt-len", "--output-len"])
def test_counts_are_positive(option: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        parse(f"{option}=0")
    assert "expected a positive integer, found '0'" in capsys.readouterr().err


def test_one_output_token_leaves_nothing_to_decode(capsys: Captured) -> None:
    assert main(["bench", "x.gguf", "--output-len", "1"]) == 2
    assert "--output-len: expected at least 2" in capsys.readouterr().err


def test_a_load_is_the_same_every_time_and_has_no_control_tokens() -> None:
    load = bench.make_load(49152, 8, 128, 64)
    assert load == bench.make_load(49152, 8, 128, 64)
    assert len(set(load.prompts)) == 8
    assert load.prompt_tokens == 8 * 128
    assert all(1000 <= token < 49152 for prompt in load.prompts for token in prompt)
    small = bench.make_load(448, 1, 16, 2)
    assert all(224 <= token < 448 for token in small.prompts[0])


def test_a_row_reports_medians() -> None:
    row = bench.Row("e", 1, [Sample(1.0, 10.0), Sample(100.0, 30.0), Sample(3.0, 20.0)])
    assert (row.prefill, row.decode) == (3.0, 20.0)
    assert row.to_json()["decode_samples"] == [10.0, 30.0, 20.0]


def test_every_other_round_runs_in_reverse() -> None:
    engines = Engines()
    engines.opened = ["a", "b"]  # type: ignore[list-item]
    assert [list(engines.interleaved(i)) for i in range(3)] == [["a", "b"], ["b", "a"], ["a", "b"]]


def test_bandwidth_is_a_plausible_number() -> None:
    assert 0.5 < bench.read_bandwidth(1) < 2000


def test_a_peer_needs_llama_cpp_or_an_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RequestError, match="llama-cpp-python is not installed here"):
        bench.peer_python(parse("--against", "llama.cpp"))
    assert bench.peer_python(parse("--against", "llama.cpp", "--peer-python", "py")) == "py"
    assert bench.peer_python(parse()) is None


def test_an_interpreter_without_a_peer_is_refused() -> None:
    with pytest.raises(RequestError, match="expected --against"):
        bench.peer_python(parse("--peer-python", "py"))


def fake_python(folder: Path, code: str) -> str:
    """An "interpreter" that runs ``code`` instead of the worker script."""
    script = folder / "worker.py"
    script.write_text(code)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}"\n')
    python.chmod(0o755)
    return str(python)


def test_a_peer_is_asked_in_json_lines(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "hello = json.loads(sys.stdin.readline())\n"
        "print(json.dumps({'name': 'peer %(streams)d %(context)d' % hello}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    n = len(json.loads(line)['prompts'])\n"
        "    reply = {'prefill_s': 2.0, 'decode_s': 4.0, 'decode_tokens': 8 * n}\n"
        "    print(json.dumps(reply), flush=True)\n"
    )
    peer = PeerEngine(fake_python(tmp_path, code), "m.gguf", 2, 8, 192)
    assert peer.name == "peer 8 192"
    assert peer.measure(Load(((1, 2, 3), (4, 5, 6)), 9)) == Sample(prefill=3.0, decode=4.0)
    peer.close()


def test_a_peer_that_fails_says_why(tmp_path: Path) -> None:
    code = 'print(\'{"error": "no such model"}\', flush=True)'
    with pytest.raises(SdkError, match="the peer failed: no such model"):
        PeerEngine(fake_python(tmp_path, code), "m.gguf", 1, 1, 64)


def test_a_peer_that_dies_is_an_error_and_not_a_hang(tmp_path: Path) -> None:
    with pytest.raises(SdkError, match="ended without a word"):
        PeerEngine(fake_python(tmp_path, "raise SystemExit(3)"), "m.gguf", 1, 1, 64)


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(SdkError, match="--peer-python /nowhere/python: cannot be started"):
        PeerEngine("/nowhere/python", "m.gguf", 1, 1, 64)


def test_the_worker_without_llama_cpp_answers_with_an_error(tmp_path: Path) -> None:
    (tmp_path / "llama_cpp.py").write_text("raise ImportError('stand-in without a library')")
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    with pytest.raises(SdkError, match="ImportError: stand-in without a library"):
        PeerEngine(str(python), "m.gguf", 1, 1, 64)


def test_a_real_measurement_fills_the_table_and_the_file(
    golden: Path, tmp_path: Path, capsys: Captured
) -> None:
    file = tmp_path / "bench.json"
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--streams", "1,3"]
    argv += ["--prompt-len", "20", "--output-len", "6", "--rounds", "2", "--json", str(file)]
    assert main([*argv, "--threads", "1"]) == 0
    report = json.loads(file.read_text())
    assert [row["streams"] for row in report["results"]] == [1, 3]
    for row in report["results"]:
        assert len(row["decode_samples"]) == 2
        assert row["prefill_tokens_per_s"] > 0 and row["decode_tokens_per_s"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("model.gguf: 20 prompt and 6 output tokens")
    assert [line.split()[:2] for line in lines[-2:]] == [["embedlm", "1"], ["embedlm", "3"]]
