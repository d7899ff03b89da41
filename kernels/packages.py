"""Packages that a feature needs: an error that names the feature, the package and the command that
installs it. Everything here is asked before a model is loaded."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType

from sdk.kernels.errors import MissingPackageError

#: What to install for a module, where the names differ.
_DISTRIBUTIONS = {
    "google": "protobuf",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
    "opentelemetry": "opentelemetry-api",
    "humming": "humming-kernels",
    "auto_gptq": "auto-gptq",
    "awq": "autoawq",
    "lm_eval": "lm-eval",
    "langchain_core": "langchain-core",
    "llama_index": "llama-index-core",
    "haystack": "haystack-ai",
}
#: Parts of a namespace package that are distributions of their own.
_PARTS = {
    **dict.fromkeys(
        ("llama_index.llms", "llama_index.llms.openai_like"), "llama-index-llms-openai-like"
    ),
}
#: The extra of embedlm that brings a module; what is not here is installed under its own name.
_EXTRAS = {
    **dict.fromkeys(("torch", "safetensors", "transformers", "accelerate"), "torch"),
    "triton": "gpu",
    "humming": "humming",
    "llguidance": "structured",
    "PIL": "vision",
    **dict.fromkeys(("fastapi", "starlette", "uvicorn", "httptools", "uvloop"), "server"),
    **dict.fromkeys(("prometheus_client", "opentelemetry"), "metrics"),
    **dict.fromkeys(("matplotlib", "gguf"), "bench"),
    "ray": "ray",
    "auto_gptq": "gptq",
    "awq": "awq",
    "lm_eval": "lm-eval",
}


def install(module: str) -> str:
    """The command that installs what brings ``module``, as in ``pip install "embedlm[torch]"``."""
    extra = _EXTRAS.get(module)
    return f'pip install "embedlm[{extra}]"' if extra else f"pip install {_wanted(module)}"


def not_installed(module: str) -> str:
    """``the package torch, which is not installed: pip install "embedlm[torch]"``."""
    return f"the package {_wanted(module)}, which is not installed: {install(module)}"


def is_installed(module: str) -> bool:
    """Whether ``module`` can be found; it is not imported, which takes seconds for some."""
    if module in sys.modules:
        return sys.modules[module] is not None
    return find_spec(module) is not None


def package(module: str, what: str) -> ModuleType:
    """The module, which ``what`` needs (with its verb: ``"a chat template needs"``).

    :raises MissingPackageError: it is not installed, or cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise missing(error, what) from error


def check_installed(module: str, what: str, *, extra: str = "") -> None:
    """Like :func:`package`, without the import.

    ``extra``: the one to install, if ``what`` needs more than that of the module.

    :raises MissingPackageError: it is not installed.
    """
    if not is_installed(module):
        text = f"{what} {not_installed(module)}"
        if extra:
            text = text.replace(install(module), f'pip install "embedlm[{extra}]"')
        raise MissingPackageError(text, name=module)


@contextmanager
def needed_for(what: str) -> Iterator[None]:
    """A block of imports that ``what`` needs (with its verb: ``"sdk.integrations.mcp needs"``).

    :raises MissingPackageError: one of them is not installed, or cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise missing(error, what) from error


def missing(error: ImportError, what: str) -> MissingPackageError:
    """The error for a failed import. The file is not damaged if a package is missing."""
    name = error.name or ""
    name = name if name in _PARTS else name.partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and name and name != "sdk":
        text = f"{what} {not_installed(name)}"
    else:
        text = f"{what} a package that cannot be imported: {error}"
    return MissingPackageError(text, name=error.name, path=error.path)


def _wanted(module: str) -> str:
    return _PARTS.get(module) or _DISTRIBUTIONS.get(module, module)
