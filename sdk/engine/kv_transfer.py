"""Keys and values on their way out of the pages of an engine and into those of another.

Outside they lie token by token, so that neither the size of a page nor the number of ranks matters:
for each layer uint8 ``[tokens, kv_heads, row]``, a row being the codes of a key, those of the
value, and where they have them the scales of both. Into pages of the same type they go as they are,
bit for bit; into others as the values they stand for, coded anew.

The functions that take a runner run on every rank (see ``Executor.on_ranks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.engine.kv_cache import page_dtype, page_width
from sdk.kernels.kv_pages import is_mixed
from sdk.kernels.reference.page_codes import HALF_MAX, decode, encode, mixed
from sdk.quant.spec import KVPart, KVSpec

if TYPE_CHECKING:
    from sdk.engine.runner import ModelRunner

Bytes = NDArray[np.uint8]
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer: ``rows`` uint8 ``[tokens, kv_heads, row]`` and what was taken from its keys
    (``KVPages.k_centre``), float32 ``[kv_heads, head_dim]``.
    """

    rows: Bytes
    centre: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class StoredKV:
    """All layers and heads of a run of tokens; ``spec.page_size`` is of no consequence."""

    spec: KVSpec
    layers: tuple[LayerKV, ...]


def row_widths(spec: KVSpec, layer: int) -> list[int]:
    """Bytes of a row's four parts: codes of key and value, scales of key and value."""
    parts = spec.parts(layer)
    codes = [page_width(part, spec.head_dim) * page_dtype(part).itemsize for part in parts]
    return codes + [2 * part.groups for part in parts]


def read_layer(runner: ModelRunner, layer: int, pages: list[int]) -> tuple[int, LayerKV]:
    """What lies in these pages, of the rank's own heads, and the first of them."""
    kv = runner.kv.layers[layer]
    at = torch.tensor(pages, device=kv.k.device)
    columns = [_rows(kv.k, at), _rows(kv.v, at)]
    heads = kv.k.shape[1]
    for scales in (kv.k_scale, kv.v_scale):
        if scales is not None:
            columns.append(_rows(_by_slot(scales, heads), at))
    centre = None if kv.k_centre is None else kv.k_centre.cpu().numpy()
    return runner.kv.first_head, LayerKV(torch.cat(columns, dim=-1).cpu().numpy(), centre)


def _by_slot(scales: Tensor, heads: int) -> Tensor:
    """``[num_pages, heads * groups, page_size]`` -> ``[num_pages, heads, page_size, groups]``."""
    pages, _, slots = scales.shape
    return scales.view(pages, heads, -1, slots).transpose(2, 3)


def _rows(x: Tensor, pages: Tensor) -> Tensor:
    """``x [num_pages, heads, page_size, width]`` -> uint8 ``[tokens, heads, bytes]``."""
    found = x.view(_INTS[x.dtype.itemsize])[pages].transpose(1, 2).flatten(0, 1)
    return _as_bytes(found)


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8).view(*x.shape[:-1], -1)


def write_layer(
    runner: ModelRunner, layer: int, pages: list[int], stored: LayerKV, source: KVSpec
) -> None:
    """Fill these pages, whole ones, with ``stored`` tokens of all heads, of the type ``source``."""
    kv = runner.kv.layers[layer]
    first, count = runner.kv.first_head, kv.k.shape[1]
    device = kv.k.device
    rows = torch.from_numpy(stored.rows[:, first : first + count].copy()).to(device)
    columns = torch.split(rows, row_widths(source, layer), dim=-1)
    theirs = None
    if stored.centre is not None:
        theirs = torch.from_numpy(stored.centre[first : first + count].copy()).to(device)
    at = torch.tensor(pages, device=device)
    own = runner.kv.spec
    sides = zip(source.parts(layer), own.parts(layer), strict=True)
    for side, (given, wanted) in enumerate(sides):
        codes, scales = columns[side], columns[side + 2]
        centres = (theirs, kv.k_centre) if side == 0 else (None, None)
        if not (_alike(given, wanted) and _equal(*centres)):
            codes, scales = _converted(codes, scales, given, wanted, centres)
        to, to_scales = ((kv.k, kv.k_scale), (kv.v, kv.v_scale))[side]
        _put(to, at, codes)
        if to_scales is not None:
            _put(_by_slot(to_scales, count), at, scales)


def _put(x: Tensor, pages: Tensor, rows: Tensor) -> None:
    """The reverse of ``_rows``."""
    dtype = _INTS[x.dtype.itemsize]
    _, heads, slots, width = x.shape
    found = rows.contiguous().view(dtype).view(len(pages), slots, heads, width)
    x.view(dtype)[pages] = found.transpose(1, 2)


def _alike(a: KVPart, b: KVPart) -> bool:
    return (a.dtype, a.groups) == (b.dtype, b.groups)


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)


def _converted(
    codes: Tensor,
    scales: Tensor,
    given: KVPart,
    wanted: KVPart,
    centres: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor]:
    """Rows of one type as rows of another, each with what was taken from the keys."""
    typed = codes.contiguous().view(page_dtype(given))
    if given.groups:
        scale = torch.int16 if given.dtype == "int4" else torch.float16
        x = decode(typed, scales.contiguous().view(scale))
        x = mixed(x) if is_mixed(typed.dtype) else x
    else:
        x = typed.to(torch.float32)
    theirs, ours = centres
    x = x if theirs is None else x + theirs
    x = x if ours is None else x - ours
    dtype = page_dtype(wanted)
    if wanted.groups:
        made, scaled = encode(x, dtype, wanted.groups)
        return _as_bytes(made), _as_bytes(scaled)
    if dtype == torch.float16:
        x = x.clamp(-HALF_MAX, HALF_MAX)
    return _as_bytes(x.to(dtype)), scales


def joined(parts: Sequence[tuple[int, LayerKV]], kv_heads: int) -> LayerKV:
    """All heads of a layer from what the ranks have; some may have the same heads."""
    if len(parts) == 1:
        return parts[0][1]
    first = parts[0][1]
    rows = np.empty((len(first.rows), kv_heads, first.rows.shape[2]), dtype=np.uint8)
    centre = None
    if first.centre is not None:
        centre = np.empty((kv_heads, first.centre.shape[1]), dtype=np.float32)
    for start, part in parts:
        rows[:, start : start + part.rows.shape[1]] = part.rows
        if centre is not None and part.centre is not None:
            centre[start : start + len(part.centre)] = part.centre
    return replace(first, rows=rows, centre=centre)
