"""Triton kernels for GPUs: no hand-compiled code, and nothing specific to one vendor.

triton is imported when the backend is opened, not earlier. With ``TRITON_INTERPRET=1`` (for tests;
set it before triton is imported) the same kernels run on a CPU, slowly.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from sdk.kernels.gpu.scratch import LIBRARY, OLDER_LIBRARY, CardScratch, work_shape
from sdk.kernels.lazy_torch import torch
from sdk.kernels.operators.batch import WorkShape
from sdk.kernels.packages import install
from sdk.kernels.scratch import Products
from sdk.kernels.weights.layouts import BLOCK_TYPES
from sdk.kernels.weights.offload import OnDisk

if TYPE_CHECKING:
    from sdk.kernels.gpu.tuning import Tuning

__all__ = ["GpuBackend", "available", "open_backend"]

#: Triton (at least 3.3 to 3.6) has no matrix instructions for NVIDIA's cards before 8.0, the
#: library has. On a T4 (8.1 TFLOP/s in float32, 300 GB/s) 32 tokens on the plain units take as long
#: as dequantizing a 4-bit weight to memory and reading it again; estimated, not measured.
DENSE_FROM_WITHOUT_MMA = 32
#: Compute capability of the oldest card for which Triton kernels are compiled.
OLDEST_CARD = (7, 5)
#: The first torch version whose Triton (3.6) compiles every kernel: 3.5 copies no two bytes, as a
#: scale has, asynchronously.
OLDEST_TORCH = (2, 10)
#: The newest Triton whose code of every kernel is recorded (``tests/gpu/aot/compiled``). Newer ones
#: compile other code: docs/log/gpu.md has what was compared, up to 3.9.
NEWEST_TRITON = (3, 6)
ACTIVATIONS = ("float32", "bfloat16", "float16")
logger = logging.getLogger("sdk")


def available(device: str) -> str | None:
    """Why the backend cannot run on ``device``, or ``None`` if it can."""
    kind = device.partition(":")[0]
    if kind == "cpu" and _interpreted():
        return None
    if kind != "cuda":
        return f"runs on GPUs only, not on {device}"
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built for CPUs alone: install its build for this GPU"
    if find_spec("triton") is None:
        return f"triton is not installed: {install('triton')}"
    if not torch.cuda.is_available():
        return "torch finds no GPU"
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < OLDEST_TORCH:
        return f"torch {torch.__version__} is older than 2.10"
    found = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and found < OLDEST_CARD:
        return "compute capability {}.{}: expected 7.5 or newer".format(*found)
    return None


def unrecorded_triton() -> str | None:
    """A note if the installed Triton is newer than the recorded one; None if it is not, or if there
    is none. Does not import triton."""
    from importlib.metadata import PackageNotFoundError, version  # 15 ms, and every start is here

    try:
        found = version("triton")
    except PackageNotFoundError:
        return None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) <= NEWEST_TRITON:
        return None
    newest = ".".join(map(str, NEWEST_TRITON))
    return f"Triton {found} is newer than {newest}, the newest whose code of all kernels is known"


def _interpreted() -> bool:
    """Whether this process interprets Triton kernels; does not import triton."""
    triton = sys.modules.get("triton")
    return triton is not None and bool(triton.knobs.runtime.interpret)


def matrix_type(device: str) -> torch.dtype:
    """The 16-bit float type that the card's matrix units multiply best.

    NVIDIA's cards before compute capability 8.0 have no matrix units for bfloat16.
    """
    if torch.device(device).type == "cpu":
        return torch.float16
    card = torch.cuda.get_device_properties(device)
    short = torch.version.hip is None and card.major < 8
    return torch.float16 if short else torch.bfloat16


def tuning_of(device: str) -> Tuning:
    """The tile sizes of the card, or of the interpreter."""
    from sdk.kernels.gpu.tuning import AMD_STAGES, DOUBLED, Tuning, read_tuning

    if torch.device(device).type == "cpu":
        return Tuning(programs=4)
    card = torch.cuda.get_device_properties(device)
    programs, capability = 4 * card.multi_processor_count, (card.major, card.minor)
    tuning = read_tuning(card.name, programs, capability=capability)
    if torch.version.hip is not None:
        return replace(tuning, stages=AMD_STAGES)
    if card.major < 8:
        return replace(tuning, dense_from=min(tuning.dense_from, DENSE_FROM_WITHOUT_MMA))
    return replace(tuning, doubled=DOUBLED.get(card.major, ()))


def held_bytes(kind: str, rows: int, columns: int) -> int | None:
    """See :class:`sdk.kernels.backend.BackendFacts`."""
    from sdk.kernels.gpu.packing import packed_bytes

    return packed_bytes(kind, rows, columns) if kind in BLOCK_TYPES else None


def scratch_of(products: Products, device: str) -> CardScratch:
    """See :class:`sdk.kernels.backend.BackendFacts`."""
    tuning, found = tuning_of(device), torch.cuda.get_device_capability(device)
    return CardScratch(
        products,
        programs=tuning.programs,
        dense_from=tuning.dense_from,
        experts_dense_from=tuning.experts_dense_from,
        tuned=tuning.table is not None,
        library=LIBRARY if found >= (9, 0) else OLDER_LIBRARY,
        wide_sums=torch.version.hip is None,
        libraries={key: m for key, m in tuning.libraries.items() if _there(key[0])},
    )


def _there(library: str) -> bool:
    """Whether it may be used: packages are optional."""
    return library != "humming" or find_spec("humming") is not None


def open_backend(
    device: str, num_threads: int, *, fixed: bool = False, offload: OnDisk | None = None
) -> GpuBackend:
    """``fixed``: the same order of additions for every batch (slower). No threads are used."""
    from sdk.kernels.gpu import elementwise, experts, latent, low_rank, norm, rope, sampling, states
    from sdk.kernels.gpu.attention import Attention
    from sdk.kernels.gpu.cache_keys import settle_cache_keys
    from sdk.kernels.gpu.cudnn_attention import CudnnAttention
    from sdk.kernels.gpu.dense import DenseLinear
    from sdk.kernels.gpu.grouped_mm import GroupedMM
    from sdk.kernels.gpu.humming import HummingLinear
    from sdk.kernels.gpu.linear import TritonLinear
    from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile, bytes_of_card
    from sdk.kernels.gpu.scaled_mm import ScaledMM
    from sdk.kernels.gpu.shares import Sharing

    if torch.device(device).type != "cpu" and (note := unrecorded_triton()):
        logger.warning("%s: kernels may be slower; products are checked at load", note)
    tuning = tuning_of(device)
    codes: tuple[str, ...] = ("int", "e4m3")
    if torch.device(device).type != "cpu":
        found = torch.cuda.get_device_capability(device)
        codes = bytes_of_card(found, amd=torch.version.hip is not None)
    settle_cache_keys()
    sharing = Sharing()
    packed = (
        TritonLinear(dtype, tuning, fixed=fixed, sharing=sharing)
        for dtype in (matrix_type(device), torch.float32)
    )
    as_file = TritonLinearAsFile(tuning, codes, fixed=fixed, sharing=sharing)
    return GpuBackend(
        {
            "linear": (
                GroupedMM(tuning, torch.device(device), fixed=fixed),
                DenseLinear(fixed=fixed),
                DenseLinear(exact=True, fixed=fixed),
                HummingLinear(matrix_type(device), tuning, fixed=fixed, sharing=sharing),
                *packed,
                ScaledMM(tuning, codes, fixed=fixed, sharing=sharing),
                as_file,
            ),
            "attention": (
                CudnnAttention(tuning, fixed=fixed),
                Attention(False, programs=tuning.programs, fixed=fixed),
                Attention(True, programs=tuning.programs, fixed=fixed),
                *(
                    latent.LatentAttention(exact, programs=tuning.programs, fixed=fixed)
                    for exact in (False, True)
                ),
            ),
            **rope.OPS,
            **latent.OPS,
            **norm.OPS,
            **elementwise.OPS,
            **experts.OPS,
            **low_rank.OPS,
            **sampling.OPS,
            **states.OPS,
        },
        tuning.programs,
        on_card=torch.device(device).type != "cpu",
        fixed=fixed,
    )


class GpuBackend:
    """See :class:`sdk.kernels.backend.Backend`."""

    name = "gpu"
    keys_transposed = False
    multiplies_bf16 = False
    offloaded = 0

    def __init__(
        self,
        implementations: dict[str, Sequence[Any]],
        programs: int,
        *,
        on_card: bool,
        fixed: bool,
    ) -> None:
        self._implementations = implementations
        self._programs = programs
        self._fixed = fixed
        self.shares_keys = on_card and not fixed
        self.captures = on_card

    def work_shape(
        self, requests: int, heads: int, kv_heads: int, head_dim: int
    ) -> WorkShape | None:
        if self._fixed:
            return None
        return work_shape(self._programs, requests, heads, kv_heads, head_dim)

    def implementations(self, op: str) -> Sequence[Any]:
        return self._implementations.get(op, ())

    def finish_packing(self) -> None:
        """Weights are packed when ``pack`` returns."""

    def restart_threads(self, num_threads: int) -> None:
        """Nothing: there are no threads, and CUDA does not work in a forked child."""

    def close(self) -> None:
        """Nothing to free: memory belongs to torch."""
