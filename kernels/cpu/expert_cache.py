"""Experts of a model that is larger than memory: ``native/expert_cache.hpp``.

The matrices lie in a file of the cache of weights. Those that are used often stay in slots, whose
bytes are given; the others are read when a token is routed to them.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Sequence
from ctypes import addressof, byref, c_double, c_int64, c_void_p
from typing import NamedTuple

from sdk.kernels.cpu.library import ExpertCounts, ExpertRanks, WeightCheck, WeightView
from sdk.kernels.cpu.packed_weight import Packed
from sdk.kernels.cpu.runtime import NativeRuntime, check
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.system import SYSTEM
from sdk.kernels.weights.expert_slots import slot_bytes, slots_within

#: Threads that read: with four, a disk has its next request before it is done with one.
READERS = 4


class ExpertUse(NamedTuple):
    """What a cache of experts has done since the model was loaded.

    Of the matrices that products needed, ``hits`` were in memory, ``guessed`` had been asked for
    by a guess of the router, ``missed`` neither. ``asked_ahead``: matrices that guesses asked for.
    ``reads``, ``read_bytes``: of the file. ``read_seconds``: of the readers, together;
    ``waited_seconds``: of threads of products, together.
    """

    hits: int
    guessed: int
    missed: int
    asked_ahead: int
    reads: int
    read_bytes: int
    read_seconds: float
    waited_seconds: float


class ExpertHistory(NamedTuple):
    """How the experts were used since the model was loaded.

    ``tokens``: how many were routed. ``chosen``: for each layer, how many of them chose each
    expert. ``ranks``: the uses by ``ranked`` of the tokens, each of which was alone in its step, by
    rank of the expert when all are ordered by recent use. Element i counts experts with i / 64 of
    all before them, the last element experts that had not been used before.
    """

    tokens: int
    chosen: list[list[int]]
    ranked: int
    ranks: list[int]


class ExpertGroup(NamedTuple):
    """The matrices of a layer's experts in a cache. ``views``: what the library writes."""

    cache: ExpertCache
    number: int
    views: tuple[WeightView, ...]


