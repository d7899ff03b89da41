"""Attention, rope, row-wise and sampling kernels compiled for cards that are not here.

    echo '{"jobs": [["sm_90", "attention int8 .*"], ["gfx942", "rope .*"]], "wanted": null}' |
        python compile_attention.py

A program, see ``machine_code.py``. A job is the target and a pattern of the names of cases.
Activations are of the type that the target's cards have between kernels (:func:`short_of`).
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from triton.backends.compiler import GPUTarget

sys.path.insert(0, str(Path(__file__).parents[3]))

from machine_code import Source, answer, launches

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.gpu import (
    attention,
    elementwise,
    experts,
    latent,
    low_rank,
    norm,
    rates,
    rope,
    sampling,
    states,
)
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import HeadNorms
from sdk.kernels.operators.low_rank import Shape
from sdk.kernels.operators.mlp_activations import ALWAYS_GATED
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.route_rule import RouteRule
from sdk.kernels.operators.routes import TILE_ROWS, Routes, tiles_at
from sdk.kernels.operators.states import RwkvKeys, StateBatch
from sdk.kernels.packed_shapes import PackedShapes
from sdk.quant.caches import AttentionCache
from sdk.quant.spec import KVSpec
from tests.gpu.aot.sweep import BIASED, BOTH_WAYS, LATENT

TARGETS = {
    **{f"sm_{cc}": GPUTarget("cuda", cc, 32) for cc in (75, 80, 89, 90, 100, 120)},
    **{name: GPUTarget("hip", name, 64) for name in ("gfx90a", "gfx942")},
}
DTYPES = ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn", "float8_e5m2", "int4")


def short_of(target: str) -> torch.dtype:
    """What ``models/configs/activation_type.py`` chooses for most models."""
    return torch.float16 if target == "sm_75" else torch.bfloat16


def batch_of(counts: Sequence[int], context: int, shared: bool = False) -> AttentionBatch:
    tokens, requests = sum(counts), len(counts)
    return AttentionBatch(
        positions=torch.zeros(tokens, dtype=torch.int64),
        query_start=torch.tensor([0, *counts]).cumsum(0).to(torch.int32),
        context_len=torch.full((requests,), context, dtype=torch.int32),
        page_table=torch.zeros(requests, 64, dtype=torch.int32),
        slots=torch.zeros(tokens, dtype=torch.int64),
        page_size=16,
        max_query_len=max(counts),
        max_context_len=context,
        shared_len=torch.zeros(1, dtype=torch.int32) if shared else None,
    )


def pages_of(dtype: str, head_dim: int, kv_heads: int = 2) -> KVPages:
    """As an engine's lie."""
    return KVCache(KVSpec(1, kv_heads, head_dim, 16, dtype), 4, keys_transposed=False).layers[0]


def run_attention(
    short: torch.dtype,
    dtype: str,
    head_dim: int = 128,
    *,
    rich: bool = False,
    exact: bool = False,
    biased: bool = False,
    kv_heads: int = 2,
) -> None:
    """A prompt beside decoding, and decoding alone. ``rich``: window, cap, sinks, cascade.
    ``biased``: by distance. One key head has many splits."""
    pages, heads = pages_of(dtype, head_dim, kv_heads), 4 * kv_heads
    kind = torch.float32 if exact else short
    slopes = torch.zeros(heads) if biased else None
    options = (128, 30.0, torch.zeros(heads), None) if rich else (None, None, None, slopes)
    for counts, context in (([9, 5, 1], 1000), ([1, 1], 1000)):
        q = torch.zeros(sum(counts), heads, head_dim, dtype=kind)
        out = torch.zeros(sum(counts), heads * head_dim, dtype=kind)
        batch = batch_of(counts, context, shared=rich)
        kernels = attention.Attention(exact, programs=8 if kv_heads > 1 else 528)
        kernels.run(q, pages, batch, 0.1, *options, out)


