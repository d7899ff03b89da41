"""The package as it is installed, without a build of the native module."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from sdk.kernels.gpu.tuning import OPS, VERSION

ROOT = Path(__file__).parents[2]
#: ``run(code, *arguments)``: standard output and error of a fresh interpreter.
Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout that has what wheels are made of, with nothing beside it.

    Beside the checkout's own files it has a table of tile sizes, as `embedlm tune` writes it.
    """
    tree = tmp_path_factory.mktemp("around") / "tree"
    tree.mkdir()
    for name in (".gitignore", "CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for folder in ("sdk", "quant", "kernels", "models", "loaders"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored, symlinks=True)
    (tree / "kernels" / "tuned").mkdir(exist_ok=True)
    table = {
        "version": VERSION,
        "capability": [9, 0],
        "processors": 1,
        "dense_from": 77,
        "experts_dense_from": 78,
        **{op: {} for op in OPS},
    }
    (tree / "kernels" / "tuned" / "some-card.json").write_text(json.dumps(table))
    return tree


def build(tree: Path, out: Path, function: str) -> Path:
    """What a function of the build backend makes of ``tree`` without a compiler."""
    code = (
        f"import os; from scikit_build_core.build import {function}\n"
        f"os.chdir({str(tree)!r})\n"
        f"{function}({str(out)!r}, {{'wheel.cmake': 'false'}})"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=240)
    (built,) = out.glob("embedlm-*.whl")
    return built


@pytest.fixture(scope="session")
def wheel(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this checkout, the native module left out."""
    return build(tree, tmp_path_factory.mktemp("wheel"), "build_wheel")


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site-packages folder with the wheel in it."""
    site = tmp_path_factory.mktemp("site")
    zipfile.ZipFile(wheel).extractall(site)
    return site


@pytest.fixture
def run_installed(installed: Path, tmp_path: Path) -> Run:
    """Runs code in an interpreter whose path is ``before``, the installed package, and this
    environment's others; its working directory is an empty folder."""

    def run(
        code: str, *arguments: object, before: tuple[Path, ...] = (), site: Path = installed
    ) -> subprocess.CompletedProcess[str]:
        others = [entry for entry in sys.path if entry and not ROOT.is_relative_to(entry)]
        path = [*map(str, before), str(site), *others]
        folder = tmp_path / "cwd"
        folder.mkdir(exist_ok=True)
        return subprocess.run(
            # -S: no .pth files, of which one brings in this checkout
            [
                sys.executable,
                "-S",
                "-c",
                f"import sys; sys.path[:] = {path}\n{code}",
                *map(str, arguments),
            ],
            capture_output=True,
            text=True,
            timeout=240,
            cwd=folder,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )

    return run
