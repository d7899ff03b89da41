"""HQQ (``quant_method: hqq``) as the hqq package saves it in safetensors files.

With codes ``P.W_q``, ``P.scale`` and ``P.zero``, a weight is ``(code - zero) * scale``, where zero
is a float. ``nbits``, ``group_size``, ``shape``, ``axis`` and ``packing`` (text) are tensors too.
The matrix is first reshaped to groups, ``[N * K / group, group]`` along axis 1 or
``[group, N * K / group]`` along axis 0; then its first rows are the highest bits of every word, the
next ones those below, and so on. Source: hqq 0.2.8, `core/quantize.py` and `core/bitpack.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Affine, Dense, Layout
from sdk.loaders.formats.bit_streams import Bytes, all_finite, packed_matrix
from sdk.loaders.formats.scales import FLOATS, floats
from sdk.loaders.formats.stored_layer import StoredLayer

ENDINGS = (".W_q",)
#: Bits of a code and codes in a word, by ``packing``.
_PACKINGS = {
    "8bit_u8": (8, 1), "4bit_u8": (4, 2), "2bit_u8": (2, 4), "1bit_u8": (1, 8), "3bit_32": (3, 10),
}  # fmt: skip
#: Other tensors, which do not affect the weights.
_NOTES = (
    *(".unpack_view_dtype", ".view_as_float", ".compute_dtype", ".offload_meta", ".channel_wise"),
    *(".encoded_state_dict", ".stores_quant_config", ".optimize", ".round_zero"),
)
COMPANIONS = (
    *(".scale", ".zero", ".nbits", ".group_size", ".shape", ".axis", ".packing"),
    *(".quant_scale", ".quant_zero", *_NOTES),
)
_INTEGERS = ("U8", "I32", "I64")
#: Weights dequantized at a time: few enough that torch uses one thread (quant/join.py).
_CHUNK = 1 << 15


@dataclass(frozen=True, slots=True)
class _Meta:
    shape: tuple[int, int]
    bits: int
    group: int
    axis: int
    packing: str

    @property
    def stays_packed(self) -> bool:
        """Whether groups are inside rows, or run across whole rows."""
        return self.shape[1 if self.axis else 0] % self.group == 0


def settings(config: Mapping[str, Any], source: str) -> None:
    """Nothing: every layer describes itself."""


def outline(layer: StoredLayer, settings: None) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    meta = _meta(layer)
    if not meta.stays_packed:
        return meta.shape, FLOATS.get(layer.stored(".scale").dtype, "f32")
    return meta.shape, f"w{meta.bits}g{meta.group}"


def decode(layer: StoredLayer, settings: None) -> Layout:
    """The layout of a layer. Groups that cross row ends, and groups along axis 0 that are not
    aligned with rows, are dequantized to the type of the scales.

    Raises:
        CheckpointError: its tensors disagree.
    """
    for ending in _NOTES:
        layer.skip(ending)
    for ending in (".quant_scale", ".quant_zero"):
        if layer.has(ending) and _number(layer, ending):
            raise layer.fail(ending, "the scales are quantized, expected floats")
    meta = _meta(layer)
    rows, columns = meta.shape
    groups = rows * columns // meta.group
    count = groups if meta.axis == 1 else meta.group  # rows of the matrix of groups
    codes = _codes(layer, meta, count, meta.group if meta.axis == 1 else groups)
    scale, zero = (_per_group(layer, name, groups) for name in (".scale", ".zero"))
    if not meta.stays_packed:
        layer.warn(f"groups cross row ends: kept in memory as floats, not {meta.bits} bits")
        shape = (-1, 1) if meta.axis == 1 else (1, -1)
        return Dense(_values(codes, scale.reshape(shape), zero.reshape(shape)).reshape(meta.shape))
    grid, along = (rows, columns // meta.group), meta.group
    if meta.axis == 0:  # a row of the matrix of groups holds whole rows
        grid, along = (rows // meta.group, columns), 1
    whole = bool(((zero == zero.round()) & (zero >= 0) & (zero < 1 << meta.bits)).all())
    packed = torch.from_numpy(packed_matrix(codes.reshape(rows, columns), meta.bits))
    layout = Affine(meta.shape, meta.bits, along, packed, scale.reshape(grid))
    if whole:
        integers = zero.to(torch.uint8).reshape(grid).numpy()
        return replace(layout, zeros=torch.from_numpy(packed_matrix(integers, meta.bits)))
    if not all_finite(scale.to(torch.float32) * zero.to(torch.float32)):
        raise layer.fail(".zero", "times its scale is not a finite number")
    return replace(layout, zeros=zero.reshape(grid))


def _values(codes: Bytes, scale: Tensor, zero: Tensor) -> Tensor:
    """``(codes - zero) * scale`` for a matrix of groups, in the type of the scales."""
    values = torch.empty(codes.shape, dtype=scale.dtype)
    factor, minus = (part.to(torch.float32).numpy() for part in (scale, zero))
    step = max(_CHUNK // codes.shape[1], 1)
    for start in range(0, len(codes), step):
        rows = slice(start, start + step)
        along = rows if len(factor) > 1 else slice(None)
        product = (codes[rows].astype(np.float32) - minus[along]) * factor[along]
        values[rows] = torch.from_numpy(product)
    return values


def _codes(layer: StoredLayer, meta: _Meta, rows: int, columns: int) -> Bytes:
    """The codes of the matrix of groups: uint8 ``[rows, columns]``."""
    bits, per_word = _PACKINGS[meta.packing]
    dtype = torch.int32 if meta.packing == "3bit_32" else torch.uint8
    stored = layer.read(".W_q", ("U8", "I32", *FLOATS))
    expected = (-(-rows // per_word), columns)
    if stored.is_floating_point() and stored.nbytes == expected[0] * columns * dtype.itemsize:
        stored = stored.flatten().view(dtype).reshape(expected)  # saved with view_as_float
    if stored.dtype != dtype or tuple(stored.shape) != expected:
        raise layer.fail(
            ".W_q",
            f"{stored.dtype} of shape {list(stored.shape)}, expected {dtype} {list(expected)} for "
            f"{list(meta.shape)} in groups of {meta.group} along axis {meta.axis}",
        )
    words = stored.numpy()
    parts = [words >> bits * i & (1 << bits) - 1 for i in reversed(range(per_word))]
    codes = np.concatenate(parts).astype(np.uint8)[:rows]
    if int(codes.max()) >= 1 << meta.bits:
        raise layer.fail(".W_q", f"a code is {int(codes.max())}, expected {meta.bits} bits")
    return codes


def _per_group(layer: StoredLayer, ending: str, groups: int) -> Tensor:
    values = floats(layer, ending)
    if values.numel() != groups:
        raise layer.fail(
            ending, f"shape {list(values.shape)}, expected one number for each of {groups} groups"
        )
    return values.flatten()


def _meta(layer: StoredLayer) -> _Meta:
    sizes = layer.read(".shape", _INTEGERS)
    shape = tuple(int(size) for size in sizes.flatten()[:9])
    if len(shape) != 2 or min(shape) < 1:
        raise layer.fail(".shape", f"is {list(shape)}, expected two sizes")
    layer.check_shape(".shape", (shape[0], shape[1]))
    text = layer.read(".packing", ("U8",)).flatten()[:16]
    packing = bytes(text.tolist()).decode("latin-1")
    if packing not in _PACKINGS:
        raise layer.fail(".packing", f"is {packing!r}, expected {' or '.join(_PACKINGS)}")
    bits, group, axis = (_number(layer, f".{key}") for key in ("nbits", "group_size", "axis"))
    if not 1 <= bits <= _PACKINGS[packing][0]:
        raise layer.fail(".nbits", f"is {bits}, packed as {packing}")
    if axis not in (0, 1):
        raise layer.fail(".axis", f"is {axis}, expected 0 or 1")
    if group < 1 or shape[0] * shape[1] % group:
        raise layer.fail(".group_size", f"is {group}, which does not divide {list(shape)}")
    return _Meta((shape[0], shape[1]), bits, group, axis, packing)


def _number(layer: StoredLayer, ending: str) -> int:
    stored = layer.read(ending, _INTEGERS)
    if stored.numel() != 1:
        raise layer.fail(ending, f"shape {list(stored.shape)}, expected one number")
    return int(stored)
