"""``embedlm bench`` on the command line: options, loads, reports and plots."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from sdk import bench
from sdk.bench import (
    engines,
    models,
    plots,
)
from sdk.bench.engines import Peer, Sample
from sdk.bench.report import Metric, Result, Section, cells, ratio, to_markdown, to_text
from sdk.bench.settings import least_output, make_load
from sdk.bench.suites import SUITES, busy_core
from sdk.cli import build_parser, main
from sdk.kernels.cpu import levels, probe
from sdk.kernels.errors import KernelError

Captured = pytest.CaptureFixture[str]


def parse(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["bench", *argv])


@pytest.mark.parametrize("option", ["--streams", "--prompt-len", "--context"])
@pytest.mark.parametrize("text", ["", "0", "1,", "a", "-1", "2000000"])
def test_bad_lists_of_numbers_are_refused(option: str, text: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        parse(f"{option}={text}")
    assert left.value.code == 2
    assert "expected numbers in 1.." in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--rounds", "--threads", "--output-len"])
def test_counts_are_positive(option: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit):
        parse(f"{option}=0")
    assert "expected a positive integer, found '0'" in capsys.readouterr().err


def test_one_output_token_leaves_nothing_to_decode(golden: Path, capsys: Captured) -> None:
    assert main(["bench", str(golden / "gguf-Q8_0" / "model.gguf"), "--output-len", "1"]) == 2
    assert "--output-len: expected at least 2" in capsys.readouterr().err


def test_too_few_output_tokens_are_refused_before_a_model_is_read(
    golden: Path, capsys: Captured
) -> None:
    argv = ["bench", str(golden / "gguf-Q8_0" / "model.gguf"), "--streams", "1,16"]
    assert main([*argv, "--output-len", "9"]) == 2
    assert "expected at least 10 with 16 requests, found 9" in capsys.readouterr().err


@pytest.mark.parametrize(("requests", "tokens"), [(1, 2), (2, 2), (5, 4), (16, 10)])
def test_all_requests_decode_at_a_time(requests: int, tokens: int) -> None:
    assert least_output(requests) == tokens


@pytest.mark.parametrize("text", ["", "decode,nonsense", "Decode", "all,decode"])
def test_an_unknown_suite_is_refused_with_the_known_ones(text: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        parse(f"--suite={text}")
    assert left.value.code == 2
    assert "expected all or names of prefill, decode, " in capsys.readouterr().err


def test_suites_are_named_once_each_or_all_together() -> None:
    assert parse().suite == ("prefill", "decode")
    assert parse("--suite", "gemm,decode,gemm").suite == ("gemm", "decode")
    others = [name for name in SUITES if name != "embed"]  # which takes another model
    assert parse("--suite", "all").suite == tuple(others)


@pytest.mark.parametrize("text", ["", "exllama", "vllm=", "=py", "vllm,vllm=py"])
def test_an_unknown_peer_is_refused_with_the_known_ones(text: str, capsys: Captured) -> None:
    with pytest.raises(SystemExit) as left:
        parse(f"--against={text}")
    assert left.value.code == 2
    assert "each of llama.cpp, openvino, " in capsys.readouterr().err


def test_each_peer_may_have_an_interpreter_of_its_own() -> None:
    assert parse("--against", "llama.cpp=/a/python,transformers").against == (
        Peer("llama.cpp", "/a/python"),
        Peer("transformers"),
    )


def test_a_peer_that_is_not_installed_is_named(
    golden: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["bench", str(golden / "gguf-Q8_0" / "model.gguf"), "--against", "llama.cpp"]) == 2
    assert "--against llama.cpp: llama_cpp is not installed here" in capsys.readouterr().err
    engines.check_peer(Peer("llama.cpp", "/a/python"))  # the worker will say


def test_plots_without_matplotlib_are_refused_before_anything_is_measured(
    golden: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", str(golden / "gguf-Q8_0" / "model.gguf"), "--plots", "folder"]) == 2
    assert "--plots: matplotlib is not installed" in capsys.readouterr().err


def test_a_missing_model_is_one_line(capsys: Captured) -> None:
    assert main(["bench", "/nowhere/model.gguf"]) == 2
    assert capsys.readouterr().err == "embedlm: /nowhere/model.gguf: no such file or folder\n"


def test_the_command_in_a_report_repeats_the_run_without_paths() -> None:
    args = parse("/models/m 1.gguf", "--streams", "1,4", "--against", "llama.cpp=/a/python")
    assert bench.command(args) == ("embedlm bench 'm 1.gguf' --against llama.cpp --streams 1,4")
    assert bench.command(parse()) == "embedlm bench"
    assert bench.command(parse("--rounds", "5", "--output-len", "9")) == (
        "embedlm bench --output-len 9"
    )


def test_a_load_is_the_same_every_time_and_has_no_control_tokens() -> None:
    load = make_load(49152, 8, 128, 64, seed=8)
    assert load == make_load(49152, 8, 128, 64, seed=8)
    assert load != make_load(49152, 8, 128, 64, seed=9)
    assert len(set(load.prompts)) == 8
    assert load.prompt_tokens == 8 * 128
    assert all(1000 <= token < 49152 for prompt in load.prompts for token in prompt)
    small = make_load(448, 1, 16, 2, seed=1)
    assert all(224 <= token < 448 for token in small.prompts[0])


def test_a_sample_without_decoded_tokens_has_no_rate() -> None:
    assert Sample(1.0, 0.0, 0).decode_rate == 0
    assert Sample(1.0, 2.0, 64).decode_rate == 32


def result(engine: str, requests: int, *rates: float) -> Result:
    return Result(engine, f"{engine} 1.0", "float16", {"requests": requests}, {"rate": list(rates)})


RATE = Metric("rate", "tok/s")


ROWS = [
    result("embedlm", 1, 100.0, 300.0, 200.0),
    result("llama.cpp", 1, 50.0, 60.0, 40.0),
    result("embedlm", 8, 900.0),
    result("llama.cpp", 8, 100.0),
]


def test_a_row_holds_medians_and_ratios_of_the_same_case() -> None:
    assert ROWS[0].median("rate") == 200
    assert ratio(ROWS[1], ROWS, "rate") == 4
    assert ratio(ROWS[3], ROWS, "rate") == 9
    assert ratio(ROWS[0], ROWS, "rate") is None
    assert ratio(result("vllm", 16, 1.0), ROWS, "rate") is None
    assert ratio(result("vllm", 1, 0.0), ROWS, "rate") is None


def test_ratio_columns_are_there_only_beside_a_peer() -> None:
    head, rows = cells(Section("Decode", "note", [RATE], ROWS))
    assert head == ["engine", "KV", "requests", "tok/s", "embedlm / it"]
    assert rows[1] == ["llama.cpp 1.0", "float16", "1", "50.0", "4.00"]
    head, rows = cells(Section("Decode", "note", [RATE], [ROWS[0]]))
    assert head == ["engine", "KV", "requests", "tok/s"]
    assert rows == [["embedlm 1.0", "float16", "1", "200.0"]]
    head, rows = cells(Section("Share", "note", [Metric("rate", "%", ratio=False)], ROWS))
    assert head == ["engine", "KV", "requests", "%"]


REPORT = {
    "command": "embedlm bench m.gguf",
    "model": "m.gguf",
    "machine": {
        "cpu": "A CPU",
        "cpus": 2,
        "simd": "avx2",
        "python": "3.11.0",
        "read_gb_per_s": {"before": 48.0, "after": 50.0},
        "int8_tops": {"before": 2.0, "after": 1.9},
        "core_to_core_ns": {"before": 31.2, "after": 160.4},
    },
    "settings": {"threads": 2, "rounds": 3, "output_len": 64},
    "failures": ["vllm: the worker failed: no such model"],
}


def test_text_and_markdown_say_the_same() -> None:
    section = Section("Decode", "all together", [RATE], ROWS)
    text, markdown = (write(REPORT, [section]) for write in (to_text, to_markdown))
    for part in (
        "m.gguf, 2 threads, median of 3 rounds",
        "memory read 48.0 GB/s before, 50.0 after",
        "Not measured: ",
        "vllm: the worker failed: no such model",
    ):
        assert part in text and part in markdown
    lines = text.splitlines()
    assert lines[-3].split() == ["llama.cpp", "1.0", "float16", "8", "100.0", "9.00"]
    assert markdown.startswith("```bash\nembedlm bench m.gguf\n```\n")
    assert "| engine | KV | requests | tok/s | embedlm / it |\n| --- | ---: |" in markdown
    assert "| llama.cpp 1.0 | float16 | 8 | 100.0 | 9.00 |\n\nNot measured: " in markdown


def test_json_keeps_every_sample() -> None:
    assert ROWS[0].to_json() == {
        "engine": "embedlm 1.0",
        "kv": "float16",
        "requests": 1,
        "median": {"rate": 200.0},
        "samples": {"rate": [100.0, 300.0, 200.0]},
    }


WORK = models.Work(
    bytes_per_token=100_000_000, prompt_weights=10**8, decode_weights=125 * 10**6, kv_numbers=10**4
)


def test_limits_come_from_memory_or_from_the_integer_units() -> None:
    machine = REPORT["machine"]
    assert plots.limit("prefill", 512, machine, WORK, 2) == 10_000  # 2e12 / 2e8
    assert plots.limit("decode", 1, machine, WORK, 2) == 500  # 50e9 / 100e6
    assert plots.limit("decode", 8, machine, WORK, 2) == 4000
    assert plots.limit("decode", 32, machine, WORK, 2) == 8000  # 2e12 / 2.5e8
    assert plots.limit("context", 5000, machine, WORK, 2) == 250  # 5000 * 20 kB more
    assert plots.limit("context", 5000, machine, WORK, 1) == 50e9 / 150e6


class Drawing:
    """Stands in for matplotlib's figures and axes: every call is noted, and gives another."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[object, ...], dict[str, object]]] = []

    def __getattr__(self, name: str) -> object:
        def note(*args: object, **options: object) -> Drawing:
            self.calls.append((name, args, options))
            return self

        return note

    def all(self, name: str) -> list[tuple[object, ...]]:
        return [args for called, args, _ in self.calls if called == name]


