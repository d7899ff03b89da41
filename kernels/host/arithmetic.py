"""The operators of host tensors, with torch's types of results.

A result has the type of the operand of the highest kind (float, integer, bool). Among operands of
one kind tensors with dimensions decide before those without, and these before Python's numbers.
numpy's rules differ (int32 * 0.5 is float64 there), and those of numpy 1 and 2 differ too. Floats
of 16 bits are computed in float32 and rounded once.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.errors import CaptureError
from sdk.kernels.host.conversions import converted
from sdk.kernels.host.dtypes import BY_STORAGE, DTYPES, HostDtype, host_dtype

_BOOL, _INT64, _FLOAT32 = DTYPES["bool"], DTYPES["int64"], DTYPES["float32"]


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


def touch(what: str) -> None:
    """:raises CaptureError: while a step is recorded."""
    if _views.depth:
        raise CaptureError(f"a step with {what} cannot be recorded: it is not our operator")


# ---- types of results ----------------------------------------------------------------------------


def result_type(*operands: Any) -> HostDtype:
    """``torch.result_type`` of tensors and numbers."""
    ranked: dict[int, HostDtype] = {}
    for x in operands:
        if not hasattr(x, "shape") or isinstance(x, np.generic):
            rank, dtype = 0, _number_type(x)
        else:
            rank, dtype = 1 + bool(x.shape), dtype_of_operand(x)
        ranked[rank] = _wider(ranked[rank], dtype) if rank in ranked else dtype
    return reduce(_deciding, (ranked[rank] for rank in sorted(ranked, reverse=True)))


def dtype_of_operand(x: Any) -> HostDtype:
    """Of a host tensor, an array, or a tensor of torch."""
    if isinstance(x, Operators):
        return x.host_dtype
    return BY_STORAGE[x.dtype] if isinstance(x, np.ndarray) else host_dtype(x.dtype)


def _number_type(x: Any) -> HostDtype:
    if isinstance(x, bool | np.bool_):
        return _BOOL
    return _INT64 if isinstance(x, int | np.integer) else _FLOAT32


def _kind(dtype: HostDtype) -> int:
    return 2 if dtype.is_floating_point else int(dtype is not _BOOL)


def _wider(a: HostDtype, b: HostDtype) -> HostDtype:
    """The type that both types of equal rank become."""
    if a is b or _kind(a) != _kind(b):
        return a if _kind(a) >= _kind(b) else b
    if not a.computes or not b.computes:  # bfloat16 with another float
        wide = max(a, b, key=lambda dtype: dtype.itemsize)
        return wide if wide.itemsize > 2 else _FLOAT32
    return BY_STORAGE[np.promote_types(a.storage, b.storage)]


def _deciding(higher: HostDtype, lower: HostDtype) -> HostDtype:
    return higher if _kind(higher) >= _kind(lower) else lower


# ---- operands and results ------------------------------------------------------------------------


def is_operand(x: object) -> bool:
    """Whether we compute with it. torch computes with its own tensors."""
    return isinstance(x, Operators | int | float | np.ndarray | np.generic)


def numbers(x: Any, dtype: HostDtype) -> NDArray[Any]:
    """An operand for numpy, in the type in which results of ``dtype`` are computed."""
    computed = _FLOAT32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
    if isinstance(x, Operators):
        return converted(x.array, x.host_dtype, computed)
    return converted(np.asarray(x), None, computed)


_Method = Callable[[Any, Any], Any]


def _binary(
    name: str,
    function: Any,
    *,
    swap: bool = False,
    gives: Any = None,
    rounds: bool = False,
) -> _Method:
    """``gives``: the type of the result by that of the operands, if it is another one. ``rounds``:
    a number is rounded to that type first, as torch does in sums, but not in products."""

    def method(self: Any, other: Any) -> Any:
        if not is_operand(other):
            return NotImplemented
        touch(name)
        common = result_type(self, other)
        dtype = common if gives is None else gives(common)
        used = dtype if dtype.is_floating_point else common
        if rounds and not isinstance(other, Operators):
            other = self._made(np.asarray(other), common)
        a, b = numbers(self, used), numbers(other, used)
        with np.errstate(all="ignore"):
            return self._made(function(b, a) if swap else function(a, b), dtype)

    return method


def _in_place(name: str, function: Any, *, rounds: bool = False) -> _Method:
    def method(self: Any, other: Any) -> Any:
        if not is_operand(other):  # a tensor of torch, over the same memory
            getattr(self.torch(), f"__i{name}__")(other)
            return self
        touch(name)
        common = result_type(self, other)
        if rounds and not isinstance(other, Operators):
            other = self._made(np.asarray(other), common)
        with np.errstate(all="ignore"):
            found = function(numbers(self, common), numbers(other, common))
        self.array[...] = converted(np.asarray(found), None, self.host_dtype)
        return self

    return method


def _unary(name: str, function: Any, gives: Any = None) -> Callable[[Any], Any]:
    def method(self: Any) -> Any:
        touch(name)
        dtype = self.host_dtype if gives is None else gives(self.host_dtype)
        used = dtype if dtype.is_floating_point else self.host_dtype
        with np.errstate(all="ignore"):
            return self._made(function(numbers(self, used)), dtype)

    return method


def _float(dtype: HostDtype) -> HostDtype:
    return dtype if dtype.is_floating_point else _FLOAT32


def _bool(_: HostDtype) -> HostDtype:
    return _BOOL


class Operators:
    """What :class:`~sdk.kernels.host.tensor.HostTensor` computes element by element."""

    __slots__ = ()
    array: NDArray[Any]
    host_dtype: HostDtype

    __add__ = __radd__ = _binary("add", np.add, rounds=True)
    __iadd__ = _in_place("add", np.add, rounds=True)
    __sub__ = _binary("sub", np.subtract, rounds=True)
    __rsub__ = _binary("sub", np.subtract, swap=True, rounds=True)
    __isub__ = _in_place("sub", np.subtract, rounds=True)
    __mul__ = __rmul__ = _binary("mul", np.multiply)
    __imul__ = _in_place("mul", np.multiply)
    __truediv__ = _binary("div", np.true_divide, gives=_float)
    __itruediv__ = _in_place("truediv", np.true_divide)
    __floordiv__ = _binary("floor_divide", np.floor_divide, rounds=True)
    __rfloordiv__ = _binary("floor_divide", np.floor_divide, swap=True, rounds=True)
    __ifloordiv__ = _in_place("floordiv", np.floor_divide)
    __mod__ = _binary("remainder", np.remainder, rounds=True)
    __rmod__ = _binary("remainder", np.remainder, swap=True, rounds=True)
    __imod__ = _in_place("mod", np.remainder)
    __pow__ = _binary("pow", np.power)
    __rpow__ = _binary("pow", np.power, swap=True)
    __ipow__ = _in_place("pow", np.power)
    __and__ = __rand__ = _binary("and", np.bitwise_and)
    __iand__ = _in_place("and", np.bitwise_and)
    __or__ = __ror__ = _binary("or", np.bitwise_or)
    __ior__ = _in_place("or", np.bitwise_or)
    __xor__ = __rxor__ = _binary("xor", np.bitwise_xor)
    __ixor__ = _in_place("xor", np.bitwise_xor)
    __lshift__ = _binary("lshift", np.left_shift)
    __rlshift__ = _binary("lshift", np.left_shift, swap=True)
    __ilshift__ = _in_place("lshift", np.left_shift)
    __rshift__ = _binary("rshift", np.right_shift)
    __rrshift__ = _binary("rshift", np.right_shift, swap=True)
    __irshift__ = _in_place("rshift", np.right_shift)
    __matmul__ = _binary("matmul", np.matmul)
    __rmatmul__ = _binary("matmul", np.matmul, swap=True)
    __eq__ = _binary("eq", np.equal, gives=_bool)
    __ne__ = _binary("ne", np.not_equal, gives=_bool)
    __lt__ = _binary("lt", np.less, gives=_bool)
    __le__ = _binary("le", np.less_equal, gives=_bool)
    __gt__ = _binary("gt", np.greater, gives=_bool)
    __ge__ = _binary("ge", np.greater_equal, gives=_bool)
    __hash__ = object.__hash__

    __neg__ = _unary("neg", np.negative)
    __invert__ = _unary("invert", np.invert)
    abs = _unary("abs", np.abs)
    round = _unary("round", np.rint)
    square = _unary("square", np.square)
    sqrt = _unary("sqrt", np.sqrt, _float)
    exp = _unary("exp", np.exp, _float)
    log = _unary("log", np.log, _float)
    isfinite = _unary("isfinite", np.isfinite, _bool)
    isnan = _unary("isnan", np.isnan, _bool)

    reciprocal = _unary("reciprocal", np.reciprocal, _float)

    add_, sub_, mul_ = __iadd__, __isub__, __imul__

    def __rtruediv__(self, other: Any) -> Any:
        """As in torch: two roundings."""
        return self.reciprocal() * other
