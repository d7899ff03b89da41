"""The base of every exception this package raises, and what kernels raise."""

from __future__ import annotations


class SdkError(Exception):
    """Base class: ``except sdk.SdkError`` catches everything the package raises on purpose."""


class KernelError(SdkError):
    """No kernel can run the problem, or its arguments disagree (shape, dtype, device)."""
