"""Tensors of a CPU without torch: numpy's arrays with the names of torch's methods.

Importing torch takes 1.1 to 1.8 s and 110 MiB, and a CPU engine needs little of it: views of
memory, types, and some arithmetic when weights are read. That is here. What is not here imports
torch: a method that :class:`HostTensor` lacks is that of a torch tensor over the same memory, and
functions of torch take host tensors (``__torch_function__``). So nothing can be missing, only slower
to start.

Semantics are torch's: views share memory, ``/`` of integers is float32, short floats (bfloat16, 8
bits) are stored as integers of their size, which numpy does not know otherwise.
"""

from __future__ import annotations

import builtins
import importlib
import math
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np

from sdk.kernels.errors import CaptureError
from sdk.kernels.torch_import import import_torch

#: Types by torch's name: the numpy type of their memory, and whether numpy computes with it.
_STORAGE: dict[str, tuple[Any, bool]] = {
    **{name: (np.dtype(name), True) for name in ("float64", "float32", "float16")},
    **{name: (np.dtype(name), True) for name in ("int64", "int32", "int16", "int8", "uint8")},
    **{name: (np.dtype(name), True) for name in ("uint16", "uint32", "uint64")},
    "bool": (np.dtype(np.bool_), True),
    "bfloat16": (np.dtype(np.uint16), False),
    **{
        f"float8_{name}": (np.dtype(np.uint8), False)
        for name in ("e4m3fn", "e5m2", "e8m0fnu", "e4m3fnuz", "e5m2fnuz")
    },
}
_FLOATS = {"float64", "float32", "float16", "bfloat16"} | {x for x in _STORAGE if "float8" in x}
_CPU = "cpu"


def torch_module() -> Any:
    """torch, imported now if nobody has."""
    import_torch()
    return importlib.import_module("torch")


def loaded_torch() -> Any:
    """torch if it is imported as a whole, else ``None``."""
    module = sys.modules.get("torch")
    if module is None or getattr(module.__spec__, "_initializing", False):
        return None
    return module


class HostDtype:
    """A type of numbers, equal to torch's of the same name."""

    __slots__ = ("computes", "itemsize", "name", "storage")

    def __init__(self, name: str) -> None:
        self.name = name
        self.storage, self.computes = _STORAGE[name]
        self.itemsize: int = self.storage.itemsize

    @property
    def is_floating_point(self) -> bool:
        return self.name in _FLOATS

    def __eq__(self, other: object) -> bool:
        return self is other or str(other) == str(self)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype_of, (self.name,)


_DTYPES = {name: HostDtype(name) for name in _STORAGE}
_BY_STORAGE = {d.storage: d for d in _DTYPES.values() if d.computes}


def dtype_of(name: str) -> Any:
    """The type of that name: torch's, once torch is imported."""
    torch = loaded_torch()
    return _DTYPES[name] if torch is None else getattr(torch, name)


def host_dtype(dtype: Any) -> HostDtype:
    return dtype if isinstance(dtype, HostDtype) else _DTYPES[str(dtype).removeprefix("torch.")]


def real_dtype(dtype: Any) -> Any:
    """torch's type; imports torch."""
    return getattr(torch_module(), dtype.name) if isinstance(dtype, HostDtype) else dtype


class HostDevice:
    """The CPU, equal to ``torch.device("cpu")``."""

    __slots__ = ()
    type = _CPU
    index = None

    def __eq__(self, other: object) -> bool:
        return self is other or str(other) == _CPU

    def __hash__(self) -> int:
        return hash(_CPU)

    def __str__(self) -> str:
        return _CPU

    def __repr__(self) -> str:
        return "device(type='cpu')"


_HOST = HostDevice()


def device_of(device: Any = _CPU, index: int | None = None) -> Any:
    """``torch.device(device)``; any but the CPU imports torch."""
    torch = loaded_torch()
    if torch is None and str(device) == _CPU and index is None:
        return _HOST
    return torch_module().device(*([str(device)] if index is None else [str(device), index]))


class _Views(threading.local):
    """Whether only views may be made in this thread, because a step is being recorded."""

    depth = 0


_views = _Views()


@contextmanager
def only_views() -> Iterator[None]:
    """Let operations on host tensors that touch data raise :class:`CaptureError`."""
    _views.depth += 1
    try:
        yield
    finally:
        _views.depth -= 1


