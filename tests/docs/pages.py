"""The pages of the documentation: their blocks of code, links and headings.

Every block of Python is run, each page from top to bottom with one set of names. A comment right
before a block, which readers do not see, changes that:

    <!-- not run: why -->            it is only compiled, and its options are looked up
    <!-- given: code -->             this code runs before it: names of the reader's own program
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
_FENCED = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
_PYTHON = re.compile(
    r"(?:^<!-- (?P<word>given|not run):\s(?P<text>(?:(?!-->).)+?) *-->\n)?"
    r"^```python\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """``line`` is the page's, so that errors name it."""

    line: int
    code: str
    given: str
    not_run: str


def blocks(text: str) -> list[Block]:
    return [
        Block(
            text.count("\n", 0, found.start("code")),
            found["code"],
            found["text"] if found["word"] == "given" else "",
            found["text"] if found["word"] == "not run" else "",
        )
        for found in _PYTHON.finditer(text)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def prose(text: str) -> str:
    """A page without its blocks of code."""
    return _FENCED.sub("", text)


def links(text: str) -> list[str]:
    """The targets of links and pictures, those of other sites left out."""
    found = re.findall(r"\]\(([^()\s]+)\)", prose(text))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """What a code host calls the headings of a page."""
    found: set[str] = set()
    for title in re.findall(r"^#+ (.*)$", prose(text), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        anchor = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        number = 0
        while (name := anchor + (f"-{number}" if number else "")) in found:
            number += 1
        found.add(name)
    return found
