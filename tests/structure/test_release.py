"""CHANGELOG.md keeps its format, and a release's notes come from it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest
import yaml

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


class Checkout:
    """A small repository with the scripts of a release and one released version."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sdk").mkdir(parents=True)
        (root / "pyproject.toml").write_text('[project]\nversion = "1.2.0"\n')
        (root / "sdk" / "__init__.py").write_text('__version__ = "1.2.0"\n')
        (root / "CHANGELOG.md").write_text("## [Unreleased]\n\n## [1.2.0] - 2026-01-02\n- new\n")
        (root / ".gitignore").write_text("__pycache__/\n")
        (root / ".ci").mkdir()
        for name in ("native_file.py", "release.py", "release_notes.py", "wheels.py"):
            shutil.copy(ROOT / ".ci" / name, root / ".ci")
        self.git("init", "--quiet")
        self.commit()

    def git(self, *arguments: str) -> None:
        who = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
        command = ["git", "-C", str(self.root), *who, *arguments]
        subprocess.run(command, check=True, capture_output=True)

    def commit(self) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", "a change")

    def write(self, name: str, old: str, new: str) -> None:
        path = self.root / name
        text = path.read_text()
        assert old in text
        path.write_text(text.replace(old, new))

    def release(self, packages: Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(self.root / ".ci" / "release.py"), "dist", "--check"],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": str(packages)},
        )


@pytest.fixture
def zig(tmp_path: Path) -> Path:
    """A folder with a package that has the name of zig's."""
    (tmp_path / "packages" / "ziglang").mkdir(parents=True)
    (tmp_path / "packages" / "ziglang" / "__init__.py").touch()
    return tmp_path / "packages"


def test_a_release_is_made_of_the_commit_that_the_tag_of_its_version_names(
    tmp_path: Path, zig: Path
) -> None:
    checkout = Checkout(tmp_path / "checkout")
    done = checkout.release(zig)
    assert done.returncode == 1
    assert "expected the tag v1.2.0 on this commit, found none: `git tag v1.2.0`" in done.stderr
    checkout.git("tag", "v1.3.0")
    assert "expected the tag v1.2.0 on this commit, found v1.3.0" in checkout.release(zig).stderr
    checkout.git("tag", "v1.2.0")
    done = checkout.release(zig)
    assert done.returncode == 0, done.stderr
    assert re.match(r"release: 1\.2\.0 can be made: sdist, linux_\w+, .*win_amd64", done.stdout)
    (checkout.root / "new.txt").touch()
    assert re.search(r"expected no changes .*found\n\?\? new.txt\n", checkout.release(zig).stderr)
    checkout.commit()  # the tag stays behind
    assert "on this commit, found none" in checkout.release(zig).stderr


@pytest.mark.parametrize(
    ("name", "old", "found"),
    [
        ("pyproject.toml", "1.2.0", "pyproject.toml 1.2.1, sdk/__init__.py 1.2.0"),
        ("sdk/__init__.py", "1.2.0", "sdk/__init__.py 1.2.1, CHANGELOG.md 1.2.0"),
        ("CHANGELOG.md", "[1.2.0]", "CHANGELOG.md 1.2.1"),
        ("CHANGELOG.md", "[1.2.0] - 2026-01-02", "CHANGELOG.md none"),
    ],
)
def test_a_version_that_is_not_the_same_everywhere_is_not_released(
    tmp_path: Path, zig: Path, name: str, old: str, found: str
) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.write(name, old, "[1.2.0]" if "none" in found else old.replace("1.2.0", "1.2.1"))
    checkout.commit()
    checkout.git("tag", "v1.2.0")
    done = checkout.release(zig)
    assert done.returncode == 1
    assert "release: expected one version everywhere, found" in done.stderr
    assert found in done.stderr


def test_a_release_without_the_wheels_of_a_system_is_not_made(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "checkout")
    checkout.git("tag", "v1.2.0")
    done = checkout.release(tmp_path / "nothing")
    assert done.returncode == 1
    assert re.search(r"release: no compiler for .*win_amd64, macosx_11_0_arm64", done.stderr)


def test_the_conda_recipe_asks_for_what_the_package_asks_for() -> None:
    recipe = yaml.safe_load((ROOT / ".ci" / "conda" / "recipe.yaml").read_text(encoding="utf-8"))
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")

    def listed(key: str) -> set[str]:
        found = re.search(rf"^{key} = \[(.*?)\]$", text, re.MULTILINE | re.DOTALL)
        assert found is not None
        return set(re.findall(r'"(.+?)"', found[1]))

    def plain(needs: list[str]) -> set[str]:
        return {need.replace(" ", "") for need in needs}

    [version] = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    [python] = re.findall(r'^requires-python = "(.+)"$', text, re.MULTILINE)
    assert recipe["schema_version"] == 1 and recipe["context"] == {"version": version}
    assert {*recipe} >= {"package", "source", "build", "requirements", "tests", "about"}
    assert plain(recipe["requirements"]["run"]) == listed("dependencies") | {f"python{python}"}
    assert listed("requires") <= plain(recipe["requirements"]["host"])
    assert recipe["about"]["license"] == "Apache-2.0"


def test_a_tag_publishes_what_was_tried_and_no_other_job_may() -> None:
    path = ROOT / ".github" / "workflows" / "wheels.yml"
    flow = yaml.safe_load(path.read_text(encoding="utf-8"))
    may = {name for name, job in flow["jobs"].items() if "id-token" in job.get("permissions", {})}
    assert may == {"publish"} and flow["permissions"] == {"contents": "read"}
    publish = flow["jobs"]["publish"]
    assert publish["needs"] == "try" and publish["if"] == "github.ref_type == 'tag'"
    assert [step["uses"] for step in publish["steps"] if "pypi-publish" in step.get("uses", "")]
