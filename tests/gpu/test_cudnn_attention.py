"""Prompts by cuDNN's attention: torch's operator has a stand-in for the CPU."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels import gpu
from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import cudnn_attention, scratch
from sdk.kernels.gpu.cudnn_attention import CudnnAttention, pieces_of, runs_of
from sdk.kernels.gpu.scratch import ATTENTION_STEP as STEP
from sdk.kernels.gpu.tuning import NOT_FASTER, Tuning
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.attention import Attention as Reference
from tests.gpu.cudnn_stand_in import StandIn, library

__all__ = ["library"]  # a fixture

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 16, 16
KEY = "cudnn_attention", "bfloat16", WIDTH


def kernel(start: int = 8, **options: Any) -> CudnnAttention:
    return CudnnAttention(Tuning(programs=4, libraries={KEY: start}), **options)


def pages_of(count: int, dtype: str = "bfloat16", page: int = PAGE) -> KVPages:
    """With numbers in all pages but 0, where there is NaN, as where nobody has written."""
    random = torch.Generator().manual_seed(count)
    kind = KV_TYPES[dtype]
    k, v = (torch.randn(count, KV_HEADS, page, WIDTH, generator=random) for _ in range(2))
    k[0] = v[0] = math.nan
    return KVPages(k.to(getattr(torch, dtype)), v.to(getattr(torch, dtype)), kind, kind)


def batch_of(*requests: tuple[int, int], page: int = PAGE) -> AttentionBatch:
    """Requests of (queries, context), each with pages of its own from 1 on."""
    starts, tables, free = [0], [], 1
    for queries, context in requests:
        starts.append(starts[-1] + queries)
        count = -(-context // page)
        tables.append(list(range(free + count - 1, free - 1, -1)))
        free += count
    width = max(map(len, tables))
    return AttentionBatch(
        positions=torch.zeros(starts[-1], dtype=torch.int64),
        query_start=torch.tensor(starts, dtype=torch.int32),
        context_len=torch.tensor([c for _, c in requests], dtype=torch.int32),
        page_table=torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32),
        slots=torch.zeros(starts[-1], dtype=torch.int64),
        page_size=page,
        max_query_len=max(q for q, _ in requests),
        max_context_len=max(c for _, c in requests),
        lengths=requests,
    )


def run(
    attention: Any, batch: AttentionBatch, pages: KVPages, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    random = torch.Generator().manual_seed(3)
    q = torch.randn(batch.num_tokens, HEADS, 2 * WIDTH, generator=random).to(dtype)[..., :WIDTH]
    out = torch.full((batch.num_tokens, HEADS * WIDTH), math.nan, dtype=dtype)
    attention.run(q, pages, batch, 0.3, None, None, None, None, out)
    return out.float()


def away(found: Tensor, batch: AttentionBatch, pages: KVPages, **more: Any) -> float:
    wanted = run(Reference(), batch, pages, **more)
    return float((found - wanted).norm() / wanted.norm())


def test_a_prompt_and_tokens_beside_it(library: StandIn) -> None:
    batch, pages = batch_of((1, 33), (70, 70), (1, 5)), pages_of(20)
    assert away(run(kernel(), batch, pages), batch, pages) < 5e-3
    assert library.calls == [(STEP, STEP, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_chunk_is_merged_with_the_prefix_before_it(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Runs and pieces as where there is little scratch: several of each, of several sizes."""
    monkeypatch.setattr(cudnn_attention, "queries_at_once", lambda *_: STEP)
    monkeypatch.setattr(cudnn_attention, "keys_at_once", lambda *_: 2 * STEP)
    contexts = (600, 4 * STEP + 30), (9, STEP)
    batch = batch_of(*contexts)
    pages = pages_of(1 + sum(-(-c // PAGE) for _, c in contexts))
    found = run(kernel(), batch, pages, dtype)
    assert away(found, batch, pages, dtype=dtype) < 5e-3
    # queries 1478 to 1535, then those from 1536 on; the second request has less than a step before
    own, two, one = (STEP, STEP, True), (STEP, 2 * STEP, False), (STEP, STEP, False)
    assert library.calls[:5] == [own, two, own, two, one]
    assert {keys for _, keys, causal in library.calls if not causal} == {STEP, 2 * STEP}


def test_every_query_and_key_is_in_one_run_and_piece() -> None:
    for count, context in ((1, 1), (700, 700), (5000, 70000), (513, 9000)):
        runs = list(runs_of(count, context, 256, 128))
        assert [r.begin for r in runs[1:]] == [r.end for r in runs[:-1]]
        assert (runs[0].begin, runs[-1].end) == (0, count)
        for one in runs:
            assert one.base % STEP == 0 and 0 <= one.skipped < STEP
            assert scratch.padded_run(one.length) <= scratch.queries_at_once(256, 128)
            pieces = list(pieces_of(one.base, 4 * STEP))
            assert sum(n for _, n in pieces) == one.base
            assert {n for _, n in pieces} <= {STEP, 2 * STEP, 4 * STEP}


@pytest.mark.parametrize(
    ("requests", "changed"),
    [
        (((7, 7),), {}),  # too short
        (((40, 40), (7, 9)), {"heads": 16}),  # one of them is, and no drafts to verify
        (((40, 40),), {"lengths": None}),
    ],
)
def test_other_steps_are_ours(
    library: StandIn, requests: Any, changed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    if changed.pop("heads", 0):
        monkeypatch.setattr("sdk.kernels.gpu.attention.MOST_QUERIES", 2)
    batch, pages = replace(batch_of(*requests), **changed), pages_of(20)
    assert away(run(kernel(), batch, pages), batch, pages) < 5e-3
    assert library.calls == []


def test_lengths_are_those_of_all_requests() -> None:
    batch = replace(batch_of((40, 40), (1, 9)), lengths=((40, 40),))
    with pytest.raises(KernelError, match="batch lengths: expected those of 2 requests, found 1"):
        batch.check()


def test_pages_that_do_not_divide_a_step_are_ours(library: StandIn) -> None:
    batch, pages = batch_of((40, 40), page=24), pages_of(5, page=24)
    assert away(run(kernel(), batch, pages), batch, pages) < 5e-3
    assert library.calls == []


def problem(**fields: Any) -> Problem:
    return Problem("attention", **{"head_dim": WIDTH, "kv_dtype": "bfloat16", **fields})


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"kv_dtype": "int8"}, "KV pages of int8: expected float16, bfloat16"),
        ({"kv_dtype": "bfloat16>int8"}, "KV pages of bfloat16>int8: expected float16, bfloat16"),
        ({"format": "window sinks"}, "cuDNN's has no window sinks"),
        ({"head_dim": 256}, "head_dim 256: expected a multiple of 8 up to 128"),
        ({"head_dim": 64}, NOT_FASTER),
        ({"kv_dtype": "float16"}, NOT_FASTER),
        ({"compute": "exact"}, 'its products round to 16 bits, but compute="exact"'),
        ({}, None),
    ],
)
def test_what_it_does_not_take_is_said(fields: dict[str, Any], why: str | None) -> None:
    assert kernel().reject(problem(**fields)) == why


