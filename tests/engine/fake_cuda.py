"""What torch.cuda does to an engine, without a GPU: streams, events, memory, graphs that complain.

Tensors of the card (:class:`CardTensor`) lie in an arena of this process's memory, and torch
dispatches their operations here. An operation runs at once, so numbers are right by the host's
order; what a card would not order shows in the books. A stream's clock says which work of every
stream comes before its next work, and each cache line of the arena remembers who wrote and who read
it last. :class:`Hazard` is raised where

- work reads what unordered work writes, or writes what unordered work reads or writes, also after
  the memory has become another tensor's;
- a tensor is read after its memory was written as another tensor: the result of a graph after the
  next replay;
- the host writes pinned memory before the copy from it is done;
- during a capture: the host waits or asks for pinned memory; the collector may run, or runs; a
  graph is destroyed; another thread launches into the stream.

What the host reads before a copy to it is done is nonsense (:data:`POISON`).
"""

from __future__ import annotations

import gc
import mmap
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("cuda", 0)
#: Bytes of pinned memory whose copy is not done.
POISON = 0xA5
_LINE = 64
_AREA = 1 << 26  # of address space, for each pool
_ARENA = _AREA << 5
_MOST_STREAMS = 24


class Hazard(AssertionError):
    """What would be wrong on a card, sometimes."""


