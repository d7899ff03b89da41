"""Predicts the time of a kernel on a card from what it must do: a model, not a measurement.

A kernel takes as long as the slowest of: its bytes at the memory's bandwidth, or at what its loads
in flight allow; its matrix products; its instructions, by the pipe that is busiest. Programs run in
waves of as many as fit on the processors. To that comes a constant for every launch, and the time
in which a last program adds up what others have left in the second-level cache.

Peaks are the vendors' (:data:`DEVICES`). The shares of them that programs reach are the constants
below, each with its range; ``predicted.json`` says what a row becomes at both ends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: What ``tests/gpu/aot/predict.py`` writes: card -> row -> the prediction and its range.
PREDICTED = Path(__file__).with_name("predicted.json")


@dataclass(frozen=True, slots=True)
class Device:
    """A card; rates are per second, sizes in bytes.

    ``tflops``: dense products of 16-bit floats with sums in float32; ``of_bytes``: of 8-bit floats
    or integers, 0 without. ``fma`` and ``alu``: lanes per processor and cycle for float32 and
    integer instructions. ``issued``: instructions (of a warp) per processor and cycle.
    """

    name: str
    #: Its target of Triton, and the name that ``embedlm tune`` gives its table.
    target: str
    processors: int
    ghz: float
    bandwidth: float
    tflops: float
    of_bytes: float
    cache: float
    shared: int
    warps: int
    programs: int
    fma: int = 128
    alu: int = 64
    issued: int = 4
    warp: int = 32
    registers: int = 65536
    #: Bytes of shared memory that each program takes besides its own.
    reserved: int = 1024


#: From the vendors' data sheets and white papers: NVIDIA H100 (132 processors, 3.35 TB/s, 989
#: TFLOP/s dense), H200 (4.8 TB/s), A100 80GB SXM (2.04 TB/s, 312), L4 (300 GB/s, 121), Ada GPU
#: architecture for the RTX 4090 (1.01 TB/s, 165 with float32 sums), T4 (320 GB/s, 65; 8.1 in
#: float32), AMD MI300X (5.3 TB/s, 1307). Warps, programs and shared memory of a processor: CUDA C++
#: Programming Guide, table of compute capabilities; CDNA 3 white paper. Lanes: the same guide's
#: table of arithmetic throughput. ``ghz``: the boost clock that the peaks are stated at.
DEVICES = {
    device.name: device
    for device in (
        Device("H100 SXM", "sm_90", 132, 1.83, 3.35e12, 989e12, 1979e12, 50e6, 228 << 10, 64, 32),
        Device("H200", "sm_90", 132, 1.83, 4.8e12, 989e12, 1979e12, 50e6, 228 << 10, 64, 32),
        Device("A100", "sm_80", 108, 1.41, 2.04e12, 312e12, 624e12, 40e6, 164 << 10, 64, 32, 64),
        Device("L4", "sm_89", 58, 2.04, 3.0e11, 121e12, 242e12, 48e6, 100 << 10, 48, 24),
        Device("RTX 4090", "sm_89", 128, 2.52, 1.01e12, 165e12, 330e12, 72e6, 100 << 10, 48, 24),
        Device("T4", "sm_75", 40, 1.59, 3.2e11, 65e12, 0.0, 4e6, 64 << 10, 32, 16, 64, reserved=0),
        Device(
            "MI300X", "gfx942", 304, 2.1, 5.3e12, 1307e12, 2615e12, 256e6, 64 << 10, 32, 32,
            warp=64, registers=4 * 512 * 64, reserved=0,
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Assumptions:
    """What the vendors do not state. :data:`LOW` and :data:`HIGH` are the ends of the ranges."""

    #: Share of the bandwidth that a copy of 2 GiB reaches. H100: 2.9 to 3.1 of 3.35 TB/s is usual.
    bandwidth: float = 0.90
    #: Seconds from a load to its data, with the memory busy (an idle H100: 0.3 us from HBM).
    latency: float = 0.65e-6
    #: Share of instructions per cycle that a loop of loads, arithmetic and barriers reaches.
    issue: float = 0.70
    #: Share of the matrix peak that a library's large product reaches (power, tiles).
    library: float = 0.72
    #: The same of our kernels, whose products wait for the values they dequantize.
    matrix: float = 0.50
    #: Seconds between the starts of two empty kernels of a CUDA graph, of which 0.5 us is the gap
    #: (NVIDIA's "Getting started with CUDA graphs": 3.4 us for kernels of 2.9), the rest start and
    #: end of the programs.
    graph_launch: float = 1.5e-6
    #: The same of kernels with programmatic dependent launch (``kernels/gpu/launch.py``): without
    #: the gap, and with the start of programs beside the end of those before. Assumed.
    overlapped_launch: float = 0.9e-6
    #: The same of launches one by one from Python through Triton (4 to 6 us on the host for CUDA
    #: alone; see susun-blog.com/blog/pegainfer-3-cuda-graph).
    eager_launch: float = 12e-6
    #: Seconds from a load to its data in the second-level cache: 200 to 270 cycles where it is
    #: idle.
    cache_latency: float = 0.25e-6


#: Bytes per cycle that a processor gets from the second-level cache (NVIDIA's cards).
_CACHE_BYTES = 64
USUAL = Assumptions()
LOW = Assumptions(0.85, 0.80e-6, 0.55, 0.65, 0.35, 2.0e-6, 1.6e-6, 20e-6, 0.40e-6)
HIGH = Assumptions(0.93, 0.50e-6, 0.85, 0.80, 0.65, 1.0e-6, 0.5e-6, 6e-6, 0.15e-6)


@dataclass(frozen=True, slots=True)
class Work:
    """What one launch does.

    ``read``: bytes that come from memory once; ``written``. ``in_flight``: bytes a program has
    asked for and not used yet, 0 if unknown. ``macs`` on matrix units, with operands of ``bytes_``
    if ``narrow``. ``instructions``, ``fma``, ``alu``: of a program, counted by warps. ``programs``
    of ``warps`` need ``registers`` per thread and ``shared`` bytes. ``overlaps``: it is launched
    while the kernel before it still runs. ``joined``: bytes that a last program reads from the
    second-level cache, in this many ``turns`` that wait for each other.
    """

    kernel: str
    programs: int
    warps: int = 4
    registers: int = 32
    shared: int = 0
    read: float = 0.0
    written: float = 0.0
    in_flight: float = 0.0
    macs: float = 0.0
    narrow: bool = False
    instructions: float = 0.0
    fma: float = 0.0
    alu: float = 0.0
    overlaps: bool = False
    joined: float = 0.0
    turns: float = 0.0


def resident(device: Device, warps: int, registers: int, shared: int) -> int:
    """Programs that fit on a processor at once; 0: none does."""
    rounded = -(-max(registers, 16) // 8) * 8
    by_registers = device.registers // (rounded * warps * device.warp)
    by_shared = device.shared // (shared + device.reserved) if shared else device.programs
    return min(device.programs, device.warps // warps, by_registers, by_shared)


def seconds(device: Device, work: Work, given: Assumptions = USUAL, *, graph: bool = True) -> float:
    """Predicted seconds of a launch, with the time between it and the next one."""
    together = max(1, resident(device, work.warps, work.registers, work.shared))
    busiest = _on_busiest(device, work.programs, together)
    launch = _launch(work, given) if graph else given.eager_launch
    busy = max(
        _memory(device, work, given, together),
        _matrix(device, work, given, busiest),
        _arithmetic(device, work, given, busiest),
    )
    return launch + busy + _joining(device, work, given)


def bounds(device: Device, work: Work, given: Assumptions = USUAL) -> dict[str, float]:
    """Seconds by what limits them."""
    together = max(1, resident(device, work.warps, work.registers, work.shared))
    busiest = _on_busiest(device, work.programs, together)
    return {
        "launch": _launch(work, given),
        "memory": _memory(device, work, given, together),
        "matrix": _matrix(device, work, given, busiest),
        "instructions": _arithmetic(device, work, given, busiest),
        "joining": _joining(device, work, given),
    }


def _launch(work: Work, given: Assumptions) -> float:
    return given.overlapped_launch if work.overlaps else given.graph_launch


def _on_busiest(device: Device, programs: int, together: int) -> int:
    """Programs that the busiest processor runs, in waves of ``together``."""
    whole, rest = divmod(programs, device.processors * together)
    return whole * together + -(-rest // device.processors)


def _memory(device: Device, work: Work, given: Assumptions, together: int) -> float:
    rate = device.bandwidth * given.bandwidth
    if work.in_flight:
        running = min(work.programs, together * device.processors)
        rate = min(rate, running * work.in_flight / given.latency)
    return (work.read + work.written) / rate


def _matrix(device: Device, work: Work, given: Assumptions, busiest: int) -> float:
    if not work.macs:
        return 0.0
    peak = device.of_bytes if work.narrow else device.tflops
    each = 2 * work.macs / work.programs
    return busiest * each / (peak / device.processors * given.matrix)


def _joining(device: Device, work: Work, given: Assumptions) -> float:
    moving = work.joined / (_CACHE_BYTES * device.ghz * 1e9)
    return max(moving, work.turns * given.cache_latency)


def _arithmetic(device: Device, work: Work, given: Assumptions, busiest: int) -> float:
    cycles = max(
        work.instructions / device.issued,
        work.fma * device.warp / device.fma,
        work.alu * device.warp / device.alu,
    )
    return busiest * cycles / (device.ghz * 1e9 * given.issue)


def library(
    device: Device, m: int, n: int, k: int, given: Assumptions = USUAL, *, narrow: bool = False
) -> float:
    """Predicted seconds of a plain product by the vendor's library, in a graph."""
    size = 1 if narrow else 2
    peak = device.of_bytes if narrow else device.tflops
    copied = size * (n * k + m * k) + 2 * m * n
    moving = copied / (device.bandwidth * given.bandwidth)
    return given.graph_launch + max(moving, 2 * m * n * k / (peak * given.library))


