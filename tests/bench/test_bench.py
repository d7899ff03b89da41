"""``embedlm bench`` on the command line: options, reports, and real runs of a tiny model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sdk
from sdk import bench
from sdk.bench import (
    accuracy,
    engines,
    kv,
    memory,
    models,
    parallel,
    plots,
    random_models,
    speculative,
    structured,
    tenants,
)
from sdk.bench.engines import Load, Peer, Sample
from sdk.bench.peers.opening import Opening
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


@pytest.fixture
def tiny_random(monkeypatch: pytest.MonkeyPatch) -> None:
    """``random-1b`` and ``random-moe`` are a few kilobytes here."""
    sizes = {"hidden": 64, "layers": 1, "heads": 4, "kv_heads": 2, "head_dim": 16, "vocab": 128}
    for name, shape in random_models.SHAPES.items():
        monkeypatch.setitem(random_models.SHAPES, name, replace(shape, **sizes, mlp=96))


@pytest.mark.usefixtures("tiny_random")
@pytest.mark.parametrize("name", [pytest.param("random-1b", marks=pytest.mark.slow), "random-moe"])
def test_a_model_of_random_weights_runs_and_is_removed(name: str) -> None:
    with models.ModelFiles(name) as made:
        file = Path(made.path)
        work = models.work_of(made.path)
        assert work.decode_weights - work.prompt_weights == 64 * 128
        assert work.kv_numbers == 2 * 2 * 16
        with engines.Engines() as opened:
            worker = opened.open(Opening("embedlm", made.path, 1, 1, 32))
            assert worker.measure(Load(((5, 6, 7),), 4)).decode_tokens == 3
    assert not file.exists()


@pytest.mark.slow
def test_the_unpacked_copy_has_the_same_weights(golden: Path) -> None:
    import torch
    from safetensors.torch import load_file

    from sdk.loaders.open import open_checkpoint

    with models.ModelFiles(str(golden / "gguf-Q8_0" / "model.gguf")) as files:
        folder = Path(files.unpacked())
        assert files.unpacked() == str(folder)
        tensors = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(golden / "gguf-Q8_0" / "model.gguf")
    for name in ("model.embed_tokens", "model.layers.0.self_attn.q_proj"):
        expected = checkpoint.weight(name).dequantize()
        assert torch.equal(tensors[f"{name}.weight"], expected)
    checkpoint.close()
    with models.ModelFiles("a/folder") as files:
        assert files.unpacked() == "a/folder"


@pytest.mark.slow
def test_a_real_run_fills_tables_and_files(golden: Path, tmp_path: Path, capsys: Captured) -> None:
    file, page = tmp_path / "bench.json", tmp_path / "bench.md"
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--threads", "1", "--rounds", "2"]
    argv += ["--suite", "prefill,decode,busy,roofline", "--streams", "1,3"]
    argv += ["--prompt-len", "20,30", "--output-len", "6"]
    assert main([*argv, "--json", str(file), "--markdown", str(page)]) == 0
    report = json.loads(file.read_text())
    found = report["results"]
    assert list(found) == ["prefill", "decode", "busy", "roofline"]
    assert [row["prompt"] for row in found["prefill"]] == [20, 30]
    assert [row["requests"] for row in found["decode"]] == [1, 3]
    for rows in found.values():
        for row in rows:
            assert row["kv"] == "float16"
            assert all(len(values) == 2 for values in row["samples"].values())
            assert all(value > 0 for value in row["median"].values())
    out = capsys.readouterr().out
    assert out.startswith("model.gguf, 1 threads, median of 2 rounds")
    assert "Roofline, decode: " in out
    assert str(tmp_path) not in page.read_text()


def test_json_alone_on_stdout(golden: Path, capsys: Captured) -> None:
    argv = ["bench", str(golden / "gguf-Q4_0" / "model.gguf"), "--threads", "1", "--rounds", "1"]
    assert main([*argv, "--suite", "gemm", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]["gemm"]
    assert 0 < row["median"]["tops"] < row["median"]["peak_tops"]


def test_phases_add_up_to_the_step(golden: Path, capsys: Captured) -> None:
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--threads", "1", "--rounds", "1"]
    argv += ["--suite", "phases", "--streams", "1,3", "--prompt-len", "40", "--output-len", "20"]
    assert main([*argv, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["phases"]
    loads = list(dict.fromkeys(row["load"] for row in rows))
    assert loads == ["prompt of 40", "1 requests", "3 requests"]
    for load in loads:
        found = {row["phase"]: row["median"] for row in rows if row["load"] == load}
        assert {"products", "head", "attention", "quantize", "norms", "sampling"} <= found.keys()
        whole = found.pop("all")
        assert sum(phase["us"] for phase in found.values()) == pytest.approx(whole["us"], rel=0.001)
        assert whole["share"] == pytest.approx(100)
        assert found["products"]["integer_us"] > 0
        assert found["products"]["memory_us"] > 0


def test_accuracy_is_measured_against_exact_arithmetic(golden: Path, capsys: Captured) -> None:
    model = str(golden / "gguf-Q4_1" / "model.gguf")
    assert main(["bench", model, "--suite", "accuracy", "--json", "-"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["results"]["accuracy"]
    assert row["kv"] == "float32"
    assert 0.1 < row["median"]["error"] < 5  # percent
    assert 0 < row["median"]["kl"] < 0.01


def test_logits_are_compared_without_their_mean_and_by_divergence() -> None:
    import torch

    exact = torch.tensor([[0.0, 2.0], [4.0, 4.0]])
    row = Result("e", "e", "", {})
    same = accuracy.compare(row, exact, exact + 7)
    assert same.median("error") == 0
    assert abs(same.median("kl")) < 1e-6
    row = accuracy.compare(Result("e", "e", "", {}), exact, torch.tensor([[0.0, 3.0], [4.0, 4.0]]))
    assert row.median("error") == pytest.approx(50)  # half of sqrt(2) where sqrt(2) was expected
    assert row.median("kl") == pytest.approx(0.0204, abs=1e-3)


@pytest.mark.usefixtures("tiny_random")
def test_accuracy_needs_a_tokenizer_and_enough_text(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["bench", "random-1b", "--suite", "accuracy"]) == 2
    assert "expected a model with a tokenizer, found none" in capsys.readouterr().err
    monkeypatch.setattr(accuracy, "TEXT", "a few words")
    assert main(["bench", str(golden / "arch-llama3"), "--suite", "accuracy"]) == 2
    assert "expected 256 tokens, found " in capsys.readouterr().err


def kv_rows(golden: Path, capsys: Captured, *options: str) -> list[dict[str, Any]]:
    model = str(golden / "gguf-Q4_1" / "model.gguf")
    argv = ["bench", model, "--suite", "kv", "--context", "20,40", "--output-len", "6"]
    assert main([*argv, "--rounds", "2", "--threads", "1", "--json", "-", *options]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["results"]["kv"]
    return found


@pytest.mark.slow
def test_the_kv_suite_compares_every_type_with_float16(golden: Path, capsys: Captured) -> None:
    from sdk.llm import LLM

    rows = kv_rows(golden, capsys)
    assert [row["kv"] for row in rows] == list(kv.KV_TYPES)
    assert {row["context"] for row in rows} == {40}
    rates = [row["samples"]["decode_tok_s"] for row in rows]
    for row, rate in zip(rows, rates, strict=True):
        plan = LLM.plan(str(golden / "gguf-Q4_1" / "model.gguf"), kv_cache_dtype=row["kv"])
        assert row["median"]["page_bytes"] == plan.page_bytes
        assert row["median"]["pages"] == pytest.approx(2**30 / plan.page_bytes)
        speeds = [a / b for a, b in zip(rate, rates[0], strict=True)]
        assert row["samples"]["speed"] == pytest.approx(speeds, abs=1e-5)


@pytest.mark.slow
def test_one_kv_type_is_measured_beside_float16_alone(golden: Path, capsys: Captured) -> None:
    rows = kv_rows(golden, capsys, "--kv-dtype", "fp8_e4m3")
    assert [row["kv"] for row in rows] == ["float16", "fp8"]
    (row,) = kv_rows(golden, capsys, "--kv-dtype", "fp16")
    assert row["samples"]["speed"] == [1.0, 1.0]


def test_the_memory_suite_times_each_way_a_prefix_can_come(golden: Path, capsys: Captured) -> None:
    model = str(golden / "gguf-Q4_1" / "model.gguf")
    argv = ["bench", model, "--suite", "memory", "--rounds", "1", "--threads", "1"]
    assert main([*argv, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["memory"]
    ways = [(row["kv"], row["from"]) for row in rows]
    prefixes = [(kv, way) for kv in memory.KV_TYPES for way in ("cache", "swap", "snapshot")]
    assert ways == prefixes + [(memory.TIERS, way) for way in ("fp16>int8", "int8>int4")]
    assert {row["tokens"] for row in rows[:9]} == {rows[0]["tokens"]}
    assert rows[0]["tokens"] % 16 == 0 < rows[0]["tokens"]
    assert rows[-1]["tokens"] == 128
    assert all(value > 0 for row in rows for value in row["median"].values())


def test_the_speculative_suite_compares_drafts_with_plain_decoding(
    golden: Path, capsys: Captured
) -> None:
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--suite", "speculative"]
    argv += ["--rounds", "2", "--threads", "1", "--output-len", "24", "--streams", "1,2"]
    assert main([*argv, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["speculative"]
    assert [(row["requests"], row["work"]) for row in rows] == [
        (count, work) for count in (1, 2) for work in ("quote", "edit", "json", "prose")
    ]
    for row in rows:
        rates = [row["samples"][key] for key in ("plain_tok_s", "draft_tok_s", "gain")]
        assert all(b / a == pytest.approx(c, rel=1e-4) for a, b, c in zip(*rates, strict=True))
        assert all(0 <= share <= 100 for share in row["samples"]["accepted"])
    assert any(row["median"]["accepted"] > 0 for row in rows)


def test_the_structured_suite_compares_with_free_answers(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "STRUCTURES", {"any json": {"json_object": True}})
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--suite", "structured"]
    argv += ["--rounds", "1", "--threads", "1", "--streams", "1,2"]
    assert main([*argv, "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["structured"]
    assert [(row["requests"], row["structure"]) for row in rows] == [
        (count, name) for count in (1, 2) for name in structured.STRUCTURES
    ]
    for row in rows:
        free, bound, share = (
            row["samples"][key][0] for key in ("free_tok_s", "structured_tok_s", "share")
        )
        assert bound / free == pytest.approx(share, rel=1e-4)
        assert row["samples"]["gain"][0] > 0


def test_the_tenants_suite_runs_chats_alone_and_beside_a_batch(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {"_CHATS": 2, "_PAUSE_S": 0.01, "_QUEUED": 20, "_SHARED": 30}
    sizes = {"CHAT_PROMPT": 12, "CHAT_ANSWER": 4, "BATCH_PROMPT": 16, "BATCH_ANSWER": 8}
    for name, value in (small | sizes).items():
        monkeypatch.setattr(tenants, name, value)
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--suite", "tenants"]
    assert main([*argv, "--rounds", "2", "--threads", "1", "--json", "-"]) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["tenants"]
    assert [row["chats"] for row in rows] == ["alone", "beside a batch", "two batches, 4:1"]
    for row in rows[:2]:
        first, last = row["samples"]["ttft_p50_ms"], row["samples"]["ttft_p99_ms"]
        assert len(first) == 2 and all(0 < a <= b for a, b in zip(first, last, strict=True))
    assert all(0 < share < 100 for share in rows[2]["samples"]["chat_share"])


@pytest.mark.slow
def test_the_parallel_suite_measures_one_rank_two_ranks_two_stages_and_two_replicas(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parallel, "PROMPT", 24)
    argv = ["bench", str(golden / "gguf-Q8_0" / "model.gguf"), "--threads", "2", "--rounds", "1"]
    argv += ["--suite", "parallel", "--streams", "1,2", "--output-len", "64", "--json", "-"]
    assert main(argv) == 0
    rows = json.loads(capsys.readouterr().out)["results"]["parallel"]
    one = f"embedlm {sdk.__version__}"
    assert [(row["engine"], row["requests"]) for row in rows] == [
        (f"{one}{more}", count)
        for count in (1, 2)
        for more in ("", ", 2 ranks", ", 2 stages", ", 2 replicas")
    ]
    # a replica may answer in one piece: nothing is timed between its tokens
    timed = [row for row in rows if "replicas" not in row["engine"]]
    assert all(value > 0 for row in timed for value in row["median"].values())
    assert all(row["median"]["prefill_tok_s"] > 0 for row in rows)
    assert [row["median"].get("bubble", 0) > 0 for row in rows] == [False, False, True, False] * 2
    assert all(row["median"].get("bubble", 0) < 100 for row in rows)


def test_different_answers_are_no_row_of_the_speculative_suite(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = speculative._run, []

    def other(*args: Any) -> Any:
        calls.append(args)
        rate, accepted, answers = run(*args)
        return rate, accepted, [[len(calls), *tokens] for tokens in answers]

    monkeypatch.setattr(speculative, "_run", other)
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--suite", "speculative"]
    assert main([*argv, "--rounds", "1", "--output-len", "4"]) == 2
    assert "answers to 'quote' differ with drafts" in capsys.readouterr().err


@pytest.mark.slow
def test_a_prefix_that_did_not_come_is_no_row_of_the_memory_suite(
    golden: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.llm.LLM.restore", lambda self, path: 0)
    argv = ["bench", str(golden / "gguf-Q4_1" / "model.gguf"), "--suite", "memory", "--rounds", "1"]
    assert main([*argv, "--kv-dtype", "float16"]) == 2
    assert "expected a prefix of" in capsys.readouterr().err
