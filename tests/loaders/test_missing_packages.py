"""A package that is not installed is named; no file is called damaged because of it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, SamplingParams, SdkError
from sdk.api import load_progress as progress
from sdk.api.errors import MissingPackageError

ONE = SamplingParams(max_tokens=1)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes a package look as if it were not installed."""

    def block(package: str) -> None:
        for name in [one for one in sys.modules if one.partition(".")[0] == package]:
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setitem(sys.modules, package, None)

    return block


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_a_missing_tokenizers_is_no_damaged_file(
    kind: str, without: Callable[[str], None], smollm2: Path, golden: Path
) -> None:
    without("tokenizers")
    model = smollm2 if kind == "gguf" else golden / "arch-llama3" / "hf"
    with pytest.raises(MissingPackageError) as error:
        LLM(model, max_model_len=64)
    text = str(error.value)
    assert text.endswith(
        "its tokenizer needs the package tokenizers, which is not installed: pip install tokenizers"
    )
    assert text.startswith(str(model)) and error.value.name == "tokenizers"
    assert isinstance(error.value, SdkError) and isinstance(error.value, ModuleNotFoundError)


def test_a_missing_jinja2_is_named_by_the_first_chat(
    without: Callable[[str], None], golden: Path
) -> None:
    with LLM(
        golden / "arch-llama3" / "hf", max_model_len=64, chat_template="{{ messages }}"
    ) as llm:
        without("jinja2")
        with pytest.raises(MissingPackageError, match="a chat template needs the package jinja2"):
            llm.chat([{"role": "user", "content": "x"}], ONE)
        assert llm.generate("x", ONE)[0].finished


def test_a_missing_torch_is_named_before_anything_runs(
    monkeypatch: pytest.MonkeyPatch, golden: Path
) -> None:
    with LLM(golden / "gguf-Q8_0" / "model.gguf", max_model_len=64) as llm:
        before = llm.get_metrics()["num_steps"]
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(MissingPackageError, match=r"encode, which .* needs the package torch"):
            llm.encode("x")
        assert llm.get_metrics()["num_steps"] == before


def test_a_missing_transformers_is_named(without: Callable[[str], None], golden: Path) -> None:
    without("transformers")
    with pytest.raises(MissingPackageError, match="need the package transformers, which is not"):
        LLM(golden / "arch-gemma3" / "hf", max_model_len=64)


def test_a_missing_hub_library_is_named(without: Callable[[str], None]) -> None:
    without("huggingface_hub")
    with pytest.raises(MissingPackageError, match="a model of the hub needs the package huggingf"):
        LLM("org/name")


def test_what_a_conversion_needs_is_named(
    monkeypatch: pytest.MonkeyPatch, golden: Path, tmp_path: Path
) -> None:
    """transformers explains that in its own words."""
    import transformers

    def refuse(*_: Any, **__: Any) -> None:
        raise ImportError("LlamaConverter requires the SentencePiece library but it was not found")

    shutil.copytree(golden / "arch-llama3" / "hf", tmp_path / "m")
    (tmp_path / "m" / "tokenizer.json").unlink()
    (tmp_path / "m" / "vocab.json").write_text("{}")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(MissingPackageError, match="requires the SentencePiece library"):
        LLM(tmp_path / "m", max_model_len=64)


def test_a_missing_progress_bar_is_no_reason_to_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "is_terminal", lambda stream: True)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    with progress.reporting("load", "B", None) as report:
        report(1, 2)
