"""Keys and values on their way out of the pages of an engine and into those of another.

Outside they lie token by token, so that neither the size of a page nor the number of ranks matters:
for each layer uint8 ``[tokens, kv_heads, row]``, a row being the codes of a key, those of the
value, and where they have them the scales of both; integers mixed and without the centre of their
keys, floats as they are. Into pages of the same type they go bit for bit; into others as the values
they stand for, coded anew.

Pages of a ladder leave as rows of one type, that of the best of them.

The functions that take a runner run on every rank (see ``Executor.on_ranks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.engine.rank.kv_cache import page_dtype, page_width
from sdk.kernels.kv_pages import KVPages, is_mixed
from sdk.kernels.ladder import page_level
from sdk.kernels.reference.page_codes import HALF_MAX, decode, encode, mixed
from sdk.quant.spec import KVPart, KVSpec

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner

Bytes = NDArray[np.uint8]
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: On a CPU numpy copies, and torch converts so many values at a time: from 32,768 on it shares an
#: operation with its threads and waits for them, spinning. On two cores with seven processes for
#: them 1,200 tokens of SmolLM2 became int8 in 35 to 105 s that way, in 0.7 to 6 s this way (by
#: hand, five times each, in turns).
_ALONE = 2**15 - 1


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


class _Side(NamedTuple):
    """How keys or values lie: their type, whether mixed, and what was taken from each."""

    part: KVPart
    mixed: bool
    centre: Tensor | None = None

    def like(self, other: _Side) -> bool:
        """Whether what lies like this lies like the other too."""
        a, b = self.centre, other.centre
        same = a is b if a is None or b is None else torch.equal(a, b)
        return same and self._numerics == other._numerics

    @property
    def _numerics(self) -> tuple[str, int, bool]:
        return self.part.dtype, self.part.groups, self.mixed


def _in_pages(spec: KVSpec, layer: int, kv: KVPages) -> tuple[_Side, _Side]:
    """Keys and values of a layer in pages of one level."""
    k, v = spec.parts(layer)
    return _Side(k, kv.k_mixed, kv.k_centre), _Side(v, kv.v_mixed)


def _in_rows(spec: KVSpec, layer: int, centre: Tensor | None) -> tuple[_Side, _Side]:
    """Keys and values of a layer outside of pages; ``centre``: of its keys, if they have one."""
    k, v = spec.parts(layer)
    return _Side(k, is_mixed(page_dtype(k)), centre), _Side(v, is_mixed(page_dtype(v)))


def read_layer(
    runner: ModelRunner, layer: int, places: list[int], level: int
) -> tuple[int, LayerKV]:
    """What lies in the pages at these places, of the rank's own heads, as rows of the type of a
    ladder's level (0 where there is none), and the first of the heads.
    """
    levels, specs = runner.kv.layers[layer].levels, runner.kv.spec.levels
    mixes = is_mixed(page_dtype(specs[level].parts(layer)[0]))
    centre = levels[0].k_centre if mixes else None
    to = _in_rows(specs[level], layer, centre)
    parts = []
    for lies, run in groupby(map(page_level, places), key=lambda place: place[0]):
        kv = levels[lies]
        at = torch.tensor([index for _, index in run], device=kv.k.device)
        sides = zip(
            _in_pages(specs[lies], layer, kv),
            to,
            ((kv.k, kv.k_scale), (kv.v, kv.v_scale)),
            strict=True,
        )
        columns = [_read(*side, at) for side in sides]
        found = [*(codes for codes, _ in columns), *(scales for _, scales in columns)]
        parts.append(np.concatenate([column.cpu().numpy() for column in found], -1))
    taken = None if centre is None else centre.cpu().numpy()
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return runner.kv.first_head, LayerKV(rows, taken)


def _read(
    lies: _Side, wanted: _Side, pages: tuple[Tensor, Tensor | None], at: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of codes and of scales, those of floats without a column."""
    codes, scales = _rows(pages[0], at), pages[1]
    found = codes[..., :0] if scales is None else _rows(_by_slot(scales, codes.shape[1]), at)
    return (codes, found) if lies.like(wanted) else _converted(codes, found, lies, wanted)


def _by_slot(scales: Tensor, heads: int) -> Tensor:
    """``[num_pages, heads * groups, page_size]`` -> ``[num_pages, heads, page_size, groups]``."""
    pages, _, slots = scales.shape
    return scales.view(pages, heads, -1, slots).transpose(2, 3)


