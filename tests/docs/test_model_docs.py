"""The tables of docs/models.md are what the registry, the table of refusals and the sweep say."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from sdk.models.architecture import architectures, gguf_names
from tests.docs.pages import ROOT


@pytest.fixture(scope="module")
def script() -> Any:
    path = ROOT / ".ci" / "model_docs.py"
    spec = importlib.util.spec_from_file_location("model_docs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_current(script: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "argv", ["model_docs.py", "--check"])
    script.main()
    names = tmp_path / "architecture_names.py"
    names.write_text(script.NAMES.read_text("utf-8").replace('"llama", "mistral", ', '"llama", '))
    monkeypatch.setattr(script, "NAMES", names)
    monkeypatch.setattr(script, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match=r"architecture_names.py is old: run this script"):
        script.main()
    monkeypatch.undo()
    monkeypatch.setattr(sys, "argv", ["model_docs.py", "--check"])
    old = tmp_path / "page.md"
    old.write_text(script.PAGE.read_text("utf-8").replace("native** |", "ours** |"), "utf-8")
    monkeypatch.setattr(script, "PAGE", old)
    with pytest.raises(SystemExit, match=r"docs/models.md is old: run this script"):
        script.main()
    monkeypatch.setattr(sys, "argv", ["model_docs.py"])
    script.main()
    assert "native** |" in old.read_text("utf-8")
    old.write_text("# Models\n", "utf-8")
    with pytest.raises(SystemExit, match="expected the marks <!-- begin"):
        script.main()


def test_every_name_is_in_one_row_of_its_table(script: Any) -> None:
    names = set(script.GGUF.read_text("utf-8").split()) | {*gguf_names()}
    for table, wanted in ((script.gguf_table()[0], names), (script.type_table()[0], None)):
        cells = [row.split("|")[3] for row in table.splitlines()[2:]]
        listed = re.sub(r" \([^)]*\)", "", ", ".join(cell.strip() for cell in cells)).split(", ")
        assert len(listed) == len(set(listed))
        assert wanted is None or {*listed} == wanted


def test_native_names_come_from_the_registry(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    every = (one for one in architectures() if one.folders)
    own = {name for one in every for name in (one.model_type, *one.aliases)}
    twice = {name for name in own if "_" in name and name.replace("_", "-") in own}
    assert {"data2vec_text", "openai_gpt"} <= twice
    own -= twice  # a module's name has no dashes
    assert script.native_types() == own
    assert not script.slow_types() & own
    assert f"**GGUF files: {len(gguf_names())} native**" in script.gguf_table()[1]
    assert f"**Folders: {len(own)} types native**" in script.type_table()[1]
    readme = (ROOT / "README.md").read_text("utf-8")
    assert f"| {len(gguf_names())} architecture names of GGUF files and {len(own)} model" in readme
    assert f"{len(script.slow_types())} more types run through transformers' code" in readme
    monkeypatch.setattr(script, "gguf_names", lambda: [*gguf_names(), "qwen35"])
    assert "qwen35" in script.gguf_table()[0].splitlines()[2]


def test_the_sweep_found_nothing_wrong(
    script: Any,
) -> None:
    record = script.sweep_record()
    assert len(record) > 150
    assert not [name for name, found in record.items() if found.startswith("WRONG")]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ("model_type 'xlm': in transformers 5.24.0 its attention is code of its own, which cannot"
         " use a paged KV cache; run it with transformers",
         "its attention is code of its own, which cannot use a paged KV cache"),
        ("model_type 'a', layer 0: expected key heads x head_dim (2, 16), found (4, 16): this kind",
         "expected key heads x head_dim"),
        ("model_type 'b' (is_decoder is false): an encoder, which does not run: its tokens attend"
         " in both directions. docs/embeddings.md names",
         "an encoder; its tokens attend in both directions"),
        ("FOLDER: model.layers.0.x.q_proj is missing: no tensor 'model.layers.0.x.q_proj.weight' in"
         " the files", "its tensors have other names than transformers' class"),
    ],
)  # fmt: skip
def test_the_reason_of_a_message_is_without_what_belongs_to_one_model(
    script: Any, message: str, reason: str
) -> None:
    assert script._because(message) == reason
