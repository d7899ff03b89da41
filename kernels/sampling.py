"""What decides the token of one row of logits: the numbers every sampling kernel takes.

The steps, in this order (vLLM's, with typical where llama.cpp has it): temperature, ``min_p``,
``top_k``, ``typical_p``, ``top_p``, XTC, the draw; or mirostat in place of the truncations. Each
counts what the earlier ones left. A token's *gap* is ``(best - logit) / temperature``, its weight
``e^-gap``, or 0 beyond a gap of 87.3 (e^-87.3 is 1e-38). A token is likelier than another when its
gap is smaller or, where they are equal, its id. The draw takes the first token, in order of ids,
with which the running sum of the weights exceeds ``uniform`` times their total.

Before all of that the logits of a row may change (:class:`Shape`), of the draw's own copy: the
logits stay as they are.

Arithmetic: gaps are float32 (one rounding for the difference, one for the quotient), sums float64.
Two kernels may round weights differently by some 1e-7 and choose other tokens only where
``uniform``, or the mass of a truncation, lies that near to a boundary.
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
    """One ``DRAW`` as bytes: what does not change from token to token is packed once."""
    return _RECORD.pack(
        temperature, min_p, typical_p, top_p, xtc_threshold, mirostat_mu, top_k, 0.0
    )


def join_draws(packed: Sequence[bytes], uniforms: Sequence[float]) -> Draws:
    """``DRAW [R]`` of R packed ones and their numbers in [0, 1)."""
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
    #: What tokens that were there already cost. ``values[i]``: how often ``ids[i]`` is in the
    #: output (0: in the prompt only). In float32: divided by the repetition factor (Keskar et al.
    #: 2019) where the logit is positive, else multiplied; less frequency times ``values[i]``; less
    #: presence where ``values[i]`` is positive.
    PENALIZE = 1
    #: ``logits[ids[i]] = -inf``
    FORBID = 2
    #: All are minus infinity but that of ``ids[0]``, which is 0.
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
    """One way in which the logits of a row change: the first ``count`` of ``ids`` int32 and
    ``values`` float32 (ADD and PENALIZE), which may have room for more.

    ``ids`` are distinct, but in FORBID; those outside of the row change nothing. ``factors``, of
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
        """The same in memory of its own."""
        made, arguments = self.__reduce__()
        copied: Change = made(*arguments)
        return copied

    def write(self, ids: ArrayLike, values: ArrayLike = ()) -> None:
        """Replace ids and values, as many as ids where the kind has any."""
        array = np.asarray(ids)
        count = len(array)
        self.resize(count)
        self.ids[:count] = array
        if self.values is not None:
            self.values[:count] = values

    def resize(self, count: int) -> None:
        """Keep the first entries, or add some, which the caller then writes."""
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
        """Replace the changes; the same ones again cost nothing."""
        if len(changes) == len(self.changes) and all(map(operator.is_, changes, self.changes)):
            return
        self.changes = tuple(changes)
        self._addresses = (c_void_p * len(changes))(*(change.address for change in changes))
        self._record.changes = addressof(self._addresses)
        self._record.count = len(changes)


def mask_of(ids: ArrayLike) -> Mask:
    """The bits of a mask that leaves ``ids``, at least one, and no others."""
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
    """What became of R rows.

    ``tokens``; ``best``, the rows' maxima (NaN where there is a NaN: unless it is finite the row's
    token is that of the maximum, or the first NaN's); ``probabilities``, the tokens' shares of what
    could be drawn (1 where nothing was drawn). Where a row changes before the draw, ``best`` is the
    changed row's maximum, unless the row itself was not finite; if only the changed one is not,
    the probability is 0.
    """

    tokens: list[int]
    best: list[float]
    probabilities: list[float]


#: One row's changes, as ``RowShape`` of cpu/native/abi.hpp.
_ROW = np.dtype([("shape", np.uint64), ("mask", np.uint64), ("words", np.int64)])


class SampleBuffers:
    """Memory that stays: draws of up to ``rows`` rows, all greedy at first, and their outcome.

    ``records``: where the draws are to lie, ``rows * DRAW.itemsize`` bytes; else memory of its own.
    A row may have a :class:`Shape`, and a mask of ``masks`` uint32 ``[slots, words]``
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
        # Read in the few instructions of a memoryview: after a step the caches hold weights.
        self._views: list[Any] = [x.data for x in (self.tokens, self.best, self.probabilities)]
        #: What each row's draw reads, and what keeps that alive.
        self.row_shapes = np.zeros(rows, _ROW)
        self.rows_address: int = self.row_shapes.ctypes.data  # asking takes 1 us
        self.shapes: list[Shape | None] = [None] * rows
        self.mask_slots = np.full(rows, -1, np.int32)
        self.masks = np.zeros((0, 0), np.uint32)

    def set(self, row: int, packed: bytes, uniform: float) -> None:
        """The draw of one row; writing what already stands there costs nothing."""
        at = row * _RECORD.size
        if self._written[row] is not packed:
            self._records[at : at + _RECORD.size] = packed
            self._written[row] = packed
        if packed is not GREEDY:
            _UNIFORM.pack_into(self._records, at + _RECORD.size - _UNIFORM.size, uniform)

    def set_shape(self, row: int, shape: Shape | None) -> None:
        """How the logits of one row change; setting what already stands there costs nothing."""
        if self.shapes[row] is not shape:
            self.shapes[row] = shape
            self.row_shapes["shape"][row] = 0 if shape is None else shape.address

    def use_masks(self, width: int, slots: int | None = None) -> Masks:
        """Make ``masks`` for rows of ``width`` logits, if there are none, all tokens allowed.

        So many slots as rows unless told otherwise. What is written there is read at each draw.
        """
        if not self.masks.size:
            shape = len(self.tokens) if slots is None else slots, -(-width // 32)
            self.masks = np.full(shape, 2**32 - 1, np.uint32)
        return self.masks

    def set_mask(self, row: int, slot: int) -> None:
        """The slot of ``masks`` that says which tokens of a row may be drawn; -1: all may.

        :raises KernelError: where there is no such slot.
        """
        if self.mask_slots[row] == slot:
            return
        slots, words = self.masks.shape
        if not -1 <= slot < slots:
            raise KernelError(f"sample: expected a mask's slot below {slots}, found {slot}")
        self.mask_slots[row] = slot
        at = 0 if slot < 0 else self.masks.ctypes.data + slot * self.masks.strides[0]
        self.row_shapes[row] = self.row_shapes["shape"][row], at, words

    def mask(self, row: int) -> Mask | None:
        """That of a row's slot."""
        slot = self.mask_slots[row]
        return None if slot < 0 else self.masks[slot]

    def shaped(self, rows: int) -> list[int]:
        """Which of the first ``rows`` rows change before their draw."""
        known = zip(self.shapes[:rows], self.mask_slots[:rows].tolist(), strict=True)
        return [row for row, (shape, slot) in enumerate(known) if shape is not None or slot >= 0]

    def write(self, outcome: NDArray[np.float64]) -> None:
        """The outcome of as many rows as ``outcome [R, 3]`` has: token, best, probability."""
        rows = len(outcome)
        self.tokens[:rows], self.best[:rows], self.probabilities[:rows] = outcome.T

    def read(self, rows: int) -> Tokens:
        """The outcome of the first ``rows`` rows."""
        tokens, best, probabilities = (view[:rows].tolist() for view in self._views)
        return Tokens(tokens, best, probabilities)
