"""Pages of several types in one table: attention over them, and what takes one to the next type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.engine.plan import Move, Swap
from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.cpu import CpuBackend, open_backend
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.kv.recoder import page_recoder
from sdk.kernels.kv.tiers import TIER_PAGE_SIZE, page_id
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.attention import Attention
from sdk.kernels.reference.page_codes import mixed, page_floats
from sdk.kernels.reference.recode import RecodePage
from sdk.kernels.reference.rope import RopeAndCache
from sdk.quant.spec import KVSpec
from tests.kernels.plain_kernels import plain_kernels

TIERS = "float16>int8>int4"
SLABS = 12
#: Of requests, one page in each slab: places of all tiers, in no order.
PLACES = [
    [page_id(0, 5), page_id(1, 2), page_id(2, 13), page_id(0, 7), page_id(2, 12), page_id(0, 9)],
    [page_id(2, 14), page_id(1, 3), page_id(0, 11)],
    [page_id(0, 8)],
]
LENGTHS = [700, 300, 50]


def make_cache(head_dim: int, kv_heads: int, tiers: str = TIERS) -> KVCache:
    return KVCache(KVSpec(1, kv_heads, head_dim, TIER_PAGE_SIZE, tiers), SLABS)


def make_batch(new: list[int]) -> AttentionBatch:
    """The last this many tokens of each request."""
    starts = torch.tensor([0, *new]).cumsum(0)
    table = torch.zeros(len(new), 6, dtype=torch.int32)
    for row, places in zip(table, PLACES, strict=False):
        row[: len(places)] = torch.tensor(places)
    spans = zip(LENGTHS, new, strict=False)
    positions = torch.cat([torch.arange(length - count, length) for length, count in spans])
    return AttentionBatch(
        positions=positions,
        query_start=starts.to(torch.int32),
        context_len=torch.tensor(LENGTHS[: len(new)], dtype=torch.int32),
        page_table=table,
        slots=torch.zeros(len(positions), dtype=torch.int64),
        page_size=TIER_PAGE_SIZE,
        max_query_len=max(new),
        max_context_len=max(LENGTHS),
    )


def fill(pages: KVPages, rope: Any, recode: Any) -> None:
    """Write all positions in float16, then take each page to where it belongs."""
    count, (kv_heads, head_dim) = TIER_PAGE_SIZE, (pages.k.shape[1], pages.head_dim)
    random = torch.Generator().manual_seed(1)
    still = torch.zeros(count, 0)
    for place in [place for places in PLACES for place in places]:
        tier, index = place >> 28, place & (1 << 28) - 1
        slab = 2 if tier else index
        batch = replace(
            make_batch([1]),
            positions=torch.arange(count),
            slots=torch.arange(count) + slab * count,
        )
        q, k, v = torch.randn(3, count, kv_heads, head_dim, generator=random) * 3
        rope.run(q, k, v, still, still, batch, pages)
        if tier:
            recode.bind([pages])(0, slab, tier, index)


def expected(pages: KVPages, batch: AttentionBatch, q: Tensor, window: int | None) -> Tensor:
    """Float64, token by token, from the definition; ``q`` is mixed."""
    heads, head_dim = q.shape[1:]
    out = torch.empty(q.shape, dtype=torch.float64)
    starts = batch.query_start.tolist()
    for r, length in enumerate(batch.context_len.tolist()):
        sides = []
        for side in range(2):
            parts = [
                page_floats(pages.tiers[p >> 28], torch.tensor([p & (1 << 28) - 1]))[side][0]
                for p in PLACES[r]
            ]
            x = torch.cat(parts, dim=1)[:, :length].double()
            sides.append(x.repeat_interleave(heads // x.shape[0], 0))
        for t in range(starts[r], starts[r + 1]):
            end = int(batch.positions[t]) + 1
            low = max(0, end - (window or end))
            score = torch.einsum("hd,htd->ht", q[t].double(), sides[0][:, low:end])
            weight = (score * head_dim**-0.5).softmax(dim=1)
            out[t] = torch.einsum("ht,htd->hd", weight, sides[1][:, low:end])
    return mixed(out).flatten(1)


def attend(kernel: Any, pages: KVPages, batch: AttentionBatch, q: Tensor, window: Any) -> Tensor:
    out = torch.full((q.shape[0], q.shape[1] * q.shape[2]), float("nan"))
    kernel.run(q, pages, batch, q.shape[2] ** -0.5, window, None, None, None, out)
    return out


def queries(tokens: int, heads: int, head_dim: int) -> Tensor:
    return torch.randn(tokens, heads, head_dim, generator=torch.Generator().manual_seed(2))


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 64), (3, 1, 80), (2, 2, 24)])
@pytest.mark.parametrize("new", [[1, 1, 1], [60, 2, 50]])
def test_attention_over_pages_of_three_types_matches_float64(
    backend: CpuBackend,
    cases: Any,
    heads: int,
    kv_heads: int,
    head_dim: int,
    new: list[int],
    window: int | None,
) -> None:
    [pages] = make_cache(head_dim, kv_heads).layers
    rope, recode, kernel = (
        plain_kernels(backend, op)[0] for op in ("rope_and_cache", "recode_page", "attention")
    )
    fill(pages, rope, recode)
    batch, q = make_batch(new), queries(sum(new), heads, head_dim)
    found = attend(kernel, pages, batch, q, window)
    wanted = expected(pages, batch, q, window)
    assert (
        cases.nmse(found, wanted) < 1e-8
    )  # 16-bit queries and weights where pages are int8 or int4
    assert cases.nmse(attend(Attention(), pages, batch, q, window), wanted) < 1e-11


def test_a_row_is_the_same_bits_alone_and_with_any_number_of_threads(backend: CpuBackend) -> None:
    [pages] = make_cache(64, 2).layers
    fill(pages, RopeAndCache(), RecodePage())
    [kernel] = plain_kernels(backend, "attention")
    [single] = plain_kernels(open_backend("cpu", 1, backend.runtime.level), "attention")
    q = queries(60, 6, 64)
    whole = attend(kernel, pages, make_batch([60]), q, None)
    assert torch.equal(attend(single, pages, make_batch([60]), q, None), whole)
    assert torch.equal(attend(kernel, pages, make_batch([1]), q[-1:], None), whole[-1:])
    many = torch.cat((q[-1:], queries(3, 6, 64)))
    assert torch.equal(attend(single, pages, make_batch([1, 2, 1]), many, None)[:1], whole[-1:])


@pytest.mark.quick_cases(11)
@pytest.mark.parametrize("head_dim", [64, 80, 24])
@pytest.mark.parametrize(
    ("above", "below", "dtype"),
    [
        *((0, 1, "float16"), (0, 2, "float16"), (1, 2, "float16")),
        *((0, 1, "bfloat16"), (0, 2, "float32")),
    ],
)
def test_a_recoded_page_has_the_bits_of_the_reference(
    backend: CpuBackend, head_dim: int, above: int, below: int, dtype: str
) -> None:
    [recode] = backend.implementations("recode_page")
    tiers = f"{dtype}>int8>int4"
    first, second = (make_cache(head_dim, 3, tiers).layers[0] for _ in range(2))
    for pages in (first, second):
        fill(pages, RopeAndCache(), RecodePage())
        pages.v[5, 1, 17] = float("nan")  # stays visible in its group
    source = 5 if above == 0 else 2
    to = 10 << below
    recode.bind([first])(above, source, below, to)
    RecodePage().bind([second])(above, source, below, to)
    found, wanted = first.tiers[below], second.tiers[below]
    for name in ("k", "v", "k_scale", "v_scale"):
        ours, theirs = (getattr(one, name)[to].contiguous() for one in (found, wanted))
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    if above == 0:
        assert page_floats(found, torch.tensor([to]))[1][0, 1, 17].isnan().any()


def test_floats_are_written_mixed_and_without_their_centre(backend: CpuBackend) -> None:
    [pages] = make_cache(64, 2).layers
    centre = torch.linspace(-4, 4, 128).view(2, 64)
    pages = replace(pages, k_centre=centre)
    count = TIER_PAGE_SIZE
    q, k, v = torch.randn(3, count, 2, 64, generator=torch.Generator().manual_seed(3))
    batch = replace(
        make_batch([1]), positions=torch.arange(count), slots=torch.arange(count) + 2 * count
    )
    [rope] = backend.implementations("rope_and_cache")
    still, given = torch.zeros(count, 0), q.clone()
    rope.run(q, k, v, still, still, batch, pages)
    keys, values = page_floats(pages, torch.tensor([2]))
    assert (keys[0].transpose(0, 1) - mixed(k - centre)).abs().max() < 9e-3  # of up to 17
    assert (values[0].transpose(0, 1) - mixed(v)).abs().max() < 4e-3
    assert (q - mixed(given)).abs().max() < 1e-5


@pytest.mark.parametrize("place", [page_id(0, SLABS), page_id(2, 4 * SLABS), page_id(3, 0), -1])
def test_a_page_that_does_not_exist_is_refused(backend: CpuBackend, place: int) -> None:
    [pages] = make_cache(64, 2).layers
    [kernel] = plain_kernels(backend, "attention")
    batch = make_batch([1])
    batch.page_table[0, 3] = place
    with pytest.raises(KernelError, match="lies outside of its tensor"):
        attend(kernel, pages, batch, queries(1, 2, 64), None)


def test_a_page_goes_down_only() -> None:
    ops = Ops("cpu", num_threads=1)
    [pages] = make_cache(64, 1).layers
    recode = page_recoder(ops.context, [pages])
    for source, target in [(page_id(1, 4), page_id(1, 5)), (page_id(1, 4), page_id(0, 5))]:
        with pytest.raises(KernelError, match="found tiers 1 and"):
            recode(source, target)
    with pytest.raises(KernelError, match="pages below 12 and 24, found 12 and 4"):
        recode(page_id(0, SLABS), page_id(1, 4))
    ops.close()


def test_moves_keep_what_a_page_holds_and_touch_no_other() -> None:
    """Within its own slab a page goes through slab 0, as the pool plans it."""
    ops = Ops("cpu", num_threads=2)
    cache = make_cache(64, 2)
    [pages] = cache.layers
    fill(pages, RopeAndCache(), RecodePage())
    two = torch.tensor([5, 7])
    before = page_floats(pages, two)
    own = [(page_id(0, 5), page_id(1, 0)), (page_id(1, 0), page_id(1, 10))]
    cache.copy([Move(*move) for move in own], ops)
    cache.copy([Move(page_id(0, 7), page_id(1, 11)), Move(page_id(1, 10), page_id(1, 14))], ops)
    assert pages.next_tier is not None
    after = page_floats(pages.next_tier, torch.tensor([14, 11]))
    for x, y in zip(before, after, strict=True):
        assert ((x - y).abs() <= x.abs().amax(dim=-1, keepdim=True) / 127 * 0.51 + 1e-3).all()
    ops.close()


@pytest.mark.parametrize("where", ["memory", "file"])
def test_pages_of_any_level_swap_bit_for_bit_and_touch_no_other(tmp_path: Path, where: str) -> None:
    """One slot takes a page of the first type, or two, or four; what is beside it stays."""
    ops = Ops("cpu", num_threads=1)
    spec = KVSpec(3, 2, 64, TIER_PAGE_SIZE, TIERS)
    folder = tmp_path if where == "file" else None
    cache = KVCache(spec, SLABS, num_swap_pages=2, swap_path=folder)
    memory = cache._memories[0].places.view(SLABS, 4, -1)
    memory.copy_(torch.randint(256, memory.shape, dtype=torch.uint8))
    before = memory.clone()
    slots = {
        page_id(0, 5): page_id(0, 1),
        page_id(1, 2): page_id(1, 1),
        page_id(2, 13): page_id(2, 1),
    }
    cache.copy([Swap(page, (slot,), out=True) for page, slot in slots.items()], ops)
    assert torch.equal(memory, before)
    memory[[5, 1, 3]] = 0
    back = page_id(0, 1), page_id(1, 5), page_id(2, 15)
    pairs = zip(back, slots.values(), strict=True)
    cache.copy([Swap(page, (slot,), out=False) for page, slot in pairs], ops)
    expected = before.clone()
    expected[[5, 1, 3]] = 0
    expected[1] = before[5]
    expected[2, 2:] = before[1, :2]
    expected[3, 3] = before[3, 1]
    assert torch.equal(memory, expected)
    cache.close()
    ops.close()
