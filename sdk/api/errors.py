"""All exceptions that callers may see. Each derives from :class:`SdkError`."""

from __future__ import annotations

from typing import Any

from sdk.kernels.errors import KernelError, MissingPackageError, SdkError
from sdk.quant.errors import (
    AlignmentError,
    CheckpointError,
    QuantizationError,
    UnsupportedError,
)


class RequestError(SdkError, ValueError):
    """A request or option is invalid: the message names the parameter, its limit and its value."""


class EngineAsleepError(RequestError):
    """The engine sleeps (``LLM.sleep``): requests are rejected until ``wake_up``."""


class OutOfMemoryError(SdkError, MemoryError):
    """The memory budget is too small; has a memory breakdown and three changes that would help."""


class QueueFullError(SdkError, RuntimeError):
    """Too many requests are unfinished (``max_waiting``), and none of the call's was accepted.

    ``expected_wait``: seconds until there should be room, by how fast requests ended lately.
    """

    def __init__(self, message: str, expected_wait: float) -> None:
        super().__init__(message)
        self.expected_wait = expected_wait

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.expected_wait)


class SnapshotError(SdkError):
    """A snapshot cannot be written or read, is damaged, or belongs to another model."""


class TransferError(SdkError):
    """Keys and values were not handed over: the other side refused, left, or sent what is wrong."""


class EngineClosedError(SdkError, RuntimeError):
    """The engine was closed, or is used in a forked child process that does not own it."""


class EngineDeadError(SdkError, RuntimeError):
    """A worker died or a step failed; every waiting request gets this error."""


class LoadCancelled(SdkError):
    """``on_progress`` returned ``False``; everything loaded so far was freed."""


class ToolError(SdkError, RuntimeError):
    """A tool call failed in ``run_tools(..., on_error="raise")``; the cause is the exception."""


__all__ = [
    "AlignmentError",
    "CheckpointError",
    "EngineAsleepError",
    "EngineClosedError",
    "EngineDeadError",
    "KernelError",
    "LoadCancelled",
    "MissingPackageError",
    "OutOfMemoryError",
    "QuantizationError",
    "QueueFullError",
    "RequestError",
    "SdkError",
    "SnapshotError",
    "ToolError",
    "TransferError",
    "UnsupportedError",
]
