"""Rows of activations that a norm hands to a product as codes, where the weight's file asks for
quantized activations: they are not written and read again as floats."""

from __future__ import annotations

from typing import NamedTuple

from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import ActivationScheme


@dataclass(frozen=True, slots=True)
class Rounding:
    """How the kernel of a weight wants its rows: ``columns`` codes of type ``dtype``, zeros behind
    the row's own, and ``groups`` scales for each row."""

    scheme: ActivationScheme
    dtype: torch.dtype
    columns: int
    groups: int


class Rounded(NamedTuple):
    """``codes [T, columns]`` and float32 ``scales [groups, T]`` of rows of ``width`` features."""

    codes: Tensor
    scales: Tensor
    width: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.width


#: What a projection multiplies.
Rows = Tensor | Rounded
