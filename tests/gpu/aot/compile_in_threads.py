"""Compile kernels ahead for a card that is not here: see sdk/kernels/gpu/compile_ahead.py.

    TRITON_CACHE_DIR=FOLDER python tests/gpu/aot/compile_in_threads.py

Prints a line of JSON with what happened. Triton must not interpret here.
"""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[2])]

from machine_code import _OnlyATarget  # noqa: E402
from triton import AsyncCompileMode  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

from sdk.kernels.gpu import compile_ahead, launch  # noqa: E402
from sdk.kernels.gpu.elementwise import Map, map_kernel  # noqa: E402


class Cancelled(Exception):
    pass


def scale(dtype: torch.dtype) -> torch.Tensor:
    x = torch.ones(3, 70, dtype=dtype)
    Map("scale").run(x, None, 2.0)
    return x


def main() -> None:
    target = GPUTarget("cuda", 80, 32)
    patch = pytest.MonkeyPatch()
    patch.setattr(driver, "_active", _OnlyATarget(target))
    patch.setattr(launch, "REACHED", "cpu")
    patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    found: dict[str, Any] = {"can": compile_ahead.can_compile_ahead()}

    reports: list[tuple[int, int]] = []
    with compile_ahead.compiling_ahead(lambda done, total: reports.append((done, total))):
        results = [scale(t) for t in (torch.float32, torch.float16, torch.float32)]
        found["threads"] = [t.name for t in threading.enumerate() if "embedlm-compile" in t.name]
    found["launched"] = any(bool((x != 1).any()) for x in results)
    found["reports"] = reports
    kernels = map_kernel.device_caches[target][0].values()
    found["cubins"] = [len(kernel.asm["cubin"]) > 0 for kernel in kernels]

    def cancel(done: int, total: int) -> None:
        raise Cancelled

    try:
        with compile_ahead.compiling_ahead(cancel):
            scale(torch.bfloat16)
    except Cancelled:
        found["cancelled"] = True
    found["after"] = [compile_ahead.ONLY_COMPILES.get(), compile_ahead.can_compile_ahead()]

    def bad(*args: Any, **named: Any) -> Any:
        raise ValueError("out of registers")

    with pytest.MonkeyPatch.context() as broken:
        broken.setattr(map_kernel, "compile", bad, raising=False)
        with compile_ahead.compiling_ahead():  # the launch will say
            Map("softcap").run(torch.ones(3, 70), None, 2.0)
    with compile_ahead._Threads() as threads, AsyncCompileMode(threads):
        found["beside the caller's"] = compile_ahead.can_compile_ahead()
    found["left"] = [t.name for t in threading.enumerate() if "embedlm-compile" in t.name]
    patch.undo()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
