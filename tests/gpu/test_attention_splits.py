"""Contexts whose keys several programs read: how many there are, and the sum of their parts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sdk.kernels import gpu
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import (
    attention,
    attention_decode,
    attention_work,
    scratch,
)
from sdk.kernels.gpu.attention import Attention
from sdk.kernels.gpu.tuning import Tuning
from sdk.kernels.operators.batch import WorkShape
from sdk.kernels.operators.ops import Ops
from tests.gpu.attention_steps import (
    ROUNDED,
    Step,
    alone,
    close,
    expected,
    make_step,
)


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
