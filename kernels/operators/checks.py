"""Checks of tensors that kernels access through raw pointers, for all backends."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.mlp_activations import NUMBERS, Activation
from sdk.kernels.operators.norm import Norm


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


def expect_norm(what: str, norm: Norm, x: Tensor) -> None:
    """:func:`expect` for what a norm of the last dimension of ``x`` has."""
    if norm.weight is not None:
        shape = x.shape[1:] if norm.weight.dim() == 2 else x.shape[-1:]
        expect(f"{what} weight", norm.weight, torch.float32, *shape)
    if norm.bias is not None:
        expect(f"{what} bias", norm.bias, torch.float32, x.shape[-1])


def expect_numbers(what: str, kind: Activation, numbers: Sequence[float]) -> None:
    """:raises KernelError: unless there are as many numbers as the activation takes."""
    if len(numbers) != NUMBERS.get(kind, 0):
        raise KernelError(
            f"{what}: expected {NUMBERS.get(kind, 0)} numbers of {kind}, found {len(numbers)}"
        )
