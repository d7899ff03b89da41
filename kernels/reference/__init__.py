"""Pure torch kernels: the fallback for every format and device, and the oracle of kernel tests.

Exact rather than fast: weights are dequantized to float32 on the fly and multiplied in fixed tiles,
so that a row's result has the same bits whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

from sdk.kernels.weights.offload import OnDisk

#: 16-bit activations are read as float32, and rounded when they are written.
ACTIVATIONS = ("float32", "bfloat16", "float16")


def available(device: str) -> str | None:
    """Always: torch runs everywhere."""
    return None


def open_backend(
    device: str, num_threads: int, *, fixed: bool = False, offload: OnDisk | None = None
) -> ReferenceBackend:
    """Always ``fixed``; ``num_threads`` has no effect, because torch's thread pool belongs to the
    host. Weights stay in memory unchanged.
    """
    return ReferenceBackend()


class ReferenceBackend:
    """See :class:`sdk.kernels.backend.Backend`."""

    name = "reference"
    keys_transposed = True
    offloaded = 0
    shares_keys = False
    multiplies_bf16 = False
    captures = False

    @cached_property
    def _implementations(self) -> dict[str, Sequence[Any]]:
        # Most engines fall back on none of them.
        from sdk.kernels.reference.operators import operators

        return operators()

    def work_shape(self, requests: int, heads: int, kv_heads: int, head_dim: int) -> None:
        return None

    def implementations(self, op: str) -> Sequence[Any]:
        return self._implementations.get(op, ())

    def finish_packing(self) -> None:
        """Weights are packed when ``pack`` returns."""

    def restart_threads(self, num_threads: int) -> None:
        """Nothing: torch's threads belong to the process."""

    def close(self) -> None:
        """Nothing to free."""
