"""Comparing a model with a reference: the numbers, the table, and what cannot be compared."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

import sdk
from sdk import LLM, CheckpointError, LoadCancelled, RequestError, SamplingParams
from sdk.cli import main
from sdk.evaluating.divergence import Comparison
from sdk.evaluating.logits import logits_of
from sdk.evaluating.plot import Placed, frontier

TOKENS = 32
EXACT = {"compute": "exact", "kv_cache_dtype": "float32"}


@pytest.fixture(scope="module")
def ids() -> list[list[int]]:
    return torch.randint(3, 448, (3, TOKENS), generator=torch.Generator().manual_seed(5)).tolist()


@pytest.fixture
def base(golden: Path) -> Path:
    return golden / "arch-llama3" / "hf"


def test_a_model_agrees_with_itself(base: Path, ids: list[list[int]]) -> None:
    found = sdk.evaluate(base, text=ids, tokens=TOKENS, **EXACT)
    assert (found.kl_mean, found.kl_p99, found.top1) == (0.0, 0.0, 1.0)
    assert found.perplexity == found.reference_perplexity
    assert (found.windows, found.tokens) == (3, TOKENS)
    assert found.model == found.reference == str(base)


def test_the_numbers_are_those_of_the_logits_in_float64(base: Path, ids: list[list[int]]) -> None:
    found = sdk.evaluate(base, text=ids, tokens=TOKENS, quantization="rtn-w3g32", **EXACT)
    divergences, losses, same = [], [], 0
    for row in ids:
        known, made = (
            logits_of(base, row, quantization=name, **EXACT).numpy().astype(np.float64)
            for name in (None, "rtn-w3g32")
        )
        p, q = (x - np.log(np.exp(x).sum(1, keepdims=True)) for x in (known, made))
        divergences += (np.exp(p) * (p - q)).sum(1).tolist()
        losses += [-q[i, token] for i, token in enumerate(row[1:])]
        same += int((p.argmax(1) == q.argmax(1)).sum())
    assert found.kl_mean == pytest.approx(np.mean(divergences), rel=1e-4)
    assert found.kl_p99 == pytest.approx(np.quantile(divergences, 0.99), rel=1e-4)
    assert found.top1 == same / (3 * TOKENS)
    assert found.perplexity == pytest.approx(np.exp(np.mean(losses)), rel=1e-5)
    assert found.kl_mean > 1e-3


def test_a_policy_is_evaluated_with_every_page_as_low_as_it_may_be(base: Path) -> None:
    """The first page of 128 tokens and the one being written stay in float16."""
    ids = torch.randint(3, 448, (1, 640), generator=torch.Generator().manual_seed(5)).tolist()
    options = {"compute": "exact", "hf_overrides": {"max_position_embeddings": 1024}}
    policy = {**options, "kv_policy": "fp16>int8>int4"}
    loss = {
        name: sdk.evaluate(base, text=ids, tokens=640, **options, kv_cache_dtype=name).kl_mean
        for name in ("float16", "int4")
    }
    found = sdk.evaluate(base, text=ids, tokens=640, **policy)
    assert found.kv_dtype == "float16>int8>int4"
    assert 20 * loss["float16"] < found.kl_mean < 0.8 * loss["int4"]
    kept = sdk.evaluate(base, text=ids, tokens=640, **policy, kv_keep=(1, 1))
    assert 20 * loss["float16"] < kept.kl_mean < 0.9 * found.kl_mean
    assert sdk.evaluate(base, text=ids, tokens=256, **policy).kl_mean < 2 * loss["float16"]


def test_what_is_compared_is_what_is_served(base: Path, ids: list[list[int]]) -> None:
    """The log-probabilities of a prompt through the public call are those of ``logits_of``."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    with LLM(base, max_model_len=64) as llm:
        [answer] = llm.generate([{"prompt_token_ids": ids[0]}], params)
    assert answer.prompt_logprobs is not None
    served = [
        row[token].logprob
        for row, token in zip(answer.prompt_logprobs[1:], ids[0][1:], strict=True)
        if row is not None
    ]
    scores = logits_of(base, ids[0]).to(torch.float64).log_softmax(-1)
    expected = [float(scores[i, token]) for i, token in enumerate(ids[0][1:])]
    assert served == pytest.approx(expected, abs=1e-5)


def test_steps_do_not_change_the_logits(base: Path, ids: list[list[int]]) -> None:
    whole = logits_of(base, ids[0])
    assert torch.equal(logits_of(base, ids[0], step=5), whole)
    assert torch.equal(logits_of(base, ids[0], step=5, enforce_eager=True), whole)


