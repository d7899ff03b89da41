"""CHANGELOG.md keeps its format, and a release's notes come from it."""

from __future__ import annotations

import re
import subprocess
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: The kinds of changes, in the order in which they stand.
KINDS = ["Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"]


def releases(text: str) -> list[tuple[str, str | None, str]]:
    """(version, date or None, notes) of every second-level heading, from top to bottom."""
    parts = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    found = []
    for heading, notes in zip(parts[::2], parts[1::2], strict=True):
        matched = re.fullmatch(r"\[([^\]]+)\](?: - (\d{4}-\d\d-\d\d))?", heading)
        assert matched is not None, f"expected ## [version] - date, found ## {heading}"
        found.append((matched[1], matched[2], notes))
    return found


def wrong(text: str) -> list[str]:
    """What in a changelog is not in the format of keepachangelog.com 1.1.0."""
    errors = []
    found = releases(text)
    if [(version, day) for version, day, _ in found[:1]] != [("Unreleased", None)]:
        errors.append("the first section is not [Unreleased]")
    days, numbers = [], []
    for version, day, _ in found[1:]:
        if day is None or not re.fullmatch(r"\d+\.\d+\.\d+", version):
            errors.append(f"[{version}]: expected a version of three numbers and a date")
        else:
            days.append(date.fromisoformat(day))
            numbers.append(tuple(map(int, version.split("."))))
    if days != sorted(days, reverse=True) or numbers != sorted(set(numbers), reverse=True):
        errors.append("the newest version does not stand first")
    for version, _, notes in found:
        parts = re.split(r"^### (.+)\n", notes, flags=re.MULTILINE)[1:]
        kinds = parts[::2]
        if kinds != [kind for kind in KINDS if kind in kinds]:
            errors.append(f"[{version}]: expected {', '.join(KINDS)}, found {', '.join(kinds)}")
        for kind, listed in zip(kinds, parts[1::2], strict=True):
            lines = [line for line in listed.splitlines() if line]
            if not lines or not lines[0].startswith("- "):
                errors.append(f"[{version}] {kind}: expected a list")
            errors += [line for line in lines if not line.startswith(("- ", "  "))]
    return errors


def test_the_changelog_keeps_its_format() -> None:
    assert wrong((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")) == []


def test_the_check_notices_what_is_wrong() -> None:
    good = (
        "# C\n\n## [Unreleased]\n\n### Added\n- a\n  b\n\n## [1.0.0] - 2026-01-02\n### Fixed\n- c\n"
    )
    assert wrong(good) == []
    for old, new in (
        ("[Unreleased]", "[0.9.0] - 2026-01-01"),
        ("[1.0.0] - 2026-01-02", "[1.0.0]"),
        ("[1.0.0] - 2026", "[1.0] - 2026"),
        ("Added", "New"),
        ("- a\n", ""),
        ("- c\n", "- c\nd\n"),
        ("### Fixed", "### Fixed\n- c\n### Added"),
        ("- c\n", "- c\n## [2.0.0] - 2026-01-01\n"),
    ):
        assert wrong(good.replace(old, new)), (old, new)


def notes(version: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "--no-print-directory", "release-notes", f"VERSION={version}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )


def test_the_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    for version, _, text in releases((ROOT / "CHANGELOG.md").read_text(encoding="utf-8")):
        done = notes(version)
        assert done.returncode == 0 and done.stdout.strip() == text.strip() != ""


def test_an_unknown_version_names_those_that_exist() -> None:
    for version, found in (("9.9.9", ", found '9.9.9'"), ("", "")):
        done = notes(version)
        assert done.returncode != 0
        assert f"expected VERSION to be one of Unreleased, 0.1.0{found}\n" in done.stderr
