"""Concatenating layouts along the output rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.decode import row_scales
from sdk.kernels.weights.layouts import Affine, Blocks, Dense, Float8, Layout

#: At least this many scales share a super scale after joining; fewer would add more than 3 % bytes.
_LEAST_SUPERS = 8


def join(layouts: Sequence[Layout]) -> Layout | None:
    """All parts as one layout, or ``None`` if they differ in anything but the number of rows."""
    first = layouts[0]
    shape = (sum(layout.shape[0] for layout in layouts), first.shape[1])
    if all(isinstance(w, Dense) for w in layouts):
        values = [w.values for w in layouts if isinstance(w, Dense)]
        if len({v.dtype for v in values}) == 1:
            return Dense(_stacked(values))
        return None
    if all(isinstance(w, Float8) for w in layouts):
        return _join_float8([w for w in layouts if isinstance(w, Float8)])
    if all(isinstance(w, Blocks) for w in layouts):
        blocks = [w for w in layouts if isinstance(w, Blocks)]
        if len({w.type for w in blocks}) == 1:
            return Blocks(shape, blocks[0].type, _stacked([w.data for w in blocks]))
        return None
    if not all(isinstance(w, Affine) for w in layouts):
        return None
    affine = [w for w in layouts if isinstance(w, Affine)]
    if len({_facts(w) for w in affine}) != 1 or any(w.repeats for w in affine):
        return None
    if affine[0].scale_table is not None:
        affine = _nested_alike(affine)
        if affine[0].super_group < _LEAST_SUPERS * affine[0].group:
            return None
    return replace(
        affine[0],
        shape=shape,
        codes=_stacked([w.codes for w in affine]),
        scale=_stacked([w.scale for w in affine]),
        zeros=_stacked_if_any([w.zeros for w in affine]),
        minus=_stacked_if_any([w.minus for w in affine]),
        super_scale=_stacked_if_any([w.super_scale for w in affine]),
        scale_offset=_stacked_if_any([w.scale_offset for w in affine]),
    )


def _nested_alike(parts: Sequence[Affine]) -> list[Affine]:
    """Super scales shared by so few scales that none of them spans two parts."""
    count = math.gcd(
        *(w.super_group // w.group for w in parts), *(w.scale.numel() for w in parts[:-1])
    )
    found = []
    for w in parts:
        assert w.super_scale is not None
        times = w.super_group // w.group // count
        supers = np.repeat(w.super_scale.numpy(), times)[: -(-w.scale.numel() // count)]
        found.append(replace(w, super_scale=torch.from_numpy(supers), super_group=count * w.group))
    return found


def _facts(w: Affine) -> tuple[object, ...]:
    """Everything that must be equal for layouts to be joined."""
    table = None if w.table is None else tuple(w.table.tolist())
    level = None if w.super_scale is None else w.super_scale.dtype
    lookup = None if w.scale_table is None else tuple(w.scale_table.tolist())
    zeros = None if w.zeros is None else w.zeros.dtype
    minus = None if w.minus is None else w.minus.dtype
    kinds = (zeros, minus, table, level, lookup, w.inputs)
    super_group = 0 if lookup else w.super_group
    return w.name, w.bits, w.group, super_group, w.zero, w.signed, w.scale.dtype, kinds


def _join_float8(parts: Sequence[Float8]) -> Float8 | None:
    """Whole blocks stay blocks; scales of different height become one per output channel."""
    columns = parts[0].shape[1]
    facts = {(w.values.dtype, w.scale.dtype, min(w.block[1], columns), w.inputs) for w in parts}
    if len(facts) != 1:
        return None
    values = _stacked([w.values for w in parts])
    high, wide = parts[0].block
    whole = all(w.shape[0] % high == 0 for w in parts[:-1])
    if whole and len({w.block for w in parts}) == 1:
        return replace(parts[0], values=values, scale=_stacked([w.scale for w in parts]))
    scale = _stacked([row_scales(w) for w in parts])
    return replace(parts[0], values=values, scale=scale, block=(1, wide))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat`` in this thread alone.

    torch would copy with OpenMP threads, which compete with the engine's spinning threads: on two
    busy cores a matrix takes 5 to 40 ms instead of 0.1.
    """
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[parts[0].itemsize]
    joined = np.concatenate([part.view(bits).numpy() for part in parts])
    return torch.from_numpy(joined).view(parts[0].dtype)


def _stacked_if_any(parts: Sequence[Tensor | None]) -> Tensor | None:
    there = [part for part in parts if part is not None]
    return _stacked(there) if there else None
