"""The base of every exception this package raises, and what kernels raise."""

from __future__ import annotations


class SdkError(Exception):
    """Base class: ``except sdk.SdkError`` catches everything the package raises on purpose."""


class MissingPackageError(SdkError, ModuleNotFoundError):
    """A package that a feature needs is not installed, or cannot be imported; names both."""


class CollectiveError(SdkError):
    """A sum or a gather over ranks failed: another rank ended, or did not take part in time."""


class KernelError(SdkError):
    """No kernel can run the problem, or its arguments disagree (shape, dtype, device)."""


class CaptureError(KernelError):
    """The forward pass cannot be recorded; the message says why."""
