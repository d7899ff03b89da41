"""The table of docs/models.md: every architecture, for GGUF files and folders; and the list of the
files of models/architectures that a name may mean (models/architecture_names.py).

python .ci/model_docs.py            # rewrites the part of the page between its marks, and the list
python .ci/model_docs.py --check    # exit code 1 if it would

What is native comes from the registry (models/architectures), why GGUF names do not run from
models/other_models.py, and what transformers' types do from the last sweep
(``python -m tests.models.sweep --write``).
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from sdk.models.architecture import (  # noqa: E402
    architecture,
    architectures,
    gguf_names,
    gguf_rules,
)
from sdk.models.other_models import refused_gguf  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
NAMES = ROOT / "models" / "architecture_names.py"
SWEEP = ROOT / "tests" / "models" / "sweep.json"
GGUF = ROOT / "tests" / "models" / "gguf_names.txt"
BEGIN, END = "<!-- begin: .ci/model_docs.py -->\n", "<!-- end: .ci/model_docs.py -->\n"
#: Parts of a message that belong to one model.
_OWN = (
    (r"^FOLDER\S*: ", ""),
    (r"^model_type '[^']*'( \(is_decoder is false\))?,?:? ?", ""),
    (r"config of '[^']*': ", ""),
    (r"in transformers [\d.]+ ", ""),
    (r"^layer \d+: ", ""),
    (r"^lm_head\.decoder\.bias is missing.*", "its head has a bias that its file lacks"),
    (r"^\S+ is missing: no tensor .*", "its tensors have other names than transformers' class"),
    (r"; run it with transformers$", ""),
    (r", found .*", ""),
    (r"(heads x head_dim|layers to attend).*", r"\1"),
    (r"(its attention has a mask of its own).*", r"\1"),
    (r"^(expected layers of one size): .*", r"\1"),
    (r", which does not run: (.*?)\. (?:docs/|Open |A folder ).*", r"; \1"),
)


def sweep_record() -> dict[str, str]:
    """The outcome of each type in the last sweep."""
    found: dict[str, str] = json.loads(SWEEP.read_text(encoding="utf-8"))
    return found


def slow_types() -> set[str]:
    """The types that run through transformers' code."""
    return {
        name
        for name, outcome in sweep_record().items()
        if outcome == "transformers" and architecture(name) is None
    }


def native_types() -> set[str]:
    """The ``model_type`` of all that run with our own code, with other names for them; a name with
    dashes once, not as its module is called, too."""
    names = {
        name for own in architectures() if own.folders for name in (own.model_type, *own.aliases)
    }
    return {name for name in names if "_" not in name or name.replace("_", "-") not in names}


def _because(message: str) -> str:
    """The reason in a message, without the model's own names."""
    for pattern, replacement in _OWN:
        message = re.sub(pattern, replacement, message)
    return message.strip(" :,")


def _rows(reasons: Iterable[tuple[str, str]]) -> list[str]:
    """One row per reason, the reason with the most names first."""
    groups: dict[str, list[str]] = {}
    for name, reason in reasons:
        groups.setdefault(reason, []).append(name)
    ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"| {why} | {len(who)} | {', '.join(sorted(who))} |" for why, who in ordered]


def _table(native: set[str], slow: set[str], refused: list[tuple[str, str]]) -> str:
    """``slow``: names that run through transformers' code."""
    head = ["| | | architectures |", "|---|---:|---|"]
    rows = [f"| **native** | {len(native)} | {', '.join(sorted(native))} |"]
    if slow:
        shown = ", ".join(sorted(slow))
        rows.append(f"| **through transformers' code** | {len(slow)} | {shown} |")
    return "\n".join([*head, *rows, *_rows((name, f"refused: {why}") for name, why in refused)])


def gguf_table() -> tuple[str, str]:
    """The table of GGUF names, and its counts in a sentence."""
    names = [*GGUF.read_text(encoding="utf-8").split(), *gguf_names()]
    native = {*gguf_names()}
    refused: list[tuple[str, str]] = []
    for name in sorted({*names} - native):
        found = refused_gguf(name)
        assert found is not None, f"{name}: add it to a group of models/other_models.py"
        refused.append((name, f"{found.what}; {found.why}"))
    counts = (
        f"**GGUF files: {len(native)} native** of {len({*names})} names; {len(refused)} are "
        "refused."
    )
    return _table(native, set(), refused), counts


def type_table() -> tuple[str, str]:
    """The table of types of configs, and its counts in a sentence."""
    native, record = native_types(), sweep_record()
    slow = slow_types()
    refused = [
        (name, _because(outcome.removeprefix("refused: ")))
        for name, outcome in record.items()
        if outcome.startswith("refused: ") and name not in native
    ]
    unknown = [
        name for name, found in record.items() if found.startswith("- no") and name not in native
    ]
    total = len(native) + len(slow) + len(refused)
    counts = (
        f"**Folders: {len(native)} types native** of {total}; {len(slow)} run through "
        f"transformers' code; {len(refused)} are refused. The sweep made no small model of "
        f"{len(unknown)} more ({', '.join(sorted(unknown))})."
    )
    return _table(native, slow, refused), counts


def written() -> str:
    """What belongs between the marks."""
    gguf, gguf_counts = gguf_table()
    types, type_counts = type_table()
    return f"""
{paragraph(gguf_counts)}

{paragraph(type_counts)}

### `general.architecture` of GGUF files

{gguf}

### `model_type` of folders

{types}

"""


def paragraph(text: str) -> str:
    """Lines of 120 characters."""
    return textwrap.fill(" ".join(text.split()), 120, break_on_hyphens=False)


def names_module() -> str:
    """The source of models/architecture_names.py."""
    types: dict[str, list[str]] = {}
    files: dict[str, list[str]] = {}
    for own in architectures():
        for name in (own.model_type, *own.aliases):
            types.setdefault(name, []).append(own.model_type)
        for name in sorted({rules.name for rules in gguf_rules(own)}):
            files.setdefault(name, []).append(own.model_type)
    lines = [
        '"""The files of ``models/architectures`` that a name may mean; others are not imported.',
        "",
        "Written by .ci/model_docs.py from their descriptions.",
        '"""',
        "",
    ]
    for title, found in (("MODEL_TYPES", types), ("GGUF_NAMES", files)):
        what = "Of configs." if title == "MODEL_TYPES" else "Of GGUF files."
        lines += [f"#: {what}", f"{title}: dict[str, tuple[str, ...]] = {{"]
        for name, modules in sorted(found.items()):
            listed = ", ".join(map(json.dumps, modules)) + "," * (len(modules) == 1)
            one = f'    "{name}": ({listed}),'
            wrapped = [f'    "{name}": (', *(f'        "{one}",' for one in modules), "    ),"]
            lines += [one] if len(one) <= 100 else wrapped
        lines += ["}"]
    return "\n".join(lines) + "\n"


def main() -> None:
    if NAMES.read_text(encoding="utf-8") != (names := names_module()):
        if "--check" in sys.argv[1:]:
            raise SystemExit(f"model_docs: {NAMES.relative_to(ROOT)} is old: run this script")
        NAMES.write_text(names, encoding="utf-8")
    text = PAGE.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"model_docs: docs/models.md: expected the marks {BEGIN}and {END}")
    wanted = before + begin + written() + end + after
    if text != wanted and "--check" in sys.argv[1:]:
        raise SystemExit("model_docs: docs/models.md is old: run this script")
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
