"""docs/architecture.md lists the files that a decoded token passes through: it is complete."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

from sdk import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
FOLDERS = ("sdk", "kernels", "models", "loaders", "quant")
#: A token's way must stay short enough to be read in one sitting.
MAX_FILES = 25


def documented() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("### The way of one token")[2].partition("\n### ")[0]
    return re.findall(r"^\| \d+ \| (\S+) \|", section, re.MULTILINE)


def own_file(filename: str) -> str | None:
    """The path in the repository of a module of ours; ``None`` for other code."""
    for folder in FOLDERS:
        _, found, rest = filename.rpartition(f"/sdk/{folder}/")
        if found:
            return f"{folder}/{rest}"
    _, found, rest = filename.rpartition("/sdk/")
    path = f"sdk/{rest}" if found else filename.removeprefix(f"{ROOT}/")
    return path if path.startswith(FOLDERS) and (ROOT / path).is_file() else None


def test_the_files_on_a_token_s_way_are_those_documented_and_few(smollm2: Path) -> None:
    listed = documented()
    assert len(listed) <= MAX_FILES and len(set(listed)) == len(listed)
    assert [name for name in listed if not (ROOT / name).is_file()] == []
    seen: set[str] = set()
    tracing = False

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if tracing and event == "call":
            seen.add(frame.f_code.co_filename)

    threading.setprofile(profile)
    try:
        with LLM(smollm2, max_model_len=128, max_num_seqs=2) as llm:
            params = SamplingParams(max_tokens=40, temperature=0)
            pieces = llm.stream("The capital of France is", params)
            for _ in range(5):
                next(pieces)
            tracing = True
            sys.setprofile(profile)
            for _ in range(5):
                next(pieces)
            tracing = False
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    found = {name for name in map(own_file, seen) if name is not None}
    assert {"sdk/engine/engine.py", "kernels/cpu/runtime.py"} <= found
    assert found - set(listed) == set()
