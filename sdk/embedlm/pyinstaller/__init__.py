"""Hooks for PyInstaller: the parts of embedlm that a frozen application needs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def hook_dirs() -> list[str]:
    return [str(Path(__file__).parent)]


def package() -> Path:
    """The folder of ``sdk``, found without importing it."""
    spec = find_spec("sdk")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def modules() -> list[str]:
    """All modules of ``sdk``. PyInstaller's ``collect_submodules`` would leave out the four folders
    that have no ``__init__.py``."""
    root = package()
    return sorted(
        ".".join(path.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
        for path in root.rglob("*.py")
    )


def files(*, libraries: bool) -> list[tuple[str, str]]:
    """The native library, or the data files: (path, folder in the application)."""
    root = package()
    return [
        (str(path), str(path.parent.relative_to(root.parent)))
        for path in sorted(root.rglob("*"))
        if path.is_file()
        and path.suffix not in (".py", ".pyc")
        and (path.suffix in (".so", ".pyd")) == libraries
    ]
