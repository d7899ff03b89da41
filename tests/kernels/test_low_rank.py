"""Adapters of a product, on the reference and at every SIMD level, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu import CpuBackend, levels, open_backend
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.low_rank import AdapterTable, Factors, Shape, factor_memory
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference import ReferenceBackend
from tests.kernels.plain_kernels import plain_kernels

#: Features in and out: tails of every width, more than an item has.
SHAPES = [(576, 192), (100, 83), (5, 40), (1, 1)]
RANKS = [(1,), (3, 8, 16), (64,), (17, 5)]
#: Rows of several slots, of none, of an empty slot (3) and more of one than an item takes.
SLOTS = [0, -1, 2, 2, 1, 0, 3, -1, 2] + [1] * 40


def table_of(
    backend: Any, shape: Shape, compute: str = "auto", dtype: torch.dtype | None = None
) -> AdapterTable:
    context: Any = SimpleNamespace(
        kernel=lambda op, like=(): plain_kernels(backend, op)[0],
        compute=compute,
        activations=torch.float32,
        device=torch.device("cpu"),
    )
    return AdapterTable(context, shape, dtype)


@pytest.fixture(scope="module", params=["reference", *levels()])
def either(request: pytest.FixtureRequest) -> Iterator[Any]:
    """The reference, then the CPU's kernels at every level."""
    if request.param == "reference":
        yield ReferenceBackend()
        return
    opened = open_backend("cpu", 2, request.param)
    yield opened
    opened.close()


def inputs(cases: Any, shape: Shape, rows: int = len(SLOTS)) -> tuple[Tensor, Tensor, Tensor]:
    """x, y and slots."""
    x = cases.activations(rows, shape.in_features)
    if shape.of_ids:
        x = torch.arange(rows) * 7 % shape.in_features
    return x, cases.activations(rows, shape.out_features, seed=3), torch.tensor(SLOTS[:rows]).int()


def fill(cases: Any, table: AdapterTable, ranks: tuple[int, ...]) -> dict[int, Any]:
    """Adapters in slots 0 to 2, the last one with a bias: ``(parts, bias)``."""
    placed = {}
    for slot in range(3):
        parts = cases.low_rank_parts(table.shape, ranks, seed=slot)
        bias = torch.linspace(-1, 1, table.shape.out_features) if slot == 2 else None
        table.write(slot, cases.pack(table, parts, bias))
        placed[slot] = parts, bias
    return placed


def expected(cases: Any, placed: Any, x: Tensor, y: Tensor, slots: Tensor) -> Tensor:
    """What the rows' adapters add, float64."""
    found = torch.zeros_like(y, dtype=torch.float64)
    for slot, (parts, bias) in placed.items():
        rows = slots == slot
        found[rows] = cases.low_rank(x[rows], parts, y.shape[1])
        if bias is not None:
            found[rows] += bias
    return found


@pytest.mark.quick_cases(18)
@pytest.mark.parametrize("ranks", RANKS, ids=str)
@pytest.mark.parametrize(("k", "n"), SHAPES)
def test_each_row_gets_the_update_of_its_slot(
    either: Any, cases: Any, k: int, n: int, ranks: tuple[int, ...]
) -> None:
    shape = Shape(4, k, n, len(ranks))
    # auto: factors of 11 bits; int8: two factors with errors of up to 1/254 of a row's largest
    for compute, dtype, error in (
        ("exact", None, 1e-12),
        ("auto", None, 1e-6),
        ("auto", torch.int8, 4e-4),
    ):
        table = table_of(either, shape, compute, dtype)
        placed = fill(cases, table, ranks)
        x, y, slots = inputs(cases, shape)
        before = y.clone()
        table.add(x, y, slots)
        wanted = expected(cases, placed, x, y, slots)
        rest = torch.zeros_like(y)
        table.add(x, rest, slots)
        assert cases.nmse(rest, wanted) < error
        assert (y - before - wanted).abs().max() < 1e-5 + error**0.5 * wanted.abs().max()
        assert torch.equal(y[slots < 0], before[slots < 0])
        assert torch.equal(y[slots == 3], before[slots == 3])  # nothing is in it


