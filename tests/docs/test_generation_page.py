"""The examples of docs/generation.md, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "generation.md"


def test_the_examples_run_from_top_to_bottom(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").symlink_to(smollm2)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    try:
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start(1))  # so that errors name the page's line
            exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    finally:
        if "llm" in names:
            names["llm"].close()
    assert len(re.findall(r"^```python$", text, re.MULTILINE)) > 1