@dataclass(frozen=True, slots=True)
class Prediction:
    """``value`` of a row in its unit, and what it is at the ends of the assumptions' ranges."""

    value: float
    low: float
    high: float

    def holds(self, measured: float) -> bool:
        """Whether a measurement is in the range."""
        return self.low <= measured <= self.high

    def ratio(self, measured: float) -> float:
        """The measurement as a multiple of the prediction."""
        return measured / self.value if self.value else 0.0

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def device_like(name: str) -> Device | None:
    """The device that a driver calls so, such as ``NVIDIA H100 80GB HBM3``."""
    plain = name.upper().replace("-", " ")
    aliases = {"H100 80GB HBM3": "H100 SXM", "TESLA T4": "T4", "A100 SXM4": "A100"}
    for part, known in aliases.items():
        if part in plain:
            return DEVICES[known]
    words = plain.split()
    for device in DEVICES.values():
        if all(word in words for word in device.name.upper().split()):
            return device
    return None


def read_predictions(card: str, path: Path = PREDICTED) -> Mapping[str, Prediction]:
    """The predictions for a card by its driver's name: what is measured, against what."""
    device = device_like(card)
    if device is None or not path.is_file():
        return {}
    found: dict[str, dict[str, list[float]]] = json.loads(path.read_text())
    rows = found.get(device.name, {})
    return {name: Prediction(*values) for name, values in rows.items()}
