"""Paged attention under the Triton interpreter, against a softmax in float64 and the reference.

The interpreter takes about 3 ms for a tile of keys, so contexts are short.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels import gpu
from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import (
    attention,
    attention_decode,
    attention_work,
    page_codes,
    scratch,
)
from sdk.kernels.gpu.attention import Attention
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.kv.kv_types import KV_ALIASES, KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch, WorkShape
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.attention import Attention as Reference

#: What 16-bit weights of the values leave of exactness, beside the largest value of about 3.
ROUNDED = {"float32": 2e-6, "bfloat16": 2e-2}


@dataclass(frozen=True)
class Step:
    """Requests of (context, new tokens) with their pages filled, and their queries."""

    batch: AttentionBatch
    pages: KVPages
    q: Tensor

    def run(
        self,
        *,
        exact: bool = False,
        fixed: bool = False,
        programs: int = 8,
        sinks: Tensor | None = None,
        slopes: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """``[T, heads, head_dim]``."""
        out = torch.full((self.q.shape[0], self.q[0].numel()), float("nan"))
        settings: dict[str, Any] = {"scale": 0.2, "window": None, "softcap": None} | options
        Attention(exact, programs=programs, fixed=fixed).run(
            self.q, self.pages, self.batch, **settings, sinks=sinks, slopes=slopes, out=out
        )
        return out.view(self.q.shape)


def some_scales(codes: Tensor, groups: int, size: float, random: torch.Generator) -> Tensor:
    """``[pages, heads * groups, slots]``: float16, or scale and zero of int4."""
    pages, heads, slots, _ = codes.shape
    shape = (pages, heads * groups, slots)
    scale = ((torch.rand(shape, generator=random) + 0.5) * size).half()
    if codes.dtype != torch.uint8:
        return scale
    bits = scale.view(torch.int16).to(torch.int32) >> 7
    return (torch.randint(90, 150, shape, generator=random) << 8 | bits).to(torch.int16)


def make_side(
    shape: tuple[int, ...], dtype: str, groups: int, random: torch.Generator
) -> tuple[Tensor, Tensor | None]:
    """Keys or values ``shape`` of about 1 in size, pages apart from one another."""
    x = torch.randn(shape[0], 3, *shape[1:], generator=random)[:, 1]
    if dtype == "int8":
        codes = (x * 40).clamp(-127, 127).to(torch.int8)
        return codes, some_scales(codes, groups, 0.025, random)
    if dtype.startswith("float8"):
        codes = (x * 100).to(getattr(torch, dtype))
        return codes, some_scales(codes, groups, 0.01, random)
    if dtype == "int4":
        half = (*shape[:3], shape[3] // 2)
        codes = torch.randint(0, 256, half, generator=random).to(torch.uint8)
        return codes, some_scales(codes, groups, 0.2, random)
    return x.to(getattr(torch, dtype)), None


def decoded(codes: Tensor, scales: Tensor | None) -> Tensor:
    """Float64 ``[pages, heads, slots, head_dim]``, as ``gpu/pages.py`` says."""
    if scales is None:
        return codes.double()
    if codes.dtype == torch.uint8:
        codes = torch.cat([codes & 15, codes >> 4], dim=3)
    x = codes.double()
    pages, heads, slots, width = x.shape
    groups = scales.shape[1] // heads
    size = -(-width // (32 * groups)) * 32
    wide = scales.view(pages, heads, groups, slots).transpose(2, 3)
    wide = wide.repeat_interleave(size, dim=3)[..., :width]
    if scales.dtype == torch.float16:
        return x * wide.double()
    step = ((wide.to(torch.int32) & 255) << 7).to(torch.int16).view(torch.float16)
    return step.double() * (x - (wide.to(torch.int32) >> 8 & 255) / 16)


def make_step(
    requests: Sequence[tuple[int, int]],
    heads: int = 2,
    kv_heads: int = 1,
    head_dim: int = 64,
    page_size: int = 16,
    dtype: str = "float32",
    shared: int = 0,
    groups: int = 1,
) -> Step:
    """Pages in random order, unused slots NaN; ``shared`` tokens of all in the same pages.

    ``dtype``: of keys and values, or ``keys/values``.
    """
    random = torch.Generator().manual_seed(len(requests) + head_dim)
    common = shared // page_size
    counts = [-(-context // page_size) for context, _ in requests]
    order = torch.randperm(sum(counts) + 2, generator=random).tolist()
    first = [order.pop() for _ in range(common)]
    names = dtype.split("/")
    shape = (sum(counts) + 2, kv_heads, page_size, head_dim)
    (k, k_scale), (v, v_scale) = (
        make_side(shape, name, groups, random) for name in (names[0], names[-1])
    )
    unused = torch.ones(shape[0], page_size, dtype=torch.bool)
    tables, starts = [], [0]
    for (context, new), count in zip(requests, counts, strict=True):
        own = first + [order.pop() for _ in range(count - common)]
        tables.append(own + [0] * (max(counts) - count))
        starts.append(starts[-1] + new)
        for token in range(context):
            unused[own[token // page_size], token % page_size] = False
    for codes, scale in ((k, k_scale), (v, v_scale)):
        nan = float("nan") if scale is None or scale.dtype == torch.float16 else 255
        target = codes.transpose(1, 2) if scale is None else scale.transpose(1, 2)
        target[unused] = nan
    q = torch.randn(starts[-1], heads + 1, head_dim, generator=random)[:, :heads]  # strided
    batch = AttentionBatch(
        positions=torch.zeros(starts[-1], dtype=torch.int64),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([c for c, _ in requests], dtype=torch.int32),
        page_table=torch.tensor(tables, dtype=torch.int32),
        slots=torch.zeros(starts[-1], dtype=torch.int64),
        page_size=page_size,
        max_query_len=max(new for _, new in requests),
        max_context_len=max(c for c, _ in requests),
        shared_len=torch.tensor([shared], dtype=torch.int32) if shared else None,
    )
    k_type, v_type = (KV_TYPES[KV_ALIASES.get(name, name)] for name in (names[0], names[-1]))
    return Step(batch, KVPages(k, v, k_type, v_type, k_scale, v_scale), q)


def hadamard(size: int) -> Tensor:
    """Orthonormal, in blocks of the largest power of two within ``size``."""
    block = torch.ones(1, 1, dtype=torch.float64)
    while block.shape[0] < (size & -size):
        block = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), block)
    return torch.block_diag(*[block / block.shape[0] ** 0.5] * (size // block.shape[0]))


def expected(
    step: Step,
    *,
    scale: float = 0.2,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
    causal: bool = True,
    chunked: bool = False,
    ahead: Tensor | None = None,
) -> Tensor:
    """The definition, token by token and head by head, in float64."""
    pages, batch = step.pages, step.batch
    k, v = decoded(pages.k, pages.k_scale), decoded(pages.v, pages.v_scale)
    out = torch.zeros(step.q.shape, dtype=torch.float64)
    group = step.q.shape[1] // k.shape[1]
    for r, length in enumerate(batch.context_len.tolist()):
        start, end = batch.query_start[r : r + 2].tolist()
        for token in range(start, end):
            last = length - (end - token)
            first = 0 if window is None else max(0, last - window + 1)
            if chunked and window is not None:
                first = last // window * window
            stop = last + 1 if causal else min(length, last + (window or length))
            if ahead is not None:
                stop = min(length, stop + int(ahead[token]))
            places = [(int(batch.page_table[r, t // batch.page_size]), t % batch.page_size)
                      for t in range(first, stop)]  # fmt: skip
            for head in range(step.q.shape[1]):
                keys = torch.stack([k[page, head // group, slot] for page, slot in places])
                values = torch.stack([v[page, head // group, slot] for page, slot in places])
                score = keys @ step.q[token, head].double() * scale
                if softcap is not None:
                    score = torch.tanh(score / softcap) * softcap
                if slopes is not None:
                    score = score - slopes[head] * (torch.arange(first, stop) - last).abs()
                if sinks is not None:
                    score = torch.cat([score, sinks[head].double()[None]])
                weights = score.softmax(0)[: len(values)]
                out[token, head] = weights @ values
    mixed = pages.v.dtype in (torch.int8, torch.uint8)
    return out @ hadamard(out.shape[2]) if mixed else out


def close(found: Tensor, wanted: Tensor, tolerance: float) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=tolerance)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("head_dim", "heads", "kv_heads", "page_size", "dtype", "groups"),
    [
        (64, 4, 1, 16, "float32", 1),
        (80, 2, 2, 32, "float32", 1),
        (96, 8, 1, 64, "float16", 1),
        (128, 4, 1, 16, "bfloat16", 1),
        (256, 3, 1, 32, "float16", 1),
        (512, 2, 1, 16, "float16", 1),
        (64, 8, 1, 64, "int8", 1),
        (80, 4, 2, 16, "int8", 2),
        (96, 1, 1, 16, "float8_e4m3fn", 1),
        (128, 8, 1, 32, "float8_e5m2", 1),
        (256, 4, 1, 64, "int8", 4),
        (64, 4, 1, 16, "int4", 2),
        (96, 2, 1, 32, "int4", 3),
        (80, 2, 2, 16, "int8/int4", 2),
        (80, 2, 1, 16, "int4", 1),
        (64, 2, 1, 16, "bfloat16/float8_e4m3fn", 1),
    ],
)
def test_decode_and_prompts_are_the_softmax_of_the_definition(
    head_dim: int, heads: int, kv_heads: int, page_size: int, dtype: str, groups: int
) -> None:
    # one key, a full page, one more, a chunk behind a cached prefix, a whole prompt
    requests = [(1, 1), (page_size, 1), (page_size + 1, 1), (page_size + 21, 5), (18, 18)]
    step = make_step(requests, heads, kv_heads, head_dim, page_size, dtype, groups=groups)
    close(step.run(), expected(step), ROUNDED.get(dtype.split("/")[0], 4e-3))


def test_a_card_s_own_conversion_of_8_bit_floats_gives_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = make_step([(70, 1), (20, 12)], dtype="float8_e4m3fn")
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    every[every % 128 == 127] = 0  # not a number
    for codes in (step.pages.k, step.pages.v):
        codes.view(torch.uint8)[..., :] = every.view(-1, 64)[torch.arange(16) % 4]
    portable = step.run()
    monkeypatch.setattr(attention, "convert_of", lambda device: page_codes.FLOAT8)
    assert torch.equal(step.run(), portable)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", ["float16", "int8", "float8_e4m3fn", "int4/int8"])
def test_exact_arithmetic_leaves_nothing_but_float32(dtype: str) -> None:
    step = make_step([(40, 1), (40, 9)], 4, 2, 64, 16, dtype)
    close(step.run(exact=True), expected(step), 5e-6)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("requests", [[(300, 1), (90, 1)], [(90, 40), (90, 1)]])
@pytest.mark.parametrize(
    "options",
    [
        {"window": 1},
        {"window": 70, "softcap": 3.0},
        {"window": 70, "chunked": True},
        {"window": 33, "sinks": torch.tensor([0.5, -1.0])},
        {"sinks": torch.tensor([8.0, -40.0])},
        {"slopes": torch.tensor([0.5, 0.015625])},
        {"slopes": torch.tensor([0.25, 2.0]), "window": 33, "softcap": 3.0},
    ],
)
def test_windows_caps_sinks_and_slopes(
    requests: list[tuple[int, int]], options: dict[str, Any]
) -> None:
    step = make_step(requests)
    close(step.run(**options), expected(step, **options), 3e-6)


def test_the_reference_gives_the_same() -> None:
    step = make_step([(50, 1), (37, 20)], 4, 2, 80, 16, "int8")
    out = torch.empty(step.q.shape[0], step.q[0].numel())
    Reference().run(step.q, step.pages, step.batch, 0.2, 24, None, None, None, out)
    found = step.run(exact=True, window=24)
    torch.testing.assert_close(found, out.view(found.shape), rtol=0, atol=3e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_long_contexts_are_joined_from_their_splits(dtype: str) -> None:
    step = make_step([(256, 1), (257, 1), (600, 1), (3, 1)], 3, 1, 64, 32, dtype)
    close(step.run(), expected(step), 3e-3)


def keys_per_split(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "SPLIT", keys)
    for module in (attention_work, attention_decode):
        monkeypatch.setattr(module, "SPLIT", attention_work.SPLIT.__class__(keys))


def test_a_context_of_many_splits_has_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    keys_per_split(64, monkeypatch)
    monkeypatch.setattr(attention, "most_splits", lambda *shape: 2)
    step = make_step([(600, 1), (100, 1)])
    close(step.run(), expected(step), 3e-6)


def alone(step: Step, request: int) -> Step:
    """One request of a step as a step of its own."""
    start, end = step.batch.query_start[request : request + 2].tolist()
    length = int(step.batch.context_len[request])
    batch = replace(
        step.batch,
        positions=step.batch.positions[start:end],
        query_start=torch.tensor([0, end - start], dtype=torch.int32),
        context_len=step.batch.context_len[request : request + 1],
        page_table=step.batch.page_table[request : request + 1],
        slots=step.batch.slots[start:end],
        max_query_len=end - start,
        max_context_len=length,
        shared_len=None,
    )
    return Step(batch, step.pages, step.q[start:end])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fixed", [False, True])
def test_a_row_does_not_depend_on_its_batch(fixed: bool) -> None:
    requests = [(300, 1), (40, 1), (30, 17), (280, 3), (600, 2)]
    step = make_step(requests, 4, 1, 64, 16, "float16")
    together = step.run(window=200, fixed=fixed)
    for request in range(len(requests)):
        part = alone(step, request)
        start = int(step.batch.query_start[request])
        found = part.run(window=200, fixed=fixed)
        assert torch.equal(found, together[start : start + len(found)]), request


@pytest.mark.parametrize("fixed", [False, True])
def test_a_prompt_does_not_depend_on_its_chunks(fixed: bool) -> None:
    step = make_step([(70, 70)], 2, 1, 64, 16, "float16")
    whole = step.run(fixed=fixed)
    # Rows keep their place in the tile of 32 queries: the interpreter's matrix product is a BLAS's,
    # which adds up differently in different rows. Matrix instructions do not.
    chunks = [(32, 32), (64, 32), (70, 6)]
    if fixed:  # chunks of one token too: a preempted request's tokens come again in longer ones
        chunks += [(33, 1), (65, 1)]
    for length, count in chunks:
        batch = replace(
            step.batch,
            positions=step.batch.positions[:count],
            slots=step.batch.slots[:count],
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_len=torch.tensor([length], dtype=torch.int32),
            max_query_len=count,
            max_context_len=length,
        )
        part = Step(batch, step.pages, step.q[length - count : length]).run(fixed=fixed)
        assert torch.equal(part, whole[length - count : length]), (length, count)


@pytest.mark.parametrize(
    "shared", [*(pytest.param(x, marks=pytest.mark.slow) for x in (64, 256)), 528]
)
def test_a_shared_prefix_is_read_once_and_changes_nothing(shared: int) -> None:
    requests = [(600, 1), (541, 1), (533, 4), (529, 1)]
    step = make_step(requests, 2, 1, 64, 16, "float32", shared)
    options: dict[str, Any] = {"sinks": torch.tensor([0.5, 1.0])}
    found = step.run(**options)
    close(found, expected(step, **options), 3e-6)
    apart = Step(replace(step.batch, shared_len=None), step.pages, step.q).run(**options)
    torch.testing.assert_close(found, apart, rtol=0, atol=1e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("shared", [pytest.param(0, marks=pytest.mark.slow), 528])
@pytest.mark.parametrize(
    ("heads", "dtype", "options"),
    [
        (4, "float16", {}),
        (2, "float8_e4m3fn", {"window": 150, "sinks": torch.tensor([0.5, -1.0])}),
        (3, "int4", {"softcap": 3.0}),
    ],
)
def test_drafts_are_verified_by_decode_attention(
    heads: int, dtype: str, options: dict[str, Any], shared: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(attention, "prefill_kernel")
    step = make_step([(700, 8), (620, 1), (1100, 3), (530, 1)], heads, 1, 64, 16, dtype, shared)
    close(step.run(**options), expected(step, **options), 4e-3)


def test_so_many_queries_that_they_are_a_prompt_and_few_of_another_request() -> None:
    step = make_step([(130, 9), (40, 8), (300, 1)], 2, 2, 64, 16)
    close(step.run(), expected(step), 3e-6)


@pytest.mark.slow
def test_parts_that_do_not_fit_into_scratch_are_made_in_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = make_step([(1100, 2), (600, 1), (1030, 5)], 2, 1, 64, 16, "float32", 528)
    found = step.run()
    turns = []
    monkeypatch.setattr(scratch, "SCRATCH", 4096)
    monkeypatch.setattr(
        attention, "runs", lambda *given: turns.append(given) or list(scratch.runs(*given))
    )
    assert torch.equal(step.run(), found)
    assert turns == [(3, 1)]


def test_a_step_s_list_of_work_serves_all_layers_and_is_left_as_it_was() -> None:
    requests = [(300, 1), (5, 1), (1100, 4), (40, 9), (520, 2)]
    step = make_step(requests, 2, 1, 64, 16)
    most = 32
    work = torch.full((9, most + 1), -7, dtype=torch.int32)
    attention_work.list_work(step.batch, work, most)
    counts = [2, 1, 3, 0, 2]  # splits of 256 keys, of 512 with several queries
    wanted = [(r, rank) for rank in range(5) for r in range(5) if counts[r] > rank]
    listed = work[1:, :most].flatten()[: len(wanted)].tolist()
    assert [divmod(x, most) for x in listed] == wanted
    ends = [sum(min(count, rank + 1) for count in counts) for rank in range(5)]
    assert work[0, :5].tolist() == ends and work[0, most] == 1100
    assert not work[1:6, most:].any()
    kept = work.clone()
    with_list = Step(replace(step.batch, work=work, splits=most), step.pages, step.q)
    for window in (None, 100):
        close(with_list.run(window=window), expected(step, window=window), 3e-6)
        assert torch.equal(work, kept)
    with pytest.raises(KernelError, match=r"work of int32 \[6, 33\] or more, found .* \[9, 32\]"):
        Step(replace(with_list.batch, work=work[:, :32]), step.pages, step.q).run()
    for splits in (0, 24):
        with pytest.raises(KernelError, match=f"power of two of splits, found {splits}"):
            Step(replace(with_list.batch, splits=splits), step.pages, step.q).run()


#: Programs of an H100, four for each processor.
CARD = 528


@pytest.mark.parametrize(
    ("programs", "heads", "kv_heads", "head_dim", "splits"),
    [
        *((CARD, 4, 1, 128, 128), (CARD, 14, 2, 64, 64), (CARD, 16, 4, 128, 32)),
        *((CARD, 32, 8, 128, 32), (CARD, 32, 32, 128, 32)),
        *((CARD, 48, 1, 128, 32), (CARD, 4, 1, 256, 64)),  # the parts are large
        *((160, 4, 1, 128, 32), (232, 4, 1, 256, 64), (1216, 14, 2, 64, 128), (4, 4, 1, 64, 32)),
    ],
)
def test_few_key_heads_have_more_splits(
    programs: int, heads: int, kv_heads: int, head_dim: int, splits: int
) -> None:
    assert scratch.most_splits(programs, heads, kv_heads, head_dim) == splits
    assert scratch.work_shape(programs, 9, heads, kv_heads, head_dim).width == splits + kv_heads


def listed(step: Step, splits: int) -> Step:
    """The same step with a list of up to this many splits of a request."""
    kv_heads = step.pages.k.shape[1]
    work = torch.full((step.batch.num_requests + 1, splits + kv_heads), -7, dtype=torch.int32)
    attention_work.list_work(step.batch, work, splits)
    return replace(step, batch=replace(step.batch, work=work, splits=splits))


def split_counts(step: Step) -> list[int]:
    """How many splits each request has in the step's list."""
    batch = step.batch
    assert batch.work is not None
    last = scratch.split_count(batch.max_context_len, batch.splits) - 1
    items = batch.work[1:, : batch.splits].flatten()[: int(batch.work[0, last])]
    return torch.bincount(items // batch.splits, minlength=batch.num_requests).tolist()


@pytest.mark.slow
def test_one_request_with_one_key_head_fills_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 32 splits at most 18 programs had work here, of 512 keys each."""
    step = make_step([(9000, 1)], 2, 1, 64, 64, "float16")
    grids = []
    run_kernel = attention.run_kernel

    def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
        grids.append((*grid, constants["MAX_SPLITS"]))
        run_kernel(kernel, grid, *arguments, **constants)

    monkeypatch.setattr(attention, "run_kernel", run)
    close(step.run(programs=CARD), expected(step), 3e-3)
    assert grids == [(36, 128)]
    assert split_counts(listed(step, 128)) == [36]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "requests", "shared", "options"),
    [
        (4, 1, 64, "float32", [(2500, 1), (70, 1), (2113, 1)], 0, {}),
        (6, 2, 64, "int8", [(2300, 1), (2049, 1)], 0, {"window": 1100, "softcap": 3.0}),
        (3, 1, 64, "float8_e4m3fn", [(4500, 8), (2200, 1), (900, 3)], 0, {}),
        (2, 1, 64, "int4", [(2700, 1), (2612, 1), (2590, 1)], 2560, {}),
        (2, 2, 96, "bfloat16", [(2200, 1)], 0, {"window": 150}),
        (4, 1, 256, "float16", [(2300, 1), (65, 1)], 0, {}),
        (2, 1, 64, "float8_e5m2", [(4500, 4), (4450, 1)], 4416, {"softcap": 3.0}),
        (2, 1, 80, "int4", [(2300, 1)], 0, {"window": 2200}),
    ],
)
def test_many_parts_of_long_contexts_are_added_up(
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
    requests: list[tuple[int, int]],
    shared: int,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More than 32 parts, of 64 keys each, which take the interpreter a quarter of the time."""
    keys_per_split(64, monkeypatch)
    step = make_step(requests, heads, kv_heads, head_dim, 64, dtype, shared)
    sinks = torch.linspace(-1.0, 1.0, heads)
    many = listed(step, 128)
    assert max(split_counts(many)) > 32
    found = many.run(sinks=sinks, **options)
    wanted = expected(step, sinks=sinks, **options)
    close(found, wanted, ROUNDED["bfloat16"] if dtype == "bfloat16" else 4e-3)
    if dtype == "float32":
        close(found, wanted, 3e-6)


@pytest.mark.slow
def test_a_row_of_many_splits_does_not_depend_on_its_batch_or_the_longest_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in a captured graph, whose splits are those of the longest context that there may be."""
    keys_per_split(64, monkeypatch)
    step = make_step([(2300, 1), (40, 1), (2113, 3)], 4, 2, 64, 64, "float16")
    together = listed(step, 128).run()
    captured = replace(step, batch=replace(step.batch, max_context_len=1 << 13))
    assert torch.equal(listed(captured, 128).run(), together)
    for request in range(3):
        start, end = step.batch.query_start[request : request + 2].tolist()
        found = listed(alone(step, request), 128).run()
        assert torch.equal(found, together[start:end]), request


def test_the_list_of_a_step_has_the_splits_of_the_model_s_key_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Made once by ``find_places`` for all layers, which read it alike."""
    keys_per_split(64, monkeypatch)
    monkeypatch.setattr(gpu, "tuning_of", lambda device: Tuning(programs=CARD))
    ops = Ops("cpu", num_threads=1, backends=("gpu", "reference"))
    step = make_step([(2300, 1), (130, 1)], 4, 1, 64, 64, "float16")
    shape = ops.work_shape(4, 4, 1, 64)
    assert shape == WorkShape(5, 128, 1)
    work = torch.full((shape.rows, shape.width), -7, dtype=torch.int32)
    given = replace(step, batch=replace(step.batch, work=work, splits=shape.splits))
    ops.find_places(given.batch)
    assert int(work[0, :128].max()) == 36 + 3 and int(work[0, 128]) == 2300
    counts = [2300 // 64 + 1, 3]
    assert work[0, :36].tolist() == [sum(min(n, rank + 1) for n in counts) for rank in range(36)]
    kept, found = work.clone(), given.run()
    assert torch.equal(work, kept)
    close(found, expected(step), 3e-3)
    ops.close()


@pytest.mark.slow
def test_more_programs_than_work_and_fewer() -> None:
    step = make_step([(600, 1), (100, 1), (300, 2)], 2, 2)
    out = torch.empty(step.q.shape[0], step.q[0].numel())
    found = []
    for programs in (1, 1000):
        Attention(False, programs=programs).run(
            step.q, step.pages, step.batch, 0.2, None, None, None, None, out.fill_(torch.nan)
        )
        found.append(out.clone())
    assert torch.equal(*found)
    close(found[0].view(step.q.shape), expected(step), 3e-6)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("window", [None, pytest.param(130, marks=pytest.mark.slow), 200])
def test_prompts_see_tiles_of_keys_without_masks_like_all_others(window: int | None) -> None:
    step = make_step([(330, 70), (200, 30)])
    close(step.run(window=window), expected(step, window=window), 3e-6)


@pytest.mark.parametrize(
    ("window", "fixed", "slopes"),
    [
        (None, False, None),
        (70, False, None),
        (1, True, None),
        (None, True, torch.tensor([0.5, 0.015625])),
    ],
)
def test_tokens_that_see_both_ways(window: int | None, fixed: bool, slopes: Tensor | None) -> None:
    step = make_step([(140, 140), (1, 1), (80, 20)])
    found = step.run(window=window, causal=False, fixed=fixed, slopes=slopes)
    close(found, expected(step, window=window, causal=False, slopes=slopes), 3e-6)


@pytest.mark.parametrize(("window", "fixed"), [(None, False), (90, True)])
def test_spans_that_see_themselves_both_ways(window: int | None, fixed: bool) -> None:
    """70 tokens of a prompt, a whole prompt, and none: of other requests of the step."""
    step = make_step([(140, 120), (30, 30), (80, 1)])
    ahead = torch.zeros(151, dtype=torch.int32)
    ahead[10:80] = torch.arange(69, -1, -1)
    ahead[120:150] = torch.arange(29, -1, -1)
    found = step.run(window=window, fixed=fixed, ahead=ahead)
    close(found, expected(step, window=window, ahead=ahead), 3e-6)
    out = torch.empty(151, step.q[0].numel())
    given = (step.q, step.pages, step.batch, 0.2, window, None, None, None, out)
    Reference().run(*given, ahead=ahead)
    close(out.view(found.shape), found.double(), 3e-6)


def test_a_window_hides_most_of_a_shared_prefix() -> None:
    step = make_step([(600, 1), (700, 1)], 2, 1, 64, 16, "float32", 512)
    close(step.run(window=150), expected(step, window=150), 3e-6)


def test_what_cannot_be_run_is_declined() -> None:
    fast, exact = Attention(exact=False), Attention(exact=True)
    fine = Problem("attention", head_dim=64, kv_dtype="float16")
    assert fast.reject(fine) is None
    assert "round to 16 bits" in str(fast.reject(replace(fine, compute="exact")))
    assert exact.reject(replace(fine, compute="exact")) is None
    assert "head_dim 20" in str(fast.reject(replace(fine, head_dim=20)))
    by_distance = replace(fine, compute="exact", format="both ways biases")
    assert "biases of scores by distance" in str(exact.reject(by_distance))
    assert "float64" in str(fast.reject(replace(fine, kv_dtype="float64")))


def test_pages_that_lie_otherwise_are_refused() -> None:
    step = make_step([(5, 1)])
    turned = step.pages.k.transpose(2, 3).contiguous().transpose(2, 3)
    with pytest.raises(KernelError, match=r"\[page_size, 64\] in the memory of a page"):
        replace(step, pages=replace(step.pages, k=turned)).run()
    with pytest.raises(KernelError, match="do not agree"):
        replace(step, pages=replace(step.pages, k=step.pages.k[:1])).run()
    with pytest.raises(
        KernelError, match=r"of float32: expected torch\.float32 .* found torch\.float64"
    ):
        replace(step, pages=replace(step.pages, k=step.pages.k.double())).run()
    codes = make_step([(5, 1)], dtype="int8")
    with pytest.raises(KernelError, match=r"expected scales .* found None"):
        replace(codes, pages=replace(codes.pages, k_scale=None)).run()
    with pytest.raises(KernelError, match=r"expected contiguous torch\.float16 scales"):
        replace(codes, pages=replace(codes.pages, v_scale=codes.pages.v_scale.float())).run()
    with pytest.raises(KernelError, match="window of at least 1"):
        step.run(window=0)
    with pytest.raises(KernelError, match=r"expected a scale above 0, found -0\.2"):
        step.run(scale=-0.2)