def test_it_is_not_for_a_fixed_order_nor_without_the_operator(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert "order of additions" in str(kernel(fixed=True).reject(problem()))
    monkeypatch.setattr(cudnn_attention, "operator", lambda: None)
    assert kernel().reject(problem()) == f"torch {torch.__version__} has no cuDNN attention here"


def chosen(tuning: Tuning, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What an engine would choose for such pages, checked: the choice."""
    monkeypatch.setattr(gpu, "tuning_of", lambda device: tuning)
    monkeypatch.setattr("sdk.kernels.known_answers.check.machine", lambda device: {})
    with_library = Ops("cpu", backends=("gpu", "reference"), activations="bfloat16")
    with_library.check_answers(None)
    pages, batch = pages_of(8), batch_of((40, 40))
    q = torch.randn(40, HEADS, WIDTH).bfloat16()
    with_library.attention(q, pages, batch, scale=0.25)
    ((_, choice),) = with_library.context.chosen()
    with_library.close()
    return choice


def test_a_table_and_its_known_answers_decide(
    library: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuning = Tuning(programs=4, libraries={KEY: 8})
    assert chosen(tuning, monkeypatch).name == "gpu.cudnn_attention"
    # of the check: a prompt, and one behind a prefix
    assert {(STEP, STEP, True), (STEP, STEP, False)} <= set(library.calls)
    own = chosen(Tuning(programs=4), monkeypatch)
    assert (own.name, own.declined) == ("gpu.attention", (("gpu.cudnn_attention", NOT_FASTER),))


@pytest.mark.parametrize(
    "trouble", ["it raises", pytest.param("its scores are wrong", marks=pytest.mark.slow)]
)
def test_a_library_that_is_wrong_is_replaced_and_named(
    library: StandIn, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    if trouble == "it raises":
        library.error = RuntimeError("no valid execution plans built")
    else:
        library.factor = 1.3
    choice = chosen(Tuning(programs=4, libraries={KEY: 8}), monkeypatch)
    assert choice.name == "gpu.attention"
    ((name, why),) = choice.declined
    assert name == "gpu.cudnn_attention" and why.startswith("failed its known-answer check: ")
    assert ("no valid execution plans" in why) == (trouble == "it raises")
