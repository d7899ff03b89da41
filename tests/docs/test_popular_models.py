"""docs/popular_models.md is what the registry of architectures says now."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

from sdk.models.architecture import Architecture, architectures, gguf_names
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    path = ROOT / ".ci" / "popular_models.py"
    spec = importlib.util.spec_from_file_location("popular_models", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["popular_models"] = module
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["popular_models.py", "--check"])
    script.main()
    old = tmp_path / "page.md"
    old.write_text(script.page().replace("runs", "rans", 1), encoding="utf-8")
    monkeypatch.setattr(script, "PAGE", old)
    with pytest.raises(SystemExit, match=r"popular_models.md is old: run this script"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["popular_models.py"])
    script.main()
    assert old.read_text(encoding="utf-8") == script.page()


def test_every_architecture_of_ours_is_on_the_page(script: Any) -> None:
    listed = {name for family in script.FAMILIES for name in (*family.gguf, *family.types)}
    assert {*gguf_names()} <= listed
    for own in architectures():
        assert listed & {own.model_type, *own.aliases}, own.model_type


def test_a_model_that_does_not_run_has_one_instead_that_runs(script: Any) -> None:
    assert len(script.FAMILIES) > 46
    for family in script.FAMILIES:
        advised = [script.named(name) for name in family.instead]
        assert script.runs(family) or any(script.runs(one) for one in advised), family.name
        assert script.runs(family) or family.needs, family.name
        assert all(one.kind == family.kind for one in advised), family.name


def test_a_row_follows_the_registry(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    family = script.Family("Toy", ("toy",), ("toy",), "parts of its own", ("Qwen3",))
    before = script.row(family, {"toy"})
    assert "| not yet | slowly |" in before and "use " in before
    assert "| not yet | not yet |" in script.row(family, set())
    known = gguf_names()
    monkeypatch.setattr(script, "gguf_names", lambda: [*known, "toy"])
    monkeypatch.setattr(script, "architecture", lambda name: Architecture(name))
    assert script.row(family, set()) == "| Toy | runs | runs |  |"
    lfm = script.named("LFM2")
    monkeypatch.undo()
    assert "slowly" not in script.row(lfm, {"lfm2", "lfm2_moe"})
