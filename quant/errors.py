"""Errors about checkpoints and quantization."""

from __future__ import annotations

from sdk.kernels.errors import SdkError as SdkError  # re-exported: loaders import from quant only


class CheckpointError(SdkError):
    """A model file is missing, damaged or contradicts itself.

    The message names the file and the field or tensor, and says what was expected and found.
    """


class UnsupportedError(CheckpointError):
    """The file is valid but holds something that is not supported; the message says what to do."""


class AdapterError(CheckpointError):
    """An adapter does not fit the model; the message names the matrix."""


class AlignmentError(SdkError):
    """A weight cannot be cut here: the cut falls inside a quantization group."""


class QuantizationError(SdkError):
    """A matrix or model cannot be quantized this way; the message says what to use instead."""
