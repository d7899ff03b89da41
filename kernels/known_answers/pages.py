"""Known-answer cases of operators that use KV pages: see ``cases.py``.

Pages are laid out as those of the engine, whose strides are constants of the kernels, but there are
few of them. A long context has the same pages again and again: attention only reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.known_answers.place import PRODUCT, Found, Place
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.head_norms import HeadNorms, QueryScale
from sdk.kernels.operators.norm import Norm
from sdk.kernels.reference.page_codes import page_floats
from sdk.kernels.reference.rope import LatentRopeAndCache, RopeAndCache

#: Keys of the longest context: several programs share it, and one adds up their parts.
_LONG = 600
#: Keys and values as codes: one of 32 may be the next code, where a number lies between two, which
#: happens once in a million times. A step is up to 0.4 of a usual number (int4), 3/127 (int8) or
#: 3/16 (8-bit floats), and counts divided by the root of 32.
_CODES = {"int4": 0.09, "int8": 0.01}
_FLOAT_CODES = 0.05


def _count(page_size: int) -> int:
    """Pages of a case; page 0 is never a request's, and no two tokens are written to one slot."""
    return 6 if page_size >= 8 else 25


def _like(x: Tensor | None, count: int, device: torch.device) -> Tensor | None:
    """Zeros ``[count, ...]`` with the strides of x."""
    if x is None:
        return None
    if not x.shape[-1]:  # the values of latent pages
        return x.new_zeros(count, *x.shape[1:], device=device)
    shape, strides = (count, *x.shape[1:]), x.stride()
    size = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    room = torch.zeros(size + 64, dtype=x.dtype, device=device)
    begin = -room.data_ptr() % 64 // x.element_size()
    return room[begin : begin + size].as_strided(shape, strides)


def _pages_like(pages: KVPages, place: Place) -> KVPages:
    """Empty pages; with a centre of keys if those have one."""
    names, count = ("k", "v", "k_scale", "v_scale"), _count(pages.page_size)
    parts: dict[str, Any] = {n: _like(getattr(pages, n), count, place.device) for n in names}
    centre = pages.k_centre
    if centre is not None:
        centre = place.floats(*centre.shape, seed=41)
    return replace(pages, **parts, k_centre=centre, next_tier=None)


def _to_device(pages: KVPages, place: Place) -> KVPages:
    """A copy with the same strides."""
    moved = _pages_like(pages, place)
    for name in ("k", "v", "k_scale", "v_scale"):
        x, target = getattr(pages, name), getattr(moved, name)
        if x is not None:
            target.copy_(x)
    return moved


def _floats_of(pages: KVPages) -> tuple[Tensor, Tensor]:
    """Keys and values ``[pages, kv_heads, page_size, head_dim]`` on the CPU; of latent pages keys
    twice."""
    names = ("k", "v", "k_scale", "v_scale")
    parts: dict[str, Any] = {
        n: None if (x := getattr(pages, n)) is None else x.cpu() for n in names
    }
    every = torch.arange(_count(pages.page_size))
    return page_floats(replace(pages, **parts), every, pages.head_dim)


