"""Keys of compiled kernels that do not depend on the order in which a process uses them.

Triton (3.5 to 3.6, ``runtime/jit.py``) puts the constants of a called function into the caller's
key only if that function's own key was computed before. So the same kernel has other keys in a
process that launches others first, and is compiled again. Here called functions come first.
"""

from __future__ import annotations

import sys
from typing import Any

from triton.runtime.jit import JITFunction

from sdk.kernels.gpu.launch import INTERPRETED

_PACKAGE = __name__.rpartition(".")[0]


def settle_cache_keys() -> None:
    """Compute the keys of all kernels of this package that are imported, once per process."""
    if INTERPRETED:
        return
    seen: set[int] = set()
    for name in sorted(sys.modules):
        if name.startswith(f"{_PACKAGE}."):
            for found in list(vars(sys.modules[name]).values()):
                if isinstance(found, JITFunction) and found.module.startswith(_PACKAGE):
                    _settle(found, seen)


def _settle(function: Any, seen: set[int]) -> None:
    if id(function) in seen:
        return
    seen.add(id(function))
    for name in function.fn.__code__.co_names:
        called = function.fn.__globals__.get(name)
        if isinstance(called, JITFunction):
            _settle(called, seen)
    _ = function.cache_key
