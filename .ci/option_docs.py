"""The docstrings of ``EngineOptions``, which editors show, from the table of docs/api.md.

python .ci/option_docs.py            # rewrites sdk/api/options.py
python .ci/option_docs.py --check    # exit code 1 if it would
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[1]
OPTIONS = ROOT / "sdk" / "api" / "options.py"
FIELD = re.compile(r'^    (\w+): [^\n]+\n(?:    """.*?"""\n)?', re.MULTILINE | re.DOTALL)


def meanings() -> dict[str, str]:
    """The first sentence of each option's row, without markup."""
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    table = text.partition("## `LLM(model, **options)`")[2].partition("\n## ")[0]
    found = {}
    for name, default, meaning in re.findall(
        r"^\| `(\w+)` \| (.*?) \| (.*) \|$", table, re.MULTILINE
    ):
        plain = re.sub(r" \((?:see )?\[[^\]]*\]\([^)]*\)[^)]*\)", "", meaning)  # pages to read
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", plain).replace("**", "")
        first = re.split(r"(?<=[^.])\. (?=[A-Z])", plain)[0].rstrip(".")
        first = first[0].upper() + first[1:] if first[0].isalpha() else first
        found[name] = f"{first}. Default: {default.rstrip('.')}." if default else f"{first}."
    return found


def documented(source: str) -> str:
    """The source of sdk/api/options.py with a docstring under each field of ``EngineOptions``."""
    head, start, rest = source.partition("class EngineOptions(TypedDict, total=False):\n")
    body, end, tail = rest.partition("\n\n\ndef engine_config(")
    texts = meanings()

    def field(match: re.Match[str]) -> str:
        declaration = match[0].partition("\n")[0]
        if match[1] not in texts:
            raise SystemExit(f"option_docs: docs/api.md has no row for {match[1]}")
        text = texts[match[1]].replace("\\", "\\\\")
        if text.endswith('"'):
            text += " "
        lines = textwrap.wrap(f'"""{text}"""', 96, break_long_words=False, break_on_hyphens=False)
        if len(lines) > 1 and lines[-1] == '"""':
            lines[-2:] = [lines[-2] + '"""']
        return declaration + "\n" + textwrap.indent("\n".join(lines), "    ") + "\n"

    return head + start + FIELD.sub(field, body + "\n")[:-1] + end + tail


def main() -> None:
    source = OPTIONS.read_text(encoding="utf-8")
    wanted = documented(source)
    if source != wanted and "--check" in sys.argv[1:]:
        raise SystemExit("option_docs: sdk/api/options.py is not what docs/api.md says: run me")
    OPTIONS.write_text(wanted, encoding="utf-8")


if __name__ == "__main__":
    main()
