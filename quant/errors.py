"""What can be wrong with a checkpoint."""

from __future__ import annotations

from sdk.kernels.errors import SdkError as SdkError  # re-exported: loaders import from quant only


class CheckpointError(SdkError):
    """A model file is missing, damaged or contradicts itself.

    The message names the file and the field or tensor, what was expected and what was found.
    """


class UnsupportedError(CheckpointError):
    """The file is sound but holds something we do not run yet; the message says what to do."""


class AlignmentError(SdkError):
    """A weight cannot be cut where asked: the cut falls inside a quantization group."""


class QuantizationError(SdkError):
    """A matrix or a model cannot be quantized as asked; the message says what to ask instead."""
