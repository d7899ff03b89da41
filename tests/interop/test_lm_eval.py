"""lm-eval as a client: its command line with tasks of our own, against the logits of the model."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk import LLM, SamplingParams
from sdk.evaluating.logits import logits_of
from tests.interop.conftest import ROOT, surroundings

MODEL = ROOT / "tests" / "golden" / "gguf-Q8_0" / "model.gguf"
#: Shorter than the long text, so that it is read in windows.
LENGTH = 48
EXACT = {"compute": "exact", "kv_cache_dtype": "float32"}

CHOICES = [
    {"question": "Hello there, how", "choices": ["are you", "is it now"], "answer": 0},
    {"question": "", "choices": ["good day", "I am well"], "answer": 1},
]
TEXTS = [{"text": "A short one."}, {"text": "Hello there, how are you? I am well. " * 6}]
PROMPTS = [{"question": "Hello there"}, {"question": "I am"}]
TASKS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "choice": (
        CHOICES,
        {
            "output_type": "multiple_choice",
            "doc_to_text": "{{question}}",
            "doc_to_choice": "{{choices}}",
            "doc_to_target": "{{answer}}",
            "metric_list": [{"metric": "acc"}],
        },
    ),
    "rolling": (
        TEXTS,
        {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "{{text}}",
            "metric_list": [{"metric": "byte_perplexity"}],
        },
    ),
    "until": (
        PROMPTS,
        {
            "output_type": "generate_until",
            "doc_to_text": "{{question}}",
            "doc_to_target": "nothing",
            "generation_kwargs": {"until": ["e"], "max_gen_toks": 12},
            "metric_list": [{"metric": "exact_match"}],
        },
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks."""
    place = tmp_path_factory.mktemp("lm_eval")
    for name, (documents, task) in TASKS.items():
        data = place / f"{name}.jsonl"
        data.write_text("".join(json.dumps(document) + "\n" for document in documents))
        files = {"data_files": {"test": str(data)}}
        whole = {
            "task": f"tiny_{name}",
            "dataset_path": "json",
            "dataset_kwargs": files,
            "test_split": "test",
            **task,
        }
        (place / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return place


#: How lm-eval names the model, and its arguments.
OURS = ("embedlm", f"pretrained={MODEL},max_length={LENGTH},compute=exact,kv_cache_dtype=float32")


def run(
    python: Path, how: list[str], place: Path, out: Path, model: tuple[str, str] = OURS
) -> dict[str, list[dict[str, Any]]]:
    """What lm-eval's command, started by ``how``, writes of each task: a row per document."""
    command = [str(python), *how, "run", "--include_path", str(place)]
    command += ["--model", model[0], "--model_args", model[1]]
    command += ["--tasks", *(f"tiny_{name}" for name in TASKS), "--log_samples"]
    command += ["--output_path", str(out)]
    own = {**surroundings(), "HF_HOME": str(place / "cache")}
    done = subprocess.run(command, cwd=place, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for name in TASKS:
        [written] = out.rglob(f"samples_tiny_{name}_*.jsonl")
        rows = map(json.loads, written.read_text().splitlines())
        found[name] = sorted(rows, key=lambda row: row["doc_id"])
    return found


@pytest.fixture(scope="module")
def samples(python: Callable[[str], Path], place: Path) -> dict[str, list[dict[str, Any]]]:
    return run(python("lm-eval"), ["-m", "sdk.evaluating.harness"], place, place / "out")


#: What releases after 0.4.13 do before they look for a model.
DISCOVERY = """
from importlib.metadata import entry_points
import lm_eval.models
from lm_eval.api.registry import model_registry
from lm_eval.__main__ import cli_evaluate
for entry in entry_points(group="lm_eval.models"):
    if entry.name not in model_registry:
        model_registry.register(entry.name, target=entry)
cli_evaluate()
"""


def test_an_entry_point_finds_the_same_model(
    samples: dict[str, list[dict[str, Any]]],
    python: Callable[[str], Path],
    place: Path,
    tmp_path: Path,
) -> None:
    found = run(python("lm-eval"), ["-c", DISCOVERY], place, tmp_path)
    for name, rows in samples.items():
        assert [row["resps"] for row in found[name]] == [row["resps"] for row in rows]


def test_scores_and_texts_are_those_of_transformers_in_lm_eval(
    python: Callable[[str], Path], model: Callable[[str], Path], place: Path, tmp_path: Path
) -> None:
    folder = f"pretrained={model('llama')},max_length={LENGTH},dtype=float32"
    exact = "compute=exact,kv_cache_dtype=float32"
    own = (["-m", "sdk.evaluating.harness"], place, tmp_path / "ours")
    ours = run(python("lm-eval"), *own, ("embedlm", f"{folder},{exact}"))
    other = (["-m", "lm_eval"], place, tmp_path / "theirs")
    theirs = run(python("lm-eval"), *other, ("hf", folder))
    for row, expected in zip(ours["choice"], theirs["choice"], strict=True):
        for [found], [answer] in zip(row["resps"], expected["resps"], strict=True):
            assert float(found[0]) == pytest.approx(float(answer[0]), abs=1e-3)
            assert str(found[1]) == str(answer[1])
    # lm-eval reads long texts in windows that are two tokens longer with transformers
    found, answer = (rows["rolling"][0]["resps"][0][0] for rows in (ours, theirs))
    assert float(found) == pytest.approx(float(answer), abs=1e-3)
    assert [row["resps"] for row in ours["until"]] == [row["resps"] for row in theirs["until"]]


@pytest.fixture(scope="module")
def encode() -> Callable[[str], list[int]]:
    """Token ids of a text behind BOS."""
    with LLM(MODEL, max_model_len=LENGTH) as llm:
        return llm.get_tokenizer().encode


def score(ids: list[int], count: int) -> tuple[float, bool]:
    """Of the last ``count`` ids, from the logits in float64."""
    rows = logits_of(MODEL, ids, **EXACT).to(torch.float64).log_softmax(-1)[:-1][-count:]
    last = torch.tensor(ids[-count:])
    total = float(rows.gather(1, last.unsqueeze(1)).sum())
    return total, bool(torch.equal(rows.argmax(-1), last))


def test_a_choice_is_scored_behind_its_question(
    samples: dict[str, list[dict[str, Any]]], encode: Callable[[str], list[int]]
) -> None:
    for document, row in zip(CHOICES, samples["choice"], strict=True):
        for choice, [answer] in zip(document["choices"], row["resps"], strict=True):
            before = encode(document["question"])
            ids = encode(f"{document['question']} {choice}")
            expected = score(ids, len(ids) - len(before))
            assert float(answer[0]) == pytest.approx(expected[0], abs=1e-3)
            assert str(answer[1]) == str(expected[1])


def test_a_text_longer_than_the_context_is_read_in_windows(
    samples: dict[str, list[dict[str, Any]]], encode: Callable[[str], list[int]]
) -> None:
    short, long = (encode(document["text"]) for document in TEXTS)
    assert len(short) < LENGTH < len(long)
    assert float(samples["rolling"][0]["resps"][0][0]) == pytest.approx(
        score(short, len(short) - 1)[0], abs=1e-3
    )
    room = LENGTH - 2  # read and scored at once: one token is generated, one is only read
    begin, tokens, total = long[:1], long[1:], 0.0
    for start in range(0, len(tokens), room):
        part = tokens[start : start + room]
        before = begin if not start else tokens[max(start + len(part) - room - 1, 0) : start]
        total += score(before + part, len(part))[0]
    assert float(samples["rolling"][1]["resps"][0][0]) == pytest.approx(total, abs=1e-3)


def test_text_is_generated_up_to_the_stop_string(
    samples: dict[str, list[dict[str, Any]]],
) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, stop=["e"])
    with LLM(MODEL, max_model_len=LENGTH, **EXACT) as llm:
        expected = llm.generate([document["question"] for document in PROMPTS], params)
    for output, row in zip(expected, samples["until"], strict=True):
        assert row["resps"] == [[output.outputs[0].text]]


#: What makes no sense, and what it is told; all in one process, which takes seconds to begin.
REFUSED = {
    "EmbedLM()": "model_args: expected pretrained=MODEL, found none",
    "EmbedLM(path, nonsense=1)": "LLM() got an unknown option 'nonsense'",
    "EmbedLM(path)._params({'beams': 2})": "generation_kwargs: expected until, ",
    "EmbedLM(path, max_length=8)._loglikelihood_tokens([(None, [1], [5] * 7)])": (
        "continuation: expected fewer than 7 tokens (max_length), found 7"
    ),
}


def test_what_makes_no_sense_is_refused_by_name(python: Callable[[str], Path]) -> None:
    code = (
        "import sys; from sdk.evaluating.harness import EmbedLM\n"
        "path, *calls = sys.argv[1:]\n"
        "for call in calls:\n"
        "    try: eval(call); print('accepted')\n"
        "    except Exception as error: print(error)"
    )
    command = [str(python("lm-eval")), "-c", code, str(MODEL), *REFUSED]
    done = subprocess.run(command, cwd=ROOT, env=surroundings(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    told = done.stdout.splitlines()
    assert len(told) == len(REFUSED)
    for line, expected in zip(told, REFUSED.values(), strict=True):
        assert line.startswith(expected)
