"""Runs pytest against a copy of the checkout whose native library was built with sanitizers.

python run_tests.py TREE [pytest arguments]

An editable installation redirects ``sdk`` to its own files, ahead of ``sys.path``: that redirection
is taken out first, and what was found is looked at, so that no other library is tested by mistake.
"""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest


def main(tree: Path, arguments: list[str]) -> int:
    sys.meta_path[:] = [
        finder
        for finder in sys.meta_path
        if type(finder).__name__ != "ScikitBuildRedirectingFinder"
    ]
    sys.path.insert(0, str(tree))
    os.chdir(tree)
    spec = find_spec("sdk.kernels.cpu._native")
    if spec is None or spec.origin is None:
        raise SystemExit(f"no native library in {tree}")
    library = Path(spec.origin)
    if tree not in library.parents or b"__asan_init" not in library.read_bytes():
        raise SystemExit(f"not the sanitized library of {tree}: {library}")
    return int(pytest.main(arguments))


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
