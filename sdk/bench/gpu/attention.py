"""Paged attention, relative to the card's bandwidth and to torch's attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sdk.bench.gpu.card import Card, expect_close
from sdk.bench.gpu.rows import Finding, ratio, share, without
from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.backend import Problem
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.reference.attention import Attention as Reference
from sdk.quant.spec import KVSpec

PAGE = 16
#: Floor and goal, in % of the copy bandwidth.
_TARGETS = {"bfloat16": (70, 88), "int8": (60, 80), "fp8": (60, 80)}
#: The largest distance from the reference in float32 arithmetic on the same pages.
_LIMIT = 2e-2
#: Queries of a prompt that are compared with the reference.
_CHECKED = 16


class Heads(NamedTuple):
    """Of queries, of keys, and the width of each."""

    queries: int
    keys: int
    width: int


#: Those of Llama-3-8B.
USUAL = Heads(32, 8, 128)
#: Those of Gemma-3-1B and Qwen2.5-1.5B, of which 32 splits of a request would not fill a card.
_FEW = (Heads(4, 1, 256), Heads(12, 2, 128))


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of equal length with filled pages; ``nbytes`` of keys and values in total."""

    batch: AttentionBatch
    pages: KVPages
    q: Tensor
    nbytes: int

    def run(self, kernel: Any, out: Tensor) -> None:
        scale = self.q.shape[2] ** -0.5
        kernel.run(self.q, self.pages, self.batch, scale, None, None, None, None, out)


