"""The parameters of sampling one row of logits, and the definition that all kernels share.

The steps, in this order (vLLM's, with typical as in llama.cpp): temperature, ``min_p``, ``top_k``,
``typical_p``, ``top_p``, XTC, the draw; or mirostat instead of the truncations. Each step sees the
tokens that earlier ones left. A token's *gap* is ``(best - logit) / temperature``, its weight
``e^-gap``, or 0 beyond a gap of 87.3 (e^-87.3 is 1e-38). A token is likelier than another if its
gap is smaller or, for equal gaps, its id. The draw takes the first token, in order of ids, at which
the running sum of the weights exceeds ``uniform`` times their total.

Before that, the logits of a row may be changed (:class:`Shape`), on a copy for the draw: the logits
themselves stay unchanged.

Arithmetic: gaps are float32 (one rounding for the difference, one for the quotient), sums float64.
Two kernels may round weights differently by some 1e-7, and choose different tokens only if
``uniform``, or the mass of a truncation, is that close to a boundary.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Sequence
from ctypes import Structure, addressof, c_float, c_int32, c_int64, c_void_p
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sdk.kernels.errors import KernelError
from sdk.kernels.operators.mask_tasks import MaskFunctions, MaskTask, MaskTasks

#: One row, as ``Draw`` of cpu/native/abi.hpp. Temperature 0 is the argmax, below 1e-30 it is 1e-30;
#: ``min_p`` 0, ``typical_p`` 1, ``top_p`` 1, ``top_k`` 0, a negative ``xtc_threshold`` and a NaN
#: ``mirostat_mu`` (bits of surprise) are off. ``uniform`` is in [0, 1).
DRAW = np.dtype(
    [
        *((name, np.float64) for name in ("temperature", "min_p", "typical_p", "top_p")),
        *((name, np.float64) for name in ("xtc_threshold", "mirostat_mu")),
        ("top_k", np.int64),
        ("uniform", np.float64),
    ]
)

#: The largest gap with a weight.
FAR = float(np.float32(87.3))

Draws = NDArray[np.void]
Mask = NDArray[np.uint32]
Masks = NDArray[np.uint32]

_RECORD = struct.Struct("=6dqd")


def pack_draw(
    temperature: float = 1.0,
    min_p: float = 0.0,
    typical_p: float = 1.0,
    top_p: float = 1.0,
    xtc_threshold: float = -1.0,
    mirostat_mu: float = float("nan"),
    top_k: int = 0,
) -> bytes:
    """One ``DRAW`` as bytes, packed once for all tokens of a request."""
    return _RECORD.pack(
        temperature, min_p, typical_p, top_p, xtc_threshold, mirostat_mu, top_k, 0.0
    )


def join_draws(packed: Sequence[bytes], uniforms: Sequence[float]) -> Draws:
    """``DRAW [R]`` from R packed draws and their random numbers in [0, 1)."""
    draws = np.frombuffer(bytearray().join(packed), DRAW)
    draws["uniform"] = uniforms
    return draws


#: The draw of a row whose token is the argmax.
GREEDY = pack_draw(temperature=0.0)
_UNIFORM = struct.Struct("=d")


class ChangeKind(IntEnum):
    """``ChangeKind`` of cpu/native/abi.hpp."""

    #: ``logits[ids[i]] += values[i]``
    ADD = 0
    #: Penalties for tokens that occurred before. ``values[i]``: how often ``ids[i]`` is in the
    #: output (0: in the prompt only). In float32: divide by the repetition factor (Keskar et al.
    #: 2019) if the logit is positive, else multiply; subtract frequency times ``values[i]``;
    #: subtract presence if ``values[i]`` is positive.
    PENALIZE = 1
    #: ``logits[ids[i]] = -inf``
    FORBID = 2
    #: All logits become minus infinity except that of ``ids[0]``, which becomes 0.
    FORCE = 3


class _ChangeRecord(Structure):
    """``Change`` of cpu/native/abi.hpp."""

    _fields_ = [
        *((name, c_void_p) for name in ("ids", "values")),
        ("count", c_int64),
        ("factors", c_float * 3),
        ("kind", c_int32),
    ]


class _ShapeRecord(Structure):
    """``Shape`` of cpu/native/abi.hpp."""

    _fields_ = [
        ("mask", c_void_p),
        ("words", c_int64),
        ("changes", c_void_p),
        ("count", c_int64),
    ]


class Change:
    """One change of a row's logits: the first ``count`` of ``ids`` int32 and ``values`` float32
    (for ADD and PENALIZE), which may have room for more.

    ``ids`` are distinct, except in FORBID; ids outside the row have no effect. ``factors`` of
    PENALIZE: repetition, frequency, presence.
    """

    def __init__(
        self,
        kind: ChangeKind,
        ids: ArrayLike = (),
        values: ArrayLike = (),
        factors: Sequence[float] = (1.0, 0.0, 0.0),
    ) -> None:
        self.kind = ChangeKind(kind)
        self.factors = tuple(factors)
        self._record = _ChangeRecord(kind=kind, factors=self.factors)
        self.address = addressof(self._record)
        self.count = 0
        self.ids = np.empty(0, np.int32)
        self.values: NDArray[np.float32] | None = None
        if self.kind in (ChangeKind.ADD, ChangeKind.PENALIZE):
            self.values = np.empty(0, np.float32)
        self.write(ids, values)

    def __reduce__(self) -> Any:
        values = () if self.values is None else self.values[: self.count]
        return Change, (self.kind, self.ids[: self.count], values, self.factors)

    def copy(self) -> Change:
        """A copy with its own memory."""
        made, arguments = self.__reduce__()
        copied: Change = made(*arguments)
        return copied

    def write(self, ids: ArrayLike, values: ArrayLike = ()) -> None:
        """Replace ids and values (as many as ids, if the kind has values)."""
        array = np.asarray(ids)
        count = len(array)
        self.resize(count)
        self.ids[:count] = array
        if self.values is not None:
            self.values[:count] = values

    def resize(self, count: int) -> None:
        """Keep the first entries, or add new ones, which the caller must write."""
        if count > len(self.ids):
            room = max(2 * len(self.ids), count)
            self.ids = np.concatenate((self.ids, np.empty(room - len(self.ids), np.int32)))
            self._record.ids = self.ids.ctypes.data
            if self.values is not None:
                more = np.empty(room - len(self.values), np.float32)
                self.values = np.concatenate((self.values, more))
                self._record.values = self.values.ctypes.data
        self.count = self._record.count = count


class Shape:
    """How the logits of a row change before its token is drawn. Read at each draw.

    First ``mask`` uint32 ``[W]``: token i may be drawn if bit ``i % 32`` of word ``i // 32`` is
    set (tokens after the last word may not); then ``changes``, in their order. Forbidden logits
    are minus infinity.
    """

    def __init__(self, mask: Mask | None = None, changes: Sequence[Change] = ()) -> None:
        self._record = _ShapeRecord()
        self.address = addressof(self._record)
        self.mask = mask
        if mask is not None:
            _expect_words(mask)
            self._record.mask, self._record.words = mask.ctypes.data, len(mask)
        self.changes: tuple[Change, ...] = ()
        self._addresses = (c_void_p * 0)()
        self.set_changes(changes)

    def set_changes(self, changes: Sequence[Change]) -> None:
        """Replace the changes; setting the same ones again costs nothing."""
        if len(changes) == len(self.changes) and all(map(operator.is_, changes, self.changes)):
            return
        self.changes = tuple(changes)
        self._addresses = (c_void_p * len(changes))(*(change.address for change in changes))
        self._record.changes = addressof(self._addresses)
        self._record.count = len(changes)


def mask_of(ids: ArrayLike) -> Mask:
    """A mask that allows only ``ids``, of which there is at least one."""
    array = np.asarray(ids, np.int64)
    bits = np.zeros((int(array.max()) // 32 + 1) * 32, np.uint8)
    bits[array] = 1
    return np.packbits(bits, bitorder="little").view(np.dtype("<u4")).astype(np.uint32)


def _expect_words(mask: Mask) -> None:
    if mask.dtype != np.uint32 or mask.ndim != 1 or not mask.flags.c_contiguous:
        raise KernelError(
            f"sample: expected a mask of contiguous uint32 words, found {mask.dtype} "
            f"{list(mask.shape)} with strides {mask.strides}"
        )


class Tokens(NamedTuple):
    """The outcome of sampling R rows.

    ``tokens``; ``best``, the rows' maxima (NaN if there is one; if it is not finite, the token is
    that of the maximum or of the first NaN); ``probabilities``, the tokens' shares among those that
    could be drawn (1 if nothing was drawn). If a row was changed before the draw, ``best`` is the
    changed row's maximum, unless the original row was not finite; if only the changed row is not
    finite, the probability is 0.
    """

    tokens: list[int]
    best: list[float]
    probabilities: list[float]


#: One row's changes, as ``RowShape`` of cpu/native/abi.hpp.
_ROW = np.dtype([("shape", np.uint64), ("mask", np.uint64), ("words", np.int64)])


class SampleBuffers:
    """Fixed memory for the draws of up to ``rows`` rows, initially greedy, and their outcome.

    ``records``: memory for the draws, ``rows * DRAW.itemsize`` bytes; by default newly allocated. A
    row may have a :class:`Shape`, and a mask from ``masks`` uint32 ``[slots, words]``
    (:meth:`use_masks`): that of its slot in ``mask_slots`` int32 ``[rows]``, -1 for none.
    """

    def __init__(self, rows: int, records: memoryview | None = None) -> None:
        self._records = memoryview(bytearray(len(GREEDY) * rows))
        if records is not None:
            self._records = records.cast("B")
        self._records[:] = GREEDY * rows
        self._written = [GREEDY] * rows
        self.draws: Draws = np.frombuffer(self._records, DRAW)
        self.tokens = np.zeros(rows, np.int64)
        self.best = np.zeros(rows, np.float32)
        self.probabilities = np.ones(rows, np.float64)
        # A memoryview needs few instructions to read: after a step the caches are full of weights.
        self._views: list[Any] = [x.data for x in (self.tokens, self.best, self.probabilities)]
        #: The memory that each row's draw reads, and the objects that keep it alive.
        self.row_shapes = np.zeros(rows, _ROW)
        self.rows_address: int = self.row_shapes.ctypes.data  # getting it takes 1 us
        self.shapes: list[Shape | None] = [None] * rows
        self.mask_slots = np.full(rows, -1, np.int32)
        self.masks = np.zeros((0, 0), np.uint32)
        self.mask_tasks = MaskTasks(rows)

    def set(self, row: int, packed: bytes, uniform: float) -> None:
        """Set the draw of one row; setting the same again costs nothing."""
        at = row * _RECORD.size
        if self._written[row] is not packed:
            self._records[at : at + _RECORD.size] = packed
            self._written[row] = packed
        if packed is not GREEDY:
            _UNIFORM.pack_into(self._records, at + _RECORD.size - _UNIFORM.size, uniform)

    def set_shape(self, row: int, shape: Shape | None) -> None:
        """Set the changes of one row's logits; setting the same again costs nothing."""
        if self.shapes[row] is not shape:
            self.shapes[row] = shape
            self.row_shapes["shape"][row] = 0 if shape is None else shape.address

    def use_masks(self, width: int, slots: int | None = None) -> Masks:
        """Create ``masks`` for rows of ``width`` logits, if there are none; all tokens are allowed.

        By default there are as many slots as rows. Masks are read at each draw.
        """
        if not self.masks.size:
            shape = len(self.tokens) if slots is None else slots, -(-width // 32)
            self.masks = np.full(shape, 2**32 - 1, np.uint32)
        return self.masks

    def set_mask(self, row: int, slot: int) -> None:
        """Set the slot of ``masks`` with the tokens that a row may draw; -1 allows all.

        :raises KernelError: there is no such slot.
        """
        if self.mask_slots[row] == slot:
            return
        slots, words = self.masks.shape
        if not -1 <= slot < slots:
            raise KernelError(f"sample: expected a mask slot below {slots}, found {slot}")
        self.mask_slots[row] = slot
        at = 0 if slot < 0 else self.masks.ctypes.data + slot * self.masks.strides[0]
        self.row_shapes[row] = self.row_shapes["shape"][row], at, words

    def set_mask_tasks(self, functions: MaskFunctions, tasks: Sequence[MaskTask]) -> None:
        """Have masks computed before the next draw, each for its row; other rows get none.

        :meth:`use_masks` was called.
        """
        self.clear_mask_tasks()
        self.mask_tasks.set(functions, tasks, self.masks)
        for task in tasks:
            for row in range(task.row, task.row + 1 + len(task.drafts)):
                self.set_mask(row, row)

    def clear_mask_tasks(self) -> None:
        """No row has a mask any more."""
        if len(self.mask_tasks):
            self.mask_tasks.clear()
            for row in np.flatnonzero(self.mask_slots >= 0).tolist():
                self.set_mask(row, -1)

    def mask(self, row: int) -> Mask | None:
        """The mask of a row's slot."""
        slot = self.mask_slots[row]
        return None if slot < 0 else self.masks[slot]

    def shaped(self, rows: int) -> list[int]:
        """The rows among the first ``rows`` that are changed before their draw."""
        known = zip(self.shapes[:rows], self.mask_slots[:rows].tolist(), strict=True)
        return [row for row, (shape, slot) in enumerate(known) if shape is not None or slot >= 0]

    def write(self, outcome: NDArray[np.float64]) -> None:
        """Write ``outcome [R, 3]`` of the first R rows: token, best, probability."""
        rows = len(outcome)
        self.tokens[:rows], self.best[:rows], self.probabilities[:rows] = outcome.T

    def read(self, rows: int) -> Tokens:
        """The outcome of the first ``rows`` rows."""
        tokens, best, probabilities = (view[:rows].tolist() for view in self._views)
        return Tokens(tokens, best, probabilities)