@pytest.mark.parametrize("rank", [1, 9, 64])
def test_an_embedding_takes_columns_by_id(either: Any, cases: Any, rank: int) -> None:
    shape = Shape(4, 71, 90, of_ids=True)
    for dtype, error in ((None, 1e-12), (torch.int8, 4e-4)):
        table = table_of(either, shape, "exact", dtype)
        placed = fill(cases, table, (rank,))
        x, y, slots = inputs(cases, shape)
        y.zero_()
        table.add(x, y, slots)
        assert cases.nmse(y, expected(cases, placed, x, y, slots)) < error


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_a_row_has_the_same_bits_in_any_batch(either: Any, cases: Any, dtype: Any) -> None:
    shape = Shape(4, 200, 120, 2)
    table = table_of(either, shape, dtype=dtype)
    fill(cases, table, (16, 5))
    x, y, slots = inputs(cases, shape)
    alone = y.clone()
    table.add(x, y, slots)
    for row in range(12):
        one = alone[row : row + 1]
        table.add(x[row : row + 1], one, slots[row : row + 1])
        assert torch.equal(one[0], y[row]), row
    backwards = inputs(cases, shape)[1].flip(0)
    table.add(x.flip(0), backwards, slots.flip(0))
    assert torch.equal(backwards.flip(0), y)


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
def test_threads_and_levels_with_fma_agree_bit_for_bit(cases: Any, dtype: Any) -> None:
    shape, found = Shape(4, 577, 203, 3), []
    for level in levels():
        for threads in (1, 3):
            backend = open_backend("cpu", threads, level)
            table = table_of(backend, shape, dtype=dtype)
            fill(cases, table, (8, 16, 3))
            x, y, slots = inputs(cases, shape)
            table.add(x, y, slots)
            found.append((level, y))
            backend.close()
    fused = [y for level, y in found if level != "portable"]
    assert all(torch.equal(y, fused[0]) for y in fused)
    portable = [y for level, y in found if level == "portable"]
    assert all(torch.equal(y, portable[0]) for y in portable)
    if dtype == torch.int8:  # integers
        assert all(torch.equal(y, portable[0]) for y in fused)
    assert cases.nmse(portable[0], (fused or portable)[0]) < 1e-12


def test_int8_sums_of_the_largest_codes_do_not_overflow(either: Any) -> None:
    """x and every factor are largest, so that sums of more than 8,192 features and 512 ranks do."""
    shape = Shape(1, 20_000, 3, max_rank=1200)
    table = table_of(either, shape, dtype=torch.int8)
    part = Factors(torch.ones(1200, 20_000), torch.ones(3, 1200), 0)
    memory = factor_memory(table.nbytes([part], bias=False), torch.device("cpu"))
    table.write(0, table.pack([part], None, memory))
    y = torch.zeros(1, 3)
    table.add(torch.ones(1, 20_000), y, torch.zeros(1).int())
    assert torch.allclose(y, torch.full((1, 3), 1200 * 20_000.0), rtol=1e-4)


def test_int8_rows_that_are_zero_or_not_finite(either: Any, cases: Any) -> None:
    shape = Shape(1, 40, 20)
    table = table_of(either, shape, dtype=torch.int8)
    table.write(0, cases.pack(table, cases.low_rank_parts(shape, (4,), seed=1), None))
    x, y = cases.activations(4, 40), torch.ones(4, 20)
    x[1], x[2, 39], x[3, 3] = 0.0, float("inf"), float("nan")
    table.add(x, y, torch.zeros(4).int())
    assert y[0].isfinite().all() and (y[1] == 1).all()
    assert not y[2:].isfinite().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_factors_of_16_bits_are_exact_whatever_their_range(either: Any, dtype: Any) -> None:
    shape = Shape(1, 32, 32)
    table = table_of(either, shape)
    for power in (-10, 0, 60) if dtype == torch.bfloat16 else (-14, 0, 5):
        a = torch.eye(32).to(dtype) * 1.25 * 2.0**power
        b = torch.diag(2.0 ** -torch.arange(8.0).repeat(4)).to(dtype)
        nbytes = table.nbytes([Factors(a, b, 0)], bias=False)
        memory = torch.empty(nbytes, dtype=torch.uint8)
        table.write(0, table.pack([Factors(a, b, 0)], None, memory))
        y = torch.zeros(32, 32)
        table.add(torch.eye(32), y, torch.zeros(32).int())
        assert torch.equal(y, (a.float() @ b.float().t()).t())


