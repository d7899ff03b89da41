"""What host tensors know of themselves, and other views of their memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.host.arithmetic import touch
from sdk.kernels.host.dtypes import HostDtype, device_of, dtype_of, host_dtype

if TYPE_CHECKING:
    from typing_extensions import Self


class Shape(tuple):  # type: ignore[type-arg]
    """``torch.Size``."""

    __slots__ = ()

    def numel(self) -> int:
        return math.prod(self)


class Views:
    """See the module. ``array`` has the storage type of ``host_dtype``."""

    __slots__ = ()
    array: NDArray[Any]
    host_dtype: HostDtype
    is_cuda = is_meta = is_sparse = is_quantized = requires_grad = False
    is_cpu = True

    if TYPE_CHECKING:

        def _as(self, array: Any, dtype: HostDtype | None = None) -> Self: ...

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def dtype(self) -> Any:
        return dtype_of(self.host_dtype.name)

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
        return self.host_dtype.itemsize

    @property
    def itemsize(self) -> int:
        return self.host_dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.array.nbytes

    def data_ptr(self) -> int:
        """0 for no elements."""
        if not self.array.size:
            return 0
        found: int = self.array.__array_interface__["data"][0]
        return found

    def stride(self, dim: int | None = None) -> Any:
        """In elements."""
        strides = tuple(s // self.host_dtype.itemsize for s in self.array.strides)
        return strides if dim is None else strides[dim]

    def storage_offset(self) -> int:
        """0: see :meth:`as_strided`."""
        return 0

    def is_contiguous(self) -> bool:
        return bool(self.array.flags.c_contiguous)

    def is_floating_point(self) -> bool:
        return self.host_dtype.is_floating_point

    def is_pinned(self, device: Any = None) -> bool:
        return False

    def __len__(self) -> int:
        return len(self.array)

    # ---- other shapes ----------------------------------------------------------------------------

    def view(self, *shape: Any) -> Self:
        """With sizes, or with a type."""
        sizes = _given(shape)
        if not isinstance(sizes, tuple | list):
            dtype = host_dtype(sizes)
            if dtype.itemsize == self.host_dtype.itemsize:
                return self._as(self.array.view(dtype.storage), dtype)
            return self._as(_other_width(self.array, dtype), dtype)
        found = self.array.view()
        try:
            found.shape = _sizes(sizes, self.array.size)
        except AttributeError:  # numpy's word for: only in a copy
            raise RuntimeError(
                f"view: a tensor {list(self.shape)} with strides {self.stride()} is not a view of "
                f"{list(sizes)}: use reshape"
            ) from None
        return self._as(found)

    def reshape(self, *shape: Any) -> Self:
        sizes = _given(shape)
        try:
            return self.view(sizes)
        except RuntimeError:
            touch("reshape")
            return self._as(self.array.reshape(_sizes(sizes, self.array.size)))

    def flatten(self, first: int = 0, last: int = -1) -> Self:
        shape = self.array.shape or (1,)
        first, last = first % len(shape), last % len(shape)
        return self.reshape(*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])

    def as_strided(
        self, size: Sequence[int], stride: Sequence[int], storage_offset: int = 0
    ) -> Self:
        """Only within this tensor's memory; ``storage_offset`` counts from its first element."""
        steps = [s * self.host_dtype.itemsize for s in stride]
        start = self.array.reshape(-1)[storage_offset:]
        return self._as(np.lib.stride_tricks.as_strided(start, tuple(size), steps))

    def transpose(self, a: int, b: int) -> Self:
        return self._as(self.array.swapaxes(a, b))

    def t(self) -> Self:
        return self._as(self.array.T)

    @property
    def T(self) -> Self:
        return self.t()

    def permute(self, *dims: Any) -> Self:
        return self._as(self.array.transpose(*dims))

    def unsqueeze(self, dim: int) -> Self:
        return self._as(np.expand_dims(self.array, dim))

    def expand(self, *sizes: Any) -> Self:
        wanted = _given(sizes)
        own = (1,) * (len(wanted) - self.array.ndim) + self.array.shape
        shape = [o if n == -1 else n for n, o in zip(wanted, own, strict=True)]
        return self._as(np.broadcast_to(self.array, shape))

    def detach(self) -> Self:
        return self._as(self.array.view())

    # ---- parts -----------------------------------------------------------------------------------

    def select(self, dim: int, index: int) -> Self:
        at = (*_before(dim, self.array.ndim), index)
        return self[at]

    def narrow(self, dim: int, start: int, length: int) -> Self:
        at = (*_before(dim, self.array.ndim), slice(start, start + length))
        return self[at]

    def split(self, size: Any, dim: int = 0) -> tuple[Self, ...]:
        length = self.array.shape[dim]
        if isinstance(size, int):
            size = [min(size, length - i) for i in range(0, length, size)]
        return self.split_with_sizes(size, dim)

    def split_with_sizes(self, sizes: Sequence[int], dim: int = 0) -> tuple[Self, ...]:
        length = self.array.shape[dim]
        if sum(sizes) != length:
            raise RuntimeError(f"split: expected sizes with a sum of {length}, found {list(sizes)}")
        return tuple(self.narrow(dim, sum(sizes[:i]), n) for i, n in enumerate(sizes))

    def chunk(self, count: int, dim: int = 0) -> tuple[Self, ...]:
        return self.split(-(-self.array.shape[dim] // count), dim)

    def unbind(self, dim: int = 0) -> tuple[Self, ...]:
        return tuple(self.select(dim, i) for i in range(self.array.shape[dim]))

    def __iter__(self) -> Iterator[Self]:
        return iter(self.unbind())

    def __getitem__(self, index: Any) -> Self:
        at = numpy_index(index)
        found = self.array[at]
        if not isinstance(found, np.ndarray):  # one number: a view too, which numpy copies
            found = self.array[(*at, ...) if isinstance(at, tuple) else (at, ...)]
        elif found.base is None:
            touch("index")
        return self._as(found)


def _before(dim: int, count: int) -> tuple[slice, ...]:
    """An index of the dimensions before one."""
    return (slice(None),) * (dim % count)


def numpy_index(index: Any) -> Any:
    """What numpy's arrays take as an index."""
    if isinstance(index, tuple):
        return tuple(map(numpy_index, index))
    if isinstance(index, Views):
        return index.array
    return index.numpy() if hasattr(index, "data_ptr") else index


def _given(sizes: tuple[Any, ...]) -> Any:
    """The only argument, or all if they are numbers."""
    one = len(sizes) == 1 and not isinstance(sizes[0], int | np.integer)
    return sizes[0] if one else sizes


def _sizes(sizes: Sequence[int], count: int) -> tuple[int, ...]:
    """The sizes with -1 replaced, also for no elements, where numpy cannot.

    :raises RuntimeError: they have another number of elements.
    """
    found = [int(n) for n in sizes]
    if -1 in found:
        rest = -math.prod(found)
        found[found.index(-1)] = count // rest if rest else 0
    if math.prod(found) != count:
        raise RuntimeError(f"shape {list(sizes)} is invalid for a tensor of {count} elements")
    return tuple(found)


def _other_width(array: NDArray[Any], dtype: HostDtype) -> NDArray[Any]:
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