class Shape(tuple):  # type: ignore[type-arg]
    """``torch.Size``."""

    __slots__ = ()

    def numel(self) -> int:
        return math.prod(self)


class HostTensor:
    """See the module. ``array`` has the storage type of :attr:`dtype`."""

    __slots__ = ("__weakref__", "_dtype", "array")
    array: np.ndarray[Any, Any]
    is_cuda = is_meta = is_sparse = is_quantized = requires_grad = False
    is_cpu = True

    def __init__(self, array: Any, dtype: HostDtype | None = None) -> None:
        self.array = array
        self._dtype = _BY_STORAGE[array.dtype] if dtype is None else dtype

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        return self._dtype if loaded_torch() is None else dtype_of(self._dtype.name)

    @property
    def device(self) -> Any:
        return device_of()

    @property
    def shape(self) -> Shape:
        return Shape(self.array.shape)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.array.shape[dim]

    def dim(self) -> int:
        return self.array.ndim

    @property
    def ndim(self) -> int:
        return self.array.ndim

    def numel(self) -> int:
        return self.array.size

    def element_size(self) -> int:
        return self._dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self._dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def data_ptr(self) -> int:
        if not self.array.size:
            return 0
        found: int = self.array.__array_interface__["data"][0]
        return found

    def stride(self, dim: int | None = None) -> Any:
        """In elements."""
        size = self._dtype.itemsize
        if dim is not None:
            return self.array.strides[dim] // size
        return tuple(s // size for s in self.array.strides)

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def is_floating_point(self) -> bool:
        return self._dtype.is_floating_point

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def storage_offset(self) -> int:
        """0: see :meth:`as_strided`."""
        return 0

    def get_device(self) -> int:
        return -1

    def __len__(self) -> int:
        return len(self.array)

    def __repr__(self) -> str:
        values = self.array if self._dtype.computes else self.float().array
        return f"HostTensor({values!r}, dtype={self._dtype!r})"

    # ---- torch's own -----------------------------------------------------------------------------

    def torch(self) -> Any:
        """A torch tensor over the same memory; imports torch."""
        torch = torch_module()
        array = self.array
        if any(stride < 0 for stride in array.strides):
            array = array.copy()
        if not array.flags.writeable:  # a part of a file: torch warns, and nobody writes to it
            memory = np.ndarray(array.shape, array.dtype, _Writable(array), 0, array.strides)
            array = memory
        signed = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}
        if array.dtype.name in signed:
            array = array.view(signed[array.dtype.name])
        found = torch.from_numpy(array)
        wanted = getattr(torch, self._dtype.name)
        return found if found.dtype == wanted else found.view(wanted)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.torch(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*real(list(args)), **real(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _restored, (self.array, self._dtype.name)

    # ---- views -----------------------------------------------------------------------------------

    def _as(self, array: Any) -> HostTensor:
        return HostTensor(array, self._dtype)

    def view(self, *shape: Any) -> HostTensor:
        if len(shape) == 1 and not isinstance(shape[0], int | tuple | list | Shape):
            dtype = host_dtype(shape[0])
            if dtype.itemsize == self._dtype.itemsize:
                return HostTensor(self.array.view(dtype.storage), dtype)
            return HostTensor(_resized(self.array, dtype), dtype)
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        found = self.array.view()
        try:
            found.shape = _sizes(sizes, self.array.size)
        except AttributeError:
            raise RuntimeError(
                f"view: a tensor {list(self.shape)} with strides {self.stride()} is no view of "
                f"{list(sizes)}: use reshape"
            ) from None
        return self._as(found)

    def reshape(self, *shape: Any) -> HostTensor:
        sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        try:
            return self.view(*sizes)
        except RuntimeError:
            _touch("reshape")
            return self._as(self.array.reshape(_sizes(sizes, self.array.size)))

    def flatten(self, first: int = 0, last: int = -1) -> HostTensor:
        shape = self.array.shape
        first, last = first % max(1, len(shape)), last % max(1, len(shape))
        return self.reshape(*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])

    def unflatten(self, dim: int, sizes: Sequence[int]) -> HostTensor:
        dim, shape = dim % self.array.ndim, self.array.shape
        return self.view(*shape[:dim], *_sizes(sizes, shape[dim]), *shape[dim + 1 :])

    def as_strided(
        self, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
    ) -> HostTensor:
        """Only within this tensor's memory; ``storage_offset`` counts from its first element."""
        bytes_ = [s * self._dtype.itemsize for s in stride]
        start = self.array.reshape(-1)[storage_offset:]
        return self._as(np.lib.stride_tricks.as_strided(start, tuple(size), bytes_))

    def transpose(self, a: int, b: int) -> HostTensor:
        return self._as(self.array.swapaxes(a, b))

    def t(self) -> HostTensor:
        return self._as(self.array.T)

    @property
    def T(self) -> HostTensor:
        return self._as(self.array.T)

    def permute(self, *dims: Any) -> HostTensor:
        return self._as(self.array.transpose(*dims))

    def unsqueeze(self, dim: int) -> HostTensor:
        return self._as(np.expand_dims(self.array, dim))

    def squeeze(self, dim: int | None = None) -> HostTensor:
        if dim is not None and self.array.shape[dim] != 1:
            return self._as(self.array.view())
        return self._as(self.array.squeeze(dim))

    def expand(self, *sizes: Any) -> HostTensor:
        sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
        own = (1,) * (len(sizes) - self.array.ndim) + self.array.shape
        shape = [o if n == -1 else n for n, o in zip(sizes, own, strict=True)]
        return self._as(np.broadcast_to(self.array, shape))

    def expand_as(self, other: HostTensor) -> HostTensor:
        return self.expand(*other.shape)

    def select(self, dim: int, index: int) -> HostTensor:
        return self._as(self.array[(slice(None),) * (dim % self.array.ndim) + (index,)])

    def narrow(self, dim: int, start: int, length: int) -> HostTensor:
        at = (slice(None),) * (dim % self.array.ndim)
        return self._as(self.array[(*at, slice(start, start + length))])

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> tuple[HostTensor, ...]:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(self.narrow(dim, a, n) for a, n in zip(starts, sizes, strict=True))

    def split(self, size: Any, dim: int = 0) -> tuple[HostTensor, ...]:
        if isinstance(size, int):
            length = self.array.shape[dim]
            size = [min(size, length - i) for i in range(0, length, size)]
        return self.split_with_sizes(size, dim)

    def chunk(self, count: int, dim: int = 0) -> tuple[HostTensor, ...]:
        return self.split(-(-self.array.shape[dim] // count), dim)

    def unbind(self, dim: int = 0) -> tuple[HostTensor, ...]:
        return tuple(self.select(dim, i) for i in range(self.array.shape[dim]))

    def diagonal(self) -> HostTensor:
        return self._as(self.array.diagonal())

    def detach(self) -> HostTensor:
        return self._as(self.array.view())

    @property
    def data(self) -> HostTensor:
        return self.detach()

    def __iter__(self) -> Iterator[HostTensor]:
        return iter(self.unbind())

    def __getitem__(self, index: Any) -> HostTensor:
        at = _index(index)
        found = self.array[at]
        if not isinstance(found, np.ndarray):  # one number is a view too
            whole = (*at,) if isinstance(at, tuple) else (at,)
            first, *rest = whole
            found = self.array[(slice(first, first + 1 or None), *rest)].reshape(())
        elif found.base is None:
            _touch("index")
        return self._as(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        _touch("index_put_")
        self.array[_index(index)] = _values(value, self._dtype)

    # ---- copies ----------------------------------------------------------------------------------

    def numpy(self, *, force: bool = False) -> Any:
        if not self._dtype.computes:
            raise TypeError(f"Got unsupported ScalarType {self._dtype.name}")
        return self.array

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.numpy() if dtype is None else self.numpy().astype(dtype)

    def cpu(self) -> HostTensor:
        return self

    def contiguous(self) -> HostTensor:
        if self.array.flags.c_contiguous:
            return self
        _touch("contiguous")
        return self._as(np.ascontiguousarray(self.array).reshape(self.array.shape))

    def clone(self, memory_format: Any = None) -> HostTensor:
        _touch("clone")
        return self._as(self.array.copy())

    def to(self, *given: Any, **named: Any) -> Any:
        """Types and the CPU; another device imports torch."""
        named.pop("non_blocking", None)
        copy = named.pop("copy", False)
        dtype = named.pop("dtype", None)
        where = named.pop("device", None)
        for one in given:
            if isinstance(one, HostTensor) or hasattr(one, "data_ptr"):
                dtype, where = one.dtype, one.device
            elif isinstance(one, str) or hasattr(one, "type"):
                where = one
            elif one is not None and not isinstance(one, bool):
                dtype = one
        if str(where) == "meta":
            return _Meta(np.broadcast_to(np.zeros((), self.array.dtype), self.shape), self._dtype)
        if where is not None and str(where) != _CPU:
            moved = self.torch().to(where)
            return moved if dtype is None else moved.to(real_dtype(dtype))
        wanted = self._dtype if dtype is None else host_dtype(dtype)
        if wanted is self._dtype:
            return self.clone() if copy else self
        _touch("to")
        return HostTensor(_converted(self.array, self._dtype, wanted), wanted)

    def type(self, dtype: Any) -> HostTensor:
        return self.to(dtype)  # type: ignore[no-any-return]

    def float(self) -> HostTensor:
        return self.to(_DTYPES["float32"])  # type: ignore[no-any-return]

    def double(self) -> HostTensor:
        return self.to(_DTYPES["float64"])  # type: ignore[no-any-return]

    def half(self) -> HostTensor:
        return self.to(_DTYPES["float16"])  # type: ignore[no-any-return]

    def bfloat16(self) -> HostTensor:
        return self.to(_DTYPES["bfloat16"])  # type: ignore[no-any-return]

    def int(self) -> HostTensor:
        return self.to(_DTYPES["int32"])  # type: ignore[no-any-return]

    def long(self) -> HostTensor:
        return self.to(_DTYPES["int64"])  # type: ignore[no-any-return]

    def byte(self) -> HostTensor:
        return self.to(_DTYPES["uint8"])  # type: ignore[no-any-return]

    def bool(self) -> HostTensor:
        return self.to(_DTYPES["bool"])  # type: ignore[no-any-return]

    def copy_(self, source: Any, non_blocking: builtins.bool = False) -> HostTensor:
        _touch("copy_")
        self.array[...] = _values(source, self._dtype)
        return self

    def fill_(self, value: Any) -> HostTensor:
        return self.copy_(value)

    def zero_(self) -> HostTensor:
        _touch("zero_")
        self.array[...] = 0
        return self

    def new_empty(self, *shape: Any, dtype: Any = None, **_: Any) -> HostTensor:
        return empty(*shape, dtype=self._dtype if dtype is None else dtype)

    def new_zeros(self, *shape: Any, dtype: Any = None, **_: Any) -> HostTensor:
        return zeros(*shape, dtype=self._dtype if dtype is None else dtype)

    def new_ones(self, *shape: Any, dtype: Any = None, **_: Any) -> HostTensor:
        return full(_shape(shape), 1, dtype=self._dtype if dtype is None else dtype)

    def new_full(self, shape: Any, value: Any, *, dtype: Any = None, **_: Any) -> HostTensor:
        return full(shape, value, dtype=self._dtype if dtype is None else dtype)

    def new_tensor(self, values: Any, *, dtype: Any = None, **_: Any) -> HostTensor:
        return tensor(values, dtype=self._dtype if dtype is None else dtype)

    def tolist(self) -> Any:
        return self._plain().tolist()

    def item(self) -> Any:
        return self._plain().item()

    def repeat_interleave(self, count: builtins.int, dim: builtins.int) -> HostTensor:
        _touch("repeat_interleave")
        return self._as(np.repeat(self.array, count, dim))

    def _plain(self) -> Any:
        """Numbers for numpy."""
        _touch("computation")
        return self.array if self._dtype.computes else self.float().array

    def __bool__(self) -> builtins.bool:
        return builtins.bool(self._plain())

    def __int__(self) -> builtins.int:
        return builtins.int(self._plain())

    def __index__(self) -> builtins.int:
        return int(self._plain().__index__())

    def __float__(self) -> builtins.float:
        return builtins.float(self._plain())

    # ---- arithmetic ------------------------------------------------------------------------------

    def sum(
        self, dim: Any = None, keepdim: builtins.bool = False, *, dtype: Any = None
    ) -> HostTensor:
        kind = None if dtype is None else host_dtype(dtype).storage
        if kind is None and self.array.dtype.kind in "biu":
            kind = np.dtype(np.int64)
        return _made(self._plain().sum(axis=_axis(dim), keepdims=keepdim, dtype=kind))

    def mean(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return _made(self._plain().mean(axis=_axis(dim), keepdims=keepdim))

    def all(self, dim: Any = None) -> HostTensor:
        return _made(self._plain().all(axis=_axis(dim)))

    def any(self, dim: Any = None) -> HostTensor:
        return _made(self._plain().any(axis=_axis(dim)))

    def amax(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return _made(self._plain().max(axis=_axis(dim), keepdims=keepdim))

    def amin(self, dim: Any = None, keepdim: builtins.bool = False) -> HostTensor:
        return _made(self._plain().min(axis=_axis(dim), keepdims=keepdim))

    def abs(self) -> HostTensor:
        return _made(np.abs(self._plain()))

    def sqrt(self) -> HostTensor:
        return _made(np.sqrt(self._plain()))

    def exp(self) -> HostTensor:
        return _made(np.exp(self._plain()))

    def log(self) -> HostTensor:
        return _made(np.log(self._plain()))

    def round(self) -> HostTensor:
        return _made(np.rint(self._plain()))

    def isfinite(self) -> HostTensor:
        return _made(np.isfinite(self._plain()))

    def isnan(self) -> HostTensor:
        return _made(np.isnan(self._plain()))

    def square(self) -> HostTensor:
        return _made(np.square(self._plain()))

    def clamp(self, min: Any = None, max: Any = None) -> HostTensor:
        low, high = (None if x is None else _operand(x) for x in (min, max))
        return _made(np.clip(self._plain(), low, high).astype(self._plain().dtype, copy=False))


class _Meta(HostTensor):
    """Shape and type of a tensor without its numbers."""

    __slots__ = ()
    is_meta = True


def _binary(name: str, function: Any, *, turned: bool = False) -> None:
    def method(self: HostTensor, other: Any) -> Any:
        if not _computable(other):
            return NotImplemented
        _touch(name)
        a, b = self._plain(), _operand(other)
        return _made(function(b, a) if turned else function(a, b))

    setattr(HostTensor, name, method)


def _in_place(name: str, function: Any) -> None:
    def method(self: HostTensor, other: Any) -> HostTensor:
        _touch(name)
        result = function(self._plain(), _operand(other))
        self.array[...] = _converted(np.asarray(result), None, self._dtype)
        return self

    setattr(HostTensor, name, method)


def _divide(a: Any, b: Any) -> Any:
    if all(getattr(x, "dtype", np.dtype(int)).kind in "biu" for x in (a, b)):
        return np.true_divide(np.asarray(a, np.float32), np.asarray(b, np.float32))
    return np.true_divide(a, b)


_ARITHMETIC: dict[str, Any] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": _divide,
    "floordiv": np.floor_divide, "mod": np.remainder, "pow": np.power, "and": np.bitwise_and,
    "or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift, "rshift": np.right_shift,
    "matmul": np.matmul,
}  # fmt: skip
for _name, _function in _ARITHMETIC.items():
    _binary(f"__{_name}__", _function)
    _binary(f"__r{_name}__", _function, turned=True)
    _in_place(f"__i{_name}__", _function)
for _name, _function in {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater,
    "ge": np.greater_equal,
}.items():  # fmt: skip
    _binary(f"__{_name}__", _function)
HostTensor.__hash__ = object.__hash__  # type: ignore[method-assign]
for _name, _function in {"add_": np.add, "sub_": np.subtract, "mul_": np.multiply}.items():
    _in_place(_name, _function)


def _unary(name: str, function: Any) -> None:
    setattr(HostTensor, name, lambda self: _made(function(self._plain())))


_unary("__neg__", np.negative)
_unary("__invert__", np.invert)
_unary("__abs__", np.abs)


# ---- functions of torch --------------------------------------------------------------------------


def from_numpy(array: Any) -> HostTensor:
    return HostTensor(array)


def empty(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.empty, shape, dtype, device)


def zeros(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.zeros, shape, dtype, device)


def ones(*shape: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return full(_shape(shape), 1, dtype=dtype, device=device)


def full(shape: Any, value: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    if dtype is None:
        kinds = {bool: "bool", int: "int64"}
        dtype = _DTYPES[kinds.get(type(value), "float32")]
    made = _new(np.empty, (shape,), dtype, device)
    return made.fill_(value)


def empty_like(x: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.empty, (x.shape,), dtype or x.dtype, device)


def zeros_like(x: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    return _new(np.zeros, (x.shape,), dtype or x.dtype, device)


def full_like(x: Any, value: Any, *, dtype: Any = None, **_: Any) -> Any:
    return full(x.shape, value, dtype=dtype or x.dtype)


def tensor(values: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    array = np.array(values.numpy() if isinstance(values, HostTensor) else values)
    kind = host_dtype(dtype) if dtype is not None else None
    if kind is None and array.dtype.kind == "f" and not isinstance(values, np.ndarray):
        kind = _DTYPES["float32"]
    kind = kind or _BY_STORAGE[array.dtype]
    return HostTensor(_converted(array, None, kind), kind).to(device or _CPU)


def arange(*given: Any, dtype: Any = None, device: Any = None, **_: Any) -> Any:
    kind = _DTYPES["int64" if all(isinstance(x, int) for x in given) else "float32"]
    kind = kind if dtype is None else host_dtype(dtype)
    return HostTensor(np.arange(*given).astype(kind.storage), kind).to(device or _CPU)


def cat(tensors: Sequence[HostTensor], dim: int = 0) -> Any:
    return _joined(np.concatenate, tensors, dim)


def stack(tensors: Sequence[HostTensor], dim: int = 0) -> Any:
    return _joined(np.stack, tensors, dim)


def where(condition: Any, a: Any, b: Any) -> HostTensor:
    _touch("where")
    return _made(np.where(_operand(condition), _operand(a), _operand(b)))


def equal(a: HostTensor, b: HostTensor) -> bool:
    return a.shape == b.shape and bool(np.array_equal(a._plain(), b._plain()))


def maximum(a: HostTensor, b: HostTensor) -> HostTensor:
    return _made(np.maximum(_operand(a), _operand(b)))


def minimum(a: HostTensor, b: HostTensor) -> HostTensor:
    return _made(np.minimum(_operand(a), _operand(b)))


def isfinite(x: HostTensor) -> HostTensor:
    return x.isfinite()


def is_tensor(x: object) -> bool:
    return isinstance(x, HostTensor)


def pad(x: HostTensor, sizes: Sequence[int], value: float = 0) -> HostTensor:
    """``torch.nn.functional.pad`` with a constant; sizes of the last dimension come first."""
    _touch("pad")
    pairs = [(sizes[i], sizes[i + 1]) for i in range(0, len(sizes), 2)][::-1]
    widths = [(0, 0)] * (x.array.ndim - len(pairs)) + pairs
    return x._as(np.pad(x.array, widths, constant_values=value))


def real(x: Any) -> Any:
    """The same with torch's tensors and types."""
    if isinstance(x, HostTensor):
        return x.torch()
    if isinstance(x, HostDtype):
        return real_dtype(x)
    if isinstance(x, HostDevice):
        return torch_module().device(_CPU)
    if isinstance(x, list | tuple):
        return type(x)(map(real, x)) if not hasattr(x, "_fields") else type(x)(*map(real, x))
    if isinstance(x, dict):
        return {key: real(value) for key, value in x.items()}
    return x


# ---- parts ---------------------------------------------------------------------------------------


class _Writable:
    """Memory that may not be written, for an array of torch, which wants one that may."""

    def __init__(self, array: Any) -> None:
        self._array = array  # keeps the memory
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        interface["strides"] = array.strides
        self.__array_interface__ = interface


def _restored(array: Any, name: str) -> HostTensor:
    return HostTensor(array, _DTYPES[name])


def _touch(what: str) -> None:
    """:raises CaptureError: while a step is recorded."""
    if _views.depth:
        raise CaptureError(f"a step with {what} cannot be recorded: it is not our operator")


def _new(make: Any, shape: Any, dtype: Any, device: Any) -> Any:
    if device is not None and str(device) != _CPU:
        torch = torch_module()
        kind = None if dtype is None else real_dtype(dtype)
        return getattr(torch, make.__name__)(*shape, dtype=kind, device=device)
    _touch(make.__name__)
    kind = _DTYPES["float32"] if dtype is None else host_dtype(dtype)
    return HostTensor(make(_shape(shape), kind.storage), kind)


def _shape(given: Any) -> tuple[int, ...]:
    if len(given) == 1 and not isinstance(given[0], int | np.integer):
        given = given[0]
    return tuple(int(n) for n in given)


def _sizes(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """The sizes with -1 replaced, also for no elements, where numpy cannot."""
    found = [int(n) for n in sizes]
    if -1 in found:
        rest = -math.prod(found)
        found[found.index(-1)] = count // rest if rest else 0
    return tuple(found)


def _resized(array: Any, dtype: HostDtype) -> Any:
    """A view with elements of another size along the last dimension."""
    if array.ndim and array.shape[-1] and array.strides[-1] == array.itemsize:
        try:
            return array.view(dtype.storage)
        except ValueError as error:
            raise RuntimeError(f"view: {error}") from None
    if not array.size:
        width = array.shape[-1] * array.itemsize // dtype.itemsize
        return np.empty((*array.shape[:-1], width), dtype.storage)
    raise RuntimeError("view: the last dimension has gaps")


def _index(index: Any) -> Any:
    if isinstance(index, HostTensor):
        return index.array
    if isinstance(index, tuple):
        return tuple(map(_index, index))
    return index.numpy() if hasattr(index, "data_ptr") else index


def _computable(x: object) -> bool:
    return isinstance(x, HostTensor | int | float | bool | np.ndarray | np.generic)


def _operand(x: Any) -> Any:
    if isinstance(x, HostTensor):
        return x._plain()
    return x.numpy() if hasattr(x, "data_ptr") else x


def _values(x: Any, dtype: HostDtype) -> Any:
    """What is assigned to memory of that type."""
    if isinstance(x, HostTensor):
        return _converted(x.array, x._dtype, dtype)
    if hasattr(x, "data_ptr"):  # torch's
        return _converted(x.float().numpy() if not dtype.computes else x.numpy(), None, dtype)
    return _converted(np.asarray(x), None, dtype)


def _converted(array: Any, own: HostDtype | None, wanted: HostDtype) -> Any:
    """The numbers of an array in another type; ``own``: its type, if numpy does not know it."""
    if own is wanted:
        return array
    if own is not None and not own.computes:
        array = _bfloat16_values(array) if own.name == "bfloat16" else _bytes_table(own.name)[array]
    if wanted.computes:
        with np.errstate(over="ignore", invalid="ignore"):
            return array.astype(wanted.storage)
    if wanted.name == "bfloat16":
        return _bfloat16_bits(array.astype(np.float32))
    torch = torch_module()
    found = torch.from_numpy(np.ascontiguousarray(array, np.float32)).to(
        getattr(torch, wanted.name)
    )
    return found.view(torch.uint8).numpy()


def _bfloat16_values(bits: Any) -> Any:
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bfloat16_bits(x: Any) -> Any:
    """Rounded to nearest, ties to even."""
    bits = x.view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), 0x7FC0, rounded).astype(np.uint16)


@cache
def _bytes_table(name: str) -> Any:
    """The float32 values of all codes of a type of 8 bits. Sources: OCP 8-bit floating point
    specification (e4m3, e5m2), OCP microscaling formats (e8m0)."""
    if name == "float8_e8m0fnu":
        values = [2.0 ** (code - 127) for code in range(255)] + [math.nan]
        return np.array(values, np.float64).astype(np.float32)
    if name not in ("float8_e4m3fn", "float8_e5m2"):
        torch = torch_module()
        codes = torch.arange(256, dtype=torch.uint8)
        return codes.view(getattr(torch, name)).float().numpy()
    mantissa, bias = (3, 7) if name == "float8_e4m3fn" else (2, 15)
    values = []
    for code in range(256):
        exponent, fraction = (code & 127) >> mantissa, code & ((1 << mantissa) - 1)
        if name == "float8_e4m3fn" and code & 127 == 127:
            value = math.nan
        elif name == "float8_e5m2" and exponent == 31:
            value = math.nan if fraction else math.inf
        elif exponent:
            value = (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)
        else:
            value = fraction / (1 << mantissa) * 2.0 ** (1 - bias)
        values.append(-value if code & 128 else value)
    return np.array(values, np.float32)


def _made(array: Any) -> HostTensor:
    """A result of numpy's."""
    return HostTensor(np.asarray(array))


def _axis(dim: Any) -> Any:
    return tuple(dim) if isinstance(dim, list | tuple) else dim


def _joined(join: Any, tensors: Sequence[Any], dim: int) -> Any:
    _touch(join.__name__)
    kinds = {x._dtype for x in tensors}
    if len(kinds) == 1:
        return HostTensor(join([x.array for x in tensors], dim), next(iter(kinds)))
    return _made(join([x._plain() for x in tensors], dim))
