"""Checks of tensors that kernels access through raw pointers, for all backends."""

from __future__ import annotations

from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch


def expect(what: str, x: Tensor, dtype: torch.dtype, *shape: int | None) -> None:
    """Check the ``dtype`` and ``shape`` of ``x`` (``None``: any size; no sizes at all: any shape).

    Also check that its address is a multiple of its element size. A view of external memory may
    not be aligned.

    :raises KernelError: with ``what``, what was expected and what was found.
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


def expect_floats(what: str, x: Tensor, short: torch.dtype, *shape: int | None) -> None:
    """:func:`expect` for activations: ``short``, the engine's activation type, or float32."""
    expect(what, x, short if x.dtype == short else torch.float32, *shape)