def make_case(
    card: Card, dtype: str, requests: int, context: int, queries: int, given: Heads = USUAL
) -> Case:
    """A batch where each request runs the last ``queries`` tokens of its ``context``."""
    kv_heads = card.size(given.keys, min(given.keys, 2))
    heads = card.size(given.queries, 2 * kv_heads)
    head_dim = card.size(given.width, min(given.width, 64))
    count = requests * (context // PAGE)
    spec = KVSpec(1, kv_heads, head_dim, PAGE, dtype)
    pages = KVCache(spec, count, card.device, keys_transposed=False).pages[0]
    for codes, scales in ((pages.k, pages.k_scale), (pages.v, pages.v_scale)):
        _fill(card, codes, scales)
    order = torch.randperm(count, generator=card.random, device=card.device)
    table = order.to(torch.int32).view(requests, -1)
    int32: Any = {"dtype": torch.int32, "device": card.device}
    batch = AttentionBatch(
        positions=torch.zeros(requests * queries, dtype=torch.int64, device=card.device),
        query_start=torch.arange(requests + 1, **int32) * queries,
        context_len=torch.full((requests,), context, **int32),
        page_table=table,
        slots=torch.zeros(requests * queries, dtype=torch.int64, device=card.device),
        page_size=PAGE,
        max_query_len=queries,
        max_context_len=context,
        lengths=((queries, context),) * requests,
    )
    q = card.normal(requests * queries, heads, head_dim)
    return Case(batch, pages, q, count * spec.page_bytes)


def _fill(card: Card, codes: Tensor, scales: Tensor | None) -> None:
    """Fill pages in groups, so that no second cache is needed."""
    for start in range(0, codes.shape[0], 4096):
        part = codes[start : start + 4096]
        x = card.normal(*part.shape, dtype=torch.float32)
        part.copy_((x * 40).clamp(-127, 127) if scales is not None else x)
    if scales is not None:
        scales.fill_(1 / 40)


def _seconds(card: Card, *cases: Case) -> float:
    """Of one of ``cases``, which are alike and run in turn."""
    case = cases[0]
    problem = Problem("attention", head_dim=case.q.shape[2], kv_dtype=case.pages.dtype)
    kernel = card.choose(problem)
    out = torch.full_like(case.q.flatten(1), torch.nan)
    case.run(kernel, out)
    check_case(card, case, out, kernel.name)
    return card.time([partial(one.run, kernel, out) for one in cases])


def check_case(card: Card, case: Case, out: Tensor, name: str) -> None:
    """Compare the last queries of the first request with the reference on a CPU."""
    batch, pages = case.batch, case.pages
    ids = batch.page_table[0].long()
    queries = min(batch.max_query_len, _CHECKED)
    rows = slice(batch.max_query_len - queries, batch.max_query_len)

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[ids].cpu()

    k, v = own(pages.k), own(pages.v)
    assert k is not None and v is not None
    first = replace(
        batch,
        positions=batch.positions[rows].cpu(),
        query_start=torch.tensor([0, queries], dtype=torch.int32),
        context_len=batch.context_len[:1].cpu(),
        page_table=torch.arange(len(ids), dtype=torch.int32)[None],
        slots=batch.slots[rows].cpu(),
        max_query_len=queries,
        lengths=((queries, batch.max_context_len),),
    )
    expected = torch.empty(queries, out.shape[1])
    q = case.q[rows].cpu()
    found = replace(pages, k=k, v=v, k_scale=own(pages.k_scale), v_scale=own(pages.v_scale))
    Reference().run(q, found, first, q.shape[2] ** -0.5, None, None, None, None, expected)
    expect_close(name, out[rows].cpu(), expected, _LIMIT)


def measure_decode(card: Card) -> Iterator[Finding]:
    """64 requests of 4096 tokens, one query each."""
    requests, context = card.size(64, 2), card.size(4096, 64)
    for dtype, target in _TARGETS.items():
        case = make_case(card, dtype, requests, context, 1)
        seconds = _seconds(card, case)
        what = f"decode attention {requests}x{context}, {dtype} pages"
        speed = case.nbytes / seconds / card.copy
        yield share(what, "copy bandwidth", speed, target, us=seconds * 1e6)
        if dtype == "bfloat16":
            yield from without(_against_sdpa(card, case, what, seconds), what, "SDPA")


def measure_few_heads(card: Card) -> Iterator[Finding]:
    """One request of a model with few key heads, in contexts of 8,192 and 32,768 tokens."""
    for given in _FEW:
        for length in (8192, 32768):
            context = card.size(length, 48)
            # together 256 MiB, five times what the second-level cache of an H100 holds
            nbytes = 4 * context * given.keys * given.width
            count = card.size(-(-(256 << 20) // nbytes), 2)
            cases = [make_case(card, "bfloat16", 1, context, 1, given) for _ in range(count)]
            seconds = _seconds(card, *cases)
            heads = f"{given.queries} heads of {given.keys}x{given.width}"
            what = f"decode attention 1x{context}, {heads}, bfloat16 pages"
            speed = cases[0].nbytes / seconds / card.copy
            yield share(what, "copy bandwidth", speed, us=seconds * 1e6)


def measure_prefill(card: Card) -> Iterator[Finding]:
    """One prompt of 4096 tokens."""
    context = card.size(4096, 48)
    case = make_case(card, "bfloat16", 1, context, context)
    seconds = _seconds(card, case)
    what = f"prefill attention {context}, bfloat16 pages"
    operations = 2 * context * context * case.q[0].numel()  # two products of half of the pairs
    yield share(what, "bf16 product", operations / seconds / card.gemm, us=seconds * 1e6)
    yield from without(_against_sdpa(card, case, what, seconds), what, "SDPA")


def measure_flex(card: Card) -> Iterator[Finding]:
    """FlexAttention, compiled, on contiguous keys and values."""
    requests, context = card.size(64, 2), card.size(4096, 64)
    case = make_case(card, "bfloat16", requests, context, 1)
    seconds = _seconds(card, case)
    what = f"decode attention {requests}x{context}, bfloat16 pages"
    yield from without(_against_flex(card, case, what, seconds), what, "FlexAttention")


def _contiguous(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[R, heads, Q, head_dim]``, k and v ``[R, kv_heads, L, head_dim]``, bfloat16."""
    requests = case.batch.num_requests
    q = case.q.view(requests, -1, *case.q.shape[1:]).transpose(1, 2).bfloat16().contiguous()
    table = case.batch.page_table.long()

    def joined(x: Tensor) -> Tensor:
        return x[table].transpose(1, 2).flatten(2, 3).contiguous()

    return q, joined(case.pages.k), joined(case.pages.v)


def _against_sdpa(card: Card, case: Case, what: str, seconds: float) -> Iterator[Finding]:
    q, k, v = _contiguous(case)
    attend = torch.nn.functional.scaled_dot_product_attention
    causal = q.shape[2] > 1
    theirs = card.time([lambda: attend(q, k, v, is_causal=causal, enable_gqa=True)])
    yield ratio(what, "SDPA", theirs / seconds, us=seconds * 1e6, peer_us=theirs * 1e6)


def _against_flex(card: Card, case: Case, what: str, seconds: float) -> Iterator[Finding]:
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = _contiguous(case)
    attend = flex_attention if card.tiny else torch.compile(flex_attention)
    theirs = card.time([lambda: attend(q, k, v, enable_gqa=True)], graph=False)
    yield ratio(what, "FlexAttention", theirs / seconds, us=seconds * 1e6, peer_us=theirs * 1e6)
