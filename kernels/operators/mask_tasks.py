"""Masks of allowed tokens that grammar matchers compute while the model runs.

A matcher is a foreign library's object, used only through C functions (:class:`MaskFunctions`). The
CPU runtime calls them on its own threads before it samples (cpu/native/masks.hpp), without the
interpreter lock; :meth:`MaskTasks.compute` does the same for other devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, Structure, c_bool, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class MaskFunctions(NamedTuple):
    """Addresses of C functions.

    ``compute(matcher, mask, bytes)``, ``consume(matcher, tokens, count)`` and ``rollback(matcher,
    count)`` return 0, or another number on an error; ``validate(matcher, tokens, count)`` returns
    how many tokens may follow; ``stopped(matcher)`` says whether the structure is complete.
    """

    compute: int
    validate: int
    consume: int
    rollback: int
    stopped: int


class MaskTask(NamedTuple):
    """The masks of consecutive output rows, from ``row`` on: one, and one after each draft.

    ``also``: a token that the first mask allows too; -1: none.
    """

    matcher: int
    row: int
    drafts: tuple[int, ...] = ()
    also: int = -1


class _TaskRecord(Structure):
    """``MaskTask`` of cpu/native/abi.hpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("matcher", "masks", "drafts")),
        *((name, c_int32) for name in ("count", "also", "failed")),
    ]


class _TasksRecord(Structure):
    """``MaskTasks`` of cpu/native/abi.hpp."""

    _fields_ = [
        *((name, c_void_p) for name in MaskFunctions._fields),
        *((name, c_int64) for name in ("words", "count")),
        ("tasks", POINTER(_TaskRecord)),
        ("waited_ns", c_int64),
    ]


class MaskTasks:
    """The tasks of one step, in memory that recorded steps read. At most ``rows`` tasks."""

    def __init__(self, rows: int) -> None:
        self._record = _TasksRecord()
        self._tasks = (_TaskRecord * rows)()
        self._record.tasks = self._tasks
        #: The address that the CPU runtime reads.
        self.address = ctypes.addressof(self._record)
        self._drafts: list[object] = []  # keeps their memory
        self._masks: NDArray[np.uint32] | None = None
        self._done = True

    def __len__(self) -> int:
        return int(self._record.count)

    def set(
        self, functions: MaskFunctions, tasks: Sequence[MaskTask], masks: NDArray[np.uint32]
    ) -> None:
        """Replace the tasks. The masks of row r are written to ``masks[r]`` uint32 ``[words]``."""
        record = self._record
        for name, address in zip(functions._fields, functions, strict=True):
            setattr(record, name, address)
        record.words, record.count, record.waited_ns = masks.shape[1], len(tasks), 0
        self._masks, self._drafts, self._done = masks, [], False
        base, stride = masks.ctypes.data, masks.strides[0]
        for one, task in zip(self._tasks, tasks, strict=False):
            one.matcher, one.masks = task.matcher, base + task.row * stride
            one.count, one.also, one.failed = 1 + len(task.drafts), task.also, 0
            if task.drafts:
                drafts = (c_uint32 * len(task.drafts))(*task.drafts)
                self._drafts.append(drafts)
                one.drafts = ctypes.addressof(drafts)

    def clear(self) -> None:
        """There is nothing to compute any more."""
        self._record.count, self._drafts = 0, []

    def take_waited_seconds(self) -> float:
        """How long the last step waited for the masks, after it had computed the logits."""
        waited, self._record.waited_ns = self._record.waited_ns, 0
        return float(waited) * 1e-9

    def failed(self, index: int) -> bool:
        """Whether the matcher of a task reported an error; its row then allows no token."""
        return bool(self._tasks[index].failed)

    def compute(self) -> None:
        """Compute the masks in this thread, unless that was done."""
        if not self._record.count or self._done:
            return
        self._done = True
        begin = perf_counter_ns()
        self._compute()
        self._record.waited_ns = perf_counter_ns() - begin

    def _compute(self) -> None:
        record, size = self._record, self._record.words * 4
        compute = _PROTOTYPES[0](record.compute)
        validate, consume = _PROTOTYPES[1](record.validate), _PROTOTYPES[1](record.consume)
        rollback, stopped = _PROTOTYPES[2](record.rollback), _PROTOTYPES[3](record.stopped)
        for task in self._tasks[: record.count]:
            matcher, masks = task.matcher, task.masks
            failed = compute(matcher, masks, size) != 0
            if failed:
                ctypes.memset(masks, 0, size)
            elif task.also >= 0:
                word = c_uint32.from_address(masks + task.also // 32 * 4)
                word.value |= 1 << task.also % 32
            consumed = 0
            for row in range(1, task.count):
                draft = task.drafts + 4 * (row - 1)
                ctypes.memset(masks + row * size, 0xFF, size)
                if failed or consumed < row - 1 or validate(matcher, draft, 1) != 1:
                    continue
                failed = consume(matcher, draft, 1) != 0
                consumed += not failed
                if not failed and not stopped(matcher):
                    failed = compute(matcher, masks + row * size, size) != 0
            if consumed and rollback(matcher, consumed) != 0:
                failed = True
            task.failed = failed


_PROTOTYPES = (
    ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_size_t),
    ctypes.CFUNCTYPE(c_int32, c_void_p, c_void_p, c_size_t),
    ctypes.CFUNCTYPE(c_int32, c_void_p, c_size_t),
    ctypes.CFUNCTYPE(c_bool, c_void_p),
)
