"""Moves whole pages of the first tier out of an engine and into another with the same KV types.

These are the pages of layers that keep all tokens; others have frames or states instead. Nothing is
converted, so this is a copy: rows as in :mod:`sdk.engine.rank.kv_transfer`, for all layers at once.
All tiers of both engines must be the same, not only the first: in a tiered cache the first tier is
rotated as well, and may have centres. A page of 30 layers takes 0.4 ms this way and 3.5 ms layer by
layer through ``read_layer``, which must find out for each whether it has to convert (measured by
hand with SmolLM2-135M), and running requests wait for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sdk.engine.rank.kv_transfer import INTS, Bytes, LayerKV, read_layer, write_layer
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.quant.spec import KVSpec

if TYPE_CHECKING:
    from sdk.engine.rank.runner import ModelRunner


class RankRows(NamedTuple):
    """For each layer that keeps all tokens the rows of a rank's heads, and the first of these."""

    first_heads: tuple[int, ...]
    layers: list[Bytes]


def read_rows(runner: ModelRunner, pages: list[int]) -> RankRows:
    """The contents of these pages. Runs on every rank (``Executor.on_ranks``)."""
    kv, layers = runner.kv, runner.kv.spec.layers_in(0)
    first_heads = tuple(kv.first_heads[i] for i in layers)
    if not _pages(runner, layers[0]).k.is_cpu:
        return RankRows(first_heads, [_layer(runner, i, pages).rows for i in layers])
    at, found = _index(pages), []
    for layer in layers:
        columns = _columns(_pages(runner, layer))
        _, heads, slots = columns[0].shape[:3]
        width = sum(column.shape[3] * column.itemsize for column in columns)
        rows = np.empty((len(pages), slots, heads, width), dtype=np.uint8)
        for column, part in zip(columns, _parts(rows, columns), strict=True):
            part[...] = column[at].swapaxes(1, 2)
        found.append(rows.reshape(-1, heads, width))
    return RankRows(first_heads, found)


def write_rows(
    runner: ModelRunner, pages: list[int], stored: Sequence[Bytes], spec: KVSpec
) -> None:
    """Fill these pages with rows of all heads, one array for each layer that keeps all tokens;
    ``spec``: of the pages, over all ranks. Runs on every rank.
    """
    layers = runner.kv.spec.layers_in(0)
    if not _pages(runner, layers[0]).k.is_cpu:
        for i, rows in zip(layers, stored, strict=True):
            write_layer(runner, i, pages, _with_centre(runner, i, rows), spec)
        return
    at = _index(pages)
    for layer, rows in zip(layers, stored, strict=True):
        columns, first = _columns(_pages(runner, layer)), runner.kv.first_heads[layer]
        _, heads, slots = columns[0].shape[:3]
        own = rows[:, first : first + heads]
        own = own.reshape(len(pages), slots, heads, -1)
        for column, part in zip(columns, _parts(own, columns), strict=True):
            column[at] = part.swapaxes(1, 2)


def _pages(runner: ModelRunner, layer: int) -> KVPages:
    pages = runner.kv.layers[layer]
    assert isinstance(pages, KVPages)
    return pages


def _with_centre(runner: ModelRunner, layer: int, rows: Bytes) -> LayerKV:
    """Rows from which the same centre was subtracted as from keys in the pages."""
    return LayerKV(rows, _layer(runner, layer, [0]).centre)


def _layer(runner: ModelRunner, layer: int, pages: list[int]) -> LayerKV:
    found = read_layer(runner, layer, pages, 0)
    assert found is not None  # there are no stages: EnginePages.of
    return found[1]


def _index(pages: list[int]) -> slice | NDArray[np.intp]:
    """How to index with pages: consecutive ones need one copy less."""
    first = pages[0]
    if pages == list(range(first, first + len(pages))):
        return slice(first, first + len(pages))
    return np.array(pages, dtype=np.intp)


def _columns(kv: KVPages) -> list[NDArray[Any]]:
    """A layer's pages ``[num_pages, heads, page_size, ...]``, in the order of a row: codes of keys
    and of values, then the scales of both, if they have any.
    """
    found = [_numbers(kv.k), _numbers(kv.v)]
    heads = kv.k.shape[1]
    for scale in (kv.k_scale, kv.v_scale):
        if scale is not None:  # [num_pages, heads * groups, page_size]
            num_pages, both, slots = scale.shape
            by_group = _numbers(scale).reshape(num_pages, heads, both // heads, slots)
            found.append(by_group.swapaxes(2, 3))
    return found


def _numbers(x: Tensor) -> NDArray[Any]:
    """As integers of the same size: numpy has neither bfloat16 nor float8."""
    array: NDArray[Any] = x.view(getattr(torch, INTS[x.dtype.itemsize])).numpy()
    return array


def _parts(rows: Bytes, columns: Sequence[NDArray[Any]]) -> list[NDArray[Any]]:
    """The columns of ``rows [pages, page_size, heads, row]``, each of the type of its pages."""
    found, begin = [], 0
    for column in columns:
        end = begin + column.shape[3] * column.itemsize
        found.append(rows[..., begin:end].view(column.dtype))
        begin = end
    return found


def joined_rows(parts: Sequence[RankRows], spec: KVSpec) -> list[Bytes]:
    """All heads of each layer, joined from the ranks' parts; ranks may have the same heads.
    ``spec``: of all ranks together."""
    if len(parts) == 1:
        return parts[0].layers
    found = []
    every = zip(*(part.layers for part in parts), strict=True)
    for index, (layer, layers) in enumerate(zip(spec.layers_in(0), every, strict=True)):
        tokens, _, width = layers[0].shape
        rows = np.empty((tokens, spec.cache(layer).kv_heads, width), dtype=np.uint8)
        for part, own in zip(parts, layers, strict=True):
            first = part.first_heads[index]
            rows[:, first : first + own.shape[1]] = own
        found.append(rows)
    return found
