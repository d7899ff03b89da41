"""The summary and the parameters of a docstring in Google's, NumPy's or reST style."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

_GOOGLE = re.compile(r"(Args|Arguments|Parameters|Params):\s*", re.IGNORECASE)
_GOOGLE_SECTION = re.compile(
    r"(Args|Arguments|Parameters|Params|Returns?|Yields?|Raises|Examples?|Notes?|Attributes|"
    r"Warnings?|See Also|References|Todo|Keyword Args|Other Parameters):\s*",
    re.IGNORECASE,
)
_GOOGLE_ITEM = re.compile(r"\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)")
_NUMPY_PARAMETERS = ("parameters", "other parameters")
_NUMPY_ITEM = re.compile(r"\*{0,2}(\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?::.*)?")
_REST_ITEM = re.compile(
    r":(?:param|parameter|arg|argument|key|keyword)\s+(?:[^:]*\s)?\*{0,2}(\w+)\s*:(.*)"
)
_REST_FIELD = re.compile(r":\w+[^:]*:")


class Docstring(NamedTuple):
    """``summary``: the text before the first section. ``parameters``: description by name."""

    summary: str
    parameters: dict[str, str]


def read_docstring(text: str | None) -> Docstring:
    """The parts of a docstring; empty ones if there is none."""
    lines = inspect.cleandoc(text or "").splitlines()
    summary: list[str] = []
    parameters: dict[str, str] = {}
    at = 0
    in_summary = True
    while at < len(lines):
        line = lines[at]
        if _GOOGLE_SECTION.fullmatch(line):
            in_summary = False
            end = _end_of_google(lines, at + 1)
            if _GOOGLE.fullmatch(line):
                parameters.update(_indented_items(lines[at + 1 : end]))
            at = end
        elif _is_underline(lines, at + 1, line):
            in_summary = False
            end = _end_of_numpy(lines, at + 2)
            if line.strip().lower() in _NUMPY_PARAMETERS:
                parameters.update(_numpy_items(lines[at + 2 : end]))
            at = end
        elif _REST_FIELD.match(line):
            in_summary = False
            end = _end_of_field(lines, at + 1)
            if found := _REST_ITEM.fullmatch(" ".join(part.strip() for part in lines[at:end])):
                parameters[found[1]] = found[2].strip()
            at = end
        else:
            if in_summary:
                summary.append(line)
            at += 1
    return Docstring(
        _paragraphs(summary), {name: text for name, text in parameters.items() if text}
    )


def _paragraphs(lines: list[str]) -> str:
    """Text with one line per paragraph."""
    text = "\n".join(line.strip() for line in lines).strip()
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)


def _end_of_google(lines: list[str], at: int) -> int:
    """A section ends before the next line that is not indented."""
    while at < len(lines) and (not lines[at] or lines[at][0].isspace()):
        at += 1
    return at


def _is_underline(lines: list[str], at: int, title: str) -> bool:
    return bool(title.strip()) and at < len(lines) and re.fullmatch(r"-{3,}", lines[at]) is not None


def _end_of_numpy(lines: list[str], at: int) -> int:
    """A section ends before the next title."""
    while at < len(lines) and not _is_underline(lines, at + 1, lines[at]):
        at += 1
    return at


def _end_of_field(lines: list[str], at: int) -> int:
    """A field ends before a line that is empty or not indented."""
    while at < len(lines) and lines[at] and lines[at][0].isspace():
        at += 1
    return at


def _indented_items(lines: list[str]) -> dict[str, str]:
    """``name (type): text``, which may go on in lines that are indented more."""
    indent = min((_indent(line) for line in lines if line.strip()), default=0)
    items: dict[str, list[str]] = {}
    texts: list[str] = []
    for line in lines:
        found = _GOOGLE_ITEM.fullmatch(line.strip())
        if found and _indent(line) == indent:
            texts = items.setdefault(found[1], [])
            texts.append(found[2])
        elif line.strip():
            texts.append(line.strip())
    return {name: " ".join(texts).strip() for name, texts in items.items()}


def _numpy_items(lines: list[str]) -> dict[str, str]:
    """``name : type``, then indented text. ``a, b : type`` describes both."""
    items: dict[str, list[str]] = {}
    names: list[str] = []
    for line in lines:
        found = _NUMPY_ITEM.fullmatch(line.rstrip())
        if found and not line[:1].isspace():
            names = [name.strip(" *") for name in found[1].split(",")]
            items.update({name: [] for name in names})
        elif line.strip():
            for name in names:
                items[name].append(line.strip())
    return {name: " ".join(texts) for name, texts in items.items()}


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())
