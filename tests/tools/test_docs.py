"""docs/tools.md: its table lists every format. The package stays light."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from sdk.tools import all_formats

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "tools.md").read_text(encoding="utf-8")


def test_the_table_lists_every_format() -> None:
    part = PAGE.partition("## Formats")[2].partition("## Parsing")[0]
    assert re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) != []
    assert set(re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE)) == {
        one.name for one in all_formats()
    }


def test_the_package_needs_no_other_one() -> None:
    code = "import json, sys, sdk.tools; sdk.tools.all_formats(); print(json.dumps([*sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
    )
    modules = {name.partition(".")[0] for name in json.loads(done.stdout)}
    heavy = {"torch", "numpy", "transformers", "tokenizers", "llguidance", "pydantic", "jinja2"}
    assert modules & (heavy | {"asyncio", "jsonschema"}) == set()
