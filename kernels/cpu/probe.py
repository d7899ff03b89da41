"""Measures the limits of this machine; benchmarks report speeds as shares of them."""

from __future__ import annotations

from collections.abc import Callable
from ctypes import c_double, c_int, c_int64
from typing import Any

from sdk.kernels.cpu.library import LEVELS, find_library
from sdk.kernels.errors import KernelError

#: Bytes that each thread reads repeatedly: far more than the cache of any core.
_BYTES = 128 * 2**20


def read_bandwidth(num_threads: int, seconds: float = 0.1, tries: int = 3) -> float:
    """Bytes per second that ``num_threads`` threads read together, best of ``tries`` measurements.

    :raises KernelError: without the native module, or out of memory or threads.
    """
    read = _function("probe_read", c_int64, c_int)
    return _best("read bandwidth", [read(_BYTES, num_threads, seconds) for _ in range(tries)])


def core_to_core(num_threads: int, seconds: float = 0.02, tries: int = 3) -> float:
    """Seconds until a thread sees what another one has written: the shortest of ``tries`` means
    over a ring of ``num_threads`` threads, at least two. About 30 ns within one cache, 160 ns
    across caches; a step that exchanges rows between threads then takes longer.

    :raises KernelError: without the native module, with fewer than two threads, or out of threads.
    """
    hand_over = _function("probe_hand_over", c_int)
    rates = [hand_over(num_threads, seconds) for _ in range(tries)]
    return 1 / _best("time from core to core", rates)


def int8_peak(num_threads: int, level: str, seconds: float = 0.1, bits: int = 8) -> float:
    """Integer operations per second (a multiply-add counts as two), best of three runs: activations
    of 8 bits by codes of ``bits`` bits. AVX2 without VNNI takes fewer instructions for codes of up
    to 6 bits; otherwise they make no difference.

    ``level``: the instruction set whose dot product is measured, one of ``levels()``.

    :raises KernelError: without the native module, for a level this CPU lacks, or out of threads.
    """
    if level not in LEVELS:
        raise KernelError(f"SIMD level: expected one of {LEVELS}, found {level!r}")
    peak = _function("probe_int8_peak", c_int, c_int, c_int)
    index = LEVELS.index(level)
    return _best(
        f"int8 peak of {level}", [peak(index, bits, num_threads, seconds) for _ in range(3)]
    )


def _function(name: str, *numbers: type) -> Callable[..., float]:
    library = find_library()
    if isinstance(library, str):
        raise KernelError(library)
    function: Any = getattr(library, f"embedlm_{name}")
    function.restype = c_double
    function.argtypes = (*numbers, c_double)
    return function  # type: ignore[no-any-return]


def _best(what: str, rates: list[float]) -> float:
    if not all(rates):
        raise KernelError(f"{what}: not measured: out of memory or threads, or not available here")
    return max(rates)