class Stream:
    """``clock[s]``: of the work of stream s, how much comes before this one's next."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = DEVICE
        self.clock = np.zeros(_MOST_STREAMS, np.int64)
        self.number = _cuda().number_of(self)

    def wait_stream(self, other: Stream) -> None:
        np.maximum(self.clock, other.clock, out=self.clock)

    def wait_event(self, event: Event) -> None:
        if event.clock is not None:
            np.maximum(self.clock, event.clock, out=self.clock)

    def synchronize(self) -> None:
        _cuda().host_waits(self.clock)


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.clock: Any = None

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or _cuda().current()).clock.copy()

    def synchronize(self) -> None:
        if self.clock is not None:
            _cuda().host_waits(self.clock)


class Memory:
    """A piece of the arena, until it is dropped. ``tag``: which tensor of many at one place."""

    def __init__(self, begin: int, size: int, pool: Any) -> None:
        self.begin, self.size, self.pool = begin, size, pool
        self.tag = _cuda().new_tag()


class CardTensor(Tensor):
    """A tensor on the card: ``inner`` is its memory, as a tensor of the CPU."""

    inner: Tensor
    memory: Memory

    @staticmethod
    def __new__(cls, inner: Tensor, memory: Memory) -> CardTensor:
        made = Tensor._make_wrapper_subclass(
            cls,
            inner.shape,
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device="meta",
        )
        made.inner, made.memory = inner, memory
        return made

    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_cpu = property(lambda self: False)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, **kwargs: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def cpu(self, *args: Any) -> Tensor:
        return _cuda().to_host(self)

    def pin_memory(self, *args: Any) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor'")

    def record_stream(self, stream: Stream) -> None:
        _cuda().used_by(self.memory, stream)

    def __repr__(self, **kwargs: Any) -> str:
        return f"CardTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _cuda().dispatch(func, args, kwargs or {})


class Graph:
    """``torch.cuda.CUDAGraph``: what was launched between begin and end, in order."""

    def __init__(self) -> None:
        self._launches: list[Callable[[], Any]] = []

    def capture_begin(self, pool: Any, capture_error_mode: str = "global") -> None:
        cuda = _cuda()
        if capture_error_mode != "thread_local":
            cuda.hazard("a capture forbids calls of other threads of the host")
        if gc.isenabled():
            cuda.hazard("the garbage collector may run during a capture")
        if cuda.current() is cuda.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if cuda.capturing is not None:
            raise RuntimeError("a capture in a capture")
        self._pool = pool
        cuda.capturing, cuda.capturing_thread = self, threading.get_ident()
        cuda.capturing_stream = cuda.current()

    def capture_end(self) -> None:
        cuda = _cuda()
        if cuda.capturing is not self:
            raise RuntimeError("there is no capture to end")
        cuda.capturing = None
        cuda.graphs += 1

    def add(self, launch: Callable[[], Any]) -> None:
        self._launches.append(launch)

    def replay(self) -> None:
        cuda = _cuda()
        if cuda.capturing is not None and cuda.capturing_thread == threading.get_ident():
            cuda.hazard("a replay in a capture")
        cuda.replays += 1
        with torch.no_grad():
            for launch in self._launches:
                launch()

    def __del__(self) -> None:
        cuda = _ACTIVE[-1] if _ACTIVE else None
        inside = cuda is not None and cuda.capturing not in (None, self)
        if inside and cuda.capturing_thread == threading.get_ident():  # type: ignore[union-attr]
            cuda.hazards.append("a graph is destroyed during a capture")  # type: ignore[union-attr]


class Copy:
    """A copy between pinned memory and the card that may not be done yet."""

    def __init__(self, host: Tensor, value: Tensor, stream: Stream, *, to_host: bool) -> None:
        self.host, self.value, self.to_host = _as_bytes(host), _as_bytes(value).clone(), to_host
        self.stream, self.at = stream.number, int(stream.clock[stream.number])
        if to_host:
            self.host.fill_(POISON)

    def overlaps(self, host: Tensor) -> bool:
        begin, end = host.data_ptr(), host.data_ptr() + host.nbytes
        own = self.host.data_ptr()
        return own < end and begin < own + self.host.nbytes


class Cuda:
    """The card, and what stands for ``torch.cuda``."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._bytes = torch.from_numpy(np.frombuffer(mmap.mmap(-1, _ARENA), np.uint8))
        lines = _ARENA // _LINE
        self._writer, self._written = np.zeros(lines, np.int8), np.zeros(lines, np.int64)
        self._tags = np.zeros(lines, np.int64)
        self._read: dict[int, Any] = {}  # by stream: the last work that read each line
        self._lines = lines
        self._streams: list[Any] = []
        self._here = threading.local()
        self._tag = 0
        self.living: dict[int, tuple[int, Any]] = {}  # begin -> end, pool
        self._host = np.zeros(_MOST_STREAMS, np.int64)
        self._copies: list[Copy] = []
        self._pinned: dict[int, int] = {}
        self._pending_uses: dict[int, list[Any]] = {}
        self._blocked: list[tuple[int, int, Any]] = []
        self._pools = 0
        self._areas: dict[Any, int] = {}
        self.capturing: Graph | None = None
        self.capturing_thread = 0
        self.capturing_stream: Stream | None = None
        self.graphs = self.replays = self.waits = 0
        self.hazards: list[str] = []
        _ACTIVE.append(self)
        self.default = Stream()

    # Streams

    def number_of(self, stream: Stream) -> int:
        for number, one in enumerate(self._streams):
            if one() is None and number:  # torch reuses them too
                stream.clock[:] = self._host
                np.maximum(stream.clock, self._all(number), out=stream.clock)
                self._streams[number] = weakref.ref(stream)
                return number
        assert len(self._streams) < _MOST_STREAMS, "too many streams"
        self._streams.append(weakref.ref(stream))
        return len(self._streams) - 1

    def _all(self, number: int) -> Any:
        clock = np.zeros(_MOST_STREAMS, np.int64)
        clock[number] = self._written[self._writer == number].max(initial=0)
        if number in self._read:
            clock[number] = max(clock[number], self._read[number].max(initial=0))
        return clock

    def current(self, device: Any = None) -> Stream:
        return getattr(self._here, "stream", self.default)

    @contextmanager
    def stream(self, stream: Stream | None) -> Iterator[None]:
        before = self.current()
        self._here.stream = before if stream is None else stream
        try:
            yield
        finally:
            self._here.stream = before

    def host_waits(self, clock: Any) -> None:
        """The host waits until all of that is done."""
        self._not_in_capture("the host waits")
        with self._lock:
            self.waits += 1
            np.maximum(self._host, clock, out=self._host)
            left = []
            for copy in self._copies:
                if copy.at > self._host[copy.stream]:
                    left.append(copy)
                elif copy.to_host:
                    copy.host.copy_(copy.value)
                else:
                    self._check_source(copy)
            self._copies = left

    def synchronize(self, device: Any = None) -> None:
        self.host_waits(np.maximum.reduce([s().clock for s in self._streams if s() is not None]))

    def _not_in_capture(self, what: str) -> None:
        if self.capturing is not None and self.capturing_thread == threading.get_ident():
            self.hazard(f"{what} during a capture")

    def hazard(self, what: str) -> None:
        self.hazards.append(what)
        raise Hazard(what)

    # Memory

    def new_tag(self) -> int:
        with self._lock:
            self._tag += 1
            return self._tag

    def new_pool(self) -> int:
        self._pools += 1
        return self._pools

    def allocate(self, like: Tensor) -> CardTensor:
        """Memory for a tensor like this; during a capture from the graph's pool."""
        strides, shape, dtype = like.stride(), like.shape, like.dtype
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        size = max(-(-count * dtype.itemsize // _LINE) * _LINE, _LINE) if 0 not in shape else _LINE
        capturing = self.capturing is not None and self.capturing_thread == threading.get_ident()
        pool = ("graph", self.capturing._pool) if capturing else ("stream", self.current().number)  # type: ignore[union-attr]
        with self._lock:
            self._blocked = [b for b in self._blocked if not (b[2] <= self._host).all()]
            # a copy: other threads free memory meanwhile
            taken = [(begin, end) for begin, (end, _) in self.living.copy().items()]
            taken += [(begin, end) for begin, end, _ in self._blocked]
            # a pool has pieces of its own
            area = self._areas.setdefault(pool, len(self._areas))
            begin = area * _AREA
            for first, last in sorted(taken):
                if last <= begin:
                    continue
                if first - begin >= size:
                    break
                begin = last
            assert begin + size <= (area + 1) * _AREA <= _ARENA, "the fake card is full"
            memory = Memory(begin, size, pool)
            self.living[begin] = begin + size, pool
            weakref.finalize(memory, self._free, begin, size, memory.tag)
        whole = self._bytes[begin : begin + size].view(dtype)
        made = CardTensor(whole.as_strided(shape, strides), memory)
        if capturing:
            mark = partial(self._mark, begin, size, memory.tag)
            self.capturing.add(mark)  # type: ignore[union-attr]
        else:
            self._mark(begin, size, memory.tag)
        return made

    def _mark(self, begin: int, size: int, tag: int) -> None:
        self._tags[begin // _LINE : (begin + size) // _LINE] = tag

    def used_by(self, memory: Memory, stream: Stream) -> None:
        self._pending_uses.setdefault(memory.tag, []).append(stream)

    def _free(self, begin: int, size: int, tag: int) -> None:
        self.living.pop(begin, None)
        for stream in self._pending_uses.pop(tag, ()):
            self._blocked.append((begin, begin + size, stream.clock.copy()))

    def in_pools(self) -> set[int]:
        """Where tensors lie in the pools of graphs."""
        return {begin for begin, (_, pool) in self.living.copy().items() if pool[0] == "graph"}

    def pin(self, tensor: Tensor) -> Tensor:
        self._not_in_capture("pinned memory is allocated")
        begin = tensor.data_ptr()
        self._pinned[begin] = begin + tensor.nbytes
        weakref.finalize(tensor.untyped_storage(), self._pinned.pop, begin, None)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        at = tensor.data_ptr()
        return any(begin <= at < end for begin, end in list(self._pinned.items()))

    # Work

    def launched(self, reads: Sequence[CardTensor], writes: Sequence[CardTensor]) -> None:
        """Enter work into the books, in the current stream."""
        with self._lock:
            stream = self.current()
            busy = self.capturing_stream if self.capturing is not None else None
            if stream is busy and self.capturing_thread != threading.get_ident():
                self.hazard("another thread launches into a stream that is captured")
            clock, own = stream.clock, stream.number
            np.maximum(clock, self._host, out=clock)
            clock[own] += 1
            for tensor in reads:
                at = _lines(tensor, self._bytes)
                if (self._written[at] > clock[self._writer[at]]).any():
                    self.hazard("work reads what another stream has not written yet")
                if (self._tags[at] != tensor.memory.tag).any():
                    self.hazard("memory is read after it was written as another tensor")
            for tensor in writes:
                at = _lines(tensor, self._bytes)
                if (self._written[at] > clock[self._writer[at]]).any():
                    self.hazard("work writes what another stream still writes")
                for other, seen in self._read.items():
                    if other != own and (seen[at] > clock[other]).any():
                        self.hazard("work writes what another stream still reads")
                self._writer[at], self._written[at] = own, clock[own]
            for tensor in reads:
                if own not in self._read:
                    self._read[own] = np.zeros(self._lines, np.int64)
                self._read[own][_lines(tensor, self._bytes)] = clock[own]

    def launch(
        self,
        run: Callable[[], Any],
        reads: Sequence[CardTensor],
        writes: Sequence[CardTensor],
    ) -> Any:
        """Run work that has its results in ``writes``, or note it for the replays of a graph.

        A graph does not keep tensors: their memory is another's as soon as nobody holds them.
        """
        if self.capturing is not None and self.capturing_thread == threading.get_ident():
            seen = [_Seen(x) for x in reads], [_Seen(x) for x in writes]

            def again() -> None:
                self.launched(*seen)  # type: ignore[arg-type]
                run()

            self.capturing.add(again)
            return None
        self.launched(reads, writes)
        return run()

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = str(func)
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, CardTensor)]
        if _is_view(func):
            return _wrapped(func(*_inner(args), **_inner(kwargs)), inputs[0].memory)
        if name.startswith("aten._local_scalar_dense"):
            return self.to_host(inputs[0]).item()
        if name.startswith("aten.copy_."):
            return self._copy(
                args[0],
                args[1],
                bool((args[2:] or (False,))[0]) or kwargs.get("non_blocking", False),
            )
        if name.startswith("aten._to_copy"):
            kwargs = {k: v for k, v in kwargs.items() if k not in ("non_blocking", "pin_memory")}
            where = kwargs.pop("device", DEVICE)
            if torch.device(where).type == "cpu":
                return torch.ops.aten._to_copy(self.to_host(args[0]), **kwargs)
        if name.startswith(("aten.equal", "aten.nonzero", "aten.is_nonzero", "aten.unique")):
            hosts = [self.to_host(x) if isinstance(x, CardTensor) else x for x in args]
            return func(*hosts, **kwargs)
        kwargs = {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        foreign = [
            x for x in tree_flatten((args, kwargs))[0]
            if isinstance(x, Tensor) and not isinstance(x, CardTensor) and x.dim()
        ]  # fmt: skip
        if foreign:  # torch copies indices, for example, and waits
            self._not_in_capture(f"{name} copies a tensor of the host")
        run = partial(func, *_inner(args), **_inner(kwargs))  # without what keeps their memory
        if func._schema.is_mutable:
            written = [
                value
                for given, value in zip(func._schema.arguments, args, strict=False)
                if given.alias_info is not None and given.alias_info.is_write
            ]
            written += [
                kwargs[x.name] for x in func._schema.arguments
                if x.name in kwargs and x.alias_info is not None and x.alias_info.is_write
            ]  # fmt: skip
            self.launch(run, inputs, written)
            return written[0] if len(written) == 1 else tuple(written)
        if any(name.startswith(f"aten.{x}") for x in ("new_empty", "empty_like")):
            return self.allocate(func(*_inner(args), **_inner(kwargs)))
        with torch.no_grad():
            likes, spec = tree_flatten(func(*_inner(args), **_inner(kwargs)))
        outs = [self.allocate(x) if isinstance(x, Tensor) else x for x in likes]
        inner = [x.inner for x in outs if isinstance(x, CardTensor)]

        def fill() -> None:
            made = [x for x in tree_flatten(run())[0] if isinstance(x, Tensor)]
            for out, value in zip(inner, made, strict=True):
                out.copy_(value)

        # a graph reads the memory of its inputs, not the tensors
        self.launch(fill, inputs, [x for x in outs if isinstance(x, CardTensor)])
        return torch.utils._pytree.tree_unflatten(outs, spec)

    def to_host(self, x: CardTensor) -> Tensor:
        """A copy for which the host waits."""
        self._not_in_capture("the host reads a tensor")
        self.launched([x], [])
        self.host_waits(self.current().clock)
        return x.inner.clone()

    def _copy(self, target: Tensor, source: Tensor, non_blocking: bool) -> Tensor:
        stream = self.current()
        if isinstance(target, CardTensor) and isinstance(source, CardTensor):
            to, of = target.inner, source.inner
            self.launch(lambda: to.copy_(of), [source], [target])
        elif isinstance(target, CardTensor):
            if not source.dim() and self.capturing is not None:
                to, of = target.inner, source.clone()
                self.launch(lambda: to.copy_(of), [], [target])
                return target
            self._not_in_capture("a copy from the host")
            self.launched([], [target])
            if self.is_pinned(source):
                self._end_copies(source, stream, writes=False)
            target.inner.copy_(source)
            if non_blocking and self.is_pinned(source):
                self._copies.append(Copy(source, source, stream, to_host=False))
            else:
                self.host_waits(stream.clock)
        else:
            assert isinstance(source, CardTensor)
            self._not_in_capture("a copy to the host")
            self.launched([source], [])
            if non_blocking and self.is_pinned(target):
                self._end_copies(target, stream, writes=True)
                converted = source.inner.to(target.dtype).expand(target.shape).contiguous()
                self._copies.append(Copy(target, converted, stream, to_host=True))
            else:
                target.copy_(source.inner)
                self.host_waits(stream.clock)
        return target

    def _end_copies(self, host: Tensor, stream: Stream, *, writes: bool) -> None:
        """Before the next copy from or to a place of pinned memory: the ones before it are done
        when it begins. Nobody has to wait for that, but they have to be ordered."""
        left = []
        for copy in self._copies:
            if not copy.overlaps(host):
                left.append(copy)
                continue
            if copy.at > stream.clock[copy.stream]:
                self.hazard("two copies of one place of pinned memory are not ordered")
            if not copy.to_host:
                self._check_source(copy)
                if not writes:
                    left.append(copy)
            elif not writes:
                copy.host.copy_(copy.value)
        self._copies = left

    def _check_source(self, copy: Copy) -> None:
        if not torch.equal(copy.host, copy.value):
            self.hazard("the host has written pinned memory before it was copied to the card")

    def check(self) -> None:
        """At the end: what was found, also by threads that could not raise."""
        for copy in self._copies:
            if not copy.to_host and not torch.equal(copy.host, copy.value):
                self.hazards.append("the host has written pinned memory before it was copied")
        assert self.hazards == []

    def collecting(self, phase: str, info: Any) -> None:
        """For ``gc.callbacks``."""
        if phase == "start" and self.capturing is not None:
            self.hazards.append("garbage is collected during a capture")


_ACTIVE: list[Cuda] = []


def _cuda() -> Cuda:
    return _ACTIVE[-1]


class _Seen:
    """Where a tensor lies, for a graph that does not keep it."""

    class _Tag:
        def __init__(self, tag: int) -> None:
            self.tag = tag

    def __init__(self, x: CardTensor) -> None:
        self.inner, self.memory = x.inner, self._Tag(x.memory.tag)


def _lines(x: Any, arena: Tensor) -> slice:
    inner = x.inner
    begin = inner.data_ptr() - arena.data_ptr()
    last = sum((n - 1) * s for n, s in zip(inner.shape, inner.stride(), strict=True))
    end = begin + (last + 1) * inner.itemsize if inner.numel() else begin
    return slice(begin // _LINE, -(-end // _LINE))


def _is_view(func: Any) -> bool:
    """Whether an operation returns its input's memory and moves no data."""
    alias = [one.alias_info for one in func._schema.returns]
    return str(func).startswith("aten._unsafe_view") or any(a and not a.is_write for a in alias)


def _inner(x: Any) -> Any:
    return tree_map(lambda one: one.inner if isinstance(one, CardTensor) else one, x)


def _wrapped(x: Any, memory: Memory) -> Any:
    return tree_map(lambda one: CardTensor(one, memory) if isinstance(one, Tensor) else one, x)


def _as_bytes(x: Tensor) -> Tensor:
    assert x.is_contiguous()
    return x.view(-1).view(torch.uint8)


def _on_card(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


@contextmanager
def without_a_gpu() -> Iterator[Cuda]:
    """Inside, torch has a GPU: this one."""
    cuda = Cuda()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("empty", "zeros", "ones", "full", "tensor", "arange"):
            patch.setattr(torch, name, _making(cuda, getattr(torch, name)))
        to = Tensor.to

        def moved(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            given = [*args, kwargs.get("device")]
            devices = [a for a in given if isinstance(a, torch.device | str) and _on_card(a)]
            if not devices or isinstance(x, CardTensor):
                if isinstance(x, CardTensor) and torch.device("cpu") in given + ["cpu"] * 0:
                    x = x.cpu()
                rest = [a for a in args if not (isinstance(a, torch.device | str) and _on_card(a))]
                kwargs = {k: v for k, v in kwargs.items() if not (k == "device" and _on_card(v))}
                left = rest or any(k != "non_blocking" for k in kwargs)
                return to(x, *rest, **kwargs) if left else x
            dtypes = [a for a in (*args, kwargs.get("dtype")) if isinstance(a, torch.dtype)]
            like = x.to(dtypes[0]) if dtypes else x
            made = cuda.allocate(torch.empty_like(like))
            return made.copy_(like, non_blocking=kwargs.get("non_blocking", False))

        patch.setattr(Tensor, "to", moved)
        pinned = Tensor.is_pinned
        patch.setattr(
            Tensor,
            "is_pinned",
            lambda x, *_: not isinstance(x, CardTensor) and (cuda.is_pinned(x) or pinned(x)),
        )
        patch.setattr(torch, "inference_mode", torch.no_grad)  # wrappers cannot be its tensors
        replaced = {
            "Stream": Stream, "Event": Event, "CUDAGraph": Graph, "stream": cuda.stream,
            "current_stream": cuda.current, "synchronize": cuda.synchronize,
            "graph_pool_handle": cuda.new_pool,
            "empty_cache": lambda: cuda._not_in_capture("memory is returned"),
            "get_device_name": lambda device=None: "a card that is not here",
        }  # fmt: skip
        for name, value in replaced.items():
            patch.setattr(torch.cuda, name, value)
        gc.callbacks.append(cuda.collecting)
        try:
            yield cuda
        finally:
            gc.callbacks.remove(cuda.collecting)
            _ACTIVE.remove(cuda)


def _making(cuda: Cuda, make: Callable[..., Tensor]) -> Callable[..., Any]:
    def made(*args: Any, device: Any = None, pin_memory: bool = False, **kwargs: Any) -> Any:
        if not _on_card(device):
            found = make(*args, device=device, **kwargs)
            return cuda.pin(found) if pin_memory else found
        values = make(*args, **kwargs)
        result = cuda.allocate(values)
        if make.__name__ == "empty":
            return result
        if make.__name__ == "tensor":
            return result.copy_(values)
        inner = result.inner
        cuda.launch(lambda: inner.copy_(values), [], [result])
        return result

    return made