def test_rows_of_a_wider_tensor_keep_their_neighbours(backend: CpuBackend, cases: Any) -> None:
    shape = Shape(4, 50, 37)
    table = table_of(backend, shape)
    fill(cases, table, (6,))
    x, y, slots = inputs(cases, shape)
    wide = torch.full((len(y), 45), 7.0)
    wide[:, :37] = y
    table.add(x, y, slots)
    table.add(x, wide[:, :37], slots)
    assert torch.equal(wide[:, :37], y) and bool((wide[:, 37:] == 7.0).all())


def test_a_recorded_step_sees_adapters_come_and_go(cases: Any) -> None:
    ops = Ops("cpu", num_threads=2)
    weight = ops.linear(cases.affine(96, 64, 4, 32))
    table = ops.adapter_table(Shape(2, 64, 96))
    x, slots = cases.activations(24, 64), torch.full((24,), -1, dtype=torch.int32)

    def forward() -> Tensor:
        y = weight.matmul(x)
        table.add(x, y, slots)
        return ops.scale(y, 2.0)

    graph = ops.recording.capture(forward, tokens=24, outputs=1, requests=1)

    def replayed(rows: int) -> Tensor:
        graph.replay(tokens=rows, outputs=0, requests=0)
        return graph.result[:rows].clone()

    plain = replayed(24)
    slots[:] = torch.arange(24) % 3 - 1
    assert torch.equal(replayed(24), plain)  # both slots are empty
    first, second = (cases.low_rank_parts(table.shape, (rank,), seed=rank) for rank in (16, 3))
    for one, two in ((first, second), (second, None), (None, first)):
        for slot, parts in enumerate((one, two)):
            table.write(slot, None if parts is None else cases.pack(table, parts))
        for rows in (24, 5, 1):
            expected = forward()[:rows]
            assert torch.equal(replayed(rows), expected)
            changed = (expected != plain[:rows]).any(dim=1)
            filled = [parts is not None for parts in (one, two, None)]
            assert changed.tolist() == [filled[int(slot)] for slot in slots[:rows]]
    ops.close()


def test_nothing_is_computed_for_no_rows_and_no_adapters(either: Any, cases: Any) -> None:
    table = table_of(either, Shape(2, 8, 8))
    table.add(torch.empty(0, 8), torch.empty(0, 8), torch.empty(0).int())
    y = torch.tensor([[-0.0] * 8])
    table.add(torch.full((1, 8), float("nan")), y, torch.tensor([-1]).int())
    assert torch.equal(y.signbit(), torch.ones(1, 8, dtype=torch.bool))


def test_arguments_that_do_not_fit_are_rejected(backend: CpuBackend, cases: Any) -> None:
    table = table_of(backend, Shape(2, 8, 9, max_rank=4))
    x, y, slots = torch.zeros(3, 8), torch.zeros(3, 9), torch.zeros(3).int()
    with pytest.raises(KernelError, match=r"slots: expected int32 \[3\], found torch.int64"):
        table.add(x, y, slots.long())
    with pytest.raises(KernelError, match=r"slots: expected int32 \[3\], found torch.int32 \[2\]"):
        table.add(x, y, slots[:2])
    with pytest.raises(KernelError, match="adapter x"):
        table.add(torch.zeros(3, 9), y, slots)
    with pytest.raises(KernelError, match="adapter y"):
        table.add(x, torch.zeros(3, 8), slots)
    with pytest.raises(KernelError, match="y: expected float32 rows"):
        table.add(x, torch.zeros(9, 3).t(), slots)
    with pytest.raises(KernelError, match="slot or length lies outside"):
        table.add(x, y, slots + 2)
    with pytest.raises(KernelError, match=r"adapter slot: expected 0\.\.1, found 2"):
        table.write(2, None)
    with pytest.raises(KernelError, match="ranks up to 4, found ranks"):
        cases.pack(table, cases.low_rank_parts(table.shape, (5,)))
    a, b = torch.zeros(2, 8), torch.zeros(9, 2)
    for part in (Factors(a[:, 1:], b, 0), Factors(a, b, 1), Factors(a, b[:, 1:], 0)):
        with pytest.raises(KernelError, match=r"expected a \[r, 8\] and b \[n, r\]"):
            table.pack([part], None, torch.empty(1024, dtype=torch.uint8))
    ids = table_of(backend, Shape(2, 8, 9, of_ids=True))
    with pytest.raises(KernelError, match="adapter ids"):
        ids.add(x, y, slots)
    with pytest.raises(KernelError, match="token or page id"):
        ids.add(torch.tensor([0, 1, 8]), y, slots)
