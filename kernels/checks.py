"""What every kernel relies on when it follows a raw pointer, whichever backend runs it."""

from __future__ import annotations

import torch
from torch import Tensor, dtype as Dtype

from sdk.kernels.errors import KernelError


def expect(what: str, x: Tensor, dtype: Dtype, *shape: int | None) -> None:
    """``x`` must be of ``dtype`` and ``shape`` (``None``: any size; no sizes at all: any shape).

    Its data must lie at a multiple of its element size, which a view of foreign memory may not.

    :raises KernelError: naming ``what``, what was expected and what was found.
    """
    if x.dtype != dtype or (
        shape
        and (
            x.dim() != len(shape)
            or any(n not in (None, m) for n, m in zip(shape, x.shape, strict=True))
        )
    ):
        sizes = ", ".join("any" if n is None else str(n) for n in shape)
        raise KernelError(
            f"{what}: expected {dtype}{f' [{sizes}]' if shape else ''}, "
            f"found {x.dtype} {list(x.shape)}"
        )
    if x.data_ptr() % x.element_size():
        raise KernelError(
            f"{what}: expected data at a multiple of {x.element_size()} bytes, "
            f"found address {x.data_ptr():#x}"
        )


def expect_floats(what: str, x: Tensor, short: Dtype, *shape: int | None) -> None:
    """:func:`expect` of an activation: ``short``, the type of an engine's, or float32."""
    expect(what, x, short if x.dtype == short else torch.float32, *shape)
