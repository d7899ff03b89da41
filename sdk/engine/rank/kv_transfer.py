"""Moves keys and values out of the pages of one engine and into those of another, and states.

Outside of pages they are stored token by token, so that neither the page size nor the number of
ranks matters: for each layer uint8 ``[tokens, kv_heads, row]``. A row has the codes of a key, those
of the value, and the scales of both if there are any. Types with ``hadamard`` are mixed and have
the centre of their keys subtracted; others are neither. Rows go into pages of the same type bit for
bit; for other types they are decoded and encoded again.

Tiered pages are read as rows of one type, that of the best of them.

A recurrent state is stored as each rank has it: only operators know what its numbers mean, so
nothing is converted, and engines with other numbers of ranks cannot take it.

The functions that take a runner run on every rank (see ``Executor.on_ranks``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.tiers import page_tier
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.page_codes import encode, mixed
from sdk.quant.caches import StateCache
from sdk.quant.spec import KVPart, KVSpec

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner

Bytes = NDArray[np.uint8]
#: Integers by size in bytes.
INTS = {1: "uint8", 2: "int16", 4: "int32"}
#: On a CPU numpy copies, and torch converts at most this many values at a time: from 32,768 on it
#: shares an operation with its threads and spins while it waits for them. On two cores shared by
#: seven processes, converting 1,200 tokens of SmolLM2 to int8 took 35 to 105 s that way and 0.7 to
#: 6 s this way (measured by hand, five times each, alternating).
_ALONE = 2**15 - 1


@dataclass(frozen=True, slots=True)
class LayerKV:
    """One layer: ``rows`` uint8 ``[tokens, kv_heads, row]`` and the centre subtracted from its keys
    (``KVPages.k_centre``), float32 ``[kv_heads, head_dim]``.
    """

    rows: Bytes
    centre: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class LayerStates:
    """The recurrent state of one layer after the last token: ``rows`` uint8 ``[ranks, bytes]``, the
    parts of ``StateCache`` one after another.
    """

    rows: Bytes


@dataclass(frozen=True, slots=True)
class StoredKV:
    """What all layers and heads keep of ``num_tokens`` consecutive tokens. ``spec.page_size`` is
    not used. Layers with a window may have the last rows only.
    """

    spec: KVSpec
    layers: tuple[LayerKV | LayerStates, ...]
    num_tokens: int


def row_widths(spec: KVSpec, layer: int) -> list[int]:
    """Bytes of a row's four parts: codes of key and value, scales of key and value."""
    parts, cache = spec.parts(layer), spec.cache(layer)
    widths = cache.key_dim, 0 if cache.latent else cache.value_dim
    codes = [part.type.code_bytes(width) for part, width in zip(parts, widths, strict=True)]
    return codes + [part.groups * part.type.scale_bytes for part in parts]


class _Side(NamedTuple):
    """How keys or values are stored: type, whether mixed, and the centre that was subtracted.
    ``value_dim``: of latents, whose values are mixed like keys (``page_codes.mixed``)."""

    part: KVPart
    mixed: bool
    centre: Tensor | None = None
    value_dim: int = 0

    def like(self, other: _Side) -> bool:
        """Whether both store the same values as the same bytes."""
        a, b = self.centre, other.centre
        same = a is b if a is None or b is None else torch.equal(a, b)
        return same and self._numerics == other._numerics

    @property
    def _numerics(self) -> tuple[str, int, bool]:
        return self.part.type.name, self.part.groups, self.mixed


def _in_pages(spec: KVSpec, layer: int, kv: KVPages) -> tuple[_Side, _Side]:
    """How a layer's keys and values are stored in pages of one tier."""
    k, v = spec.parts(layer)
    return _Side(k, kv.k_mixed, kv.k_centre, _latent(spec, layer)), _Side(v, kv.v_mixed)


def _in_rows(spec: KVSpec, layer: int, centre: Tensor | None) -> tuple[_Side, _Side]:
    """How a layer's keys and values are stored in rows; ``centre``: of its keys, if any."""
    k, v = spec.parts(layer)
    also = _latent(spec, layer)
    return _Side(k, k.type.hadamard, centre, also), _Side(v, v.type.hadamard)


def _latent(spec: KVSpec, layer: int) -> int:
    cache = spec.cache(layer)
    return cache.value_dim if cache.latent else 0


