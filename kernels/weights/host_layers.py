"""Layers of a model on a GPU whose weights are offloaded to the host's memory.

They alternate between two buffers on the card. While one layer computes, another stream copies the
next layer's weights to the other buffer; events order the two streams, so that a captured step
contains the copies. Every step copies each of these layers once, so the bus is the limit, not the
card (16 GB/s of PCIe 3 are 16 layers of a 7B model in 4 bits, 110 MiB each, in 0.1 s).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field, fields, is_dataclass, replace
from typing import Any, Protocol

from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch

#: Smaller tensors stay on the card: tables that weights share, scales of tiny layers.
_LEAST = 4096
#: Buffers on the card.
_NUM_BUFFERS = 2
_ALIGN = 256


class Copies(Protocol):
    """The stream that copies weights, separate from the one that computes."""

    def event(self) -> Any:
        """An event that can be recorded on one stream and awaited on the other."""

    def after_work(self) -> None:
        """Later copies wait for everything launched on the computing stream so far."""

    def copy(self, buffer: Tensor, weights: Tensor, free: Any, done: Any) -> None:
        """Copy after ``free``, if it is not None, and then record ``done``."""

    def wait(self, done: Any) -> None:
        """Later computations wait for ``done``."""

    def used(self, free: Any) -> None:
        """Record ``free`` after everything launched on the computing stream so far."""


class CardCopies:
    """A second stream of the card. Not run on a card yet; tests check the order of operations."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def event(self) -> Any:
        return torch.cuda.Event()  # type: ignore[no-untyped-call]

    def after_work(self) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())

    def copy(self, buffer: Tensor, weights: Tensor, free: Any, done: Any) -> None:
        with torch.cuda.stream(self._stream):
            if free is not None:
                self._stream.wait_event(free)
            buffer.copy_(weights, non_blocking=True)
            done.record(self._stream)

    def wait(self, done: Any) -> None:
        torch.cuda.current_stream().wait_event(done)

    def used(self, free: Any) -> None:
        free.record(torch.cuda.current_stream())


@dataclass(slots=True)
class _Layer:
    """The tensors of a layer with their offsets in its ``weights``, and its events."""

    copied: Any
    used: Any
    tensors: list[tuple[Tensor, int]] = field(default_factory=list)
    nbytes: int = 0
    weights: Tensor | None = None


class HostLayers:
    """The layers from number ``first`` on, loaded one after another and run in that order.

    After :meth:`keep`, their tensors are parts of one of the buffers. They hold their values while
    their layer runs, and inside :meth:`fetched`.
    """

    def __init__(self, first: int, device: torch.device, copies: Copies | None = None) -> None:
        self._first = first
        self._device = device
        self._copies = CardCopies(device) if copies is None else copies
        self._layers: list[_Layer] = []
        self._buffers = [
            torch.empty(0, dtype=torch.uint8, device=device) for _ in range(_NUM_BUFFERS)
        ]
        self._loading: _Layer | None = None
        self._filling: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the weights in the host's memory."""
        return sum(layer.nbytes for layer in self._layers)

    # Loading

    @contextmanager
    def load(self, index: int) -> Iterator[None]:
        """Weights kept inside this context belong to layer ``index``."""
        if index < self._first:
            yield
            return
        if index != self._first + len(self._layers):
            raise KernelError(
                f"layers in the host's memory: expected layer {self._first + len(self._layers)} "
                f"next, found {index}"
            )
        layer = _Layer(self._copies.event(), self._copies.event())
        self._layers.append(layer)
        self._loading = layer
        try:
            yield
        finally:
            self._loading = None
        buffer = self._buffer_of(layer)
        layer.weights = torch.empty(
            layer.nbytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"
        )
        layer.weights.copy_(buffer[: layer.nbytes])

    def keep(self, packed: Any) -> Any:
        """Move the tensors of a packed weight into the buffer of the layer that is loading.

        The weight that is returned has the same tensors, and says that steps write them
        (``rewritten``) if its kernels ask for that.
        """
        layer = self._loading
        if layer is None:
            return packed
        packed = getattr(packed, "own", packed)  # without what a library has of the weight besides
        for tensor in _tensors(packed):
            start = -(-layer.nbytes // _ALIGN) * _ALIGN
            values = tensor.detach().contiguous()  # a separate tensor, which is not moved
            layer.nbytes = start + values.nbytes
            if layer.nbytes > len(self._buffer_of(layer)):
                self._grow(layer.nbytes)
            _point_to(tensor, self._buffer_of(layer), start)
            tensor.copy_(values)
            layer.tensors.append((tensor, start))
        return replace(packed, rewritten=True) if hasattr(packed, "rewritten") else packed

    def _buffer_of(self, layer: _Layer) -> Tensor:
        return self._buffers[self._layers.index(layer) % _NUM_BUFFERS]

    def _grow(self, nbytes: int) -> None:
        """Enlarge the buffers; all tensors keep their offsets."""
        nbytes = max(nbytes, len(self._buffers[0]) * 5 // 4)
        for number, old in enumerate(self._buffers):
            new = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
            new[: len(old)] = old
            self._buffers[number] = new
            for layer in self._layers[number::_NUM_BUFFERS]:
                for tensor, start in layer.tensors:
                    _point_to(tensor, new, start)

    # Running

    @contextmanager
    def run(self, index: int) -> Iterator[None]:
        """The context of layer ``index`` of a step; steps run their layers from 0 on."""
        if index == 0:
            self._copies.after_work()
            for number in range(min(_NUM_BUFFERS, len(self._layers))):
                self._copy(number, None)
        number = index - self._first
        if number < 0:
            yield
            return
        layer = self._layers[number]
        self._copies.wait(layer.copied)
        yield
        if number + _NUM_BUFFERS < len(self._layers):
            self._copies.used(layer.used)
            self._copy(number + _NUM_BUFFERS, layer.used)

    @contextmanager
    def fetched(self, packed: Any) -> Iterator[None]:
        """Between steps: a context in which a packed weight's tensors hold their values."""
        wanted = next(iter(_tensors(packed)), None)
        for number, layer in enumerate(self._layers):
            if any(tensor is wanted for tensor, _ in layer.tensors):
                self._copies.after_work()
                self._copy(number, None)
                self._copies.wait(layer.copied)
        yield

    def _copy(self, number: int, free: Any) -> None:
        layer = self._layers[number]
        assert layer.weights is not None
        buffer = self._buffers[number % _NUM_BUFFERS][: layer.nbytes]
        self._copies.copy(buffer, layer.weights, free, layer.copied)


def _tensors(packed: Any) -> Iterator[Tensor]:
    """The large tensors of a packed weight."""
    if not is_dataclass(packed):
        return
    for one in fields(packed):
        value = getattr(packed, one.name)
        for part in value if isinstance(value, tuple) else (value,):
            if isinstance(part, Tensor) and not part.is_meta and part.nbytes >= _LEAST:
                yield part


def _point_to(tensor: Tensor, buffer: Tensor, start: int) -> None:
    """Make ``tensor`` the part of ``buffer`` from byte ``start`` on."""
    part = buffer[start : start + tensor.nbytes].view(tensor.dtype)
    tensor.data = part.view(tensor.shape)
