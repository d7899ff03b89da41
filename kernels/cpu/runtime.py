"""The runtime of the native kernels (threads, scratch memory, SIMD level) and its programs."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import Structure, byref, c_char, c_int64
from typing import TYPE_CHECKING

import numpy as np

from sdk.kernels.cpu.library import (
    LEVELS,
    Count,
    ExpertsArgs,
    HeadsArgs,
    LinearArgs,
    OpKind,
    WeightView,
    find_library,
    levels,
)
from sdk.kernels.cpu.operator_times import OperatorTime, ProgramTimes
from sdk.kernels.errors import CollectiveError, KernelError
from sdk.kernels.lazy_torch import Tensor, torch

if TYPE_CHECKING:
    from sdk.kernels.cpu.packed_weight import Packed

_STATUS = {
    1: "out of memory",
    2: "the engine is closed",
    3: "no such operator",
    4: "a token or page id, row, slot or length lies outside of its tensor",
    5: "another rank ended, gave up or did not answer in time",
    6: "packed weights in the cache of weights are damaged: load the model again",
    7: "an expert cannot be read from the cache of weights: load the model again",
}
_RANK_LOST = 5
_OVER_REQUESTS = frozenset(
    (OpKind.ATTENTION, OpKind.PLACES, OpKind.CONV, OpKind.DELTA, OpKind.SPACE)
)


class NativeRuntime:
    """Threads, scratch memory and instruction-set level of one ``Ops``. Thread-safe.

    :raises KernelError: without the library, or when ``level`` does not run on this CPU.
    """

    def __init__(self, num_threads: int, level: str | None = None) -> None:
        library = find_library()
        if isinstance(library, str):
            raise KernelError(library)
        if level is not None and level not in levels():
            raise KernelError(f"SIMD level: expected one of {levels()}, found {level!r}")
        self.library, self.num_threads = library, num_threads
        self.handle = self._open(num_threads, level)
        self.level = LEVELS[library.embedlm_runtime_level(self.handle)]
        self.multiplies_bf16 = self.level == "avx512_bf16"
        self.recording: Program | None = None
        #: The weight that is being packed, and what its codes or values are read from.
        self._packing: tuple[tuple[Packed, Tensor], ...] = ()
        self._packing_lock = threading.Lock()
        self._run = library.embedlm_run

    def _open(self, num_threads: int, level: str | None) -> int:
        index = -1 if level is None else LEVELS.index(level)
        handle: int = self.library.embedlm_runtime_create(num_threads, index)
        if not handle:
            raise KernelError(f"CPU kernels with {num_threads} threads: out of memory")
        # Destroyed only when nothing refers to it, and not at exit: another thread, even a daemon
        # thread, may be in a call.
        weakref.finalize(self, self.library.embedlm_runtime_destroy, handle).atexit = False
        return handle

    def restart(self, num_threads: int) -> None:
        """Use ``num_threads`` new threads, in a forked child, which has none of the old ones.

        Programs that were recorded before the fork must not run.
        """
        self.handle, self.num_threads = self._open(num_threads, self.level), num_threads

    def pack(self, packed: Packed, source: Tensor, row_bytes: int, first: int, rows: int) -> None:
        """Begin to pack ``rows`` rows into ``packed``, from row ``first`` on; ``row_bytes`` as
        ``packing_source`` returns it. Ends with the next call, or :meth:`finish_packing`.

        Meanwhile the caller reads the next matrix: 22 ms of the 0.2 s in which SmolLM2-135M loads.
        """
        view, data = byref(packed.view), source.data_ptr()
        with self._packing_lock:
            # Kept before the call: a KeyboardInterrupt may come right after it.
            self._packing = (*self._packing, (packed, source))
            status = self.library.embedlm_pack(self.handle, view, data, row_bytes, first, rows)
            self._packing = self._packing[-1:]
        check(status, "pack")

    def finish_packing(self) -> None:
        """Wait until all weights are packed."""
        with self._packing_lock:
            self.library.embedlm_pack_end(self.handle)
            self._packing = ()

    def unpack(self, packed: Packed, out: Tensor, row_bytes: int) -> None:
        """The codes or values of a packed weight into ``out``, in rows of ``row_bytes`` bytes."""
        view, data = byref(packed.view), out.data_ptr()
        check(self.library.embedlm_unpack(self.handle, view, data, row_bytes), "unpack")

    def run(self, kind: OpKind, args: Structure, rows: int, what: str) -> None:
        """Run one operator over ``rows`` rows (attention, places, states: requests); while a
        program is being recorded, add it to the program.

        :raises KernelError: naming ``what``, when the library reports an error.
        """
        if self.recording is not None:
            self.recording.add(kind, args, rows)
        else:
            check(self._run(self.handle, kind, byref(args), rows), what)

    def call(self, function: Callable[..., object], tensors: Sequence[Tensor], what: str) -> None:
        """Call ``function(*tensors)``, which no native operator can do; while a program is being
        recorded, add it to the program, which calls it with the rows of the step."""
        if self.recording is not None:
            self.recording.add_call(function, tensors, what)
        else:
            function(*tensors)

    def close(self) -> None:
        """Wait for running calls, stop the threads and free the scratch memory. Idempotent."""
        self.library.embedlm_runtime_close(self.handle)
        self._packing = ()


class Program:
    """Operators recorded for one runtime, which run with any counts up to ``limits``.

    ``limits`` are the rows of tensors during recording, for tokens, outputs and requests. After a
    select all operators run over the outputs, and between gathering the tokens of all ranks and
    combining the rows of experts over those tokens.

    Consecutive native operators are one native call. Python functions run between these calls, in
    the caller's thread. So no native thread waits for one, and what it raises (KeyboardInterrupt,
    too) ends the step: native code could not pass on an exception.
    """

    def __init__(self, runtime: NativeRuntime, limits: tuple[int, int, int]) -> None:
        self._runtime = runtime
        self._limits = limits
        self._count = Count.TOKENS
        self._gathered = 0  # rows of tensors with the tokens of all ranks
        self._counts = (c_int64 * 3)()
        self._run = runtime.library.embedlm_program_run
        #: Native operators, and the function that is called after them: what it runs over, and
        #: tensors with this many rows for each.
        self._parts: list[tuple[int, Callable[..., object], Count, list[tuple[Tensor, int]]]] = []
        #: The native operators after the last call.
        self._handle = self._native()
        #: By handle: kind, what it runs over, and its weights, if it is a product.
        self._operators: dict[int, list[tuple[OpKind, Count, _Weights]]] = {self._handle: []}

    def _native(self) -> int:
        library = self._runtime.library
        handle: int = library.embedlm_program_create()
        if not handle:
            raise KernelError("recording a program: out of memory")
        weakref.finalize(self, library.embedlm_program_destroy, handle).atexit = False
        return handle

    def add(self, kind: OpKind, args: Structure, rows: int) -> None:
        """Called by :meth:`NativeRuntime.run`."""
        if kind is OpKind.SELECT:
            self._count = Count.OUTPUTS
        elif kind is OpKind.GATHER_RANKS:
            self._count, self._gathered = Count.GATHERED, rows
        count = self._count
        if kind in _OVER_REQUESTS:
            count = Count.REQUESTS
        elif kind is OpKind.COMBINE_RANKS and count is Count.GATHERED:  # into this rank's tokens
            self._count = Count.TOKENS
        per = self._rows_per(count, rows, kind.name)
        add = self._runtime.library.embedlm_program_add
        check(add(self._handle, kind, byref(args), count, per), f"recording {kind.name}")
        self._operators[self._handle].append((kind, count, _weights_of(args)))

    def add_call(
        self, function: Callable[..., object], tensors: Sequence[Tensor], what: str
    ) -> None:
        """Called by :meth:`NativeRuntime.call`."""
        count = self._count
        found = [(unowned(x), self._rows_per(count, len(x), what)) for x in tensors]
        self._parts.append((self._handle, function, count, found))
        self._handle = self._native()
        self._operators[self._handle] = []

    def last_call(self) -> Callable[..., object] | None:
        """The function that runs last, if no native operator follows it."""
        if not self._parts or self._operators[self._handle]:
            return None
        return self._parts[-1][1]

    def _rows_per(self, count: Count, rows: int, what: str) -> int:
        limit = self._gathered if count is Count.GATHERED else self._limits[count]
        per, rest = divmod(rows, limit)
        if rest or not per:
            raise KernelError(
                f"recording {what}: expected a multiple of {limit} rows, found {rows}"
            )
        return per

    def run(self, tokens: int, outputs: int, requests: int) -> None:
        """Run all operators with these counts.

        :raises KernelError: the library reports an error. Raises what called functions raise.
        """
        self._counts[:] = [tokens, outputs, requests]
        self.run_again()

    def run_again(self) -> None:
        """Run with the counts of the last run. Raises as :meth:`run` does."""
        if self._parts:
            self._run_parts()
        if status := self._run(self._runtime.handle, self._handle, self._counts):
            check(status, "step")

    def time_operators(self, on: bool) -> None:
        """Time the operators of later runs, from zero, or no longer. Costs 50 ns per task."""
        for handle in self._operators:
            time = self._runtime.library.embedlm_program_time
            check(time(self._runtime.handle, handle, on), "timing operators")

    def times(self) -> ProgramTimes:
        """Of all runs since :meth:`time_operators` was called with ``True``.

        Called functions are not timed: their time is in none of the results.
        """
        found, seconds, runs = [], 0.0, 0
        for handle, operators in self._operators.items():
            out = (c_int64 * (2 * len(operators) + 2))()
            self._runtime.library.embedlm_program_times(self._runtime.handle, handle, out)
            for i, (kind, over, (weight, parts, per)) in enumerate(operators):
                view = None if weight is None else WeightView.from_address(weight)
                rows, tiles = out[2 * i] / 1e9, out[2 * i + 1] / 1e9
                found.append(OperatorTime(kind, over, view, rows, tiles, parts, per))
            seconds += out[2 * len(operators)] / 1e9
            runs = max(runs, out[2 * len(operators) + 1])
        return ProgramTimes(found, seconds, runs)

    def _run_parts(self) -> None:
        runtime, counts = self._runtime.handle, self._counts
        with torch.inference_mode():
            for handle, function, count, tensors in self._parts:
                if status := self._run(runtime, handle, counts):
                    check(status, "step")
                if rows := counts[count]:  # without rows there is nothing to do, on any rank
                    function(*(x[: rows * per] for x, per in tensors))


#: The address of a product's first weight, the number of its weights, and of those of one row.
_Weights = tuple[int | None, int, int]


def _weights_of(args: Structure) -> _Weights:
    if isinstance(args, ExpertsArgs):
        return args.each.w, args.count, args.k
    if isinstance(args, HeadsArgs):
        return args.each.w, args.count, args.count
    return (args.w if isinstance(args, LinearArgs) else None), 1, 1


def unowned(x: Tensor) -> Tensor:
    """The same memory, which the result does not keep: the buffers of a graph can be used again for
    later tensors, and belong to the graph."""
    found = x.numpy()
    span = sum((n - 1) * step for n, step in zip(found.shape, found.strides, strict=True))
    memory = (c_char * (span + found.itemsize)).from_address(x.data_ptr())
    return torch.from_numpy(np.ndarray(found.shape, found.dtype, memory, strides=found.strides))


def check(status: int, op: str) -> None:
    """Raise unless a native call reports success.

    :raises CollectiveError: another rank was lost. :raises KernelError: anything else.
    """
    if status:
        error = CollectiveError if status == _RANK_LOST else KernelError
        raise error(f"{op}: {_STATUS[status]}")
