"""Native kernels for the CPU: SIMD C++ chosen at run time, on the engine's own threads.

``native/`` holds the C++ sources, one library without Python or torch in it; the modules here hand
it raw pointers. Matrix products read weights repacked once at load (``native/planes.hpp``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sdk.kernels.cpu.attention import Attention
from sdk.kernels.cpu.elementwise import AddRmsNorm, GatedActivation, RmsNorm
from sdk.kernels.cpu.library import Engine, find_library, levels
from sdk.kernels.cpu.linear import Linear
from sdk.kernels.cpu.rope import RopeAndCache, RopeAngles

__all__ = ["CpuBackend", "available", "levels", "open_backend", "simd_level"]


def available(device: str) -> str | None:
    """Why the backend cannot run on ``device``, or ``None`` when it can."""
    if device.partition(":")[0] != "cpu":
        return f"runs on the CPU only, not on {device}"
    found = find_library()
    return found if isinstance(found, str) else None


def open_backend(device: str, num_threads: int, level: str | None = None) -> CpuBackend:
    """``level`` forces an instruction-set level (tests); by default the best there is."""
    return CpuBackend(Engine(num_threads, level))


def simd_level() -> str | None:
    """The instruction-set level kernels run at here; ``None`` without the native module."""
    found = levels()
    return found[-1] if found else None


class CpuBackend:
    """See :class:`sdk.kernels.registry.Backend`."""

    name = "cpu"

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._implementations: dict[str, Sequence[Any]] = {
            "linear": (Linear(engine, exact=False), Linear(engine, exact=True)),
            "rms_norm": (RmsNorm(engine),),
            "add_rms_norm": (AddRmsNorm(engine),),
            "gated_activation": (GatedActivation(engine),),
            "rope_angles": (RopeAngles(engine),),
            "rope_and_cache": (RopeAndCache(engine),),
            "attention": (Attention(engine),),
        }

    def implementations(self, op: str) -> Sequence[Any]:
        return self._implementations.get(op, ())

    def close(self) -> None:
        self.engine.close()
