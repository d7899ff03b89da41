"""Runs the blocks of code of a section of docs/guides/frameworks.md, for tests of frameworks."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest


def run_section(title: str, blocks: int, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Run the ``blocks`` blocks of Python under the heading ``title``, each by itself, in
    ``folder``, where the models have the names that the page uses."""
    text = Path(os.environ["PAGE"]).read_text(encoding="utf-8")
    section = text.split(f"{title}\n")[1].split("\n## ")[0]
    (folder / "model.gguf").symlink_to(os.environ["CHAT_MODEL"])
    (folder / "all-MiniLM-L6-v2").symlink_to(os.environ["EMBEDDING_MODEL"])
    patch.chdir(folder)
    found = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(found) == blocks
    for block in found:
        exec(compile(block, "frameworks.md", "exec"), {})
