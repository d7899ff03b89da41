"""Clients with the interfaces of other packages, on an LLM in this process."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from types import ModuleType

from sdk.api.errors import RequestError

_PACKAGES = ("vllm", "llama_cpp")


class Installed:
    """Names of a package that are ours: ``undo()`` takes them back, as does leaving a ``with``."""

    def __init__(self, package: str, modules: dict[str, ModuleType]) -> None:
        self.package = package
        self._modules = modules

    def undo(self) -> None:
        """Forget the names. Modules that have imported ours keep them. Idempotent."""
        for name, module in self._modules.items():
            if sys.modules.get(name) is module:
                del sys.modules[name]

    def __enter__(self) -> Installed:
        return self

    def __exit__(self, *exc: object) -> None:
        self.undo()


def install(package: str) -> Installed:
    """Let ``import vllm`` or ``import llama_cpp``, anywhere in this process, find our interface.

    For frameworks that import the package themselves. Call it before they do. Whether the real
    package is installed does not matter. ``importlib.metadata`` still says what is installed.

    :raises RequestError: another package, or the real one has been imported already.
    """
    if package not in _PACKAGES:
        raise RequestError(
            f"install: expected one of {', '.join(_PACKAGES)}, found {package!r:.80}"
        )
    ours = importlib.import_module(f"sdk.compat.{package}")
    found = sys.modules.get(package)
    if found is not None and found is not ours:
        raise RequestError(
            f"install: {package} has been imported already, from "
            f"{getattr(found, '__file__', None)}; call install({package!r}) before anything "
            "imports it"
        )
    modules = {package: ours}
    prefix = f"{ours.__name__}."
    for one in pkgutil.walk_packages(ours.__path__, prefix):
        name = one.name.removeprefix(prefix)
        if not name.startswith("_"):
            modules[f"{package}.{name}"] = importlib.import_module(one.name)
    sys.modules.update(modules)
    return Installed(package, modules)
