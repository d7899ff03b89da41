"""Paged attention under the Triton interpreter, against a softmax in float64 and the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import (
    attention,
    page_codes,
)
from sdk.kernels.gpu.attention import Attention
from sdk.kernels.reference.attention import Attention as Reference
from tests.gpu.attention_steps import (
    ROUNDED,
    Step,
    alone,
    close,
    expected,
    make_step,
)


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
