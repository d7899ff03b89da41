"""Native kernels for the CPU: SIMD C++ chosen at run time, on the engine's own threads.

``native/`` holds the C++ sources, one library without Python or torch in it; the modules here hand
it raw pointers. Matrix products read weights repacked once at load (``native/planes.hpp``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from sdk.kernels.cpu.attention import Attention, Places
from sdk.kernels.cpu.elementwise import (
    MAPS,
    AddRmsNorm,
    GatedActivation,
    Map,
    RmsNorm,
    SelectRows,
    TakeColumns,
)
from sdk.kernels.cpu.experts import AddOwnersBias, Combine, Group, Route
from sdk.kernels.cpu.library import Engine, Program, find_library, levels
from sdk.kernels.cpu.linear import Linear
from sdk.kernels.cpu.linear_as_file import LinearAsFile
from sdk.kernels.cpu.packed_weight import BLOCK_SOURCES, packed_bytes
from sdk.kernels.cpu.recode import RecodePage
from sdk.kernels.cpu.rope import RopeAndCache, RopeAngles
from sdk.kernels.cpu.sampling import Sample
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.offload import OnDisk
from sdk.kernels.scratch import Products

__all__ = ["CpuBackend", "available", "levels", "open_backend", "simd_level"]

ACTIVATIONS = (torch.float32,)


def available(device: str) -> str | None:
    """Why the backend cannot run on ``device``, or ``None`` when it can."""
    if device.partition(":")[0] != "cpu":
        return f"runs on the CPU only, not on {device}"
    found = find_library()
    return found if isinstance(found, str) else None


def matrix_type(device: str) -> torch.dtype:
    """See :class:`sdk.kernels.backend.BackendFacts`."""
    return torch.float32


def held_bytes(kind: str, rows: int, columns: int) -> int | None:
    """See :class:`sdk.kernels.backend.BackendFacts`."""
    return packed_bytes(kind, rows, columns) if kind in BLOCK_SOURCES else None


def scratch_of(products: Products, device: str) -> None:
    """Nothing: operators work in memory of the engine's threads, which the workspace counts."""


def open_backend(
    device: str,
    num_threads: int,
    level: str | None = None,
    *,
    fixed: bool = False,
    offload: OnDisk | None = None,
) -> CpuBackend:
    """``level`` forces an instruction-set level (tests); by default the best there is.

    Always ``fixed``.
    """
    return CpuBackend(Engine(num_threads, level), offload)


def simd_level() -> str | None:
    """The instruction-set level kernels run at here; ``None`` without the native module."""
    found = levels()
    return found[-1] if found else None


class CpuBackend:
    """See :class:`sdk.kernels.backend.Backend`."""

    name = "cpu"
    keys_transposed = True
    shares_keys = False
    graph_recorder = None

    def __init__(self, engine: Engine, offload: OnDisk | None = None) -> None:
        self.engine = engine
        self._memory = WeightMemory(offload)
        self._implementations: dict[str, Sequence[Any]] = {
            "linear": (
                *(Linear(engine, self._memory, bits) for bits in (8, 16, 32)),
                LinearAsFile(engine, self._memory),
            ),
            "route": (Route(engine),),
            "group": (Group(engine),),
            "add_owners_bias": (AddOwnersBias(engine),),
            "combine": (Combine(engine),),
            "rms_norm": (RmsNorm(engine),),
            "add_rms_norm": (AddRmsNorm(engine),),
            "gated_activation": (GatedActivation(engine),),
            **{kind: (Map(engine, kind),) for kind in MAPS},
            "rope_angles": (RopeAngles(engine),),
            "select_rows": (SelectRows(engine),),
            "take_columns": (TakeColumns(engine),),
            "find_places": (Places(engine),),
            "rope_and_cache": (RopeAndCache(engine),),
            "attention": (Attention(engine),),
            "recode_page": (RecodePage(engine),),
            "sample": (Sample(engine),),
        }

    @property
    def offloaded(self) -> int:
        """See :class:`sdk.kernels.backend.Backend`."""
        return 0 if self._memory.file is None else self._memory.file.used

    def implementations(self, op: str) -> Sequence[Any]:
        return self._implementations.get(op, ())

    @contextmanager
    def record(self, limits: tuple[int, int, int]) -> Iterator[Program]:
        """See :class:`sdk.kernels.backend.Recorder`."""
        program = self.engine.recording = Program(self.engine, limits)
        try:
            yield program
        finally:
            self.engine.recording = None

    def close(self) -> None:
        self.engine.close()
        self._memory.close()