def _rows(x: Tensor, pages: Tensor) -> Tensor:
    """``x [num_pages, heads, page_size, width]`` -> uint8 ``[tokens, heads, bytes]``."""
    x = x.view(_INTS[x.dtype.itemsize])
    if x.is_cpu:
        found = x.numpy()[pages.numpy()].swapaxes(1, 2)
        return _as_bytes(torch.from_numpy(found.reshape(-1, *found.shape[2:])))
    return _as_bytes(x[pages].transpose(1, 2).flatten(0, 1))


def _as_bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8).view(*x.shape[:-1], -1)


def write_layer(
    runner: ModelRunner, layer: int, pages: list[int], stored: LayerKV, source: KVSpec
) -> None:
    """Fill these pages, whole ones of a ladder's first type, with ``stored`` tokens of all heads,
    of the type ``source``.
    """
    kv = runner.kv.layers[layer]
    first, count = runner.kv.first_head, kv.k.shape[1]
    device = kv.k.device
    rows = torch.from_numpy(stored.rows[:, first : first + count].copy()).to(device)
    columns = torch.split(rows, row_widths(source, layer), dim=-1)
    theirs = None
    if stored.centre is not None:
        theirs = torch.from_numpy(stored.centre[first : first + count].copy()).to(device)
    at = torch.tensor(pages, device=device)
    own = _in_pages(runner.kv.spec.levels[0], layer, kv)
    sides = zip(_in_rows(source, layer, theirs), own, strict=True)
    for side, (given, wanted) in enumerate(sides):
        codes, scales = columns[side], columns[side + 2]
        if not given.like(wanted):
            codes, scales = _converted(codes, scales, given, wanted)
        to, to_scales = ((kv.k, kv.k_scale), (kv.v, kv.v_scale))[side]
        _put(to, at, codes)
        if to_scales is not None:
            _put(_by_slot(to_scales, count), at, scales)


def _put(x: Tensor, pages: Tensor, rows: Tensor) -> None:
    """The reverse of ``_rows``."""
    dtype = _INTS[x.dtype.itemsize]
    _, heads, slots, width = x.shape
    shape = len(pages), slots, heads, width
    if x.is_cpu:
        found = torch.from_numpy(np.ascontiguousarray(rows.numpy())).view(dtype).view(shape)
        x.view(dtype).numpy()[pages.numpy()] = found.transpose(1, 2).numpy()
    else:
        x.view(dtype)[pages] = rows.contiguous().view(dtype).view(shape).transpose(1, 2)


def _converted(codes: Tensor, scales: Tensor, given: _Side, wanted: _Side) -> tuple[Tensor, Tensor]:
    """Rows that lie one way as rows that lie another way."""
    if not codes.is_cpu:
        return _convert(codes, scales, given, wanted)
    codes = torch.from_numpy(np.ascontiguousarray(codes.numpy()))
    typed = codes.view(page_dtype(given.part))[0].numel()
    step = max(_ALONE // (2 * typed if given.part.dtype == "int4" else typed), 1)
    pieces = zip(torch.split(codes, step), torch.split(scales, step), strict=True)
    made = [_convert(*piece, given, wanted) for piece in pieces]
    found, scaled = (np.concatenate([x.numpy() for x in side]) for side in zip(*made, strict=True))
    return torch.from_numpy(found), torch.from_numpy(scaled)


def _convert(codes: Tensor, scales: Tensor, given: _Side, wanted: _Side) -> tuple[Tensor, Tensor]:
    typed = codes.contiguous().view(page_dtype(given.part))
    if given.part.groups:
        scale = torch.int16 if given.part.dtype == "int4" else torch.float16
        x = decode(typed, scales.contiguous().view(scale))
    else:
        x = typed.to(torch.float32)
    x = mixed(x) if given.mixed else x
    x = x if given.centre is None else x + given.centre
    x = x if wanted.centre is None else x - wanted.centre
    dtype = page_dtype(wanted.part)
    if wanted.part.groups:
        made, scaled = encode(x, dtype, wanted.part.groups)
        return _as_bytes(made), _as_bytes(scaled)
    x = mixed(x) if wanted.mixed else x
    if dtype == torch.float16:
        x = x.clamp(-HALF_MAX, HALF_MAX)
    return _as_bytes(x.to(dtype)), scales[..., :0]


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
