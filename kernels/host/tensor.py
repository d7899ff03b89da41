"""A tensor of a CPU without torch: see the package."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.host.arithmetic import Operators, numbers, result_type, touch
from sdk.kernels.host.conversions import converted, plain
from sdk.kernels.host.dtypes import BY_STORAGE, CPU, DTYPES, HostDtype, host_dtype
from sdk.kernels.host.torch_import import torch_module
from sdk.kernels.host.views import Views, numpy_index


class HostTensor(Views, Operators):
    """See the package. ``host_dtype``: the type, whether torch is imported or not."""

    __slots__ = ("__weakref__", "array", "host_dtype")

    def __init__(self, array: NDArray[Any], dtype: HostDtype | None = None) -> None:
        self.array = array
        self.host_dtype = BY_STORAGE[array.dtype] if dtype is None else dtype

    def _as(self, array: Any, dtype: HostDtype | None = None) -> HostTensor:
        """The same numbers in another array; ``dtype``: the same memory in another type."""
        return type(self)(array, self.host_dtype if dtype is None else dtype)

    def _made(self, array: Any, dtype: HostDtype) -> HostTensor:
        """A result, rounded to its type."""
        return HostTensor(converted(np.asarray(array), None, dtype), dtype)

    def __repr__(self) -> str:
        return f"HostTensor({plain(self.array, self.host_dtype)!r}, dtype={self.host_dtype!r})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.array, self.host_dtype.name)

    # ---- torch's own -----------------------------------------------------------------------------

    def torch(self, what: str = "a tensor of torch") -> Any:
        """A torch tensor over the same memory; imports torch, because ``what`` needs it."""
        torch = torch_module(what)
        array = self.array
        if any(stride < 0 for stride in array.strides):
            array = array.copy()
        if not array.flags.writeable:  # a part of a file: torch warns, and nobody writes to it
            array = np.asarray(_Writable(array))
        signed = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}
        found = torch.from_numpy(array.view(signed.get(array.dtype.name, array.dtype)))
        wanted = getattr(torch, self.host_dtype.name)
        return found if found.dtype == wanted else found.view(wanted)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.torch(f"Tensor.{name}"), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*real(list(args)), **real(kwargs or {}))

    # ---- copies ----------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        if not self.host_dtype.computes:
            raise TypeError(f"Got unsupported ScalarType {self.host_dtype.name}")
        return self.array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def cpu(self) -> HostTensor:
        return self

    def contiguous(self) -> HostTensor:
        if self.array.flags.c_contiguous:
            return self
        touch("contiguous")
        return self._as(self.array.copy("C"))

    def clone(self, memory_format: Any = None) -> HostTensor:
        touch("clone")
        return self._as(self.array.copy())

    def to(self, *given: Any, **named: Any) -> Any:
        """Another type or device; any device but the CPU imports torch."""
        dtype, device = named.get("dtype"), named.get("device")
        for one in given:
            if hasattr(one, "data_ptr"):
                dtype, device = one.dtype, one.device
            elif isinstance(one, str) or hasattr(one, "type"):
                device = one
            elif not isinstance(one, bool | None):
                dtype = one
        if str(device) == "meta":  # shape and type, without memory
            return self._as(np.broadcast_to(np.zeros((), self.array.dtype), self.shape))
        if device is not None and str(device) != CPU:
            return self.torch(f"the device {device}").to(device=real(device), dtype=real(dtype))
        wanted = self.host_dtype if dtype is None else host_dtype(dtype)
        if wanted is self.host_dtype:
            return self.clone() if named.get("copy") else self
        touch("to")
        return HostTensor(converted(self.array, self.host_dtype, wanted), wanted)

    def float(self) -> HostTensor:
        return self.to(DTYPES["float32"])  # type: ignore[no-any-return]

    def double(self) -> HostTensor:
        return self.to(DTYPES["float64"])  # type: ignore[no-any-return]

    def bfloat16(self) -> HostTensor:
        return self.to(DTYPES["bfloat16"])  # type: ignore[no-any-return]

    def long(self) -> HostTensor:
        return self.to(DTYPES["int64"])  # type: ignore[no-any-return]

    def bool(self) -> HostTensor:
        return self.to(DTYPES["bool"])  # type: ignore[no-any-return]

    def repeat_interleave(self, count: builtins.int, dim: builtins.int) -> HostTensor:
        touch("repeat_interleave")
        return self._as(np.repeat(self.array, count, dim))

    def new_empty(self, *shape: Any, dtype: Any = None) -> HostTensor:
        return self._new(np.empty, shape, dtype)

    def new_zeros(self, *shape: Any, dtype: Any = None) -> HostTensor:
        return self._new(np.zeros, shape, dtype)

    def _new(self, make: Any, shape: Any, dtype: Any) -> HostTensor:
        touch(make.__name__)
        kind = self.host_dtype if dtype is None else host_dtype(dtype)
        return HostTensor(make(shape[0] if len(shape) == 1 else shape, kind.storage), kind)

    # ---- changes ---------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> None:
        touch("index_put_")
        self.array[numpy_index(index)] = _values(value, self.host_dtype)

    def copy_(self, source: Any, non_blocking: builtins.bool = False) -> HostTensor:
        self[...] = source
        return self

    def fill_(self, value: Any) -> HostTensor:
        self[...] = value
        return self

    def zero_(self) -> HostTensor:
        return self.fill_(0)

    # ---- numbers ---------------------------------------------------------------------------------

    def _plain(self) -> Any:
        touch("item")
        return plain(self.array, self.host_dtype)

    def tolist(self) -> Any:
        return self._plain().tolist()

    def item(self) -> Any:
        return self._plain().item()

    def __bool__(self) -> builtins.bool:
        return builtins.bool(self._plain())

    def __int__(self) -> builtins.int:
        return builtins.int(self.item())

    def __index__(self) -> builtins.int:
        return builtins.int(self.item().__index__())

    def __float__(self) -> builtins.float:
        return builtins.float(self.item())

    def sum(
        self, dim: Any = None, keepdim: builtins.bool = False, *, dtype: Any = None
    ) -> HostTensor:
        own = self.host_dtype if self.host_dtype.is_floating_point else DTYPES["int64"]
        return self._reduced("sum", dim, keepdim, own if dtype is None else host_dtype(dtype))

    def mean(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return self._reduced("mean", dim, keepdim, self.host_dtype)

    def all(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return self._reduced("all", dim, keepdim, DTYPES["bool"])

    def any(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return self._reduced("any", dim, keepdim, DTYPES["bool"])

    def amax(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return self._reduced("max", dim, keepdim, self.host_dtype)

    def amin(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return self._reduced("min", dim, keepdim, self.host_dtype)

    def max(self, *dim: Any, **named: Any) -> Any:
        """Of all; along a dimension, with indices, it is torch's."""
        return self.torch().max(*dim, **named) if dim or named else self.amax()

    def min(self, *dim: Any, **named: Any) -> Any:
        return self.torch().min(*dim, **named) if dim or named else self.amin()

    def log_softmax(self, dim: builtins.int) -> HostTensor:
        touch("log_softmax")
        x = numbers(self, self.host_dtype)
        apart = x - x.max(axis=dim, keepdims=True)
        with np.errstate(divide="ignore"):
            found = apart - np.log(np.exp(apart).sum(axis=dim, keepdims=True))
        return self._made(found, self.host_dtype)

    def argmin(self) -> HostTensor:
        return HostTensor(np.asarray(self._plain().argmin()))

    def _reduced(self, name: str, dim: Any, keepdim: builtins.bool, dtype: HostDtype) -> HostTensor:
        touch(name)
        axis = tuple(dim) if isinstance(dim, list | tuple) else dim
        array = numbers(self, dtype)
        return self._made(getattr(array, name)(axis=axis, keepdims=keepdim), dtype)

    def clamp(self, min: Any = None, max: Any = None) -> HostTensor:
        touch("clamp")
        kind = result_type(self, *(x for x in (min, max) if x is not None))
        low, high = (None if x is None else numbers(x, kind) for x in (min, max))
        return self._made(np.clip(numbers(self, kind), low, high), kind)