def run_both_ways(
    short: torch.dtype, dtype: str, head_dim: int, *, window: int | None, biased: bool
) -> None:
    """Texts of an encoder, whose pages have the type of activations."""
    pages, heads = pages_of(dtype, head_dim), 8
    q = torch.zeros(12, heads, head_dim, dtype=torch.float32 if dtype == "float32" else short)
    out = torch.zeros(12, heads * head_dim, dtype=q.dtype)
    slopes = torch.zeros(heads) if biased else None
    kernels = attention.Attention(dtype == "float32")
    kernels.run(q, pages, batch_of([9, 3], 9), 0.1, window, None, None, slopes, out, False)


def run_rope(short: torch.dtype, dtype: str, head_dim: int = 128) -> None:
    pages = pages_of(dtype, head_dim)
    heads = torch.zeros(3, 12, head_dim, dtype=short)
    q, k, v = heads.split([8, 2, 2], dim=1)
    angles, batch = torch.zeros(3, head_dim // 2), batch_of([3], 3)
    weight = torch.zeros(head_dim)
    for norms in ((), (HeadNorms(Norm(weight, 1e-6), Norm(weight, 1e-6)),)):
        rope.RopeAndCache().run(q, k, v, angles, angles.clone(), batch, pages, *norms)


def run_latent(short: torch.dtype, dtype: str, exact: bool = False) -> None:
    """The write of DeepSeek's latents, decoding in splits, and a prompt."""
    short = torch.float32 if exact else short
    cache = AttentionCache(1, 576, 512, latent=True)
    spec = KVSpec(1, 1, 576, 16, dtype, (cache,))
    pages = KVCache(spec, 4, keys_transposed=False).layers[0]
    for counts, programs in (([1], 528), ([40], 8)):
        tokens, batch = sum(counts), batch_of(counts, 4096)
        q = torch.zeros(tokens, 16, 576, dtype=short)
        rest = q[..., 512:].clone(), q[:, :1, :512].clone(), q[:, :1, 512:].clone()
        angles = torch.zeros(tokens, 32)
        latent.LatentRopeAndCache().run(q, *rest, angles, angles.clone(), batch, pages)
        out = torch.zeros(tokens, 16 * 512, dtype=short)
        kernels = latent.LatentAttention(exact, programs=programs)
        kernels.run(q, pages, batch, 0.1, None, None, None, None, out)


def run_rows(short: torch.dtype) -> None:
    """The sum is float32, its norm short, that after the last layer float32; heads are short."""
    x, y = torch.zeros(4, 576), torch.zeros(4, 576, dtype=short)
    for out in (x, y):  # of the embeddings, of sums
        norm.Normalize().run(x, Norm(x[0], 1e-5), out)
        norm.AddNormalize().run(x, x, Norm(x[0], 1e-5), out)
    heads = torch.zeros(4, 9, 128, dtype=short)[:, :3]
    norm.Normalize().run(heads, Norm(torch.zeros(128), 1e-5), torch.zeros_like(heads))
    norm.AddNormalize().run(x, x, Norm(x[0], 1e-5, x[1], centred=True), y)
    norm.Normalize().run(heads, Norm(x[:3, :128].contiguous(), 1e-5, None, True), heads.clone())
    for kind in elementwise.ACTIVATIONS:
        numbers = (0.8, 0.8, 0.5, -1e-6) if kind == "xielu" else ()
        elementwise.Activate(gated=True).run(torch.zeros(4, 1152, dtype=short), kind, y, numbers)
        if kind not in ALWAYS_GATED:
            elementwise.Activate(gated=False).run(y, kind, y, numbers)
    wide, one_each = torch.zeros(4, 1152, dtype=short), torch.zeros(4, 9, dtype=short)
    for kind in ("sigmoid", "softplus"):
        elementwise.Gate().run(wide, wide, kind)
        elementwise.Gate().run(wide, one_each, kind)
    for kind in elementwise.MAPS:
        given = y if kind == "add_bias" else x
        elementwise.Map(kind).run(given, x if kind == "add" else x[0], 2.0)
    for rows in (x, y):  # hidden states, embeddings
        elementwise.gather("rows", rows, torch.zeros(4, dtype=torch.int64), x, by_row=True)
    for back in (False, True):
        elementwise.TakeColumns().run(y, torch.zeros(576, dtype=torch.int32), back, y)
    elementwise.Places().run(batch_of([3, 1], 9))
    angles = torch.zeros(4, 64), torch.zeros(4, 64)
    rope.RopeAngles().run(torch.zeros(4, dtype=torch.int64), torch.zeros(64), 1.0, *angles)
    axes = torch.zeros(64, dtype=torch.int32)  # of a model that reads images
    rope.RopeAngles().run(torch.zeros(3, 4, dtype=torch.int64), torch.zeros(64), 1.0, *angles, axes)
    for add in (False, True):
        index = torch.zeros(4, dtype=torch.int32)
        elementwise.PlaceRows().run(torch.zeros(4, 1152), torch.zeros(8, 2304), index, add)


def run_experts(short: torch.dtype) -> None:
    """Of a token, and of a prompt whose rows many programs order."""
    for tokens in (1, 300):
        order = [torch.zeros(size, dtype=torch.int32) for size in (8 * tokens,) * 3 + (61, 61)]
        places = order[0].view(tokens, 8)
        tiles = torch.zeros(tiles_at(8 * tokens, 60, TILE_ROWS[-1] + 1), 2, dtype=torch.int32)
        routes = Routes(torch.zeros(tokens, 8), places, *order[1:], tiles=tiles)
        experts.GroupByExpert().run(routes.places, routes)
    v3 = RouteRule("sigmoid", epsilon=1e-20, scale=2.5)
    rules = (
        *((RouteRule(normalized=one), None) for one in (False, True)),
        (v3, torch.zeros(60)),
        (v3._replace(groups=4, groups_used=2), torch.zeros(60)),
        (RouteRule("sqrt_softplus", normalized=False), torch.zeros(60)),
        (RouteRule("sparse_mixer", normalized=False, jitter=0.01), None),
    )
    for rule, bias in rules:
        experts.Route().run(torch.zeros(1, 60), rule, bias, routes.places, routes.weights)
    rows = torch.zeros(8, 576, dtype=short)
    experts.AddOwnersBias().run(rows, torch.zeros(60, 576), routes)
    shared, gate = torch.zeros(1, 576), torch.zeros(1, 1)
    for beside in ((None, None), (shared, None), (shared, gate)):
        experts.Combine().run(rows, routes, torch.zeros(1, 576), *beside)


def run_adapters(short: torch.dtype) -> None:
    slots, cpu = torch.zeros(16, dtype=torch.int32), torch.device("cpu")
    for factors, x, y in (
        (short, short, short),
        (short, short, torch.float32),
        (short, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.float32),
    ):
        table = low_rank.GpuTable(Shape(8, 4096, 1024, 3), factors, cpu)
        table.add(torch.zeros(16, 4096, dtype=x), torch.zeros(16, 1024, dtype=y), slots)
    for factors in (short, torch.float32):
        table = low_rank.GpuTable(Shape(8, 32000, 4096, of_ids=True), factors, cpu)
        table.add(torch.zeros(16, dtype=torch.int64), torch.zeros(16, 4096), slots)


def run_states(short: torch.dtype) -> None:
    """Of Qwen3.5's delta nets and those with a decay for each row, Granite 4's Mamba-2, Mamba-1,
    RWKV-7, LFM2."""
    batch = batch_of([9, 1], 9)
    index = torch.zeros(2, dtype=torch.int32)
    rows = StateBatch(index, torch.zeros(3, dtype=torch.int32), index, index)
    x, weight = torch.zeros(10, 6144, dtype=short), torch.zeros(2048, 4)
    q, k, v = (part.unflatten(1, (16, 128)) for part in x.split(2048, 1))
    conv, tail = states.CausalConv(), torch.zeros(4, 3, 2048)
    parts = x.split(2048, 1)
    conv.run(parts[0], weight, weight[:, 0], tail, batch, rows, "silu", None, None, parts[1])
    conv.run(parts[0], weight, None, tail, batch, rows, None, parts[1], parts[2], parts[0])
    shift = torch.zeros(6, 10, 2048, dtype=short)
    several = (torch.zeros(6, 2048, 2), None, tail[:, :1])
    conv.run(parts[0], *several, batch, rows, None, None, None, shift)
    r, state = parts[0].unflatten(1, (32, 64)), torch.zeros(4, 32, 64, 64)
    wide, keys = torch.zeros(10, 32, 64), RwkvKeys(*torch.zeros(3, 32, 64))
    for first in (None, (r, wide)):
        given = (r, r, r, wide, wide, keys, first, state, batch, rows)
        states.Rwkv().run(*given, r, r)
    state, out = torch.zeros(4, 16, 128, 128), torch.zeros(10, 16, 128, dtype=short)
    for decay in (torch.zeros(10, 16), torch.zeros(10, 16, 128)):
        given = (q, k, v, decay, torch.zeros(10, 16), state, batch, rows)
        states.GatedDelta().run(*given, 0.1, 1e-6, False, out)
    dt, state, out = torch.zeros(10, 48), torch.zeros(4, 48, 64, 128), x[:, :3072].view(10, 48, 64)
    b, c = x[:, 3072:3200].unsqueeze(1), x[:, 3200:3328].unsqueeze(1)
    for d in (dt[0], None):
        states.StateSpace().run(out, dt, dt[0], b, c, d, state, batch, rows, out)
    state, a = torch.zeros(4, 2048, 16), torch.zeros(2048, 16)
    for d in (a[:, 0], None):
        scan = (parts[0], parts[1].float(), a, x[:, :16], x[:, 16:32], d, state, batch, rows)
        states.SelectiveScan().run(*scan, parts[2])
    rate = x[:, :48]
    rates.Rates().run(rate, "softplus", dt[0], dt[0], None, dt)
    rates.Rates().run(rate, "softplus", dt[0], None, (0.0, 1.0), dt)
    rates.Rates().run(rate, "sigmoid", None, None, None, dt)
    rates.Rates().run(rate, "tanh", None, None, None, dt)
    for first in (False, True):
        rates.GatedNorm().run(q, k, Norm(torch.zeros(128), 1e-6), "silu", first, v)


def run_sampling() -> None:
    logits = torch.zeros(2, 128_256)
    draws = torch.zeros(2, 8, dtype=torch.float64)
    shapes = PackedShapes(torch.device("cpu"), 2, 128_256, (2, 8, 64, 2))
    for given in (None, draws):
        sampling.Sample().rows(logits, given)
        sampling.Sample().rows(logits, given, shapes)


def cases(short: torch.dtype) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every variant, by name."""
    yield "rows", partial(run_rows, short)
    yield "sampling", run_sampling
    yield "experts", partial(run_experts, short)
    yield "adapters", partial(run_adapters, short)
    yield "states", partial(run_states, short)
    for dtype in DTYPES:
        yield f"rope {dtype}", partial(run_rope, short, dtype)
        for head_dim, rich in itertools.product((64, 80, 96, 128, 256), (False, True)):
            label = f"attention {dtype} {head_dim}{' window cap sinks cascade' if rich else ''}"
            yield label, partial(run_attention, short, dtype, head_dim, rich=rich)
    for dtype in LATENT:
        yield f"latent {dtype}", partial(run_latent, short, dtype)
        yield f"latent {dtype} exact", partial(run_latent, short, dtype, exact=True)
    for rich in (False, True):
        one = partial(run_attention, short, "bfloat16", 256, rich=rich, kv_heads=1)
        yield f"one head{' window cap sinks cascade' if rich else ''}", one
    for dtype in BIASED:
        yield f"attention {dtype} biased", partial(run_attention, short, dtype, biased=True)
    for dtype, head_dim, more in BOTH_WAYS:
        options = {"window": 128 if more == "window" else None, "biased": more == "biased"}
        one = partial(run_both_ways, short, dtype, head_dim, **options)
        yield f"both ways {dtype} {head_dim} {more}".strip(), one
    yield "attention exact", partial(run_attention, short, "float16", exact=True)


def sources(job: list[str]) -> list[Source]:
    target, wanted = job
    with launches(TARGETS[target]) as found:
        for label, launch in cases(short_of(target)):
            if re.fullmatch(wanted, label):
                launch()
    return found


if __name__ == "__main__":
    answer(sources)
