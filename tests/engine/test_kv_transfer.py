"""Keys and values read from tiered pages and written to others."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.kv_transfer import read_layer, write_layer
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.tiers import TIER_PAGE_SIZE, page_id, page_tier
from sdk.kernels.reference.page_codes import mixed, page_floats
from sdk.kernels.reference.recode import RecodePage
from sdk.quant.spec import KVSpec
from tests.scripts import run_python

TIERS = "float16>int8>int4"
PLACES = [page_id(0, 2), page_id(1, 6), page_id(1, 7), page_id(2, 17), page_id(0, 5)]


def _cache(dtype: str, centre: Tensor | None) -> Any:
    """What a rank has: six pages of one layer, two heads of 48."""
    cache = KVCache(KVSpec(1, 2, 48, TIER_PAGE_SIZE, dtype), 6)
    cache.layers = [_with_centre(cache.layers[0], centre)]
    return SimpleNamespace(kv=cache)


def _with_centre(pages: KVPages, centre: Tensor | None) -> KVPages:
    below = None if pages.next_tier is None else _with_centre(pages.next_tier, centre)
    return replace(pages, k_centre=centre, next_tier=below)


@pytest.fixture
def rank() -> Any:
    """Tiered pages, filled at ``PLACES``."""
    rank = _cache(TIERS, torch.linspace(-4, 4, 96).view(2, 48))
    [pages] = rank.kv.layers
    random = torch.Generator().manual_seed(1)
    for place in PLACES:
        tier, index = page_tier(place)
        at = index if not tier else 4  # a float16 page that nobody needs
        for x in (pages.k, pages.v):
            x[at] = torch.randn(x.shape[1:], generator=random).to(torch.float16)
        if tier:
            RecodePage().bind([pages])(0, at, tier, index)
    return rank


def _floats(rank: Any, places: list[int]) -> tuple[Tensor, Tensor]:
    """What lies there, neither mixed nor centred: ``[tokens, heads, head_dim]`` each."""
    [pages] = rank.kv.layers
    sides: tuple[list[Tensor], list[Tensor]] = ([], [])
    for tier, index in map(page_tier, places):
        found = page_floats(pages.tiers[tier], torch.tensor([index]))
        for side, x, is_mixed in zip(sides, found, (pages.k_mixed, pages.v_mixed), strict=True):
            side.append((mixed(x) if is_mixed else x)[0].transpose(0, 1))
    k, v = (torch.cat(side) for side in sides)
    return (k if pages.k_centre is None else k + pages.k_centre), v


def test_rows_of_float16_hold_what_pages_of_three_types_stand_for(rank: Any) -> None:
    first, found = read_layer(rank, 0, PLACES, 0)
    assert first == 0 and found.centre is None
    assert found.rows.shape == (5 * TIER_PAGE_SIZE, 2, 4 * 48)
    rows = torch.from_numpy(found.rows).view(torch.float16).float()
    for x, y in zip(rows.split(48, dim=-1), _floats(rank, PLACES), strict=True):
        assert (x - y).abs().max() <= y.abs().max() * 2**-11


def test_rows_of_int8_are_the_bytes_of_the_pages_that_are_int8(rank: Any) -> None:
    _, alone = read_layer(rank, 0, PLACES[1:3], 1)
    _, among = read_layer(rank, 0, PLACES[1:4], 1)
    assert alone.centre is not None
    assert (alone.rows == among.rows[: 2 * TIER_PAGE_SIZE]).all()
    pages = rank.kv.layers[0].tiers[1]
    keys = pages.k[6:8].transpose(1, 2).flatten(0, 1)
    assert torch.equal(torch.from_numpy(alone.rows[..., :48]).view(torch.int8), keys)


class Copies(TorchDispatchMode):
    """What torch does with more than an index: its threads wait for each other on a busy machine,
    so that pages of the type wanted are copied by numpy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = op(*args, **(kwargs or {}))
        if not op.is_view and result.numel() > TIER_PAGE_SIZE:
            self.found.append(str(op))
        return result


@pytest.mark.parametrize("dtype", ["float16", "int16", "int8", "int4"])
def test_pages_of_the_type_wanted_are_copied_without_torchs_threads(dtype: str) -> None:
    source, target = (_cache(dtype, None) for _ in range(2))
    for page in (2, 4):
        [kv] = source.kv.layers
        for x in (x for x in (kv.k, kv.v, kv.k_scale, kv.v_scale) if x is not None):
            x[page] = torch.arange(x[page].numel()).view(x[page].shape) % 7
    with Copies() as copies:
        _, stored = read_layer(source, 0, [2, 4], 0)
        write_layer(target, 0, [1, 3], stored, source.kv.spec)
    assert copies.found == []
    [a], [b] = source.kv.layers, target.kv.layers
    for x, y in ((a.k, b.k), (a.v, b.v), (a.k_scale, b.k_scale), (a.v_scale, b.v_scale)):
        assert x is y is None or torch.equal(x[[2, 4]], y[[1, 3]])


@pytest.mark.parametrize("tier", [0, 1])
@pytest.mark.parametrize(
    ("dtype", "centred", "error"),
    [
        *((TIERS, True, 0.001), (TIERS, False, 0.001), ("float16", False, 0.001)),
        *(("int16", False, 0.001), ("int8", False, 0.035), ("k8v4", True, 0.2)),
    ],
)
def test_what_is_read_from_tiered_pages_is_written_into_any_pages(
    rank: Any, dtype: str, centred: bool, tier: int, error: float
) -> None:
    """``error``: what coding costs beside the largest value, half of it when it was measured; rows
    of int8 cost as much as int8 pages.
    """
    places = PLACES[tier:4]
    _, stored = read_layer(rank, 0, places, tier)
    centre = torch.linspace(1, -1, 96).view(2, 48) if centred else None
    other = _cache(dtype, centre)
    at = list(range(1, len(places) + 1))
    write_layer(other, 0, at, stored, rank.kv.spec.tiers[tier])
    for x, y in zip(_floats(other, at), _floats(rank, places), strict=True):
        assert (x - y).abs().max() < (error + 0.03 * tier) * y.abs().max()


_ALONE = """
import os, torch
from types import SimpleNamespace
from sdk.engine.rank.kv_cache import KVCache
from sdk.engine.rank.kv_transfer import read_layer, write_layer
from sdk.quant.spec import KVSpec
from tests.scripts import run_python

torch.set_num_threads(4)
names = ("float32", "int16", "int8", "int4")
caches = {name: KVCache(KVSpec(1, 4, 64, 16, name), 80) for name in names}
threads = len(os.listdir("/proc/self/task"))
pages = list(range(1, 76))  # 1,200 tokens, 307,200 values
for name, cache in caches.items():
    _, rows = read_layer(SimpleNamespace(kv=cache), 0, pages, 0)
    for other in caches.values():
        write_layer(SimpleNamespace(kv=other), 0, pages, rows, cache.spec)
assert len(os.listdir("/proc/self/task")) == threads, "torch has started threads"
torch.zeros(2**20).add_(1)
assert len(os.listdir("/proc/self/task")) > threads, "this says nothing"
"""


@pytest.mark.slow
def test_conversions_on_a_cpu_wait_for_no_threads() -> None:
    """Torch's spin while they wait: on a busy machine that was 50 times what a restore takes."""
    run_python(_ALONE)