def read_layer(
    runner: ModelRunner, layer: int, places: list[int], tier: int
) -> tuple[int, LayerKV] | None:
    """The contents of these pages for the rank's own heads as rows of the type of a tier
    (0 without a tiered cache), and the first of the heads. ``None``: another stage has the layer.
    """
    layer -= runner.kv.first_layer
    if not 0 <= layer < len(runner.kv.layers):
        return None
    pages, specs = runner.kv.layers[layer], runner.kv.spec.tiers
    assert isinstance(pages, KVPages)
    tiers = pages.tiers
    mixes = specs[tier].parts(layer)[0].type.hadamard
    centre = tiers[0].k_centre if mixes else None
    to = _in_rows(specs[tier], layer, centre)
    parts = []
    for own_tier, run in groupby(map(page_tier, places), key=lambda place: place[0]):
        kv = tiers[own_tier]
        at = torch.tensor([index for _, index in run], device=kv.k.device)
        sides = zip(
            _in_pages(specs[own_tier], layer, kv),
            to,
            ((kv.k, kv.k_scale), (kv.v, kv.v_scale)),
            strict=True,
        )
        columns = [_read(*side, at) for side in sides]
        found = [*(codes for codes, _ in columns), *(scales for _, scales in columns)]
        parts.append(np.concatenate([column.cpu().numpy() for column in found], -1))
    taken = None if centre is None else centre.cpu().numpy()
    rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return runner.kv.first_heads[layer], LayerKV(rows, taken)


def _read(
    stored: _Side, target: _Side, pages: tuple[Tensor, Tensor | None], at: Tensor
) -> tuple[Tensor, Tensor]:
    """Rows of codes and of scales; floats have no columns of scales."""
    codes, scales = _rows(pages[0], at), pages[1]
    found = codes[..., :0] if scales is None else _rows(_by_slot(scales, codes.shape[1]), at)
    as_is = stored.like(target) or not codes.shape[-1]  # latents have no values of their own
    return (codes, found) if as_is else _converted(codes, found, stored, target)


def _by_slot(scales: Tensor, heads: int) -> Tensor:
    """``[num_pages, heads * groups, page_size]`` -> ``[num_pages, heads, page_size, groups]``."""
    pages, _, slots = scales.shape
    return scales.view(pages, heads, -1, slots).transpose(2, 3)


def _rows(x: Tensor, pages: Tensor) -> Tensor:
    """``x [num_pages, heads, page_size, width]`` -> uint8 ``[tokens, heads, bytes]``."""
    x = x.view(getattr(torch, INTS[x.dtype.itemsize]))
    if x.is_cpu:
        found = x.numpy()[pages.numpy()].swapaxes(1, 2)
        return _as_bytes(
            torch.from_numpy(found.reshape(len(found) * found.shape[1], *found.shape[2:]))
        )
    return _as_bytes(x[pages].transpose(1, 2).flatten(0, 1))


def _as_bytes(x: Tensor) -> Tensor:
    width = x.shape[-1] * x.itemsize
    return x.reshape(-1).view(torch.uint8).view(*x.shape[:-1], width)


def write_layer(
    runner: ModelRunner, layer: int, pages: list[int], stored: LayerKV, source: KVSpec
) -> None:
    """Fill these pages with ``stored`` tokens of all heads, whose types are those of ``source``.

    The pages are whole ones, in a tiered cache of its first type. Nothing happens on ranks that do
    not have the layer.
    """
    own_layer = layer - runner.kv.first_layer
    if not 0 <= own_layer < len(runner.kv.layers):
        return
    kv = runner.kv.layers[own_layer]
    assert isinstance(kv, KVPages)
    first, count = runner.kv.first_heads[own_layer], kv.k.shape[1]
    device = kv.k.device
    rows = torch.from_numpy(stored.rows[:, first : first + count].copy()).to(device)
    columns = torch.split(rows, row_widths(source, layer), dim=-1)
    theirs = None
    if stored.centre is not None:
        theirs = torch.from_numpy(stored.centre[first : first + count].copy()).to(device)
    at = torch.tensor(pages, device=device)
    own = _in_pages(runner.kv.spec.tiers[0], own_layer, kv)
    sides = zip(_in_rows(source, layer, theirs), own, strict=True)
    for side, (given, target) in enumerate(sides):
        codes, scales = columns[side], columns[side + 2]
        if not given.like(target) and codes.shape[-1]:
            codes, scales = _converted(codes, scales, given, target)
        to, to_scales = ((kv.k, kv.k_scale), (kv.v, kv.v_scale))[side]
        _put(to, at, codes)
        if to_scales is not None:
            _put(_by_slot(to_scales, count), at, scales)