def _batch(
    place: Place, page_size: int, requests: Sequence[tuple[int, int]], shared: int = 0
) -> AttentionBatch:
    """Requests of (context, new tokens); ``shared`` pages are at the beginning of all of them."""
    counts = [-(-context // page_size) for context, _ in requests]
    tables: list[list[int]] = []
    slots: list[int] = []
    positions: list[int] = []
    starts, pages = [0], _count(page_size)
    for number, (context, new) in enumerate(requests):
        first, step = (number, 2) if pages == 6 else (8 * number, 1)
        own = [1 + (first + step * i) % (pages - 1) for i in range(counts[number])]
        own[:shared] = range(1, shared + 1)
        tables.append(own + [0] * (max(counts) - len(own)))
        at = range(context - new, context)
        positions += at
        slots += [own[p // page_size] * page_size + p % page_size for p in at]
        starts.append(starts[-1] + new)
    return AttentionBatch(
        positions=place.integers(positions, torch.int64),
        query_start=place.integers(starts, torch.int32),
        context_len=place.integers([context for context, _ in requests], torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32).to(place.device),
        slots=place.integers(slots, torch.int64),
        page_size=page_size,
        max_query_len=max(new for _, new in requests),
        max_context_len=max(context for context, _ in requests),
        shared_len=place.integers([shared * page_size], torch.int32) if shared else None,
        lengths=tuple((new, context) for context, new in requests),
    )


def _strided(values: Tensor, like: Tensor) -> Tensor:
    """The values in rows as far apart as those of ``like``: views of a fused projection."""
    room = values.new_zeros(values.shape[0] * max(like.stride(0), values[0].numel()))
    strides = (max(like.stride(0), values[0].numel()), *like.stride()[1:])
    return room.as_strided(values.shape, strides).copy_(values)


def attend(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    """Decoding, alone, with drafts and after a shared prefix, and prompts: like q, pages, scale,
    window, softcap, sinks, slopes, whether prefixes are shared, whether tokens see earlier ones
    only, whether windows begin at multiples of their size, whether tokens see some behind them."""
    q, pages, scale, window, softcap, sinks, slopes, shares, causal, chunked, looks_ahead = like
    size, heads, kv_heads = pages.page_size, q.shape[1], pages.k.shape[1]
    host = place.on_host()
    filled = _pages_like(pages, host)
    every = torch.arange(_count(size) * size)
    keys, values = (host.floats(len(every), kv_heads, q.shape[2], seed=s) for s in (21, 22))
    still = torch.ones(len(every), 1), torch.zeros(len(every), 1)
    batch = _batch(host, size, [(1, 1)])
    batch = replace(batch, slots=every, positions=every)
    width = problem.value_dim or q.shape[2]
    if pages.latent:
        latent, rest = keys[..., :width].contiguous(), keys[..., width:].contiguous()
        LatentRopeAndCache().run(keys.clone(), rest, latent, rest, *still, batch, filled)
    else:
        RopeAndCache().run(keys.clone(), keys, values, *still, batch, filled)
    own = _to_device(filled, place)
    if hasattr(kernel, "for_any_length"):  # else its own part would not run on so few tokens
        kernel = kernel.for_any_length(own)
    sinks = None if sinks is None else place.floats(heads, seed=23)
    slopes = None if slopes is None else place.floats(heads, seed=25)
    window = None if window is None else size + 21
    cases = {
        "decode": ([(1, 1), (size, 1), (size + 5, 1), (_LONG, 1)], 0),
        "decode with drafts": ([(_LONG, 2), (size + 5, 2), (3, 1)], 0),
        "prefill": ([(size + 26, 21), (3, 3), (size + 2, 1)], 0),
        "prefill behind a prefix": ([(_LONG, 19)], 0),
    }
    if shares:
        cases["decode after a shared prefix"] = ([(4 * size, 1), (3 * size + 1, 1)], 2)
    found: Found = []
    for name, (requests, shared) in cases.items():
        step = _batch(place, size, requests, shared)
        tokens = step.num_tokens
        queries = _strided(place.rows(tokens, heads, q.shape[2], seed=24), q)
        out = place.nan(tokens, heads * width, dtype=place.given(q.dtype))
        given = (scale, window, softcap, sinks, slopes)
        ahead = place.integers([(7 * t) % 5 for t in range(tokens)], torch.int32)
        more = (ahead,) if looks_ahead else ()
        kernel.run(queries, own, step, *given, out, causal, None, chunked, *more)
        found.append((f"{name} with {pages.dtype} pages", out, 2 * PRODUCT))
    return found


def rope(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    """Rotation, norms, a scale of queries, and what is written to pages: like q, k, v, cos, pages,
    norms, scale."""
    q, k, v, cos, pages, norms, scale = like
    size = pages.page_size
    own = _pages_like(pages, place)
    batch = _batch(place, size, [(size + 5, 5), (1, 1), (2 * size, 1)])
    tokens = batch.num_tokens
    rows = [
        _strided(place.rows(tokens, *x.shape[1:], seed=30 + i), x) for i, x in enumerate((q, k, v))
    ]
    angles = place.floats(tokens, cos.shape[1], seed=33)
    if norms is not None:
        weights = [1.0 + 0.1 * place.floats(q.shape[2], seed=34 + i) for i in range(3)]
        of_q, of_k, of_v = (Norm(weight, 1e-6) for weight in weights)
        norms = HeadNorms(of_q, of_k, None if norms.v is None else of_v, norms.after)
    if scale is not None:  # a length that some tokens exceed
        scale = QueryScale(0.5, min(scale.length, 16))
    given = [*rows, angles.cos(), angles.sin(), batch, own, norms, scale]
    kernel.run(*given)
    keys, values = _floats_of(own)
    return [
        ("the rotated queries", rows[0], place.limit(place.rounded)),
        (f"keys in {pages.dtype} pages", keys, _of_pages(place, pages.k, pages.k_type.name)),
        (f"values in {pages.dtype} pages", values, _of_pages(place, pages.v, pages.v_type.name)),
    ]


def latent_rope(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    """The rotation of latent attention, a scale of queries, and the key that is written: like q,
    latent, cos, pages, scale."""
    q, latent, cos, pages, scale = like
    size, own = pages.page_size, _pages_like(pages, place)
    batch = _batch(place, size, [(size + 5, 5), (1, 1), (2 * size, 1)])
    tokens, heads, rest = batch.num_tokens, q.shape[1], q.shape[2] - latent.shape[2]
    queries = place.rows(tokens, *q.shape[1:], seed=30)
    turned = place.rows(tokens, heads, rest, seed=31)
    key = place.rows(tokens, *latent.shape[1:], seed=32), place.rows(tokens, 1, rest, seed=33)
    angles = place.floats(tokens, cos.shape[1], seed=34)
    if scale is not None:  # a length that some tokens exceed
        scale = QueryScale(0.5, min(scale.length, 16))
    kernel.run(queries, turned, *key, angles.cos(), angles.sin(), batch, own, scale)
    return [
        ("the completed queries", queries, place.limit(place.rounded)),
        (
            f"keys in {pages.dtype} latent pages",
            _floats_of(own)[0],
            _of_pages(place, pages.k, pages.k_type.name),
        ),
    ]


def _of_pages(place: Place, x: Tensor, name: str) -> float:
    """The limit for what is written to pages."""
    if x.dtype in (torch.float32, torch.float16, torch.bfloat16):
        return place.limit(x.dtype)
    return _CODES.get(name, _FLOAT_CODES)


def find_places(kernel: Any, place: Place, problem: Problem, like: Sequence[Any]) -> Found:
    (size,) = like
    batch = _batch(place, size, [(size + 7, 9), (1, 1), (3 * size, 2)])
    wanted = replace(batch, positions=batch.positions - 99, slots=batch.slots - 99)
    kernel.run(wanted)
    return [("positions", wanted.positions, 0.0), ("slots", wanted.slots, 0.0)]
