"""Two streams of a card that is not there.

Copies happen as late as the order that was asked for allows, so that a wait that is missing shows
in the numbers; a copy over a place that the computing stream may still be reading is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Event:
    def __init__(self) -> None:
        self.time = -1


class Streams:
    """See :class:`sdk.kernels.weights.host_layers.Copies`. Every call is a moment of the computing
    stream, which has run up to ``now``; the copying one knows that it ran up to ``seen``."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.now = self.seen = 0
        self.waiting: list[tuple[Tensor, Tensor, Event]] = []
        self.reading: dict[int, int] = {}  # places, and since when nobody read them any more
        self.copied = 0

    def event(self) -> Event:
        return Event()

    def after_work(self) -> None:
        self.now += 1
        self.seen = self.now

    def copy(self, place: Tensor, weights: Tensor, free: Event | None, done: Event) -> None:
        if free is not None:
            assert free.time >= 0, "an event that nobody recorded is awaited"
            self.seen = max(self.seen, free.time)
        for other, _, _ in self.waiting:
            assert other.data_ptr() != place.data_ptr(), "two copies into one place"
        assert self.seen >= self.reading.get(place.data_ptr(), 0), "the place is still read"
        self.waiting.append((place, weights, done))

    def wait(self, done: Event) -> None:
        self.now += 1
        while self.waiting:  # in the order of their stream
            place, weights, one = self.waiting.pop(0)
            place.copy_(weights)
            self.copied += 1
            self.reading[place.data_ptr()] = self.now + 1  # until the next call at least
            if one is done:
                return
        raise AssertionError("waits for a copy that nobody asked for")

    def used(self, free: Event) -> None:
        self.now += 1
        free.time = self.now
