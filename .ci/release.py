"""Everything that a release needs, in one folder: ``make release``.

    python .ci/release.py dist

The commit is the one that the tag of its version names: ``git tag v0.1.0``. The version stands in
pyproject.toml, in sdk/__init__.py and over its notes in CHANGELOG.md; a tag that says another, a
change that is not committed, or a wheel that cannot be made here stops it before anything is
compiled. ``--check`` stops there too. Beside the files of .ci/wheels.py the folder then has
NOTES.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from pathlib import Path

import release_notes
import wheels

#: The wheels of a release, each by the tags that stand for it: wheels.py leaves out what it has
#: no compiler for.
SYSTEMS = (
    ("manylinux_2_28_x86_64", "linux_x86_64"),
    ("manylinux_2_28_aarch64", "linux_aarch64"),
    ("win_amd64",),
    ("macosx_11_0_arm64",),
    ("macosx_11_0_x86_64",),
    ("musllinux_1_2_x86_64",),
)


def git(root: Path, *arguments: str) -> str:
    command = ["git", "-C", str(root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def version(root: Path) -> str:
    """The version that this checkout says in all its places.

    :raises SystemExit: they differ, or CHANGELOG.md has no notes with a date for it.
    """
    found = {}
    for name, pattern in (
        ("pyproject.toml", r'^version = "(.+)"$'),
        ("sdk/__init__.py", r'^__version__ = "(.+)"$'),
        ("CHANGELOG.md", r"^## \[(\d[^\]]*)\] - \d{4}-\d\d-\d\d$"),
    ):
        matched = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        found[name] = matched[1] if matched else "none"
    if len({*found.values()}) != 1:
        said = ", ".join(f"{name} {one}" for name, one in found.items())
        raise SystemExit(f"release: expected one version everywhere, found {said}")
    return found["pyproject.toml"]


def check(root: Path) -> str:
    """The version of a checkout that may be released.

    :raises SystemExit: it may not, and what to do.
    """
    if changed := git(root, "status", "--porcelain"):
        raise SystemExit(
            f"release: expected no changes that are not committed, found\n{changed}\n"
            "release: commit them, or release from a clean clone"
        )
    expected = f"v{version(root)}"
    tags = git(root, "tag", "--points-at", "HEAD").split()
    if expected not in tags:
        raise SystemExit(
            f"release: expected the tag {expected} on this commit, found "
            f"{', '.join(tags) or 'none'}: `git tag {expected}`, or change the version in "
            "pyproject.toml, sdk/__init__.py and CHANGELOG.md"
        )
    return expected.removeprefix("v")


def complete(offered: list[str]) -> None:
    """:raises SystemExit: a wheel that belongs to a release cannot be made on this machine."""
    missing = [names[0] for names in SYSTEMS if not {*names} & {*offered}]
    if missing:
        raise SystemExit(
            f"release: no compiler for {', '.join(missing)}: run `make release` on x86-64 Linux, "
            "where it installs zig"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="the folder to put the files in")
    parser.add_argument("--check", action="store_true", help="only say whether it may be released")
    args = parser.parse_args()
    name = check(wheels.ROOT)
    wanted = wheels.chosen(None)
    complete(wanted)
    if args.check:
        print(f"release: {name} can be made: {', '.join(['sdist', *wanted])}")
        return
    out = args.out.resolve()
    wheels.make(out, wanted)
    changes = release_notes.CHANGELOG.read_text(encoding="utf-8")
    (out / "NOTES.md").write_text(release_notes.sections(changes)[name] + "\n", encoding="utf-8")
    print(f"release: {name} is in {out}; its tag `v{name}`, pushed, publishes it (wheels.yml)")


if __name__ == "__main__":
    main()
