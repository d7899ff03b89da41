"""Runs tests of this checkout on an installed package, with a Python that has neither.

python run_tests.py WHEEL PACKAGES TEST...     folders of both, and what pytest shall run
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path


def main() -> int:
    folders, tests = sys.argv[1:3], sys.argv[3:]
    sys.path[:0] = folders
    import pytest

    # The checkout's settings and fixtures are for an environment with everything.
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "pytest.ini"
        settings.write_text("[pytest]\n")
        options = ["--noconftest", "-c", str(settings), "--rootdir", str(Path.cwd()), "-q"]
        options += ["-p", "no:cacheprovider"]
        return int(pytest.main([*options, "--import-mode=importlib", *tests]))


if __name__ == "__main__":
    raise SystemExit(main())
