"""Row-wise operations of torch as a part of a recorded step: see ``graph.py``.

A model whose code is transformers' runs torch between our operators: norms, rotations, sums. While
a step is recorded, :class:`TorchTape` computes none of them. It notes each with its tensors, which
are views of fixed buffers as everywhere in a recorded step. A replay with fewer tokens runs the
same operations on the first rows of those buffers. What is saved is Python: modules, checks,
shapes and views, 1.2 ms of 1.3 ms in a layer of one token.

An operation can be noted if rows of its result depend on the same rows of its arguments alone:
elementwise ones, and some others over dimensions that are not of tokens. Which dimension is that of
tokens is found by its stride, because tokens are outermost in memory, and for a result by its shape
for one token more. Anything else raises :class:`CaptureError`: a mask, a value that Python reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

from sdk.kernels.activations import ActivationPool
from sdk.kernels.errors import CaptureError
from sdk.kernels.host.torch_views import VIEWS

_DTYPES = (torch.float32, torch.int64, torch.int32, torch.bool)
#: Operations that are not elementwise -> the index of the argument with the dimensions that they
#: mix, and its name. ``None``: they mix none that results keep (checked by their shapes).
_MIXING: dict[str, tuple[int, str] | None] = {
    "aten.mean": (1, "dim"),
    "aten.sum": (1, "dim"),
    "aten.amax": (1, "dim"),
    "aten._softmax": (1, "dim"),
    "aten.topk": (2, "dim"),
    "aten.cat": (1, "dim"),
    "aten.stack": (1, "dim"),
    "aten.gather": (1, "dim"),
    "aten.scatter": (1, "dim"),
    "aten.scatter_": (1, "dim"),
    "aten.zeros_like": None,
    "aten.ones_like": None,
    "aten.native_layer_norm": None,
    "aten.constant_pad_nd": None,
    "aten.clone": None,
    "aten.copy_": None,
    "aten._to_copy": None,
    "aten.index": None,  # of a table, by tokens
    "aten.mm": None,
    "aten.bmm": None,
    "aten.addmm": None,
}
#: Sizes of steps whose arguments are kept: decoding repeats one, and prompts come in between.
_KEPT = 4


class CallRecorder(Protocol):
    """What records calls of Python functions between operators."""

    def last_call(self) -> Callable[..., object] | None: ...

    def add_call(
        self, function: Callable[..., object], tensors: tuple[torch.Tensor, ...], what: str
    ) -> None: ...


class _Rows(NamedTuple):
    """A tensor of which dimension ``dim`` has ``per`` entries for each token."""

    tensor: torch.Tensor
    dim: int
    per: int

    def first(self, tokens: int) -> torch.Tensor:
        return self.tensor.narrow(self.dim, 0, tokens * self.per)


class _Call(NamedTuple):
    """``function(*args, **kwargs)``; ``out``: where its results are copied."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: tuple[_Rows, ...]


class Calls:
    """The operations between two operators of ours, for any number of tokens."""

    def __init__(self) -> None:
        self.noted: list[_Call] = []
        self._prepared: dict[int, list[tuple[Any, Any, Any, Any]]] = {}

    def __call__(self, rows: torch.Tensor) -> None:
        """Run them for as many tokens as ``rows`` has."""
        tokens = len(rows)
        prepared = self._prepared.get(tokens)
        if prepared is None:
            if len(self._prepared) >= _KEPT:
                self._prepared.pop(next(iter(self._prepared)))
            prepared = self._prepared[tokens] = [self._of(call, tokens) for call in self.noted]
        for function, args, kwargs, out in prepared:
            found = function(*args, **kwargs)
            if out:
                for to, result in zip(out, found if len(out) > 1 else (found,), strict=True):
                    to.copy_(result)

    @staticmethod
    def _of(call: _Call, tokens: int) -> tuple[Any, Any, Any, Any]:
        def first(x: Any) -> Any:
            return x.first(tokens) if isinstance(x, _Rows) else x

        def of(tree: Any) -> Any:
            return tree_map(first, tree, is_leaf=lambda x: isinstance(x, _Rows))

        return call.function, of(call.args), of(call.kwargs), of(call.out)


