"""Snapshots of recurrent states in 16 bits, outside of the slots that sequences work in.

Each number is a float16 times a scale: a power of two that its row (``quant.caches.scales_of``)
has, chosen so that the largest is next to the end of float16's range. So nothing overflows, and
what is 2^29 times smaller than the largest of its head is still more than zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from sdk.engine.rank.cache_memory import CacheMemory
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.states import LayerState
from sdk.quant.caches import StateCache, StatePart, scales_of

#: The largest number of a row is in [2^14, 2^15) after it was divided.
_EXPONENT = 15
#: No scale is below 2^-115: its reciprocal would be more than float32 has.
_LEAST_EXPONENT = -100
#: On a CPU torch converts at most this many numbers at a time: from 32,768 on it shares an
#: operation with its threads, and waits for them (kv_transfer.py).
_ALONE = 2**15 - 1


class RoundedStates:
    """``memory``: a place for each snapshot. ``exact``: by layer the slots that sequences work in,
    ``layers``: the same layers in ``memory``, which are described by ``caches``."""

    def __init__(
        self,
        memory: CacheMemory,
        exact: Mapping[int, LayerState],
        layers: Mapping[int, LayerState],
        caches: Sequence[StateCache],
    ) -> None:
        self.memory = memory
        self.layers = layers
        self._parts: list[tuple[LayerState, LayerState, StatePart]] = [
            (exact[layer], layers[layer], part)
            for layer, cache in zip(layers, caches, strict=True)
            for part in cache.parts
        ]

    def save(self, slot: int, place: int) -> None:
        """Round the states in a slot."""
        for exact, own, part in self._parts:
            source, target = exact[part.name][slot], own[part.name][place]
            if source.dtype == target.dtype:
                target.copy_(source)
                continue
            scales = own[f"{part.name}_scale"][place]
            for x, y, scale in _pieces(source, target, scales, part):
                _, exponent = torch.frexp(x.abs().amax(1, keepdim=True))
                exponent = exponent.clamp_(min=_LEAST_EXPONENT) - _EXPONENT
                torch.ldexp(torch.ones_like(scale), exponent, out=scale)
                y.copy_(x / scale)

    def load(self, slot: int, place: int) -> None:
        """The inverse of :meth:`save`, as far as it can be."""
        for exact, own, part in self._parts:
            target, source = exact[part.name][slot], own[part.name][place]
            if source.dtype == target.dtype:
                target.copy_(source)
                continue
            scales = own[f"{part.name}_scale"][place]
            for x, y, scale in _pieces(target, source, scales, part):
                torch.mul(y, scale, out=x)


def _pieces(
    x: Tensor, y: Tensor, scales: Tensor, part: StatePart
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows ``[rows, numbers]`` of both with the scales ``[rows, 1]`` that they have."""
    count = scales_of(part)
    x, y, scales = x.view(count, -1), y.view(count, -1), scales.view(count, 1)
    step = count if not x.is_cpu else max(_ALONE // x.shape[1], 1)
    for begin in range(0, count, step):
        end = begin + step
        yield x[begin:end], y[begin:end], scales[begin:end]
