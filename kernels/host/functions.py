"""Functions of torch that make host tensors. Those in ``__all__`` are names of ``lazy_torch.torch``
while torch is not imported."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sdk.kernels.host.arithmetic import dtype_of_operand, numbers, result_type, touch
from sdk.kernels.host.conversions import converted
from sdk.kernels.host.dtypes import BY_STORAGE, CPU, DTYPES, host_dtype
from sdk.kernels.host.tensor import HostTensor, real
from sdk.kernels.host.torch_import import torch_module

__all__ = [
    "arange",
    "cat",
    "copysign",
    "empty",
    "empty_like",
    "equal",
    "from_numpy",
    "full",
    "full_like",
    "isfinite",
    "maximum",
    "ones",
    "stack",
    "tensor",
    "where",
    "zeros",
    "zeros_like",
]


def from_numpy(array: Any) -> HostTensor:
    return HostTensor(array)


def empty(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.empty, shape, dtype, device)


def zeros(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.zeros, shape, dtype, device)


def ones(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.empty, shape, dtype, device).fill_(1)


def full(shape: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    kind = result_type(value) if dtype is None else dtype
    return _new(np.empty, (shape,), kind, device).fill_(value)


def empty_like(x: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.empty, (x.shape,), dtype or x.dtype, device)


def zeros_like(x: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.zeros, (x.shape,), dtype or x.dtype, device)


def full_like(x: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return full(x.shape, value, dtype=dtype or x.dtype, device=device)


def tensor(values: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    touch("tensor")
    array = np.array(values)
    if dtype is not None:
        kind = host_dtype(dtype)
    elif array.dtype.kind == "f" and not isinstance(values, np.ndarray | np.generic):
        kind = DTYPES["float32"]  # numbers of Python
    else:
        kind = BY_STORAGE[array.dtype]
    return HostTensor(converted(array, None, kind), kind).to(device or CPU)


def arange(*given: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    touch("arange")
    kind = result_type(*given) if dtype is None else host_dtype(dtype)
    return HostTensor(converted(np.arange(*given), None, kind), kind).to(device or CPU)


def cat(tensors: Sequence[HostTensor], dim: int = 0) -> HostTensor:
    return _joined(np.concatenate, tensors, dim)


def stack(tensors: Sequence[HostTensor], dim: int = 0) -> HostTensor:
    return _joined(np.stack, tensors, dim)


def where(condition: Any, a: Any, b: Any) -> HostTensor:
    touch("where")
    kind = result_type(a, b)
    return _made(np.where(condition.array, numbers(a, kind), numbers(b, kind)), kind)


def copysign(x: HostTensor, sign: HostTensor) -> HostTensor:
    touch("copysign")
    kind = result_type(x, sign)
    return _made(np.copysign(numbers(x, kind), numbers(sign, kind)), kind)


def equal(a: HostTensor, b: HostTensor) -> bool:
    touch("equal")
    return a.shape == b.shape and bool((a == b).array.all())


def maximum(a: HostTensor, b: HostTensor) -> HostTensor:
    touch("maximum")
    kind = result_type(a, b)
    return _made(np.maximum(numbers(a, kind), numbers(b, kind)), kind)


def isfinite(x: HostTensor) -> Any:
    return x.isfinite()


def pad(x: HostTensor, sizes: Sequence[int], value: float = 0) -> HostTensor:
    """``torch.nn.functional.pad`` with a constant; sizes of the last dimension come first."""
    touch("pad")
    pairs = [(sizes[i], sizes[i + 1]) for i in range(0, len(sizes), 2)][::-1]
    widths = [(0, 0)] * (x.array.ndim - len(pairs)) + pairs
    number = converted(np.asarray(value), None, x.host_dtype)
    return HostTensor(np.pad(x.array, widths, constant_values=number), x.host_dtype)


def _made(array: Any, kind: Any) -> HostTensor:
    return HostTensor(converted(array, None, kind), kind)


def _new(make: Any, shape: Any, dtype: Any, device: Any) -> Any:
    if device is not None and str(device) != CPU:
        torch = torch_module(f"the device {device}")
        kind = torch.float32 if dtype is None else real(dtype)
        return getattr(torch, make.__name__)(*shape, dtype=kind, device=device)
    touch(make.__name__)
    kind = DTYPES["float32"] if dtype is None else host_dtype(dtype)
    sizes = shape if len(shape) != 1 or isinstance(shape[0], int | np.integer) else shape[0]
    return HostTensor(make(tuple(int(n) for n in sizes), kind.storage), kind)


def _joined(join: Any, tensors: Sequence[HostTensor], dim: int) -> HostTensor:
    touch(join.__name__)
    kinds = {dtype_of_operand(x) for x in tensors}
    if len(kinds) == 1:  # no arithmetic: codes of short floats stay as they are
        return HostTensor(join([x.array for x in tensors], dim), kinds.pop())
    kind = result_type(*tensors)
    return _made(join([numbers(x, kind) for x in tensors], dim), kind)
