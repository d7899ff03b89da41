"""The page docs/compat/compat_reference.md: every option and every difference of sdk.compat.

python .ci/compat_docs.py            # rewrites the page
python .ci/compat_docs.py --check    # exit code 1 if it would
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path[0] = str(ROOT)  # .ci has a module "tests"

from sdk.compat.llama_cpp._options import OLD, REFUSED, WITHOUT_EFFECT  # noqa: E402
from sdk.compat.vllm._options import OPTIONS  # noqa: E402
from tests.compat.differences import DIFFERENCES, SHAPES  # noqa: E402

PAGE = ROOT / "docs" / "compat" / "compat_reference.md"


def names(intro: str, found: Iterable[str]) -> str:
    """A sentence with all names, in lines of 120 characters."""
    text = f"{intro} {', '.join(f'`{one}`' for one in found)}."
    return textwrap.fill(text, 120, break_on_hyphens=False)


def table(head: str, rows: Mapping[str, str]) -> str:
    """``rows``: a name and what is to be said of it."""
    lines = [f"| `{name}` | {text} |" for name, text in rows.items()]
    return "\n".join([head, "|---|---|", *lines])


def vllm(use: str) -> list[str]:
    """The options of vLLM that are used in this way."""
    return [name for name, one in OPTIONS.items() if one.use == use]


def page() -> str:
    """The whole page."""
    refused = {name: OPTIONS[name].instead for name in vllm("only")}
    arguments = {name: text for name, (_, text) in REFUSED.items()}
    shapes = [f"| `{key}` | {a} | {b} | {why} |" for (key, a, b), why in SHAPES.items()]
    titles = {"vllm": "vLLM", "llama_cpp": "llama-cpp-python", "openai": "openai"}
    differences = [table(f"| {titles[name]} | why |", DIFFERENCES[name]) for name in titles]
    api = "[api.md](../api.md#llmmodel-options)"
    translated = "[compat.md](compat.md#options-of-vllm)"
    free = "**Without effect on answers**, so any value is accepted:"
    parts = [
        "# Every option and difference of sdk.compat",
        "<!-- .ci/compat_docs.py writes this page from the tables of the source. -->",
        "What they mean, with examples: [compat.md](compat.md).",
        "## Options of vLLM",
        "**Rejected** unless they have their default:",
        table("| option | instead |", refused),
        names(f"**The same here**, described in {api}:", vllm("same")),
        names(f"**Translated** ({translated} says how):", vllm("read")),
        names(free, vllm("free")),
        "## Arguments of llama-cpp-python's Llama",
        "**Rejected** unless they have their default:",
        table("| argument | instead |", arguments),
        names(free, WITHOUT_EFFECT),
        names("Arguments of older releases, ignored as by the present one:", OLD),
        "## Differences of names and parameters",
        "A parameter that is not listed has the same name, kind and default as the original's; a\n"
        "default that is an object of the original's is None here. `*` stands for any text.",
        *differences,
        "## Differences in results",
        "\n".join(["| key | type there | here | why |", "|---|---|---|---|", *shapes]),
    ]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    wanted = page()
    current = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if current != wanted and "--check" in sys.argv[1:]:
        raise SystemExit("compat_docs: docs/compat/compat_reference.md is old: run this script")
    PAGE.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
