"""Products of plain floats whatever the host has set for the vendor's library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.gpu import dense
from sdk.kernels.gpu.dense import library_rounds, multiply, product_dense
from sdk.kernels.operators.ops import Ops

#: [M, N, K]: one row, tiles that are full and that are not, K that its blocks divide and not.
SHAPES = [(1, 70, 48), (3, 64, 33), (17, 5, 160), (70, 130, 16)]


def factors(m: int, n: int, k: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=random).to(dtype)
    w = torch.randn(n, k, generator=random).to(dtype)
    return x, w, x.double() @ w.double().t()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_float32(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    x, w, exact = factors(*shape, dtype)
    out = torch.full(exact.shape, torch.nan)
    product_dense(w, x, out).run()
    assert float((out.double() - exact).norm() / exact.norm()) < 1e-6


def test_results_may_be_columns_of_more_and_weights_rows_of_more() -> None:
    x, w, exact = factors(5, 64, 48, torch.float32)
    whole, wide = torch.full((5, 100), 7.0), torch.zeros(64, 80)
    wide[:, :48] = w
    multiply(x, wide[:, :48], whole[:, 16:80])
    assert torch.allclose(whole[:, 16:80].double(), exact, atol=1e-4)
    assert (whole[:, :16] == 7).all() and (whole[:, 80:] == 7).all()


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The types of the products that the vendor's library was asked for."""
    asked: list[Any] = []
    mm = torch.mm

    def noted(x: Tensor, w: Tensor, **options: Any) -> Tensor:
        asked.append(x.dtype)
        options.pop("out_dtype", None)
        return mm(x, w, **options)

    monkeypatch.setattr(dense.torch, "mm", noted)
    yield asked


def test_float32_is_never_given_to_the_library(library: list[Any]) -> None:
    before = torch.get_float32_matmul_precision()
    x, w, exact = factors(4, 32, 64, torch.float32)
    found = []
    try:
        for precision in ("highest", "high", "medium"):
            torch.set_float32_matmul_precision(precision)
            out = torch.empty(4, 32)
            multiply(x, w, out)
            found.append(out)
            assert torch.get_float32_matmul_precision() == precision  # nor is the setting changed
    finally:
        torch.set_float32_matmul_precision(before)
    assert library == []
    assert all(torch.equal(out, found[0]) for out in found)
    assert torch.allclose(found[0].double(), exact, atol=1e-4)


@pytest.mark.parametrize("short", [False, True])
def test_float16_is_given_to_the_library_unless_the_host_lets_it_add_in_float16(
    library: list[Any], monkeypatch: pytest.MonkeyPatch, short: bool
) -> None:
    settings = type(torch.backends.cuda.matmul)
    monkeypatch.setattr(settings, "allow_fp16_accumulation", short, raising=False)
    assert library_rounds(torch.float16) == short
    x, w, exact = factors(4, 32, 64, torch.float16)
    out = torch.empty(4, 32, dtype=torch.float16)
    multiply(x, w, out)
    assert library == ([] if short else [torch.float16])
    assert torch.allclose(out.double(), exact, atol=0.05)


def test_bfloat16_stays_with_the_library(library: list[Any]) -> None:
    x, w, _ = factors(4, 32, 64, torch.bfloat16)
    multiply(x, w, torch.empty(4, 32, dtype=torch.bfloat16))
    assert library == [torch.bfloat16]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_exact_products_with_weights_of_16_bits_do_not_round_activations(
    cases: Any, library: list[Any], dtype: torch.dtype
) -> None:
    layout, x = cases.dense(20, 48, dtype), cases.activations(3, 48)
    ops = Ops("cpu", compute="exact", backends=("gpu", "reference"))
    bound = ops.linear(layout)
    assert bound.choice.name == "gpu.dense_exact"
    expected = x.double() @ layout.values.double().t()
    assert (bound.matmul(x) - expected).norm() < 1e-6 * expected.norm()
    assert library == []
    ops.close()
