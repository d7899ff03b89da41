"""Packages that a feature needs: an error that names the feature and the package."""

from __future__ import annotations

import importlib
from types import ModuleType

from sdk.kernels.errors import MissingPackageError

#: What to install for a module, where the names differ.
_DISTRIBUTIONS = {"google": "protobuf", "PIL": "pillow", "yaml": "pyyaml"}


def package(module: str, what: str) -> ModuleType:
    """The module, which ``what`` needs (with its verb: ``"a chat template needs"``).

    :raises MissingPackageError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(error, what) from error


def missing(error: ImportError, what: str) -> MissingPackageError:
    """The error for a failed import. The file is not damaged if a package is missing."""
    name = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name and name != "sdk":
        wanted = _DISTRIBUTIONS.get(name, name)
        text = f"{what} the package {wanted}, which is not installed: pip install {wanted}"
    else:
        text = f"{what} a package that cannot be imported: {error}"
    return MissingPackageError(text, name=error.name, path=error.path)
