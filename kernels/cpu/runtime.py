"""The runtime of the native kernels (threads, scratch memory, SIMD level) and its programs."""

from __future__ import annotations

import weakref
from ctypes import Structure, byref, c_int64

from sdk.kernels.cpu.library import LEVELS, Count, OpKind, find_library, levels
from sdk.kernels.errors import CollectiveError, KernelError

_STATUS = {
    1: "out of memory",
    2: "the engine is closed",
    3: "no such operator",
    4: "a token or page id, row, slot or length lies outside of its tensor",
    5: "another rank ended, gave up or did not answer in time",
}
_RANK_LOST = 5


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
        self.library = library
        self.handle = self._open(num_threads, level)
        self.level = LEVELS[library.embedlm_runtime_level(self.handle)]
        self.pack = library.embedlm_pack
        self.unpack = library.embedlm_unpack
        self.recording: Program | None = None
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
        self.handle = self._open(num_threads, self.level)

    def run(self, kind: OpKind, args: Structure, rows: int, what: str) -> None:
        """Run one operator over ``rows`` rows (attention and places: requests); while a program is
        being recorded, add it to the program.

        :raises KernelError: naming ``what``, when the library reports an error.
        """
        if self.recording is not None:
            self.recording.add(kind, args, rows)
        else:
            check(self._run(self.handle, kind, byref(args), rows), what)

    def close(self) -> None:
        """Wait for running calls, stop the threads and free the scratch memory. Idempotent."""
        self.library.embedlm_runtime_close(self.handle)


class Program:
    """Operators recorded for one runtime, which run in one call with any counts up to ``limits``.

    ``limits`` are the rows of tensors during recording, for tokens, outputs and requests. After a
    select all operators run over the outputs, and between gathering the tokens of all ranks and
    combining the rows of experts over those tokens.
    """

    def __init__(self, runtime: NativeRuntime, limits: tuple[int, int, int]) -> None:
        self._runtime = runtime
        self._limits = limits
        self._count = Count.TOKENS
        self._gathered = 0  # rows of tensors with the tokens of all ranks
        handle = runtime.library.embedlm_program_create()
        if not handle:
            raise KernelError("recording a program: out of memory")
        self._handle: int = handle
        self._counts = (c_int64 * 3)()
        self._run = runtime.library.embedlm_program_run
        weakref.finalize(self, runtime.library.embedlm_program_destroy, handle).atexit = False

    def add(self, kind: OpKind, args: Structure, rows: int) -> None:
        """Called by :meth:`NativeRuntime.run`."""
        if kind is OpKind.SELECT:
            self._count = Count.OUTPUTS
        elif kind is OpKind.GATHER_RANKS:
            self._count, self._gathered = Count.GATHERED, rows
        count = self._count
        if kind in (OpKind.ATTENTION, OpKind.PLACES):
            count = Count.REQUESTS
        elif kind is OpKind.COMBINE_RANKS and count is Count.GATHERED:  # into this rank's tokens
            self._count = Count.TOKENS
        limit = self._gathered if count is Count.GATHERED else self._limits[count]
        per, rest = divmod(rows, limit)
        if rest or not per:
            raise KernelError(
                f"recording {kind.name}: expected a multiple of {limit} rows, found {rows}"
            )
        add = self._runtime.library.embedlm_program_add
        check(add(self._handle, kind, byref(args), count, per), f"recording {kind.name}")

    def run(self, tokens: int, outputs: int, requests: int) -> None:
        """Run all operators with these counts. :raises KernelError: the library reports an
        error."""
        self._counts[:] = [tokens, outputs, requests]
        self.run_again()

    def run_again(self) -> None:
        """Run with the counts of the last run. :raises KernelError: the library reports an
        error."""
        if status := self._run(self._runtime.handle, self._handle, self._counts):
            check(status, "step")


def check(status: int, op: str) -> None:
    """Raise unless a native call reports success.

    :raises CollectiveError: another rank was lost. :raises KernelError: anything else.
    """
    if status:
        error = CollectiveError if status == _RANK_LOST else KernelError
        raise error(f"{op}: {_STATUS[status]}")
