"""Layouts one above the other as one layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sdk.kernels.layouts import Affine, Blocks, Dense, Float8, Layout
from sdk.kernels.reference.decode import row_scales


def join(layouts: Sequence[Layout]) -> Layout | None:
    """One layout of all, or ``None`` when any fact but the number of rows differs."""
    first = layouts[0]
    shape = (sum(layout.shape[0] for layout in layouts), first.shape[1])
    if all(isinstance(w, Dense) for w in layouts):
        values = [w.values for w in layouts if isinstance(w, Dense)]
        if len({v.dtype for v in values}) == 1:
            return Dense(torch.cat(values))
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
    if len({_facts(w) for w in affine}) != 1:
        return None
    zeros = [w.zeros for w in affine if w.zeros is not None]
    minus = [w.minus for w in affine if w.minus is not None]
    supers = [w.super_scale for w in affine if w.super_scale is not None]
    return replace(
        affine[0],
        shape=shape,
        codes=torch.cat([w.codes for w in affine]),
        scale=torch.cat([w.scale for w in affine]),
        zeros=torch.cat(zeros) if zeros else None,
        minus=torch.cat(minus) if minus else None,
        super_scale=torch.cat(supers) if supers else None,
    )


def _facts(w: Affine) -> tuple[object, ...]:
    """All that is not a row's own."""
    table = None if w.table is None else tuple(w.table.tolist())
    level = None if w.super_scale is None else w.super_scale.dtype
    kinds = (w.zeros is None, w.minus is None, table, level, w.inputs)
    return w.name, w.bits, w.group, w.super_group, w.zero, w.signed, w.scale.dtype, kinds


def _join_float8(parts: Sequence[Float8]) -> Float8 | None:
    """Whole blocks stay blocks; scales of unlike height become one per output channel."""
    columns = parts[0].shape[1]
    facts = {(w.values.dtype, w.scale.dtype, min(w.block[1], columns), w.inputs) for w in parts}
    if len(facts) != 1:
        return None
    values = _stacked([w.values.view(torch.uint8) for w in parts]).view(parts[0].values.dtype)
    high, wide = parts[0].block
    whole = all(w.shape[0] % high == 0 for w in parts[:-1])
    if whole and len({w.block for w in parts}) == 1:
        return replace(parts[0], values=values, scale=torch.cat([w.scale for w in parts]))
    scale = torch.cat([row_scales(w) for w in parts])
    return replace(parts[0], values=values, scale=scale, block=(1, wide))


def _stacked(parts: Sequence[Tensor]) -> Tensor:
    """``torch.cat``, copied by this thread alone.

    torch would copy with OpenMP threads, which spin beside those of the engine: 5 to 40 ms a matrix
    instead of 0.1 on two busy cores.
    """
    return torch.from_numpy(np.concatenate([part.numpy() for part in parts]))