def read_state(runner: ModelRunner, layer: int, slot: int) -> tuple[int, Bytes] | None:
    """This rank's number and its part of a layer's state in one snapshot. ``None``: another stage
    has the layer.
    """
    parts = _state_parts(runner, layer, slot)
    if parts is None:
        return None
    return runner.kv.rank, np.concatenate([_flat_bytes(part).cpu().numpy() for part in parts])


def write_state(runner: ModelRunner, layer: int, slot: int, rows: Bytes) -> None:
    """Write each rank's part of a layer's state, uint8 ``[ranks, bytes]``, into one snapshot."""
    parts = _state_parts(runner, layer, slot)
    begin = 0
    for part in parts or ():
        end = begin + part.numel() * part.itemsize
        own, target = rows[runner.kv.rank, begin:end], _flat_bytes(part)
        if target.is_cpu:
            target.numpy()[:] = own
        else:
            target.copy_(torch.from_numpy(own.copy()))
        begin = end


def _flat_bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def _state_parts(runner: ModelRunner, layer: int, slot: int) -> list[Tensor] | None:
    layer -= runner.kv.first_layer
    if not 0 <= layer < len(runner.kv.layers):
        return None
    state, cache = runner.kv.snapshots(layer), runner.kv.snapshot_spec.caches[layer]
    assert isinstance(cache, StateCache)
    return [state[part.name][slot] for part in cache.parts]


def _put(x: Tensor, pages: Tensor, rows: Tensor) -> None:
    """The inverse of ``_rows``."""
    dtype = getattr(torch, INTS[x.dtype.itemsize])
    _, heads, slots, width = x.shape
    if not width:
        return
    shape = len(pages), slots, heads, width
    if x.is_cpu:
        found = torch.from_numpy(np.ascontiguousarray(rows.numpy())).view(dtype).view(shape)
        x.view(dtype).numpy()[pages.numpy()] = found.transpose(1, 2).numpy()
    else:
        x.view(dtype)[pages] = rows.contiguous().view(dtype).view(shape).transpose(1, 2)


def _converted(codes: Tensor, scales: Tensor, given: _Side, target: _Side) -> tuple[Tensor, Tensor]:
    """Rows stored one way as rows stored another way."""
    if not codes.is_cpu:
        return _convert(codes, scales, given, target)
    codes = torch.from_numpy(np.ascontiguousarray(codes.numpy()))
    kind = given.part.type
    step = max(_ALONE // (codes.view(kind.storage_dtype)[0].numel() * kind.packing), 1)
    pieces = zip(torch.split(codes, step), torch.split(scales, step), strict=True)
    made = [_convert(*piece, given, target) for piece in pieces]
    found, scaled = (np.concatenate([x.numpy() for x in side]) for side in zip(*made, strict=True))
    return torch.from_numpy(found), torch.from_numpy(scaled)


def _convert(codes: Tensor, scales: Tensor, given: _Side, target: _Side) -> tuple[Tensor, Tensor]:
    kind = given.part.type
    words = scales.contiguous().view(kind.scale_dtype) if kind.scale else None
    x = kind.decode(codes.contiguous().view(kind.storage_dtype), words)
    x = mixed(x, given.value_dim) if given.mixed else x
    x = x if given.centre is None else x + given.centre
    x = x if target.centre is None else x - target.centre
    part, also = target.part, target.value_dim
    made, scaled = encode(x, part.type, part.groups, mix=target.mixed, also=also)
    return _as_bytes(made), scales[..., :0] if scaled is None else _as_bytes(scaled)


def joined_states(answers: Sequence[tuple[int, Bytes] | None]) -> LayerStates:
    """The parts of all ranks, in their order; those of other stages have none."""
    parts = dict(answer for answer in answers if answer is not None)
    return LayerStates(np.stack([parts[rank] for rank in sorted(parts)]))


def joined(answers: Sequence[tuple[int, LayerKV] | None], kv_heads: int) -> LayerKV:
    """All heads of a layer, joined from the ranks' parts; ranks may have the same heads, and those
    of other stages have none."""
    parts = [answer for answer in answers if answer is not None]
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
