"""``embedlm bench``: real runs of tiny models, suite by suite."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import sdk
from sdk.bench import (
    accuracy,
    engines,
    kv,
    memory,
    models,
    parallel,
    random_models,
    speculative,
    structured,
    tenants,
)
from sdk.bench.engines import Load
from sdk.bench.peers.opening import Opening
from sdk.bench.report import Result
from sdk.cli import main

Captured = pytest.CaptureFixture[str]


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
