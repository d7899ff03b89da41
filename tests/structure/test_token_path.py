"""docs/architecture.md lists the files that a decoded token passes through: it is complete."""

from __future__ import annotations

import re
from pathlib import Path

from sdk import LLM, SamplingParams
from tests.traced_files import ROOT, traced_files

#: A token's path must stay short enough to be read in one sitting.
MAX_FILES = 26


def documented() -> list[str]:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.partition("### The path of a token")[2].partition("\n### ")[0]
    return re.findall(r"^\| \d+ \| (\S+) \|", section, re.MULTILINE)


def test_the_files_on_a_token_s_path_are_those_documented_and_few(smollm2: Path) -> None:
    listed = documented()
    assert 0 < len(listed) <= MAX_FILES and len(set(listed)) == len(listed)
    assert [name for name in listed if not (ROOT / name).is_file()] == []
    with traced_files() as trace, LLM(smollm2, max_model_len=128, max_num_seqs=2) as llm:
        pieces = llm.stream(
            "The capital of France is", SamplingParams(max_tokens=40, temperature=0)
        )
        for _ in range(5):
            next(pieces)
        trace.on = True
        for _ in range(5):
            next(pieces)
        trace.on = False
    assert {"sdk/engine/engine.py", "kernels/cpu/runtime.py"} <= trace.files
    assert trace.files - set(listed) == set()
