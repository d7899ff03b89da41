"""docs/architecture/types.md is what the docstrings say."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import ROOT


@pytest.fixture
def script() -> Any:
    spec = importlib.util.spec_from_file_location("type_docs", ROOT / ".ci" / "type_docs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["type_docs.py", "--check"])
    script.main()
    monkeypatch.setattr(script, "PAGE", tmp_path / "architecture" / "types.md")
    with pytest.raises(SystemExit, match="is old: run this script"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["type_docs.py"])
    script.main()
    assert "| `LLM` | sdk/llm.py | A model loaded" in script.PAGE.read_text("utf-8")


def test_a_class_that_is_gone_is_named(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "ROOMS", {"Models": (("models",), "Decoder NoSuchClass")})
    with pytest.raises(
        SystemExit, match="NoSuchClass: expected one class in models, found nothing"
    ):
        script.main()


def test_first_sentences_are_markdown(script: Any) -> None:
    assert script.first_sentence("One :class:`~sdk.api.x.Pool`: more.") == "One `Pool`"
    assert script.first_sentence("Of ``a | b``.\n\nMore.") == "Of `a \\| b`"
    assert script.first_sentence(None) == ""