class TorchTape(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which torch's row-wise operations on buffers of ``pool`` join ``recorder``.

    ``rows``: a tensor with one row for each token, whose memory begins with them. ``unowned``: a
    tensor in the same memory that does not keep it. ``empty``: a buffer of a shape and type.
    ``total``: the sum of two tensors of one shape, recorded as operators of ours.
    """

    def __init__(
        self,
        recorder: CallRecorder,
        pool: ActivationPool,
        rows: torch.Tensor,
        unowned: Callable[[torch.Tensor], torch.Tensor],
        empty: Callable[..., torch.Tensor],
        total: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder, self._pool = recorder, pool
        self._rows = rows
        self._tokens = len(rows)
        self._unowned, self._empty, self._total = unowned, empty, total
        #: The names of what was noted.
        self.names: list[str] = []

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """As of :class:`~sdk.kernels.host.torch_views.OnlyViews`."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = str(func).rpartition(".")[0]
        with _disable_current_modes():
            if name in VIEWS:
                return func(*args, **kwargs)
            flat = tree_flatten((args, kwargs))[0]
            rows = {id(x): self._found(x) for x in flat if isinstance(x, torch.Tensor)}
            if not any(found is not None for found in rows.values()):
                return self._constant(func, args, kwargs, flat)
            if name in ("aten.new_empty", "aten.new_zeros"):
                return self._new(func, name, args[0], args[1], kwargs.get("dtype"))
            if name == "aten.add" and (total := self._sum(args, kwargs, rows)) is not None:
                return total
            if torch.Tag.pointwise in func.tags or name in _MIXING:
                return self._note(func, name, args, kwargs, rows)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is NotImplemented:
            raise _unknown(func)
        return result

    def _found(self, x: torch.Tensor) -> _Rows | None:
        """The rows of a tensor; ``None`` for a constant.

        :raises CaptureError: it is a part of the step, and its tokens are not found.
        """
        storage = x.untyped_storage()
        if storage.data_ptr() == self._rows.untyped_storage().data_ptr():
            stride = self._rows.stride(0)
        elif self._pool.lends(storage.data_ptr()):
            stride = storage.nbytes() // self._tokens // x.itemsize
        else:
            return None
        for dim, (size, step) in enumerate(zip(x.shape, x.stride(), strict=True)):
            per, rest = divmod(size, self._tokens)
            if per and not rest and step * per == stride:
                return _Rows(x, dim, per)
        raise CaptureError(
            f"a step with a tensor {list(x.shape)} without a dimension of {self._tokens} tokens "
            "cannot be recorded"
        )

    def _constant(self, func: Any, args: Any, kwargs: Any, flat: list[Any]) -> Any:
        """The result of an operation that reads nothing of the step."""
        if any(x == self._tokens for x in flat if type(x) is int):
            raise _unknown(func)
        return func(*args, **kwargs)

    def _new(
        self, func: Any, name: str, like: torch.Tensor, shape: Any, dtype: torch.dtype | None
    ) -> torch.Tensor:
        """A tensor of a shape with one dimension of tokens."""
        dims = [dim for dim, size in enumerate(shape) if size == self._tokens]
        if len(dims) != 1 or (dtype or like.dtype) not in _DTYPES:
            raise _unknown(func)
        x = self._result(func, list(shape), dims[0], dtype or like.dtype)
        if name == "aten.new_zeros":
            own = _Rows(self._unowned(x), dims[0], 1)
            self._add(name, _Call(torch.Tensor.zero_, (own,), {}, ()))
        return x

    def _sum(self, args: Any, kwargs: Any, rows: dict[int, _Rows | None]) -> Any:
        """The sum of two tensors of one shape by operators of ours; ``None`` for another sum."""
        if kwargs or len(args) != 2 or not all(isinstance(x, torch.Tensor) for x in args):
            return None
        for x in args:
            found = rows[id(x)]
            if found is None or found.tensor.shape[: found.dim].numel() != 1:
                return None
            if x.dtype != torch.float32 or x.shape != args[0].shape or not x.is_contiguous():
                return None
        return self._total(*args)

    def _note(
        self, func: Any, name: str, args: Any, kwargs: Any, rows: dict[int, _Rows | None]
    ) -> Any:
        self._check_dims(func, name, args, kwargs, rows)
        if name == "aten.index" and rows[id(args[0])] is not None:  # tokens chosen by others
            raise _unknown(func)
        shapes = self._shapes(func, args, kwargs, rows)

        def slot(x: Any) -> Any:
            found = rows[id(x)] if isinstance(x, torch.Tensor) else None
            return x if found is None else found._replace(tensor=self._unowned(x))

        given, named = tree_map(slot, (args, kwargs))
        if func._schema.is_mutable:
            if rows[id(args[0])] is None:
                raise _unknown(func)
            self._add(name, _Call(func, given, named, ()))
            return args[0]
        results = [self._result(func, shape, dim, dtype) for shape, dim, _, dtype in shapes]
        out = tuple(
            _Rows(self._unowned(x), dim, per)
            for x, (_, dim, per, _) in zip(results, shapes, strict=True)
        )
        writes = _writing(func) if len(results) == 1 else None
        if writes is None:
            self._add(name, _Call(func, given, named, out))
        else:
            named = {key: x for key, x in named.items() if key in _names(writes)}
            self._add(name, _Call(writes, given, {**named, "out": out[0]}, ()))
        return results[0] if len(results) == 1 else tuple(results)

    def _add(self, name: str, call: _Call) -> None:
        self.names.append(name)
        calls = self._recorder.last_call()
        if not isinstance(calls, Calls):
            calls = Calls()
            self._recorder.add_call(calls, (self._rows,), "torch")
        calls.noted.append(call)

    def _check_dims(
        self, func: Any, name: str, args: Any, kwargs: Any, rows: dict[int, _Rows | None]
    ) -> None:
        """:raises CaptureError: an operation over the dimension of tokens."""
        mixing = _MIXING.get(name)
        if mixing is None or torch.Tag.pointwise in func.tags:
            return
        index, key = mixing
        dims = kwargs.get(key, args[index] if index < len(args) else None)
        if dims is None:
            dims = 0 if name in ("aten.cat", "aten.stack") else -1 if name == "aten.topk" else None
        for found in rows.values():
            if found is None:
                continue
            count = found.tensor.dim() + (name == "aten.stack")
            mixed = range(count) if dims is None else (dims,) if type(dims) is int else dims
            if found.dim in [dim % count for dim in mixed]:
                raise _unknown(func)

    def _shapes(
        self, func: Any, args: Any, kwargs: Any, rows: dict[int, _Rows | None]
    ) -> list[tuple[list[int], int, int, torch.dtype]]:
        """Of every result: the shape, the dimension of tokens, entries per token, and the type."""
        least = self._run_empty(func, args, kwargs, rows, 0)
        most = self._run_empty(func, args, kwargs, rows, 1)
        found = []
        for a, b in zip(least, most, strict=True):
            dims = [i for i, (x, y) in enumerate(zip(a.shape, b.shape, strict=True)) if x != y]
            if len(dims) != 1 or a.shape[dims[0]] % self._tokens or a.dtype not in _DTYPES:
                raise _unknown(func)
            found.append((list(a.shape), dims[0], a.shape[dims[0]] // self._tokens, a.dtype))
        return found

    def _run_empty(
        self, func: Any, args: Any, kwargs: Any, rows: dict[int, _Rows | None], more: int
    ) -> list[torch.Tensor]:
        """Results without data, for ``more`` tokens more."""

        def empty(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            shape, found = list(x.shape), rows[id(x)]
            if found is not None:
                shape[found.dim] += more * found.per
            return torch.empty(shape, dtype=x.dtype, device="meta")

        given, named = tree_map(empty, (args, kwargs))
        try:
            found = func(*given, **named)
        except (RuntimeError, IndexError) as error:
            raise _unknown(func) from error
        return list(found) if isinstance(found, tuple) else [found]

    def _result(self, func: Any, shape: list[int], dim: int, dtype: torch.dtype) -> torch.Tensor:
        """A buffer with tokens outermost in memory."""
        rest = shape[:dim] + shape[dim + 1 :]
        buffer = self._empty(shape[dim], *rest, dtype=dtype)
        x = buffer.movedim(0, dim)
        if "clone" in str(func) and not x.is_contiguous():
            raise _unknown(func)
        return x


def _writing(func: Any) -> Any:
    """The form of an operation that writes its result into ``out``; ``None`` if there is none."""
    packet = func._overloadpacket
    wanted = [(x.name, str(x.type)) for x in func._schema.arguments]
    for name in packet.overloads():
        found = getattr(packet, name)
        own = [(x.name, str(x.type)) for x in found._schema.arguments if not x.is_out]
        outs = [x.name for x in found._schema.arguments if x.is_out]
        if outs == ["out"] and own in (wanted, [x for x in wanted if x[0] not in _OF_NEW]):
            return found
    return None


#: Arguments of operations that make a tensor, which those that fill one lack.
_OF_NEW = ("dtype", "layout", "device", "pin_memory")


def _names(func: Any) -> Iterator[str]:
    return (x.name for x in func._schema.arguments)


def _unknown(func: Any) -> CaptureError:
    return CaptureError(f"a step with {func} cannot be recorded: its rows may depend on others")