class ExpertCache:
    """The experts of one model. ``budget``: bytes of all slots; ``least``: matrices of each size
    that have a slot at least.

    ``file`` is open for reading, and ``path`` is its name; a description of its own is opened.
    """

    def __init__(
        self, runtime: NativeRuntime, file: int, path: str, budget: int, least: int
    ) -> None:
        self._library, self._budget = runtime.library, budget
        self._least = max(least, runtime.num_threads + 1)
        self._file, direct = _open(file)
        handle = runtime.library.embedlm_experts_create(
            self._file, os.fsencode(os.path.realpath(path)), direct, READERS
        )
        if not handle:
            os.close(self._file)
            raise KernelError("experts: out of memory")
        self._handle: int = handle
        weakref.finalize(self, _end, self._library, handle, self._file).atexit = False
        self._kinds: dict[int, int] = {}
        self._count: dict[int, int] = {}
        self._base = 0
        self._layers: dict[str, int] = {}
        self._experts: list[int] = []  # of each layer
        self._owner: dict[int, str] = {}
        self._groups: dict[int, ExpertGroup] = {}
        #: A group whose experts will probably be needed: int32 ``[T, k]``.
        self.expected: tuple[ExpertGroup, Tensor] | None = None
        #: Slots by their bytes, once all groups are known.
        self.slots: dict[int, int] = {}

    def place(self, base: int) -> None:
        """``base``: where the file begins in the mapping to which weights point."""
        self._base = base

    @property
    def handle(self) -> int:
        return self._handle

    @property
    def matrices(self) -> int:
        """All that may be in slots."""
        return sum(self._count.values())

    @property
    def nbytes(self) -> int:
        """Of the slots."""
        return sum(size * count for size, count in self.slots.items())

    def know(self, check: WeightCheck, layer: str) -> None:
        """The bytes of ``check`` are a matrix of an expert of ``layer``."""
        self._owner[addressof(check)] = layer

    @property
    def left(self) -> list[str]:
        """Layers with experts that are not in groups."""
        return sorted(set(self._owner.values()))

    def group(self, weights: Sequence[Packed]) -> ExpertGroup | None:
        """The matrices of one projection of a layer's experts, before :meth:`open`; ``None``: they
        are not those of experts."""
        found = [one for one in (weight.kept for weight in weights) if one is not None]
        if len(found) != len(weights):
            return None
        if (known := self._groups.get(addressof(found[0]))) is not None:
            return known
        names = {self._owner.pop(addressof(one), "") for one in found}
        if names == {""}:
            return None
        (name,) = names
        layer = self._layers.setdefault(name, len(self._layers))
        if layer == len(self._experts):
            self._experts.append(len(found))
        size = slot_bytes(max(one.bytes for one in found))
        kind = self._kinds.setdefault(size, len(self._kinds))
        self._count[size] = self._count.get(size, 0) + len(found)
        views = tuple(WeightView.from_buffer_copy(weight.view) for weight in weights)
        for view in views:
            view.check = None  # compared whenever it is read
        count = len(found)
        number = self._library.embedlm_experts_add(
            self._handle,
            layer,
            kind,
            (c_void_p * count)(*(addressof(weight.view) for weight in weights)),
            (c_void_p * count)(*(addressof(view) for view in views)),
            (c_int64 * count)(*(one.begin - self._base for one in found)),
            count,
        )
        if number < 0:
            raise KernelError("experts: out of memory")
        made = self._groups[addressof(found[0])] = ExpertGroup(self, number, views)
        return made

    def open(self) -> None:
        """All groups are known: take memory for the slots.

        :raises KernelError: it is too little.
        """
        self.slots = slots_within(self._budget, self._count, self._least)
        for size, count in self.slots.items():
            check(
                self._library.embedlm_experts_reserve(self._handle, self._kinds[size], count, size),
                "experts",
            )

    def use(self) -> ExpertUse:
        """What it has done so far."""
        found = ExpertCounts()
        self._library.embedlm_experts_counts(self._handle, byref(found))
        return ExpertUse(
            found.hits,
            found.guessed,
            found.missed,
            found.asked_ahead,
            found.reads,
            found.bytes,
            found.reading_ns / 1e9,
            found.waited_ns / 1e9,
        )

    @property
    def experts(self) -> tuple[int, ...]:
        """How many each layer has, in the order in which layers run."""
        return tuple(self._experts)

    def begin_with(self, shares: Sequence[Sequence[float]]) -> None:
        """Start with the uses of earlier runs: for each layer, the share of tokens that chose each
        expert. The experts chosen most are read into free slots while readers are idle."""
        for layer, own in enumerate(shares):
            values = (c_double * len(own))(*own)
            self._library.embedlm_experts_begin_with(self._handle, layer, values, len(own))
        check(self._library.embedlm_experts_preload(self._handle), "experts")

    def history(self) -> ExpertHistory:
        """How the experts were used so far."""
        found, chosen = ExpertRanks(), []
        self._library.embedlm_experts_ranks(self._handle, byref(found))
        for layer, count in enumerate(self._experts):
            values = (c_int64 * count)()
            self._library.embedlm_experts_uses(self._handle, layer, values, count)
            chosen.append(list(values))
        return ExpertHistory(found.tokens, chosen, found.ranked, list(found.ranks))

    def close(self) -> None:
        """End the readers. No product may run any more. Idempotent."""
        self._library.embedlm_experts_stop(self._handle)


def _open(file: int) -> tuple[int, bool]:
    """The same file without the system's page cache, if the file system can do that: what is read
    is kept here, or not at all."""
    with contextlib.suppress(OSError):
        return SYSTEM.reopen(file, direct=True), True
    return SYSTEM.reopen(file), False


def _end(library: object, handle: int, file: int) -> None:
    library.embedlm_experts_destroy(handle)  # type: ignore[attr-defined]
    os.close(file)
