"""``import embedlm`` is ``import sdk``: the same objects under the distribution's name.

The build installs this folder as the top-level package ``embedlm``. It imports ``sdk`` when a name
is first used, so that our pytest plugin also loads in a project with a different ``sdk``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import CodeType, ModuleType

TYPE_CHECKING = False  # importing typing would take half of this module's import time
if TYPE_CHECKING:
    from typing import Any

    from sdk import *  # noqa: F403

#: Modules that are files in this folder; every other ``embedlm.x`` is ``sdk.x``.
_OWN = ("__main__", "pytest_plugin", "pyinstaller")


def import_ours(name: str = "sdk") -> ModuleType:
    """The module ``name`` of embedlm's package ``sdk``.

    :raises ImportError: ``import sdk`` finds a package that is not embedlm's.
    """
    found = import_module("sdk")
    if getattr(found, "__distribution__", None) != "embedlm":
        where = getattr(found, "__file__", None) or ", ".join(getattr(found, "__path__", ()))
        raise ImportError(
            f"embedlm's package is named sdk, but `import sdk` finds another one: {where}. "
            "Rename that package, or run Python where its parent folder is not on sys.path",
            name="sdk",
            path=getattr(found, "__file__", None),
        )
    return import_module(name)


class _Alias:
    """Finds and loads ``embedlm.x`` as the module ``sdk.x`` itself, not as a second copy."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, rest = name.partition(".")
        if package != __name__ or not rest or rest.partition(".")[0] in _OWN:
            return None
        import_ours()
        real = find_spec(f"sdk.{rest}")
        if real is None:
            return None
        is_package = real.submodule_search_locations is not None
        loader: Any = _Alias()
        return ModuleSpec(name, loader, origin=real.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> None:
        return None  # an empty module, which is never handed out

    def exec_module(self, module: ModuleType) -> None:
        # The import system then returns the module in sys.modules.
        sys.modules[module.__name__] = import_ours(self._real(module.__name__))

    def get_code(self, name: str) -> CodeType | None:
        """For ``python -m embedlm.x``."""
        spec = find_spec(self._real(name))
        code: CodeType | None = spec.loader.get_code(spec.name)  # type: ignore[union-attr]
        return code

    @staticmethod
    def _real(name: str) -> str:
        return "sdk." + name.partition(".")[2]


# Must be first, because the path of sdk.kernels would give a second copy of sdk.kernels.cpu.
sys.meta_path.insert(0, _Alias())


def __getattr__(name: str) -> object:
    return getattr(import_ours(), name)


def __dir__() -> list[str]:
    return dir(import_ours())