def test_the_step_of_both_models_may_be_chosen(base: Path, ids: list[list[int]]) -> None:
    found = sdk.evaluate(base, text=ids, tokens=TOKENS, max_num_batched_tokens=7, **EXACT)
    assert (found.kl_mean, found.top1) == (0.0, 1.0)


def test_bytes_and_speed_are_those_of_the_model_not_of_the_reference(
    base: Path, ids: list[list[int]]
) -> None:
    plain, packed = (
        sdk.evaluate(base, text=ids, tokens=TOKENS, quantization=name, kv_cache_dtype=kv)
        for name, kv in ((None, "float16"), ("int8", "int8"))
    )
    assert packed.weight_bytes < 0.6 * plain.weight_bytes
    assert plain.bits_per_weight == pytest.approx(16, abs=1.0)
    assert 8 < packed.bits_per_weight < 10
    assert packed.kv_bytes_per_token < plain.kv_bytes_per_token
    assert packed.kv_dtype == "int8"
    assert min(plain.prompt_tokens_per_second, plain.decode_tokens_per_second) > 0


def test_windows_of_unequal_models_begin_as_the_model_begins_its_texts(golden: Path) -> None:
    """A GGUF with a tokenizer that puts BOS first: the same text reads as the same windows."""
    model = golden / "gguf-Q8_0" / "model.gguf"
    found = sdk.evaluate(model, text="Hello there, how are you? " * 20, windows=2, tokens=16)
    assert found.windows == 2
    assert 0 < found.kl_mean < 0.1


def test_a_comparison_adds_up_over_parts_of_any_length() -> None:
    generator = torch.Generator().manual_seed(0)
    known, found = (torch.randn(80, 50, generator=generator) for _ in range(2))
    following = torch.randint(0, 50, (79,), generator=generator)
    whole, parts = Comparison(), Comparison()
    whole.add(known, found, following)
    for begin, end in ((0, 33), (33, 34), (34, 80)):
        parts.add(known[begin:end], found[begin:end], following[begin:end])
    assert parts.count == whole.count == 80
    assert parts.mean() == pytest.approx(whole.mean(), rel=1e-12)
    assert parts.quantile(0.99) == whole.quantile(0.99)
    assert parts.perplexities == pytest.approx(whole.perplexities, rel=1e-12)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("side", [0, 1])
def test_a_logit_that_is_not_finite_shows_in_its_rows_divergence(value: float, side: int) -> None:
    rows = torch.zeros(2, 6, 50)
    rows[side, 4, 7] = value
    finite = Comparison().add(rows[0], rows[1], torch.zeros(5, dtype=torch.int64)).isfinite()
    assert finite.tolist() == [True] * 4 + [False, True]


# ---- what cannot be compared --------------------------------------------------------------------


