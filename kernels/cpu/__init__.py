"""Native kernels for the CPU: C++ with SIMD levels selected at run time, on their own threads.

``native/`` holds the C++ sources of one library that uses neither Python nor torch; the modules
here pass it raw pointers. Matrix products read weights that were packed once at load
(``native/bit_planes.hpp``).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sdk.kernels.cpu.attention import Attention, Places, RoundedAttention
from sdk.kernels.cpu.elementwise import (
    MAPS,
    Activate,
    AddNormalize,
    Gate,
    Map,
    Normalize,
    PlaceRows,
    SelectRows,
    TakeColumns,
)
from sdk.kernels.cpu.library import find_library, levels
from sdk.kernels.cpu.packed_linear import PackedLinear, RoundedLinear
from sdk.kernels.cpu.packed_weight import BLOCK_SOURCES, packed_bytes
from sdk.kernels.cpu.rope import RopeAndCache, RopeAngles
from sdk.kernels.cpu.runtime import NativeRuntime, Program
from sdk.kernels.cpu.sampling import Sample
from sdk.kernels.cpu.scheme_linear import SchemeLinear
from sdk.kernels.cpu.weight_memory import WeightMemory
from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.offload import OnDisk

if TYPE_CHECKING:
    from sdk.kernels.cpu.expert_cache import ExpertCache
    from sdk.kernels.cpu.weight_map import WeightMap
from sdk.kernels.scratch import Products

__all__ = ["CpuBackend", "available", "levels", "open_backend", "simd_level"]

ACTIVATIONS = ("float32",)


def available(device: str) -> str | None:
    """Why the backend cannot run on ``device``; ``None`` if it can."""
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
    """Nothing: operators use the memory of the runtime's threads, which the workspace counts."""


def open_backend(
    device: str,
    num_threads: int,
    level: str | None = None,
    *,
    fixed: bool = False,
    offload: OnDisk | None = None,
) -> CpuBackend:
    """``level`` forces an instruction-set level (for tests); the default is the best one.

    The backend is always ``fixed``.
    """
    return CpuBackend(NativeRuntime(num_threads, level), offload)


def simd_level() -> str | None:
    """The instruction-set level of the kernels on this CPU; ``None`` without the native module."""
    found = levels()
    return found[-1] if found else None


class CpuBackend:
    """See :class:`sdk.kernels.backend.Backend`."""

    name = "cpu"
    keys_transposed = True
    shares_keys = False
    captures = False

    def __init__(self, runtime: NativeRuntime, offload: OnDisk | None = None) -> None:
        self.runtime = runtime
        self.multiplies_bf16 = runtime.multiplies_bf16
        self._memory = WeightMemory(offload)
        #: Packed weights in the cache that this engine uses.
        self.mapped: WeightMap | None = None
        self._implementations: dict[str, Sequence[Any]] = {
            "linear": (
                *(PackedLinear(runtime, self._memory, bits) for bits in (8, 16, 32)),
                SchemeLinear(runtime, self._memory),
            ),
            "norm": (Normalize(runtime),),
            "add_norm": (AddNormalize(runtime),),
            "gated_activation": (Activate(runtime, gated=True),),
            "activation": (Activate(runtime, gated=False),),
            "gate": (Gate(runtime),),
            **{kind: (Map(runtime, kind),) for kind in MAPS},
            "rope_angles": (RopeAngles(runtime),),
            "select_rows": (SelectRows(runtime),),
            "place_rows": (PlaceRows(runtime),),
            "take_columns": (TakeColumns(runtime),),
            "find_places": (Places(runtime),),
            "rope_and_cache": (RopeAndCache(runtime),),
            "attention": (Attention(runtime),),
            "sample": (Sample(runtime),),
        }
        if runtime.multiplies_bf16:
            ours = self._implementations
            ours["linear"] = (RoundedLinear(runtime, self._memory), *ours["linear"])
            ours["attention"] = (RoundedAttention(runtime), *ours["attention"])

    @property
    def experts(self) -> ExpertCache | None:
        """Experts of which only some are in memory."""
        found: ExpertCache | None = self._memory.experts
        return found

    @experts.setter
    def experts(self, cache: ExpertCache | None) -> None:
        self._memory.experts = cache

    @property
    def offloaded(self) -> int:
        """See :class:`sdk.kernels.backend.Backend`."""
        return 0 if self._memory.file is None else self._memory.file.used

    def work_shape(self, requests: int, heads: int, kv_heads: int, head_dim: int) -> None:
        return None

    def implementations(self, op: str) -> Sequence[Any]:
        if op not in self._implementations:
            self._implementations = {**self._others(), **self._implementations}
        return self._implementations.get(op, ())

    def _others(self) -> dict[str, Sequence[Any]]:
        """Operators of adapters, experts, latents, ranks, KV tiers, states: for few engines."""
        from sdk.kernels.cpu.exchange import AllGather, AllReduce, Receive, Send
        from sdk.kernels.cpu.low_rank import LowRank
        from sdk.kernels.cpu.moe import (
            AddOwnersBias,
            Combine,
            CombineRanks,
            GatherRanks,
            GroupByExpert,
            Route,
        )
        from sdk.kernels.cpu.recode import RecodePage
        from sdk.kernels.cpu.rope import LatentRopeAndCache
        from sdk.kernels.cpu.states import (
            CausalConv,
            GatedDelta,
            GatedNorm,
            Rates,
            Rwkv,
            StateSpace,
        )
        from sdk.kernels.cpu.stored_rows import ReadRows

        runtime = self.runtime
        return {
            "low_rank": (LowRank(runtime),),
            "all_reduce": (AllReduce(runtime),),
            "all_gather": (AllGather(runtime),),
            "send": (Send(runtime),),
            "receive": (Receive(runtime),),
            "route": (Route(runtime),),
            "latent_rope_and_cache": (LatentRopeAndCache(runtime),),
            "group": (GroupByExpert(runtime),),
            "group_ranks": (GroupByExpert(runtime),),
            "add_owners_bias": (AddOwnersBias(runtime),),
            "combine": (Combine(runtime),),
            "combine_ranks": (CombineRanks(runtime),),
            "gather_ranks": (GatherRanks(runtime),),
            "recode_page": (RecodePage(runtime),),
            "stored_rows": (ReadRows(runtime),),
            "causal_conv": (CausalConv(runtime),),
            "gated_delta": (GatedDelta(runtime),),
            "rwkv": (Rwkv(runtime),),
            "ssd": (StateSpace(runtime),),
            "selective_scan": (StateSpace(runtime, by_row=True),),
            "rates": (Rates(runtime),),
            "gated_norm": (GatedNorm(runtime),),
        }

    @contextmanager
    def record(self, limits: tuple[int, int, int]) -> Iterator[Program]:
        """See :class:`sdk.kernels.backend.ProgramRecorder`."""
        program = self.runtime.recording = Program(self.runtime, limits)
        try:
            yield program
        finally:
            self.runtime.recording = None

    def finish_packing(self) -> None:
        """See :class:`sdk.kernels.backend.Backend`."""
        self.runtime.finish_packing()

    def restart_threads(self, num_threads: int) -> None:
        """See :class:`sdk.kernels.backend.Backend`."""
        self.runtime.restart(num_threads)
        if self.mapped is not None:
            self.mapped.restart()

    def close(self) -> None:
        self.mapped = None
        self.runtime.close()
        self._memory.close()
