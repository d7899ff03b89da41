"""Native paged attention at every SIMD level, against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.backend import Problem
from sdk.kernels.cpu import CpuBackend, levels, open_backend
from sdk.kernels.errors import KernelError
from sdk.kernels.kv.kv_types import KV_TYPES, KVType
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.attention import Attention
from sdk.kernels.reference.page_codes import encode, mixed
from sdk.quant.spec import KVSpec
from tests.kernels.plain_kernels import FUSED, SEVERAL_FUSED, SEVERAL_LEVELS, plain_kernels

#: Integer keys and values are multiplied by queries and weights of 16 bits, whose error is at most
#: 2**-16 of the largest. The error of int8 codes themselves is 5e-5. Where values are int16 the
#: weights of a block have 2**18 in sum: 128 equal ones 2,044 each, an error of (0.29 / 2044)**2.
NMSE = dict.fromkeys(("int8", "int4", "k8v4", "fp8/int4"), 1e-8) | dict.fromkeys(
    ("int16", "int16/int8", "float16/int16"), 2e-8
)
DTYPES = (
    *("float32", "float16", "bfloat16", "int16", "int8", "fp8", "fp8_e5m2", "int4", "k8v4"),
    *("fp8/int4", "int16/int8", "float16/int16"),
)


@dataclass(frozen=True)
class Step:
    """Requests of (context, new tokens) with their pages filled and their queries."""

    batch: AttentionBatch
    pages: KVPages
    q: Tensor


def make_batch(requests: Sequence[tuple[int, int]], page_size: int) -> tuple[AttentionBatch, int]:
    """Pages are handed out in random order; also the number of pages."""
    counts = [-(-context // page_size) for context, _ in requests]
    order = torch.randperm(sum(counts) + 2, generator=torch.Generator().manual_seed(3)).tolist()
    positions, slots, starts, tables = [], [], [0], []
    for (context, new), count in zip(requests, counts, strict=True):
        pages = [order.pop() for _ in range(count)]
        tables.append(pages + [0] * (max(counts) - count))
        positions += range(context - new, context)
        slots += [
            pages[t // page_size] * page_size + t % page_size for t in range(context - new, context)
        ]
        starts.append(starts[-1] + new)
    batch = AttentionBatch(
        positions=torch.tensor(positions),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([c for c, _ in requests], dtype=torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.tensor(slots),
        page_size=page_size,
        max_query_len=max(new for _, new in requests),
        max_context_len=max(c for c, _ in requests),
    )
    return batch, sum(counts) + 2


def spoil(pages: KVPages, at: Any = slice(None), side: str = "kv") -> None:
    """Make keys or values NaN, those that are codes through their scales."""
    for name in side:
        codes, scale = getattr(pages, name), getattr(pages, f"{name}_scale")
        if scale is None:
            codes[at] = float("nan")
        else:
            scale[at] = 0xFF if scale.dtype == torch.int16 else float("nan")


def make_pages(num_pages: int, kv_heads: int, page_size: int, head_dim: int, dtype: str) -> KVPages:
    """One layer as the cache lays it out, every slot NaN."""
    pages = KVCache(KVSpec(1, kv_heads, head_dim, page_size, dtype), num_pages).layers[0]
    spoil(pages)
    return pages


def sides(pages: KVPages) -> tuple[tuple[Tensor, Tensor | None, KVType], ...]:
    """Elements, scales and types of keys and values."""
    return (pages.k, pages.k_scale, pages.k_type), (pages.v, pages.v_scale, pages.v_type)


def dequantized(pages: KVPages) -> tuple[Tensor, Tensor]:
    """Keys and values in float64, ``[num_pages, page_size, kv_heads, head_dim]``."""
    found = []
    for codes, scale, kind in sides(pages):
        x = codes
        if scale is not None:
            x = kind.decode(codes, scale.unflatten(1, (codes.shape[1], -1)).transpose(2, 3))
        found.append(x.double().transpose(1, 2))
    return found[0], found[1]


def make_step(
    requests: Sequence[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    dtype: str,
) -> Step:
    """Keys and values depend on the request and the position only; unused slots hold NaN."""
    batch, num_pages = make_batch(requests, page_size)
    pages = make_pages(num_pages, kv_heads, page_size, head_dim, dtype)
    queries = []
    for r, (context, new) in enumerate(requests):
        random = torch.Generator().manual_seed(100 + r)
        rows = torch.randn(3, 1024, 2, 8, generator=random)[:, :context]
        rows = rows.repeat(1, 1, heads, -(-head_dim // 8))[..., :head_dim]
        rows = rows * (1 + torch.arange(2 * heads).view(-1, 1) / 7)
        at = torch.arange(context)
        page, slot = batch.page_table[r].long()[at // page_size], at % page_size
        k, v = rows[0, :, :kv_heads], rows[1, :, :kv_heads]
        for x, (to, scale, kind) in zip((k, v), sides(pages), strict=True):
            if scale is None:
                to[page, :, slot] = x.to(to.dtype)
            else:
                groups = scale.shape[1] // kv_heads
                codes, scales = encode(x, kind, groups, mix=kind.hadamard)
                assert scales is not None
                to[page, :, slot], scale[page, :, slot] = codes, scales.flatten(1)
        queries.append(rows[2, context - new :, :heads])
    return Step(batch, pages, torch.cat(queries).contiguous())


def attend(kernel: Any, step: Step, **options: Any) -> Tensor:
    tokens, heads, head_dim = step.q.shape
    out = torch.full((tokens, heads * head_dim), float("nan"))
    settings = {"window": None, "softcap": None, "sinks": None, "slopes": None, **options}
    kernel.run(step.q, step.pages, step.batch, head_dim**-0.5, out=out, **settings)
    return out


def expected(step: Step, **options: Any) -> Tensor:
    """Float64, token by token, from the definition."""
    tokens, heads, head_dim = step.q.shape
    group = heads // step.pages.k.shape[1]
    keys, values = dequantized(step.pages)
    out = torch.empty(tokens, heads, head_dim, dtype=torch.float64)
    starts = step.batch.query_start.tolist()
    for r, context in enumerate(step.batch.context_len.tolist()):
        ids = torch.arange(context)
        page = step.batch.page_table[r].long()[ids // step.batch.page_size]
        slot = ids % step.batch.page_size
        k, v = (x[page, slot].repeat_interleave(group, 1) for x in (keys, values))
        for t in range(starts[r], starts[r + 1]):
            position = int(step.batch.positions[t])
            reach = options.get("window") or context
            low, end = max(0, position + 1 - reach), position + 1
            if options.get("chunked"):
                low = position // reach * reach
            if not options.get("causal", True):
                end = min(position + reach, context)
            if options.get("ahead") is not None:
                end = min(end + max(int(options["ahead"][t]), 0), context)
            score = torch.einsum("hd,thd->ht", step.q[t].double(), k[low:end])
            score = score * head_dim**-0.5
            if options.get("softcap"):
                score = torch.tanh(score / options["softcap"]) * options["softcap"]
            if options.get("slopes") is not None:
                distance = -(torch.arange(low, end) - position).abs()
                score = score + options["slopes"].double().unsqueeze(1) * distance
            if (biases := options.get("biases")) is not None:
                far = biases.shape[1] // 2
                at = (torch.arange(low, end) - position).clamp(-far, far) + far
                score = score + biases[:, at].double()
            if options.get("sinks") is not None:
                score = torch.cat((score, options["sinks"].double().unsqueeze(1)), dim=1)
            weight = score.softmax(dim=1)[:, : end - low]
            out[t] = torch.einsum("ht,thd->hd", weight, v[low:end])
    if step.pages.v_mixed:
        out = mixed(out)
    return out.view(tokens, -1)


def spans(requests: Sequence[tuple[int, int]], *found: tuple[int, int, int]) -> Tensor:
    """How far tokens see whose span sees itself both ways: of a request the tokens from the second
    to the third number."""
    starts, first, total = [], [], 0
    for context, new in requests:
        starts.append(total)
        first.append(context - new)
        total += new
    ahead = torch.zeros(total, dtype=torch.int32)
    for r, begin, end in found:
        for t in range(begin, end):
            ahead[starts[r] + t - first[r]] = end - 1 - t
    return ahead


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("dtype", DTYPES)
def test_spans_that_see_themselves_both_ways(
    backend: CpuBackend, cases: Any, dtype: str, window: int | None
) -> None:
    """Within and across blocks of keys and tiles of queries, and the bits of each row are those of
    any other batch or chunk that has the whole span."""
    requests = ((1, 1), (300, 290), (150, 150), (129, 3), (700, 1))
    ahead = spans(requests, (1, 40, 50), (1, 100, 290), (2, 0, 150), (3, 126, 129))
    step = make_step(requests, 6, 2, 32, 16, dtype)
    (kernel,) = plain_kernels(backend, "attention")
    options = {"window": window, "ahead": ahead}
    found = attend(kernel, step, **options)
    assert cases.nmse(found, expected(step, **options)) < NMSE.get(dtype, 1e-12)
    reference = attend(Attention(), step, **options)
    assert cases.nmse(reference, found.double()) < 4 * NMSE.get(dtype, 1e-12)
    plain = attend(kernel, step, window=window)
    alone = ahead == 0
    assert torch.equal(found[alone], plain[alone])  # also the last token of each span
    assert not torch.equal(found, plain)
    for r, begin, end in ((1, 100, 290), (2, 0, 150), (3, 126, 129)):
        # the step ends with the span: what comes behind is not in the pages yet
        rest = [(end, end - begin)]
        batch, _ = make_batch(rest, 16)
        batch = replace(batch, page_table=step.batch.page_table[r : r + 1])
        first = int(step.batch.query_start[r]) + begin - (requests[r][0] - requests[r][1])
        own = slice(first, first + end - begin)
        chunk = Step(batch, step.pages, step.q[own])
        given = {"window": window, "ahead": spans(rest, (0, begin, end))}
        assert torch.equal(attend(kernel, chunk, **given), found[own])


def test_tokens_see_no_further_than_the_pages(backend: CpuBackend) -> None:
    step = make_step([(40, 40)], 2, 2, 16, 16, "float32")
    (kernel,) = plain_kernels(backend, "attention")
    far = torch.full((40,), 1 << 30, dtype=torch.int32)
    whole = attend(kernel, step, causal=False)
    for one in (kernel, Attention()):
        assert torch.allclose(attend(one, step, ahead=far), whole, atol=1e-6)
        none = attend(one, step, ahead=torch.full((40,), -3, dtype=torch.int32))
        assert torch.equal(none, attend(one, step))


def test_what_excludes_tokens_behind(backend: CpuBackend) -> None:
    step = make_step([(40, 4)], 2, 2, 16, 16, "float32")
    ahead, ops = torch.zeros(4, dtype=torch.int32), Ops("cpu", backends=["reference"])
    for other in ({"causal": False}, {"slopes": torch.ones(2)}, {"biases": torch.ones(2, 3)}):
        with pytest.raises(KernelError, match="tokens that see others behind them"):
            ops.attention(step.q, step.pages, step.batch, scale=1.0, ahead=ahead, **other)
    with pytest.raises(KernelError, match=r"attention ahead: expected torch.int32 \[4\]"):
        ops.attention(step.q, step.pages, step.batch, scale=1.0, ahead=ahead[:3])
    ops.close()


MIXED = ((1, 1), (100, 1), (70, 70), (300, 17), (700, 1), (129, 64))


@pytest.mark.quick_cases(21)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "page_size", "options"),
    [
        (9, 3, 64, 16, {}),
        (3, 1, 96, 32, {}),
        (4, 4, 72, 7, {}),
        (4, 4, 72, 64, {"causal": False}),
        (8, 1, 128, 32, {"window": 20}),
        (4, 2, 256, 16, {"softcap": 3.0}),
        (6, 2, 8, 1, {"window": 170, "sinks": torch.linspace(-2, 4, 6)}),
        (14, 1, 40, 24, {"window": 70}),
        (4, 2, 24, 8, {"window": 70, "chunked": True}),
        (4, 1, 512, 16, {}),
        (2, 1, 80, 256, {"softcap": 5.0, "sinks": torch.tensor([1.0, -1.0])}),
        (5, 1, 16, 8, {"window": 130}),
        (6, 3, 32, 16, {"causal": False}),
        (4, 4, 48, 7, {"causal": False, "window": 65}),
        (6, 3, 24, 16, {"slopes": torch.logspace(-8, 0, 6, base=2)}),
        (4, 1, 16, 32, {"slopes": torch.logspace(-2, 1, 4, base=2), "window": 90, "softcap": 4.0}),
        (3, 3, 32, 16, {"slopes": torch.logspace(-3, 0, 3, base=2), "causal": False}),
        (4, 4, 32, 16, {"biases": torch.linspace(-3, 2, 4 * 257).view(4, 257), "causal": False}),
        (6, 2, 24, 7, {"biases": torch.linspace(2, -2, 6 * 41).view(6, 41), "window": 70}),
        (4, 2, 16, 8, {"biases": torch.tensor([[0.5], [0.1], [2.0], [1.0]]), "causal": False}),
    ],
)
def test_attention_matches_float64(
    backend: CpuBackend,
    cases: Any,
    dtype: str,
    heads: int,
    kv_heads: int,
    head_dim: int,
    page_size: int,
    options: dict[str, Any],
) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step(MIXED, heads, kv_heads, head_dim, page_size, dtype)
    # sums of more terms: eight times the error from 128 to 256, and from 256 to 512
    limit = NMSE.get(dtype, 1e-11 * max(1.0, head_dim / 256) ** 3)
    assert cases.nmse(attend(kernel, step, **options), expected(step, **options)) < limit


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [8, 40, 72])
def test_values_with_padding_are_read_as_those_without(
    backend: CpuBackend, dtype: str, head_dim: int
) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step(MIXED, 4, 2, head_dim, 64, dtype)
    v = step.pages.v
    padded = torch.full((*v.shape[:3], -(-head_dim // 16) * 16), float("nan"), dtype=v.dtype)
    padded[..., :head_dim] = v
    other = replace(step, pages=replace(step.pages, v=padded[..., :head_dim]))
    for options in ({}, {"causal": False}, {"window": 20}):
        assert torch.equal(attend(kernel, other, **options), attend(kernel, step, **options))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", ["float16", "int16", "int8", "fp8", "int4", "k8v4"])
@pytest.mark.parametrize(
    "options",
    [{}, *(pytest.param(x, marks=pytest.mark.slow) for x in ({"window": 90}, {"softcap": 5.0}))],
)
def test_chunks_batches_and_threads_do_not_change_a_bit(
    backend: CpuBackend, dtype: str, options: dict[str, Any]
) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    whole = attend(kernel, make_step([(150, 150)], 6, 2, 64, 16, dtype), **options)
    single = open_backend("cpu", 1, backend.runtime.level)
    (alone,) = plain_kernels(single, "attention")
    for chunks in ((1,) * 150, (64, 64, 22), (3, 140, 7)):
        end, parts = 0, []
        for new in chunks:
            end += new
            # the same request 0, now beside another one and with other pages
            step = make_step([(end, new), (33, 5)], 6, 2, 64, 8, dtype)
            parts.append(attend(alone if len(chunks) == 3 else kernel, step, **options)[:new])
        assert torch.equal(torch.cat(parts), whole)
    single.close()


@SEVERAL_LEVELS
@pytest.mark.quick_cases(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "options", [{}, {"softcap": 3.0}, {"window": 90}, {"window": 90, "chunked": True}]
)
def test_the_levels_agree(cases: Any, dtype: str, options: dict[str, Any]) -> None:
    """With a fused multiply-add the bits are equal; the portable level rounds twice."""
    found = {}
    for level in levels():
        one = open_backend("cpu", 2, level)
        (kernel,) = plain_kernels(one, "attention")
        found[level] = attend(kernel, make_step(MIXED, 6, 2, 64, 16, dtype), **options)
        one.close()
    portable = [found.pop("portable")] if "portable" in found else []
    fused = list(found.values())
    assert all(torch.equal(out, fused[0]) for out in fused)
    limit = NMSE.get(dtype, 1e-11)
    assert all(cases.nmse(one, out) < limit for one in portable for out in fused)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"window": 400, "sinks": torch.linspace(-1, 3, 6)},
        {"slopes": torch.logspace(-9, -1, 6, base=2)},
        {"biases": torch.linspace(-2, 3, 6 * 101).view(6, 101)},
    ],
)
def test_spreading_a_context_over_threads_does_not_change_a_bit(
    backend: CpuBackend, options: dict[str, Any]
) -> None:
    whole = make_step([(1000, 1000)], 6, 2, 64, 16, "float16")
    (kernel,) = plain_kernels(backend, "attention")
    wanted = attend(kernel, whole, **options)[-5:]
    for threads in (1, 2, 3):
        other = open_backend("cpu", threads, backend.runtime.level)
        (kernel,) = plain_kernels(other, "attention")
        for requests in ([(1000, 1)], [(1000, 5)], [(1000, 1)] + [(900, 1)] * 30):
            step, new = make_step(requests, 6, 2, 64, 16, "float16"), requests[0][1]
            for _ in range(3):  # what one call leaves behind is right for the next
                assert torch.equal(attend(kernel, step, **options)[:new], wanted[5 - new :])
        other.close()


@pytest.mark.parametrize(
    "options", [{}, {"window": 65}, {"biases": torch.linspace(-2, 3, 6 * 101).view(6, 101)}]
)
def test_both_ways_the_batch_and_threads_do_not_change_a_bit(
    backend: CpuBackend, options: dict[str, Any]
) -> None:
    """Neither do the other requests: each sees its own tokens only, in any order of the batch."""
    (kernel,) = plain_kernels(backend, "attention")
    whole = make_step([(300, 300)], 6, 2, 64, 16, "float32")
    wanted = attend(kernel, whole, causal=False, **options)
    for threads, others in ((1, [(33, 33)]), (2, [(1, 1), (400, 400)]), (3, [(90, 90)] * 20)):
        other = open_backend("cpu", threads, backend.runtime.level)
        (kernel,) = plain_kernels(other, "attention")
        step = make_step([(300, 300), *others], 6, 2, 64, 8, "float32")
        assert torch.equal(attend(kernel, step, causal=False, **options)[:300], wanted)
        other.close()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("head_dim", [64, 80, 512])
def test_the_largest_sums_of_16_bit_codes_fit_32_bits(
    backend: CpuBackend, head_dim: int, sign: int
) -> None:
    """All codes have the largest size, so all weights are equal and the result is each value.
    Rounding a weight of n equal ones is an error of at most n / 2 in 2**18."""
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step([(300, 300), (256, 1)], 4, 2, head_dim, 16, "int16")
    pages = step.pages
    assert pages.k_scale is not None and pages.v_scale is not None
    pages.k.fill_(sign * 8191)
    pages.v.fill_(sign * 8191)
    pages.k_scale.fill_(2**-13)
    pages.v_scale.fill_(2**-13)
    step.q.fill_(sign * 3 * head_dim**-0.5)
    for scale in (2**-13, 2**-12):  # then scores of 6 for sixteen keys
        pages.k_scale[int(step.batch.page_table[0, 3])] = scale
        found, wanted = attend(kernel, step), expected(step)
        assert (found - wanted).abs().max() < 2.5e-4 * wanted.abs().max()
        whole = found[127]  # 128 weights of 2,044 each, without an error
        if scale == 2**-13:
            assert (whole - wanted[127]).abs().max() < 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("size", [1e-3, 1.0, 3e3])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_int16_pages_lose_less_than_float16(
    backend: CpuBackend, cases: Any, head_dim: int, size: float
) -> None:
    """Against attention over the keys and values that were stored: normal ones, and values of any
    size; float16 has 0.29 to 0.31 thousandths, int16 0.17 to 0.18."""
    (kernel,) = plain_kernels(backend, "attention")
    errors = {}
    exact = make_step(MIXED, 6, 2, head_dim, 16, "float32")
    exact.pages.v.mul_(size)
    wanted = expected(exact)
    for dtype in ("float16", "int16"):
        step = make_step(MIXED, 6, 2, head_dim, 16, dtype)
        for name, (to, scale, kind) in zip("kv", sides(step.pages), strict=True):
            x = getattr(exact.pages, name)
            groups = 0 if scale is None else scale.shape[1] // x.shape[1]
            codes, scales = encode(x, kind, groups, mix=kind.hadamard)
            to.copy_(codes)
            if scale is not None and scales is not None:
                scale.copy_(scales.transpose(2, 3).flatten(1, 2))
        queries = mixed(step.q) if step.pages.k_mixed else step.q
        errors[dtype] = cases.nmse(attend(kernel, replace(step, q=queries)), wanted)
    assert errors["int16"] < 0.5 * errors["float16"]  # 0.7 of its distance


@SEVERAL_FUSED
@pytest.mark.parametrize("dtype", ["int16", "int8", "fp8", "fp8_e5m2", "int4", "float16/int4"])
@pytest.mark.parametrize("head_dim", [40, 64, 80])
def test_levels_with_fused_multiply_add_agree_to_the_bit(dtype: str, head_dim: int) -> None:
    step = make_step(MIXED, 6, 2, head_dim, 16, dtype)
    found = []
    for level in FUSED:
        opened = open_backend("cpu", 2, level)
        (kernel,) = plain_kernels(opened, "attention")
        slopes = torch.linspace(0.01, 0.3, 6)
        biases = torch.linspace(-1, 2, 6 * 257).view(6, 257)
        options = {"window": 250, "softcap": 4.0, "slopes": slopes, "biases": biases}
        found.append(attend(kernel, step, **options))
        opened.close()
    assert all(torch.equal(x, found[-1]) for x in found)


def test_a_request_without_tokens_is_passed_over(backend: CpuBackend) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step([(40, 3), (200, 1)], 4, 2, 16, 16, "float32")
    wanted = attend(kernel, step)
    batch = replace(
        step.batch,
        query_start=torch.tensor([0, 0, 3, 3, 4], dtype=torch.int32),
        context_len=torch.tensor([0, 40, 20, 200], dtype=torch.int32),
        page_table=step.batch.page_table[[0, 0, 0, 1]],
    )
    assert torch.equal(attend(kernel, replace(step, batch=batch)), wanted)


def test_queries_may_be_views_of_a_fused_projection(backend: CpuBackend) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step([(40, 9)], 4, 2, 16, 16, "float32")
    fused = torch.zeros(9, 8, 16)
    fused[:, 2:6] = step.q
    assert torch.equal(attend(kernel, replace(step, q=fused[:, 2:6])), attend(kernel, step))


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("dtype", ["float32", "int16", "int8", "fp8", "int4", "k8v4"])
def test_a_batch_of_many_requests_matches_the_reference(
    backend: CpuBackend, cases: Any, dtype: str
) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step([(i + 1, 1) for i in range(64)], 4, 2, 32, 16, dtype)
    found = attend(kernel, step)
    for codes, scale in zip(
        (step.pages.k, step.pages.v), (step.pages.k_scale, step.pages.v_scale), strict=True
    ):
        x = codes if scale is None else scale
        # the reference multiplies stale slots by zero
        x[x == 0xFF if x.dtype == torch.int16 else x.isnan()] = 0
    assert cases.nmse(found, attend(Attention(), step)) < NMSE.get(dtype, 1e-11)


def test_a_key_that_is_not_a_number_reaches_only_those_who_see_it(backend: CpuBackend) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    for dtype in DTYPES:
        step = make_step([(60, 60), (20, 20)], 4, 2, 16, 16, dtype)
        clean = attend(kernel, step)
        page, slot = int(step.batch.page_table[0, 50 // 16]), 50 % 16
        spoil(step.pages, (page, slice(None), slot), "k")
        found = attend(kernel, step)
        assert found[50:60].isnan().all()
        assert torch.equal(found[:50], clean[:50]) and torch.equal(found[60:], clean[60:])


def test_what_the_kernel_cannot_run_is_declined(backend: CpuBackend) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    reason = kernel.reject(Problem("attention", head_dim=64, kv_dtype="int8/int3"))
    assert reason is not None
    assert reason.startswith("KV pages of int3: expected float32, float16, bfloat16, int16, int8")
    for head_dim in (0, 12, 584):
        reason = kernel.reject(Problem("attention", head_dim=head_dim, kv_dtype="float16"))
        assert reason == f"head_dim {head_dim}: expected a multiple of 8 up to 576"
    assert kernel.reject(Problem("attention", head_dim=576, kv_dtype="int8/int4")) is None


def test_attention_refuses_arguments_that_disagree(backend: CpuBackend) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step([(4, 2)], 4, 2, 16, 16, "float32")
    pages, v = step.pages, step.pages.v
    with pytest.raises(KernelError, match=r"expected sinks \[4\], found \[3\]"):
        attend(kernel, step, sinks=torch.zeros(3))
    with pytest.raises(KernelError, match=r"expected slopes \[4\], found \[5\]"):
        attend(kernel, step, slopes=torch.zeros(5))
    with pytest.raises(KernelError, match=r"expected biases of 4 heads, found 5"):
        attend(kernel, step, biases=torch.zeros(5, 3))
    with pytest.raises(KernelError, match="expected a window of at least 1, found 0"):
        attend(kernel, step, window=0)
    with pytest.raises(KernelError, match=r"expected int32 index tensors, found torch\.int64"):
        batch = replace(step.batch, page_table=step.batch.page_table.long())
        attend(kernel, replace(step, batch=batch))
    with pytest.raises(KernelError, match=r"attention q: expected torch\.float32 on cpu"):
        attend(kernel, replace(step, q=step.q.double()))
    with pytest.raises(KernelError, match=r"KV pages: k .* do not agree"):
        attend(kernel, replace(step, pages=replace(pages, v=v[:2])))
    known = r"of float32: expected torch\.float32 \[pages, 2, page_size, 16\], found torch\.float64"
    with pytest.raises(KernelError, match=known):
        attend(kernel, replace(step, pages=replace(pages, v=v.double())))
    known = r"of float16: expected torch\.float16 \[pages, 2, page_size, 16\], found torch\.float32"
    with pytest.raises(KernelError, match=known):
        attend(kernel, replace(step, pages=replace(pages, k_type=KV_TYPES["float16"])))
    with pytest.raises(KernelError, match=r"KV pages: expected .* with a contiguous last"):
        attend(kernel, replace(step, pages=replace(pages, v=v.transpose(2, 3))))
    with pytest.raises(KernelError, match=r"expected keys on cpu, \[head_dim, page_size\]"):
        attend(kernel, replace(step, pages=replace(pages, k=v)))


@pytest.mark.parametrize("dtype", ["int16", "int8", "fp8", "int4"])
def test_pages_of_codes_are_refused_without_their_scales(backend: CpuBackend, dtype: str) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step([(4, 2)], 4, 2, 16, 16, dtype)
    pages = step.pages
    assert pages.k_scale is not None
    with pytest.raises(
        KernelError, match=r"expected scales \[3, a multiple of 2, 16\], found None"
    ):
        attend(kernel, replace(step, pages=replace(pages, k_scale=None, v_scale=None)))
    with pytest.raises(KernelError, match=r"KV scales: expected torch\.\w+16 on cpu"):
        attend(kernel, replace(step, pages=replace(pages, k_scale=pages.k_scale.float())))
    with pytest.raises(KernelError, match="2 scales do not fit a head of 16 in groups of 32"):
        double = pages.k_scale.repeat_interleave(2, 1)
        attend(kernel, replace(step, pages=replace(pages, k_scale=double)))
    with pytest.raises(KernelError, match=r"KV pages of float16: expected no scales"):
        plain = make_pages(3, 2, 16, 16, "float16")
        attend(kernel, replace(step, pages=replace(plain, k_scale=pages.k_scale)))


@pytest.mark.parametrize("wrong", ["page", "negative page", "narrow table", "length", "starts"])
def test_tables_that_point_outside_of_the_pages_are_refused(
    backend: CpuBackend, wrong: str
) -> None:
    (kernel,) = plain_kernels(backend, "attention")
    step = make_step([(40, 2), (70, 1)], 4, 2, 16, 16, "float32")
    batch = step.batch
    table, lengths = batch.page_table.clone(), batch.context_len.clone()
    table[1, 4] = {"page": step.pages.k.shape[0], "negative page": -1}.get(wrong, table[1, 4])
    if wrong == "narrow table":
        table = table[:, :4]
    if wrong == "length":
        lengths[0] = 1  # less than the tokens of this step
    starts = batch.query_start + (1 if wrong == "starts" else 0)
    broken = replace(batch, page_table=table, context_len=lengths, query_start=starts)
    with pytest.raises(KernelError, match="a token or page id, row, slot or length lies outside"):
        attend(kernel, replace(step, batch=broken))
    assert attend(kernel, step).isfinite().all()
