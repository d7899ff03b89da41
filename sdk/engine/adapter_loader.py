"""Brings adapters into the slots of the ranks while requests run.

Reading a file and converting it for the kernels takes milliseconds to seconds, so a thread does
that while steps go on. Between two steps only pointers are exchanged. Ranks in other processes get
the matrices in parts, one part between two steps.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping

from sdk.api.errors import SdkError
from sdk.engine.executor import Executor
from sdk.engine.rank.adapters import (
    RankAdapters,
    add_parts,
    clear_slots,
    drop_parts,
    features,
    learn_elsewhere,
    pack_parts,
    write_slot,
)
from sdk.engine.scheduling.adapter_slots import AdapterSlots, Resident
from sdk.quant.adapter import Adapter, LowRank

#: Bytes that ranks in other processes get between two steps.
_PART = 16 * 2**20


class AdapterLoader:
    """Loads what :class:`AdapterSlots` wants. Used between two steps, except for :meth:`wait`.

    ``own_rank``: the adapters of rank 0, which is in this process.
    """

    def __init__(
        self,
        slots: AdapterSlots,
        executor: Executor,
        own_rank: Callable[[], RankAdapters],
        num_ranks: int,
        num_stages: int = 1,
    ) -> None:
        self._slots = slots
        self._executor = executor
        self._own_rank = own_rank
        self._num_ranks, self._num_stages = num_ranks, num_stages
        self._queue: deque[Resident] = deque()
        self._reading: _Reading | None = None
        self._delivery: Generator[None, None, None] | None = None
        self._introduce()

    def _introduce(self) -> None:
        """Tell the ranks which matrices are in other stages."""
        if self._num_stages == 1:
            return
        found: dict[str, tuple[tuple[int, int], int]] = {}
        for answer in self._executor.on_ranks(features):
            for path, (shape, count) in answer.items():
                found[path] = shape, count + (found[path][1] if path in found else 0)
        self._executor.on_ranks(learn_elsewhere, found)

    @property
    def busy(self) -> bool:
        """Whether :meth:`advance` has something to do, now or soon."""
        return self._reading is not None or bool(self._queue) or self._slots.has_work

    def wait(self, seconds: float) -> None:
        """Wait until a file is read, at most this long."""
        reading = self._reading
        if reading is not None and self._delivery is None:
            reading.done.wait(seconds)

    def advance(self) -> list[tuple[Resident, Exception]]:
        """Do what is due between two steps; returns the adapters that cannot be loaded, and why.

        The caller ends the requests that wait for those, then calls :meth:`AdapterSlots.failed`.
        Any exception raised here means that the ranks are lost.
        """
        slots = self._slots
        if cleared := slots.take_cleared():
            self._executor.on_ranks(clear_slots, cleared)
        self._queue.extend(slots.take_wanted())
        failed: list[tuple[Resident, Exception]] = []
        reading = self._reading
        if reading is not None and reading.done.is_set():
            try:
                self._deliver(reading)
            except SdkError as error:
                failed.append((reading.adapter, error))
                self._executor.on_ranks(drop_parts)
                self._reading = self._delivery = None
        if self._reading is None and self._queue:
            self._reading = _Reading(self._queue.popleft(), self._own_rank(), self._num_ranks > 1)
        return failed

    def _deliver(self, reading: _Reading) -> None:
        """Take the next step of putting an adapter into its slot. Raises why that is impossible."""
        if reading.error is not None:
            raise reading.error
        if self._delivery is None:
            self._delivery = self._deliveries(reading)
        try:
            next(self._delivery)
        except StopIteration:
            self._reading = self._delivery = None
            self._slots.loaded(reading.adapter)

    def _deliveries(self, reading: _Reading) -> Generator[None, None, None]:
        """Sends an adapter to the ranks; pauses where a step may run."""
        ranks, adapter = self._executor.on_ranks, reading.adapter
        if reading.whole is not None:
            for part in _parts(reading.whole.matrices):
                ranks(add_parts, part)
                yield
            for error in ranks(pack_parts, adapter.source.name):
                if error is not None:
                    raise error
        ranks(write_slot, adapter.slot)

    def restart(self) -> None:
        """The ranks were started again, and their slots are empty."""
        self._stop()
        self._introduce()
        self._slots.reload_all()

    def close(self) -> None:
        """Wait for the thread. Idempotent."""
        self._stop()

    def _stop(self) -> None:
        self._queue.clear()
        reading, self._reading, self._delivery = self._reading, None, None
        if reading is not None and reading.thread.is_alive():
            reading.thread.join()


class _Reading:
    """A thread that reads one adapter and packs it for rank 0. ``whole``: for the other ranks."""

    def __init__(self, adapter: Resident, own_rank: RankAdapters, keep: bool) -> None:
        self.adapter = adapter
        self.done = threading.Event()
        self.error: SdkError | None = None
        self.whole: Adapter | None = None
        self._own_rank = own_rank
        self._keep = keep
        self.thread = threading.Thread(target=self._run, name="sdk-adapter", daemon=True)
        try:
            self.thread.start()
        except RuntimeError as error:  # the system has no thread left
            self.error = SdkError(f"adapter {adapter.source.name!r}: no thread to load it: {error}")
            self.done.set()

    def _run(self) -> None:
        source = self.adapter.source
        try:
            read = source.read()
            self._own_rank.pack(read)
            self.whole = read if self._keep else None
        except SdkError as error:
            self.error = error
        except BaseException as error:  # MemoryError; whatever torch raises
            self.error = SdkError(
                f"adapter {source.name!r} cannot be loaded: {type(error).__name__}: {error}"
            )
        finally:
            self.done.set()


def _parts(matrices: Mapping[str, LowRank]) -> Iterator[dict[str, LowRank]]:
    """The matrices in parts of some :data:`_PART` bytes."""
    part: dict[str, LowRank] = {}
    size = 0
    for path, matrix in matrices.items():
        part[path] = matrix
        size += sum(one.numel() * one.element_size() for one in matrix if one is not None)
        if size >= _PART:
            yield part
            part, size = {}, 0
    if part:
        yield part
