"""Every exception a caller can meet, in one place. All derive from :class:`SdkError`."""

from __future__ import annotations

from sdk.kernels.errors import KernelError, SdkError
from sdk.quant.errors import (
    AlignmentError,
    CheckpointError,
    QuantizationError,
    UnsupportedError,
)


class RequestError(SdkError, ValueError):
    """A request cannot be accepted: the message names the parameter, its limit and its value."""


class OutOfMemoryError(SdkError, MemoryError):
    """The memory budget is too small; lists the sums and three changes that would help."""


class SnapshotError(SdkError):
    """A snapshot cannot be written or read, is damaged, or belongs to another model."""


class EngineClosedError(SdkError, RuntimeError):
    """The engine was closed, or is used in a forked child that does not own it."""


class EngineDeadError(SdkError, RuntimeError):
    """A worker died or a step failed for good; every waiting request gets this error."""


class LoadCancelled(SdkError):
    """``on_progress`` asked to stop loading; everything loaded so far was given back."""


__all__ = [
    "AlignmentError",
    "CheckpointError",
    "EngineClosedError",
    "EngineDeadError",
    "KernelError",
    "LoadCancelled",
    "OutOfMemoryError",
    "QuantizationError",
    "RequestError",
    "SdkError",
    "SnapshotError",
    "UnsupportedError",
]
