"""The notes of a release, from CHANGELOG.md: ``make release-notes VERSION=0.1.0``."""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def sections(text: str) -> dict[str, str]:
    """The notes of each version, newest first, by what stands in the heading's brackets."""
    parts = re.split(r"^## \[([^\]]+)\].*$", text, flags=re.MULTILINE)
    return {name: notes.strip() for name, notes in zip(parts[1::2], parts[2::2], strict=True)}


def main(arguments: list[str]) -> None:
    notes = sections(CHANGELOG.read_text(encoding="utf-8"))
    if len(arguments) != 1 or arguments[0] not in notes:
        found = f", found {arguments[0]!r}" if arguments and arguments[0] else ""
        raise SystemExit(f"release-notes: expected VERSION to be one of {', '.join(notes)}{found}")
    print(notes[arguments[0]])


if __name__ == "__main__":
    main(sys.argv[1:])
