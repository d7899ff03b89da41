"""8-bit weights in rows, as the matrix units read them; fully reversible.

Both operands of ``product_bytes.py`` are bytes in the order of K, so a tile goes from memory to
shared memory to the matrix units in pieces of 16 bytes and no instruction moves a single byte.
(From the words of ``packing.py`` bytes are extracted with two shifts and a permutation for every
four weights, and those are for weights that become floats first.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sdk.kernels.gpu.scratch import rows_rounded, runs
from sdk.kernels.weights.layouts import ActivationScheme, Affine, Float8, Layout

#: Bytes to which rows are padded, so that each begins where a load of 16 bytes may.
ALIGNED = 16
#: Columns that a program multiplies at a time: a cache line of a row, and the usual block of FP8
#: files (DeepSeek-V3, Qwen3).
STEP = 128
_SCALES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True)
class ByteRows:
    """A weight ``w[n, k] = scale[g, n // scale_rows] * values[n, k]``.

    ``facts``: the layout without its data. ``values`` int8 or float8_e4m3fn ``[N, K']``, K' the
    next multiple of 16, zeros behind column K. ``scale`` has the file's type and one row, or one
    for each ``STEP`` of columns (``grouped``), as the scales of activations then have.
    """

    facts: Affine | Float8
    values: Tensor
    scale: Tensor
    scale_rows: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.facts.shape

    @property
    def inputs(self) -> ActivationScheme:
        """How activations are quantized."""
        assert self.facts.inputs is not None
        return self.facts.inputs

    @property
    def grouped(self) -> bool:
        return 0 < self.inputs.group < self.shape[1]

    @property
    def kind(self) -> str:
        return "int" if self.values.dtype == torch.int8 else "e4m3"

    @property
    def units(self) -> int:
        """Steps of K, which programs may share."""
        return -(-self.values.shape[1] // STEP)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.scale.nbytes


def multiplies_bytes(layout: Layout, codes: Sequence[str]) -> bool:
    """Whether activations and weights have the same codes, and scales that apply after sums: of
    all columns, or of ``STEP`` with one scale for whole tiles of rows.

    ``codes``: those that the card multiplies, of ``int`` and ``e4m3``.
    """
    if not isinstance(layout, Affine | Float8) or layout.inputs is None:
        return False
    scheme, k = layout.inputs, layout.shape[1]
    whole = not scheme.group or scheme.group >= k
    plain = scheme.rule in ("plain", "power") and scheme.symmetric and not scheme.zero
    if not plain or scheme.codes not in codes or layout.scale.dtype not in _SCALES:
        return False
    if isinstance(layout, Float8):
        if scheme.codes != "e4m3" or layout.values.dtype != torch.float8_e4m3fn:
            return False
        high, wide = layout.block
        grouped = scheme.group == wide == STEP and high % STEP == 0 and scheme.static is None
        return wide >= k if whole else grouped
    more = (layout.zeros, layout.minus, layout.table, layout.super_scale, layout.scale_table)
    if any(part is not None for part in more) or layout.sharing is not None:
        return False
    centred = layout.zero == (0 if layout.signed else 128)
    return whole and scheme.codes == "int" and scheme.bits == layout.bits == 8 and centred


def byte_rows(layout: Affine | Float8) -> ByteRows:
    """Pack a layout that :func:`multiplies_bytes`; :func:`layout_of` restores it bit for bit."""
    n, k = layout.shape
    given = layout.values if isinstance(layout, Float8) else layout.codes
    padded = -(-k // ALIGNED) * ALIGNED
    values = torch.zeros(n, padded, dtype=torch.uint8, device=given.device)
    values[:, :k] = given.view(torch.uint8)
    if flip := _flip(layout):
        values[:, :k] ^= flip
    scale = layout.scale.t().clone(memory_format=torch.contiguous_format)
    if isinstance(layout, Float8):
        facts: Affine | Float8 = replace(
            layout, values=layout.values.to("meta"), scale=layout.scale.new_empty(0, 0)
        )
        return ByteRows(facts, values.view(given.dtype), scale, layout.block[0])
    return ByteRows(layout.without_data(), values.view(torch.int8), scale, 1)


def layout_of(w: ByteRows) -> Affine | Float8:
    """The inverse of :func:`byte_rows`."""
    codes = w.values[:, : w.shape[1]].view(torch.uint8) ^ _flip(w.facts)
    scale = w.scale.t().clone(memory_format=torch.contiguous_format)
    if isinstance(w.facts, Float8):
        return replace(w.facts, values=codes.view(w.values.dtype), scale=scale)
    return replace(w.facts, codes=codes, scale=scale)


def decode(w: ByteRows, ids: Tensor, out: Tensor) -> None:
    """``out [T, K] = w[ids]``, exactly; ids beyond the rows are not checked, but nothing is read
    there."""
    n, k = w.shape
    for part in runs(ids.shape[0], rows_rounded(k)):
        rows = ids[part].clamp(0, n - 1)
        codes = w.values.view(torch.uint8)[rows].view(w.values.dtype)[:, :k]
        scale = w.scale[:, rows // w.scale_rows].t().float()
        if w.grouped:
            scale = scale.repeat_interleave(STEP, 1)[:, :k]
        out[part] = codes.float() * scale


def _flip(layout: Affine | Float8) -> int:
    """What makes two's complement of the codes, and these again: unsigned ones are 128 more."""
    return 128 if isinstance(layout, Affine) and not layout.signed else 0