@pytest.fixture
def drawing(monkeypatch: pytest.MonkeyPatch) -> Drawing:
    found = Drawing()
    module = ModuleType("matplotlib.figure")
    module.Figure = lambda **options: found  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "matplotlib", ModuleType("matplotlib"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", module)
    return found


def test_a_plot_has_labelled_axes_and_the_machines_limit(drawing: Drawing, tmp_path: Path) -> None:
    plots.check_matplotlib()
    sections = {"decode": Section("Decode", "note", [RATE], ROWS)}
    (path,) = plots.write_plots(tmp_path / "new", REPORT, sections, WORK)
    assert path == tmp_path / "new" / "decode.png" and path.parent.is_dir()
    ours, theirs, limits = drawing.all("plot")
    assert (ours[:2], theirs[:2]) == (([0, 1], [200, 900]), ([0, 1], [50, 100]))
    assert list(limits[1]) == [500, 4000]  # type: ignore[call-overload]
    assert drawing.all("set_xticks") == [(range(2), ["1", "8"])]
    assert drawing.all("set_xlabel") == [("concurrent requests",)]
    assert drawing.all("set_ylabel") == [("tok/s",)]
    assert drawing.all("savefig") == [(path,)]


def test_columns_without_a_case_become_bars_of_their_own(drawing: Drawing, tmp_path: Path) -> None:
    rows = [Result("embedlm", "embedlm 1.0", "", {}, {"rate": [3.0], "share": [40.0]})]
    metrics = [RATE, Metric("share", "% of peak", ratio=False)]
    plots.write_plots(tmp_path, REPORT, {"gemm": Section("GEMM", "note", metrics, rows)}, WORK)
    assert [bar[1] for bar in drawing.all("bar")] == [[3.0], [40.0]]
    assert drawing.all("set_ylabel") == [("tok/s",), ("% of peak",)]
    assert drawing.all("axhline") == [(100,)]


@pytest.mark.slow
def test_a_token_meets_some_of_the_experts_only(golden: Path) -> None:
    from sdk.loaders.open import open_checkpoint

    path = golden / "gptoss-mxfp4"
    work = models.work_of(str(path))
    sizes = {entry.name: entry.nbytes for entry in open_checkpoint(path).entries()}
    experts = sum(nbytes for name, nbytes in sizes.items() if ".experts." in name)
    embedding = sizes["model.embed_tokens.weight"]
    assert work.bytes_per_token == sum(sizes.values()) - embedding - experts // 2
    per_layer = 2 * 3 * 128 * 128  # two experts of gate, up and down
    assert work.decode_weights - work.prompt_weights == 448 * 128
    assert per_layer * 2 < work.prompt_weights < per_layer * 2 + 2 * 70_000


def test_work_counts_what_a_token_reads(golden: Path) -> None:
    tied = models.work_of(str(golden / "gguf-Q4_1" / "model.gguf"))
    file = (golden / "gguf-Q4_1" / "model.gguf").stat().st_size
    assert 0.5 * file < tied.bytes_per_token < file
    assert tied.decode_weights > tied.prompt_weights > 0


def test_probes_measure_plausible_limits() -> None:
    assert 0.2e9 < probe.read_bandwidth(1, seconds=0.005) < 2e12
    for level in levels():
        for bits in (4, 5, 6, 8):
            assert 1e8 < probe.int8_peak(2, level, seconds=0.005, bits=bits) < 1e14
    for threads in (2, 3):  # 3: more than CPUs on a small machine, so they take turns
        assert 1e-9 < probe.core_to_core(threads, seconds=0.005, tries=1) < 1


def test_probes_refuse_what_is_not_there() -> None:
    with pytest.raises(KernelError, match=r"SIMD level: expected one of .*found 'sse9'"):
        probe.int8_peak(1, "sse9")
    with pytest.raises(KernelError, match="read bandwidth: not measured"):
        probe.read_bandwidth(0)
    with pytest.raises(KernelError, match="time from core to core: not measured"):
        probe.core_to_core(1)
    with pytest.raises(KernelError, match="int8 peak of portable: not measured"):
        probe.int8_peak(0, "portable")


def test_a_busy_core_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[subprocess.Popen[bytes]] = []
    real = subprocess.Popen

    def popen(argv: list[str]) -> subprocess.Popen[bytes]:
        started.append(real(argv))
        return started[0]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(KeyboardInterrupt), busy_core():
        assert started[0].poll() is None
        raise KeyboardInterrupt
    assert started[0].poll() is not None
