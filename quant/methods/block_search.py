"""The search for scales and offsets shared by GGUF block formats.

A few grid widths are tried. The codes of each give a scale (and an offset) by weighted least
squares, and the best is kept. Errors are weighted by how much a value is likely to matter: by its
size and, if known, by the mean square of its input.

Source of the search: ggml-quants.c (make_qkx2_quants, make_qx_quants, quantize_row_iq4_nl_impl).
All arrays are float32 ``[B, G, g]``: blocks, groups of a block, values of a group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

#: float32 and uint8; numpy's stubs lose both types in arithmetic with constants.
Floats = NDArray[Any]
Bytes = NDArray[Any]

#: Grid widths to try, in codes more or less than the full number.
_LINE_WIDTHS = np.arange(-1.0, 1.01, 0.1, dtype=np.float32)
_SIGNED_WIDTHS = np.arange(-0.9, 0.91, 0.1, dtype=np.float32)
#: The same for a table of levels, in units of the levels.
_LEVEL_WIDTHS = np.arange(-14.0, 7.1, 1.75, dtype=np.float32)


def reciprocal(d: Floats) -> Floats:
    """``1 / d``, and 0 where ``d`` is 0."""
    found: Floats = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
    return found


def importance(groups: Floats, inputs: Floats | None) -> Floats:
    """Error weights; ``inputs`` holds the mean square of each value's input, if known.

    Squares of the values, which llama.cpp uses for Q3_K and Q6_K, leave 5 and 2 % more error.
    """
    if inputs is not None:
        mean = np.square(groups).mean((1, 2), keepdims=True)
        return _positive(inputs.reshape(groups.shape) * np.sqrt(mean + np.square(groups)))
    spread = np.sqrt(np.square(groups).mean(2, keepdims=True))
    return _positive(np.abs(groups) + spread)


def _positive(weights: Floats) -> Floats:
    """The weights plus a tiny number, so that no sum of them is 0."""
    found: Floats = weights + np.float32(1e-30)
    return found


def best_scale(x: Floats, w: Floats, top: int) -> Floats:
    """The scale ``[B, G]`` of codes from ``-top`` to ``top - 1``.

    Its sign puts the value of largest magnitude on the lowest code."""
    inverse = -reciprocal(_extreme(x))

    def levels(width: np.float32) -> Floats:
        found: Floats = np.rint(x * (inverse * (top + width))).clip(-top, top - 1)
        return found

    return _best(x, w, levels, _SIGNED_WIDTHS)


def best_table_scale(x: Floats, w: Floats, table: Floats) -> Floats:
    """The scale ``[B, G]`` of the levels in a rising ``table`` whose first has largest magnitude.

    Its sign puts the value of largest magnitude on that level."""
    inverse = reciprocal(_extreme(x))

    def levels(width: np.float32) -> Floats:
        return table[nearest(x * (inverse * (table[0] + width)), table)]

    return _best(x, w, levels, _LEVEL_WIDTHS)


def nearest(values: Floats, table: Floats) -> Bytes:
    """The code of the level nearest to each value, in a rising table."""
    between = (table[1:] + table[:-1]) / 2
    return np.searchsorted(between, values).astype(np.uint8)


def _extreme(x: Floats) -> Floats:
    """The value of largest magnitude in each group, with its sign, ``[B, G, 1]``."""
    at = np.abs(x).argmax(2, keepdims=True)
    found: Floats = np.take_along_axis(x, at, 2)
    return found


def _best(x: Floats, w: Floats, levels: Callable[[np.float32], Floats], widths: Floats) -> Floats:
    """The least-squares scale for the width whose levels fit best."""
    scale = np.zeros((*x.shape[:2], 1), np.float32)
    best = np.full_like(scale, -1)
    for width in widths:
        tried = levels(width)
        weighted = w * tried
        w_xl = (weighted * x).sum(2, keepdims=True)
        w_ll = (weighted * tried).sum(2, keepdims=True)
        found = w_xl * reciprocal(w_ll)
        gain = w_xl * found
        better = gain > best
        best = np.where(better, gain, best)
        scale = np.where(better, found, scale)
    return scale[:, :, 0]


def best_line(x: Floats, w: Floats, top: int, *, below: bool = True) -> tuple[Floats, Floats]:
    """Scale and offset ``[B, G]`` of codes from 0 to ``top``; with ``below``, offsets are <= 0."""
    low = x.min(2, keepdims=True)
    if below:
        low = np.minimum(low, 0)
    span = x.max(2, keepdims=True) - low
    per_unit = reciprocal(span)
    w_sum, w_x = w.sum(2, keepdims=True), (w * x).sum(2, keepdims=True)
    scale, least = span / np.float32(top), low  # the result for constant groups
    codes = np.rint((x - low) * (per_unit * top))
    off = codes * scale + least - x
    best = (w * off * off).sum(2, keepdims=True)
    for width in _LINE_WIDTHS:
        codes = np.rint((x - low) * (per_unit * (top + width))).clip(0, top)
        tried, offset = _line(x, w, codes, w_sum, w_x, below)
        off = codes * tried + offset - x
        error = (w * off * off).sum(2, keepdims=True)
        better = error < best
        best = np.where(better, error, best)
        scale, least = np.where(better, tried, scale), np.where(better, offset, least)
    return scale[:, :, 0], least[:, :, 0]


def _line(
    x: Floats, w: Floats, codes: Floats, w_sum: Floats, w_x: Floats, below: bool
) -> tuple[Floats, Floats]:
    """The weighted least-squares line through ``(codes, x)``."""
    weighted = w * codes
    w_l = weighted.sum(2, keepdims=True)
    w_ll = (weighted * codes).sum(2, keepdims=True)
    w_xl = (weighted * x).sum(2, keepdims=True)
    bottom = reciprocal(np.maximum(w_sum * w_ll - w_l * w_l, 0))
    scale = (w_sum * w_xl - w_x * w_l) * bottom
    offset = (w_ll * w_x - w_l * w_xl) * bottom
    if not below:
        return scale, offset
    above = offset > 0
    scale = np.where(above, w_xl * reciprocal(w_ll), scale)
    return scale, np.where(above, np.float32(0), offset)
