"""Rounds float matrices to codes and scales: ``native/round_rows.hpp``, with the bits of the
reference in quant/methods.

A matrix comes some rows at a time, so that its rows as floats and all of its codes are not in
memory together. Several threads read and round parts of it; each calls the library by itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from ctypes import byref
from enum import IntEnum

from sdk.kernels.cpu.library import ELEMENT_TYPES, LEVELS, find_library
from sdk.kernels.cpu.round_args import RoundArgs
from sdk.kernels.dataclass import dataclass
from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.system.blocks import MemoryBlocks
from sdk.kernels.weights.layouts import PIECE_ROWS, Dense, Pieces

#: Columns of a group that HQQ takes at most: kMostHqqGroup of native/abi_rounding.hpp.
MOST_HQQ_GROUP = 256
#: Groups are whole rows, or a multiple of this many columns.
_COLUMNS = 16
#: Numbers that a thread rounds at a time.
_PIECE = 1 << 20
_FLOATS = ("float32", "float16", "bfloat16")


class Method(IntEnum):
    """What is rounded to, with the numbers of native/abi_rounding.hpp."""

    LARGEST = 0
    INTEGERS = 1
    HQQ = 2
    E4M3 = 3
    E2M1 = 4


@dataclass(frozen=True, slots=True)
class RoundingRule:
    """How rows are rounded: ``bits`` of a code, ``group`` columns and ``height`` rows share a
    scale. ``factor``: see RoundArgs of native/abi_rounding.hpp."""

    method: Method
    bits: int
    group: int
    height: int = 1
    symmetric: bool = False
    factor: float = 0.0


class RowRounder:
    """Rounds the matrices of a load with up to ``threads`` threads.

    ``level`` forces an instruction-set level (for tests). ``kept``: bytes of memory that is
    used for codes again when nothing refers to it: clearing new pages took a third of the time.
    """

    def __init__(self, threads: int = 1, level: str | None = None, kept: int = 0) -> None:
        found = find_library()
        self._library = None if isinstance(found, str) else found
        self._threads = threads
        self._blocks = MemoryBlocks(kept)
        self._level = -1 if level is None else LEVELS.index(level)

    def reject(self, pieces: Pieces, rule: RoundingRule) -> str | None:
        """Why the matrix is left to the reference, or ``None``."""
        columns, group = pieces.shape[1], rule.group
        if self._library is None:
            return "there is no native library"
        if group % _COLUMNS and group < columns:
            return f"groups of {group} columns: expected a multiple of {_COLUMNS} or the whole row"
        if rule.method is Method.HQQ and (group > MOST_HQQ_GROUP or group % _COLUMNS):
            expected = f"a multiple of {_COLUMNS}, up to {MOST_HQQ_GROUP}"
            return f"groups of {group} columns: expected {expected}"
        if rule.method in (Method.HQQ, Method.E2M1) and columns % group:
            return f"rows of {columns} columns: expected whole groups of {group}"
        if min(pieces.shape) < 1:
            return "there is nothing to round"
        return None

    def codes(self, rows: int, nbytes: int) -> Tensor:
        """Uninitialized memory for codes, uint8 ``[rows, nbytes]``."""
        return torch.from_numpy(self._blocks.take(rows * nbytes)).reshape(rows, nbytes)

    def clear(self) -> None:
        """Free the memory that is kept for codes."""
        self._blocks.clear()

    def run(
        self,
        pieces: Pieces,
        rule: RoundingRule,
        codes: Tensor | None = None,
        scale: Tensor | None = None,
        zero: Tensor | None = None,
    ) -> float | None:
        """Round all rows into ``codes [N, bytes]``, ``scale`` and ``zero [N, groups]`` and return
        the largest scale, or magnitude. ``None``: some numbers are not finite, or their type is
        none of float32, float16 and bfloat16; then the contents of the results mean nothing.

        Raises what ``pieces`` raises.
        """
        rows, columns = pieces.shape
        step = -(-pieces.step // rule.height) * rule.height
        found: list[float | None] = []

        def part(start: int) -> bool:
            layout = pieces.read(start, min(step, rows - start))
            values = layout.values.contiguous() if isinstance(layout, Dense) else None
            if values is None or type_name(values.dtype) not in _FLOATS:
                found.append(None)
                return False
            args = RoundArgs(
                x=values.data_ptr(),
                rows=values.shape[0],
                k=columns,
                group=rule.group,
                height=rule.height,
                method=rule.method,
                type=ELEMENT_TYPES[type_name(values.dtype)],
                bits=rule.bits,
                symmetric=rule.symmetric,
                factor=rule.factor,
            )
            if codes is not None:
                args.codes, args.row_bytes = _row(codes, start), codes.stride(0)
            if scale is not None:
                args.scale = _row(scale, start // rule.height)  # of a whole matrix: not written
            if zero is not None:
                args.zero = _row(zero, start)
            assert self._library is not None
            self._library.embedlm_round(self._level, byref(args))
            found.append(None if args.bad else args.largest)
            return not args.bad

        _in_threads(part, range(0, rows, step), self._threads)
        numbers = [each for each in found if each is not None]
        return max(numbers) if len(numbers) == len(found) else None


def _row(tensor: Tensor, row: int) -> int:
    address: int = tensor.data_ptr() + row * tensor.stride(0) * tensor.itemsize
    return address


def _in_threads(part: Callable[[int], bool], starts: range, threads: int) -> None:
    """Call ``part`` for each of ``starts``, in this and other threads, until one returns False or
    raises; what it raises is raised here, when no thread runs any more."""
    left = iter(starts)
    lock = threading.Lock()
    stopped = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stopped.is_set():
                with lock:
                    start = next(left, None)
                if start is None:
                    return
                if not part(start):
                    stopped.set()
        except BaseException as error:  # raised below, in the caller's thread
            errors.append(error)
            stopped.set()

    count = min(threads, len(starts))
    others = [threading.Thread(target=work, name="embedlm-round") for _ in range(count - 1)]
    try:
        for other in others:
            other.start()
        work()
    finally:
        stopped.set()  # there are no parts left, or this thread was interrupted
        for other in others:
            if other.ident is not None:
                other.join()
    if errors:
        raise errors[0]


def pieces_of(values: Tensor) -> Pieces:
    """A matrix in memory."""

    def read(start: int, count: int) -> Dense:
        return Dense(values[start : start + count])

    rows, columns = values.shape
    step = max(_PIECE // max(columns, 1) // PIECE_ROWS, 1) * PIECE_ROWS
    return Pieces((rows, columns), read, step)
