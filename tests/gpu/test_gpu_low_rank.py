"""Adapters of products on the GPU's kernels, interpreted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.operators.low_rank import AdapterTable, Shape
from sdk.kernels.operators.ops import Ops

SLOTS = torch.tensor([0, -1, 2, 2, 1, 0, 3, -1, 2] + [1] * 9).int()


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("float16", "exact")]


@pytest.fixture(scope="module", params=["float32", "bfloat16", *SLOW])
def gpu(request: pytest.FixtureRequest) -> Iterator[Ops]:
    exact = request.param == "exact"
    opened = Ops(
        "cpu",
        backends=["gpu"],
        compute="exact" if exact else "auto",
        activations=torch.float32 if exact else getattr(torch, request.param),
    )
    yield opened
    opened.close()


def filled(gpu: Ops, cases: Any, shape: Shape, ranks: tuple[int, ...]) -> tuple[AdapterTable, Any]:
    """A table with adapters in slots 0 to 2, the last one with a bias, and what they are."""
    table, placed = gpu.adapter_table(shape), {}
    for slot in range(3):
        parts = cases.low_rank_parts(shape, ranks, seed=slot)
        parts = [one._replace(a=one.a.to(table.dtype), b=one.b.to(table.dtype)) for one in parts]
        bias = torch.linspace(-1, 1, shape.out_features) if slot == 2 else None
        table.write(slot, cases.pack(table, parts, bias))
        placed[slot] = parts, bias
    return table, placed


def wanted(cases: Any, placed: Any, x: Tensor, y: Tensor) -> Tensor:
    found = y.double()
    for slot, (parts, bias) in placed.items():
        rows = slot == SLOTS
        found[rows] += cases.low_rank(x[rows], parts, y.shape[1])
        if bias is not None:
            found[rows] += bias
    return found


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("k", "n", "ranks"), [(100, 83, (1,)), (33, 70, (17, 3, 8)), (1100, 16, (16,))], ids=str
)
def test_each_row_gets_the_update_of_its_slot(
    gpu: Ops, cases: Any, k: int, n: int, ranks: tuple[int, ...]
) -> None:
    shape = Shape(4, k, n, len(ranks), 20)
    table, placed = filled(gpu, cases, shape, ranks)
    for dtype in {torch.float32, gpu.activations}:
        x = cases.activations(len(SLOTS), k).to(dtype)
        y = cases.activations(len(SLOTS), n, seed=3).to(dtype)
        before, expected = y.clone(), wanted(cases, placed, x, y)
        table.add(x, y, SLOTS)
        rounding = {torch.bfloat16: 5e-6, torch.float16: 1e-7}.get(dtype, 1e-12)
        # Sums of 16-bit factors are float32, and one rounding follows.
        assert cases.nmse(y, expected) < max(rounding, 1e-9 if dtype != torch.float32 else 0)
        same = (SLOTS < 0) | (SLOTS == 3)
        assert torch.equal(y[same], before[same])


def test_an_embedding_takes_columns_by_id(gpu: Ops, cases: Any) -> None:
    shape = Shape(4, 71, 90, 1, 9, of_ids=True)
    table, placed = filled(gpu, cases, shape, (9,))
    ids = torch.arange(len(SLOTS)) * 7 % 71
    y = torch.zeros(len(SLOTS), 90)
    table.add(ids, y, SLOTS)
    assert cases.nmse(y, wanted(cases, placed, ids, torch.zeros_like(y))) < 1e-12


def test_a_row_has_the_same_bits_in_any_batch(gpu: Ops, cases: Any) -> None:
    table, _ = filled(gpu, cases, Shape(4, 40, 24, 2, 16), (16, 5))
    x = cases.activations(len(SLOTS), 40).to(gpu.activations)
    y = cases.activations(len(SLOTS), 24, seed=3)
    alone = y.clone()
    table.add(x, y, SLOTS)
    for row in (0, 2, 17):
        one = alone[row : row + 1]
        table.add(x[row : row + 1], one, SLOTS[row : row + 1])
        assert torch.equal(one[0], y[row])
    table.write(2, None)
    table.write(0, None)
    again = y.clone()
    table.add(x, again, SLOTS.where(SLOTS != 1, -1))
    assert torch.equal(again, y)
