"""The examples of pages in docs/, each page from top to bottom, with a real model."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from sdk.testing import tiny_adapter
from tests.drafting_heads import untrained_eagle

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    "name", ["compat", "generation", "lora", "server", "speculation", "structured", "tools"]
)
def test_the_examples_run_from_top_to_bottom(
    name: str, smollm2: Path, golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2)
    (tmp_path / "large.gguf").symlink_to(smollm2)
    (tmp_path / "float16-model").symlink_to(golden / "arch-llama3" / "hf")
    for name_, rank in (("sql", 8), ("style", 16)):
        tiny_adapter(tmp_path / f"{name_}-adapter", smollm2, rank=rank, scale=0.1)
    untrained_eagle(tmp_path / "eagle-head", hidden=576, vocab=49152)
    monkeypatch.chdir(tmp_path)
    page = DOCS / f"{name}.md"
    text = page.read_text(encoding="utf-8")
    names: dict[str, Any] = {"__name__": "__main__"}
    try:
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1))  # so that errors name the page's line
            exec(compile("\n" * line + block[1], str(page), "exec"), names)
    finally:
        if "llm" in names:
            names["llm"].close()
    assert len(re.findall(r"^```python$", text, re.MULTILINE)) > 1
