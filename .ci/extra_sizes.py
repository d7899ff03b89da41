"""What each extra brings and costs, for the table of docs/install.md.

    python .ci/extra_sizes.py        # in an environment with the extras to be measured

The cost is that of the packages that come in addition to those of a plain installation, with what
they need themselves, in MB on disk: the sizes in their own RECORD files.
"""

from __future__ import annotations

import importlib.metadata as metadata
import re
from pathlib import Path

from packaging.requirements import Requirement

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def extras() -> dict[str, list[Requirement]]:
    """The requirements of each extra; those of a plain installation are those of ``""``."""
    text = PYPROJECT.read_text(encoding="utf-8")
    table = text.partition("[project.optional-dependencies]\n")[2].partition("\n[")[0]
    table += "\ndependencies" + text.partition("\ndependencies")[2].partition("\n]")[0] + "\n]\n"
    found = {}
    for name, listed in re.findall(r"^([\w-]+) = \[(.*?)\]\n", table, re.MULTILINE | re.DOTALL):
        requirements = [Requirement(text) for text in re.findall(r'"([^"\n]+)"', listed)]
        found["" if name == "dependencies" else name] = requirements
    return found


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def closure(requirements: list[Requirement]) -> set[str]:
    """The packages that pip installs for ``requirements`` here, by name.

    :raises PackageNotFoundError: one of them is not installed.
    """
    seen: set[tuple[str, str]] = set()
    waiting = [(one, "") for one in requirements]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        needs = metadata.requires(requirement.name) or []
        for wanted in ("", *requirement.extras):
            if (key := (canonical(requirement.name), wanted)) not in seen:
                seen.add(key)
                waiting += [(Requirement(text), wanted) for text in needs]
    return {name for name, _ in seen}


def megabytes(packages: set[str]) -> float:
    """Their size on disk; files that pip compiled or a console script are not counted."""
    files = [file for name in packages for file in metadata.files(name) or []]
    return sum(file.size or 0 for file in files) / 1e6


def cost(extra: str) -> float:
    """What ``extra`` adds to a plain installation, in MB.

    :raises PackageNotFoundError: it is not installed here.
    """
    listed = extras()
    return megabytes(closure(listed[extra]) - closure(listed[""]))


def main() -> None:
    for extra, requirements in extras().items():
        try:
            size = f"{cost(extra) if extra else megabytes(closure(requirements)):.0f} MB"
        except metadata.PackageNotFoundError as error:
            size = f"{error.name} is not installed here"
        print(f"{extra or '(none)':12} {size:40} {', '.join(r.name for r in requirements)}")


if __name__ == "__main__":
    main()