def test_models_of_other_vocabularies_are_refused(base: Path, golden: Path) -> None:
    ids = [[5] * 40]
    with pytest.raises(RequestError, match=r"expected the vocabulary of .*, 512 tokens, found 448"):
        sdk.evaluate(base, golden / "ct-w4a16", text=ids, tokens=16)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"text": "", "tokens": 16}, "text: expected at least 16 tokens, found 0"),
        ({"text": "short"}, "text: expected at least 512 tokens"),
        ({"text": [[1, 2, 448] * 16], "tokens": 16}, "ids from 0 to 447"),
        ({"tokens": 15}, "tokens: expected 16 or more, found 15"),
        ({"windows": 0}, "expected 1 or more sequences"),
        ({"tokens": 10**6}, "the model's context"),
        ({"max_model_len": 64}, "max_model_len: evaluate\\(\\) sets it"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: evaluate\\(\\) sets it"),
        ({"compute": "fast"}, "compute: expected"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    change: dict[str, object], expected: str, golden: Path
) -> None:
    with pytest.raises(RequestError, match=expected):
        sdk.evaluate(golden / "gguf-Q8_0" / "model.gguf", **change)


def test_a_model_without_a_tokenizer_wants_ids(golden: Path) -> None:
    with pytest.raises(RequestError, match="no tokenizer; pass lists of token ids"):
        sdk.evaluate(golden / "gptq-w8-g128", tokens=16)


def test_a_missing_reference_is_refused(base: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere: no such file"):
        sdk.evaluate(base, "/nowhere", text=[[5] * 40], tokens=16)


def test_progress_is_told_and_may_stop_it(base: Path, ids: list[list[int]]) -> None:
    seen = []

    def stop(stage: str, done: int, total: int) -> bool:
        seen.append((stage, done, total))
        return done < 2

    before = threading.active_count()
    with pytest.raises(LoadCancelled, match="evaluate was cancelled by on_progress at 2 of 3"):
        sdk.evaluate(base, text=ids, tokens=TOKENS, on_progress=stop)
    assert seen == [("evaluate", done, 3) for done in range(3)]
    assert threading.active_count() == before


# ---- the command --------------------------------------------------------------------------------


@pytest.fixture
def prose(tmp_path: Path) -> Path:
    path = tmp_path / "prose.txt"
    path.write_text("Hello there, how are you? I am well. " * 40, encoding="utf-8")
    return path


def test_the_command_prints_a_row_per_model_and_writes_json_and_markdown(
    golden: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [str(golden / f"gguf-{kind}" / "model.gguf") for kind in ("Q8_0", "Q4_0")]
    command = ["eval", *models, "--text", str(prose), "--tokens", "16", "--windows", "2"]
    written = tmp_path / "found.json", tmp_path / "found.md"
    assert main([*command, "--json", str(written[0]), "--markdown", str(written[1])]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 sequences of 16 tokens; perplexity of model.gguf ")
    assert len(lines) == 6 and all("auto" in line for line in lines[4:])
    found = json.loads(written[0].read_text())
    assert [row["model"] for row in found] == models
    table = written[1].read_text().splitlines()
    assert f"| {found[1]['kl_mean']:.4f} |" in table[-1]
    assert table[2].count("|") == table[3].count("|") == table[-1].count("|")


def test_what_was_measured_before_a_file_failed_is_told(
    golden: Path, prose: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = tmp_path / "lacking"  # its headers are right
    shutil.copytree(golden / "ct-w4a16", lacking)
    config = json.loads((lacking / "config.json").read_text())
    layers = {"num_hidden_layers": config["num_hidden_layers"] + 1}
    (lacking / "config.json").write_text(json.dumps({**config, **layers}))
    models = [str(golden / "gguf-Q8_0" / "model.gguf"), str(lacking)]
    command = ["eval", *models, "--text", str(prose), "--tokens", "16", "--windows", "2"]
    assert main(command) == 2
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 5
    assert "lacking" in told.err


def test_the_frontier_is_what_no_other_model_beats_in_both() -> None:
    models = [
        Placed("larger, not better", 30, 0.1, 1),
        Placed("best", 20, 0.1, 1),
        Placed("worse of its size", 20, 0.2, 9),
        Placed("smallest", 10, 0.5, 1),
        Placed("beaten", 15, 0.6, 1),
    ]
    assert [one.label for one in frontier(models)] == ["smallest", "best"]


def test_the_command_draws_bytes_and_loss(golden: Path, prose: Path, tmp_path: Path) -> None:
    models = [str(golden / f"gguf-{kind}" / "model.gguf") for kind in ("Q8_0", "Q4_0")]
    command = ["eval", *models, "--text", str(prose), "--tokens", "16", "--windows", "1"]
    assert main([*command, "--plot", str(tmp_path / "out.png")]) == 0
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_anything_is_measured(
    golden: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["eval", str(golden / "gguf-Q8_0" / "model.gguf"), "--plot", "out.png"]) == 2
    assert "--plot: matplotlib is not installed" in capsys.readouterr().err


def test_json_on_stdout_is_json_alone(
    golden: Path, prose: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(golden / "gguf-Q8_0" / "model.gguf")
    options = ["--compute", "exact", "--kv-cache-dtype", "float32", "--json", "-"]
    assert main(["eval", model, "--text", str(prose), "--tokens", "16", *options]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["kl_mean"] == 0.0


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "No such file or directory"),
        (b"", "text: expected at least 512 tokens, found 0"),
        (b"\xff\xfe", "expected text in UTF-8, found invalid start byte at byte 0"),
    ],
)
def test_a_bad_text_file_is_one_line_and_exit_code_2(
    content: bytes | None,
    expected: str,
    golden: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "text"
    if content is not None:
        path.write_bytes(content)
    assert main(["eval", str(golden / "gguf-Q8_0" / "model.gguf"), "--text", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err and captured.err.count("\n") == 1


@pytest.mark.parametrize("option", ["--json", "--markdown", "--plot"])
def test_the_command_refuses_a_file_it_cannot_write_before_it_measures(
    option: str, golden: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in (tmp_path / "missing" / "out", tmp_path):
        assert main(["eval", str(golden / "gguf-Q8_0" / "model.gguf"), option, str(path)]) == 2
        expected = f"embedlm: {option}: expected a file that can be written, found {path}\n"
        assert capsys.readouterr().err == expected
