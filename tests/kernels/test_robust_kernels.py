"""What callers get wrong and machines do to a process: an error or the right result, never a fault.

Run under the sanitizers too (`make sanitize`), where an access outside of a tensor ends the test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import DRAW
from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.layouts import Affine, Dense


@pytest.fixture
def ops() -> Iterator[Ops]:
    opened = Ops("cpu", num_threads=2)
    yield opened
    opened.close()


def misaligned(x: Tensor) -> Tensor:
    """The same values one byte behind an aligned address."""
    memory = bytearray(x.nbytes + 17)
    start = (1 - np.frombuffer(memory, np.uint8).ctypes.data) % 16
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=x.nbytes, offset=start)
    flat.copy_(x.contiguous().view(-1).view(torch.uint8))
    view = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=start).view(x.shape)
    assert view.data_ptr() % 16 == 1
    return view


def make_batch(**changes: Any) -> AttentionBatch:
    """Two requests with 5 of 5 and 1 of 3 tokens new, pages of 4, four pages."""
    batch = AttentionBatch(
        positions=torch.tensor([0, 1, 2, 3, 4, 2]),
        query_start=torch.tensor([0, 5, 6], dtype=torch.int32),
        context_len=torch.tensor([5, 3], dtype=torch.int32),
        page_table=torch.tensor([[2, 0], [3, 0]], dtype=torch.int32),
        slots=torch.tensor([8, 9, 10, 11, 0, 14]),
        page_size=4,
        max_query_len=5,
        max_context_len=5,
    )
    return replace(batch, **changes)


def make_pages(dtype: torch.dtype = torch.float32, page_size: int = 4) -> KVPages:
    """Keys lie transposed in their pages; 8-bit pages have scales."""
    k = torch.zeros(4, 2, 16, page_size, dtype=dtype).transpose(2, 3)
    scales = [torch.ones(4, 2, page_size, dtype=torch.float16) for _ in range(2)]
    v = torch.zeros(4, 2, page_size, 16, dtype=dtype)
    kind = next(x for x in KV_TYPES.values() if x.storage_dtype == dtype)
    return KVPages(k, v, kind, kind, *(scales if kind.scale else ()))


def rope(ops: Ops, batch: AttentionBatch, pages: KVPages, tokens: int = 6) -> None:
    angle = torch.zeros(tokens, 8)
    q, k = torch.zeros(tokens, 4, 16), torch.zeros(tokens, 2, 16)
    ops.rope_and_cache(q, k, k, angle, angle, batch, pages)


# --- shapes ---


def test_the_smallest_and_unevenest_matrices_multiply_right(ops: Ops, cases: Any) -> None:
    exact = Ops("cpu", num_threads=3, compute="exact")
    shapes = [(1, 1, 32), (1, 300, 16), (17, 1, 1), (1, 33, 32), (3, 47, 16), (16, 40, 48)]
    for n, k, group in shapes:
        for bits in (2, 3, 4, 5, 8):
            weight = cases.affine(n, k, bits, group, "minus", seed=bits)
            for engine in (ops, exact):
                linear = engine.linear(weight)
                assert cases.same(linear.layout(), weight)
                for m in (0, 1, 3):
                    x = torch.randn(m, k)
                    found = linear.matmul(x)
                    assert found.shape == (m, n)
                    wanted = (x if engine is exact else cases.rounded(x)).double()
                    wanted = wanted @ decode(weight).double().T
                    assert torch.allclose(found.double(), wanted, rtol=1e-4, atol=1e-5)
    exact.close()


def test_weights_at_odd_addresses_pack_the_same(ops: Ops, cases: Any) -> None:
    affine = cases.affine(20, 96, 4, 32, "minus")
    odd = Affine(
        affine.shape,
        *(affine.bits, affine.group),
        *(misaligned(affine.codes), misaligned(affine.scale)),
        minus=misaligned(affine.minus),
    )
    assert cases.same(ops.linear(odd).layout(), affine)
    dense = cases.dense(20, 33, torch.bfloat16)
    assert cases.same(ops.linear(Dense(misaligned(dense.values))).layout(), dense)


def test_empty_batches_give_empty_results(ops: Ops, cases: Any) -> None:
    linear, none = ops.linear(cases.affine(20, 96)), torch.zeros(0, 96)
    ids = torch.zeros(0, dtype=torch.int64)
    assert linear.matmul(none).shape == (0, 20)
    assert linear.rows(ids).shape == (0, 96)
    assert ops.norm(none, Norm(torch.ones(96), 1e-5)).shape == (0, 96)
    assert ops.add_norm(none, none.clone(), Norm(torch.ones(96), 1e-5))[0].shape == (0, 96)
    assert ops.gated_activation(none, "silu").shape == (0, 48)
    assert ops.zeros(0, 7).shape == (0, 7) and ops.zeros(7, 0).shape == (7, 0)
    assert ops.add(none, none).shape == ops.scale(none, 2.0).shape == (0, 96)
    assert ops.add_bias(none, torch.ones(96)).shape == ops.softcap(none, 2.0).shape == (0, 96)
    assert ops.select_rows(none, ids).shape == (0, 96)
    assert ops.rope_angles(ids, torch.ones(4), 1.0)[0].shape == (0, 4)
    assert ops.sampling.argmax(none) == ([], [], [])
    batch = make_batch(
        positions=ids,
        slots=ids,
        query_start=torch.zeros(1, dtype=torch.int32),
        context_len=torch.zeros(0, dtype=torch.int32),
        page_table=torch.zeros(0, 2, dtype=torch.int32),
    )
    ops.find_places(batch)
    rope(ops, batch, make_pages(), tokens=0)
    assert ops.attention(torch.zeros(0, 4, 16), make_pages(), batch, scale=1.0).shape == (0, 64)


def test_more_threads_than_rows_or_processors_change_nothing(cases: Any) -> None:
    weights = [cases.affine(3, 64), cases.affine(700, 512)]
    found = []
    for threads in (1, 64):
        ops = Ops("cpu", num_threads=threads)
        for weight in weights:
            linear = ops.linear(weight)
            found.append([linear.matmul(cases.activations(m, weight.shape[1])) for m in (1, 2, 40)])
        ops.close()
    for one, many in zip(found[:2], found[2:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, many, strict=True))


# --- wrong arguments ---

X, WEIGHT, IDS = torch.randn(4, 96), torch.rand(96), torch.tensor([0, 3])
FLOAT_ARGUMENTS: dict[str, tuple[Callable[[Ops, Tensor], Any], Tensor]] = {
    "norm x": (lambda ops, x: ops.norm(x, Norm(WEIGHT, 1e-5)), X),
    "norm weight": (lambda ops, x: ops.norm(X, Norm(x, 1e-5)), WEIGHT),
    "add_norm x": (lambda ops, x: ops.add_norm(x, X.clone(), Norm(WEIGHT, 1e-5)), X),
    "add_norm residual": (lambda ops, x: ops.add_norm(X, x, Norm(WEIGHT, 1e-5)), X),
    "add_norm weight": (lambda ops, x: ops.add_norm(X, X.clone(), Norm(x, 1e-5)), WEIGHT),
    "gated_activation": (lambda ops, x: ops.gated_activation(x, "silu"), X),
    "add x": (lambda ops, x: ops.add(x, X), X),
    "add other": (lambda ops, x: ops.add(X.clone(), x), X),
    "add_bias x": (lambda ops, x: ops.add_bias(x, WEIGHT), X),
    "add_bias bias": (lambda ops, x: ops.add_bias(X.clone(), x), WEIGHT),
    "scale x": (lambda ops, x: ops.scale(x, 2.0), X),
    "softcap x": (lambda ops, x: ops.softcap(x, 2.0), X),
    "select_rows x": (lambda ops, x: ops.select_rows(x, IDS), X),
    "place_rows x": (
        lambda ops, x: ops.place_rows(x, X, torch.full((4,), -1, dtype=torch.int32)),
        X,
    ),
    "place_rows rows": (
        lambda ops, x: ops.place_rows(X.clone(), x, torch.full((4,), -1, dtype=torch.int32)),
        X,
    ),
    "rope_angles inv_freq": (lambda ops, x: ops.rope_angles(IDS, x, 1.0), WEIGHT),
    "sample logits": (lambda ops, x: ops.sampling.argmax(x), X),
    "attention q": (
        lambda ops, x: ops.attention(x, make_pages(), make_batch(), scale=1.0),
        torch.randn(6, 4, 16),
    ),
    "attention sinks": (
        lambda ops, x: ops.attention(
            torch.zeros(6, 4, 16), make_pages(), make_batch(), scale=1.0, sinks=x
        ),
        torch.randn(4),
    ),
    "attention slopes": (
        lambda ops, x: ops.attention(
            torch.zeros(6, 4, 16), make_pages(), make_batch(), scale=1.0, slopes=x
        ),
        torch.randn(4),
    ),
    "attention biases": (
        lambda ops, x: ops.attention(
            torch.zeros(6, 4, 16), make_pages(), make_batch(), scale=1.0, biases=x
        ),
        torch.randn(4, 5),
    ),
}


@pytest.mark.parametrize("name", FLOAT_ARGUMENTS)
def test_floats_of_another_type_or_at_an_odd_address_are_refused(ops: Ops, name: str) -> None:
    call, good = FLOAT_ARGUMENTS[name]
    call(ops, good.clone())
    with pytest.raises(KernelError, match=r"float32.*float64"):
        call(ops, good.double())
    with pytest.raises(KernelError, match=rf"{name}: expected data at a multiple of 4 bytes"):
        call(ops, misaligned(good))


@pytest.mark.parametrize("name", ["linear x", "linear out", "rows ids"])
def test_arguments_of_a_weight_are_checked(ops: Ops, cases: Any, name: str) -> None:
    linear = ops.linear(cases.affine(20, 96))
    out = torch.empty(4, 20)
    calls: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
        "linear x": (lambda x: linear.matmul(x), X),
        "linear out": (lambda x: linear.matmul(X, x), out),
        "rows ids": (lambda x: linear.rows(x), IDS),
    }
    call, good = calls[name]
    for bad in (good.half(), good.unsqueeze(0), good[..., None]):
        with pytest.raises(KernelError, match=rf"{name}: expected"):
            call(bad)
    with pytest.raises(KernelError, match=rf"{name}: expected data at a multiple of"):
        call(misaligned(good))


def test_rows_that_overlap_or_lie_apart_in_columns_are_no_output(ops: Ops, cases: Any) -> None:
    linear = ops.linear(cases.affine(20, 96))
    one = torch.zeros(1, 20)
    for out in (
        one.expand(4, 20),
        torch.zeros(20, 4).T,
        torch.zeros(100).as_strided((4, 20), (19, 1)),
    ):
        with pytest.raises(KernelError, match="linear out: expected contiguous, separate rows"):
            linear.matmul(X, out)
    assert not one.any()


def test_operands_of_other_shapes_are_refused(ops: Ops) -> None:
    with pytest.raises(KernelError, match=r"add other: expected torch.float32 \[4, 96\]"):
        ops.add(X.clone(), torch.zeros(96, 4))
    with pytest.raises(KernelError, match=r"add_bias bias: expected torch.float32 \[96\]"):
        ops.add_bias(X.clone(), torch.zeros(95))
    with pytest.raises(KernelError, match="add_norm residual: expected"):
        ops.add_norm(X, torch.zeros(3, 96), Norm(WEIGHT, 1e-5))
    with pytest.raises(KernelError, match="activation: expected 4 numbers of xielu, found 0"):
        ops.activation(X.clone(), "xielu")
    with pytest.raises(KernelError, match="gated_activation: expected 0 numbers of relu, found 1"):
        ops.gated_activation(X, "relu", None, (0.5,))
    with pytest.raises(KernelError, match="norm weight: expected"):
        ops.norm(X, Norm(torch.ones(5, 96), 1e-5))  # X has no heads
    with pytest.raises(KernelError, match="add_norm bias: expected"):
        ops.add_norm(X, X.clone(), Norm(None, 1e-5, torch.ones(95)))
    with pytest.raises(KernelError, match="gated_activation: expected an even width, found 95"):
        ops.gated_activation(X[:, :95], "silu")
    with pytest.raises(KernelError, match="norm: expected float32 rows of at most 3 dimensions"):
        ops.norm(torch.zeros(2, 2, 2, 96), Norm(WEIGHT, 1e-5))
    with pytest.raises(KernelError, match="scale: expected contiguous rows"):
        ops.scale(torch.zeros(96, 4).T, 2.0)


def test_views_with_strides_give_what_their_copies_give(ops: Ops, cases: Any) -> None:
    linear, wide = ops.linear(cases.affine(20, 96)), torch.randn(8, 300)
    view, tall = wide[::2, 5:197:2], torch.randn(96, 4).T
    for x in (view, tall, wide[:1, :96].expand(4, 96)):
        copy = x.contiguous()
        assert torch.equal(linear.matmul(x), linear.matmul(copy))
        assert torch.equal(ops.gated_activation(x, "gelu"), ops.gated_activation(copy, "gelu"))
        assert torch.equal(ops.select_rows(x, IDS), ops.select_rows(copy, IDS))
        assert ops.sampling.argmax(x) == ops.sampling.argmax(copy)
        assert torch.equal(ops.add(X.clone(), x), ops.add(X.clone(), copy))
    assert torch.equal(
        linear.rows(torch.tensor([1, 7, 2, 7])[::2]), linear.rows(torch.tensor([1, 2]))
    )


@pytest.mark.parametrize("bad", [-1, 4, 2**40, -(2**63)])
def test_indices_outside_of_their_tensor_are_refused(ops: Ops, cases: Any, bad: int) -> None:
    linear = ops.linear(cases.affine(4, 96))
    with pytest.raises(KernelError, match=rf"rows: expected ids in 0..3, found {bad}"):
        linear.rows(torch.tensor([0, bad]))
    with pytest.raises(
        KernelError, match="select_rows: a token or page id, row, slot or length lies outside"
    ):
        ops.select_rows(X, torch.tensor([0, bad]))


@pytest.mark.parametrize("bad", [-2, 4, 2**31 - 1, -(2**31)])
def test_rows_to_place_outside_of_their_tensor_are_refused(ops: Ops, bad: int) -> None:
    x, rows = torch.zeros(3, 8), torch.ones(4, 8)
    with pytest.raises(KernelError, match="place_rows: a token or page id, row, slot or length"):
        ops.place_rows(x, rows, torch.tensor([0, bad, 1], dtype=torch.int32))
    assert not x.any()


def test_a_replayed_step_refuses_indices_outside_of_their_tensor(ops: Ops, cases: Any) -> None:
    embedding = ops.linear(cases.affine(30, 96))
    ids, rows = torch.zeros(8, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)

    def forward() -> Tensor:
        return ops.select_rows(ops.scale(embedding.rows(ids), 2.0), rows)

    graph = ops.recording.capture(forward, tokens=8, outputs=2, requests=1)
    for tensor, bad in ((ids, 30), (ids, -1), (rows, 8), (rows, -5)):
        graph.replay(tokens=3, outputs=2, requests=1)
        before = graph.result.clone()
        tensor[1] = bad
        with pytest.raises(
            KernelError, match="step: a token or page id, row, slot or length lies outside"
        ):
            graph.replay(tokens=3, outputs=2, requests=1)
        assert torch.equal(graph.result, before)
        tensor.zero_()


def test_strange_draws_are_refused(ops: Ops) -> None:
    draws = np.zeros(8, DRAW)
    for bad in (draws[:4:2], draws[::2], draws.view(np.uint8)[1:-7].view(np.uint8), draws[:3]):
        with pytest.raises(KernelError, match="sample: expected one DRAW for each row"):
            ops.sampling.sample(X, bad)


BATCH_ERRORS: dict[str, dict[str, Any]] = {
    "positions of another type": {"positions": torch.zeros(6, dtype=torch.int32)},
    "slots of another type": {"slots": torch.zeros(6, dtype=torch.int32)},
    "too few slots": {"slots": torch.zeros(5, dtype=torch.int64)},
    "64-bit starts": {"query_start": torch.tensor([0, 5, 6])},
    "too few starts": {"query_start": torch.tensor([0, 6], dtype=torch.int32)},
    "64-bit lengths": {"context_len": torch.tensor([5, 3])},
    "too few page tables": {"page_table": torch.zeros(1, 2, dtype=torch.int32)},
    "a flat page table": {"page_table": torch.zeros(4, dtype=torch.int32)},
    "page tables in columns": {"page_table": torch.zeros(2, 2, dtype=torch.int32).T},
    "positions with gaps": {"positions": torch.zeros(12, dtype=torch.int64)[::2]},
    "slots at an odd address": {"slots": misaligned(torch.zeros(6, dtype=torch.int64))},
    "starts at an odd address": {"query_start": misaligned(torch.tensor([0, 5, 6]).int())},
    "no page size": {"page_size": 0},
}


@pytest.mark.parametrize("what", BATCH_ERRORS)
def test_batches_that_are_not_what_they_say_are_refused(ops: Ops, what: str) -> None:
    batch = make_batch(**BATCH_ERRORS[what])
    with pytest.raises(KernelError, match="batch"):
        ops.find_places(batch)
    with pytest.raises(KernelError, match="batch"):
        rope(ops, batch, make_pages())
    with pytest.raises(KernelError, match="batch"):
        ops.attention(torch.zeros(6, 4, 16), make_pages(), batch, scale=1.0)


#: Requests whose tokens, lengths or pages lie outside of their tensors.
BEYOND = [
    {"query_start": torch.tensor([0, 5, 7], dtype=torch.int32)},
    {"query_start": torch.tensor([-1, 5, 6], dtype=torch.int32)},
    {"query_start": torch.tensor([0, 7, 6], dtype=torch.int32)},
    {"context_len": torch.tensor([4, 3], dtype=torch.int32)},
    {"context_len": torch.tensor([5, -3], dtype=torch.int32)},
    {"context_len": torch.tensor([9, 3], dtype=torch.int32)},
]


@pytest.mark.parametrize("changes", BEYOND)
def test_requests_that_reach_beyond_their_tensors_have_no_places(
    ops: Ops, changes: dict[str, Any]
) -> None:
    with pytest.raises(
        KernelError, match="find_places: a token or page id, row, slot or length lies outside"
    ):
        ops.find_places(make_batch(**changes))


PAGE_TYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int8]


@pytest.mark.parametrize("dtype", PAGE_TYPES)
@pytest.mark.parametrize("bad", [4, -1, 2**31 - 1, -(2**31)])
def test_pages_that_do_not_exist_are_refused(ops: Ops, dtype: torch.dtype, bad: int) -> None:
    pages, batch = make_pages(dtype), make_batch()
    q = torch.zeros(6, 4, 16)
    batch.page_table[0, 1] = bad
    with pytest.raises(KernelError, match=r"attention: a token or page id, row, slot or length"):
        ops.attention(q, pages, batch, scale=1.0)
    batch = make_batch()
    batch.page_table[1, 1] = bad  # behind the context: never looked at
    assert not ops.attention(q, pages, batch, scale=1.0).any()


@pytest.mark.parametrize("dtype", PAGE_TYPES)
@pytest.mark.parametrize("bad", [16, -1, 2**40, -(2**62)])
def test_slots_outside_of_the_pages_are_refused(ops: Ops, dtype: torch.dtype, bad: int) -> None:
    pages, batch = make_pages(dtype), make_batch()
    rope(ops, batch, pages)
    batch.slots[5] = bad
    with pytest.raises(KernelError, match=r"rope_and_cache: a token or page id, row, slot or"):
        rope(ops, batch, pages)


@pytest.mark.parametrize("changes", BEYOND)
def test_attention_beyond_its_tensors_is_refused(ops: Ops, changes: dict[str, Any]) -> None:
    with pytest.raises(KernelError, match=r"attention: a token or page id, row, slot or length"):
        ops.attention(torch.zeros(6, 4, 16), make_pages(), make_batch(**changes), scale=1.0)


def test_scores_that_may_not_be_moved_are_refused_for_keys_with_a_centre(ops: Ops) -> None:
    pages = replace(make_pages(), k_centre=torch.zeros(2, 16))
    q, batch = torch.zeros(6, 4, 16), make_batch()
    ops.attention(q, pages, batch, scale=1.0)
    for options in ({"softcap": 3.0}, {"sinks": torch.zeros(4)}):
        with pytest.raises(KernelError, match="a centre allow neither softcap nor sinks"):
            ops.attention(q, pages, batch, scale=1.0, **options)


def test_places_are_found_where_they_are(ops: Ops) -> None:
    expected, batch = make_batch(), make_batch()
    batch.positions.zero_()
    batch.slots.zero_()
    ops.find_places(batch)
    assert torch.equal(batch.positions, expected.positions)
    assert torch.equal(batch.slots, expected.slots)


def test_pages_of_another_size_are_refused(ops: Ops) -> None:
    pages = make_pages(page_size=2)
    with pytest.raises(KernelError, match="batch page_size: expected 2, as in KV pages, found 4"):
        rope(ops, make_batch(), pages)
    with pytest.raises(KernelError, match="batch page_size: expected 2, as in KV pages, found 4"):
        ops.attention(torch.zeros(6, 4, 16), pages, make_batch(), scale=1.0)


def test_biases_by_distance_have_one_for_each_distance_of_both_sides(ops: Ops) -> None:
    with pytest.raises(KernelError, match=r"biases: expected one for each .*, found 4"):
        ops.attention(
            torch.zeros(6, 4, 16), make_pages(), make_batch(), scale=1.0, biases=torch.zeros(4, 4)
        )