def real(x: Any) -> Any:
    """The same with torch's tensors and types; imports torch."""
    if isinstance(x, HostTensor):
        return x.torch()
    if isinstance(x, HostDtype):
        return getattr(torch_module(f"torch.{x.name}"), x.name)
    if isinstance(x, list | tuple):
        return type(x)(map(real, x)) if not hasattr(x, "_fields") else type(x)(*map(real, x))
    if isinstance(x, dict):
        return {key: real(value) for key, value in x.items()}
    return x


class _Writable:
    """Memory that may not be written, for an array of torch, which wants one that may."""

    def __init__(self, array: Any) -> None:
        self._array = array  # keeps the memory
        place = (array.__array_interface__["data"][0], False)
        self.__array_interface__ = {**array.__array_interface__, "data": place}


def _restored(array: Any, name: str) -> HostTensor:
    return HostTensor(array, DTYPES[name])


def _values(x: Any, dtype: HostDtype) -> Any:
    """What is assigned to memory of that type."""
    if isinstance(x, HostTensor):
        return converted(x.array, x.host_dtype, dtype)
    if hasattr(x, "data_ptr"):  # torch's; numpy does not know its short floats
        known = str(x.dtype).removeprefix("torch.") in DTYPES and host_dtype(x.dtype).computes
        return converted((x if known else x.float()).detach().cpu().numpy(), None, dtype)
    return converted(np.asarray(x), None, dtype)
