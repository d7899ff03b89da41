"""Native kernels for the CPU. Not built yet: the reference runs everything."""

from __future__ import annotations

from sdk.kernels.registry import Backend


def available(device: str) -> str | None:
    return "the native module is not built"


def open_backend(device: str, num_threads: int) -> Backend:
    raise NotImplementedError
