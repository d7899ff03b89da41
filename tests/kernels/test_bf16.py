"""Products and attention in bfloat16, where the CPU has them, against float64 and torch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.cpu import levels, open_backend
from sdk.kernels.cpu.attention import RoundedAttention
from sdk.kernels.cpu.packed_linear import RoundedLinear
from sdk.kernels.kv.kv_types import KV_TYPES
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import Dense
from sdk.models.vision.sequences import num_pages, sequence_batch, sequence_pages

needs_bf16 = pytest.mark.skipif(
    "avx512_bf16" not in levels(), reason="this CPU does not multiply bfloat16"
)


@pytest.fixture(params=[1, 2])
def ops(request: pytest.FixtureRequest) -> Iterator[Ops]:
    found = Ops(num_threads=request.param)
    yield found.rounding()
    found.close()


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@needs_bf16
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(70, 33, 77), (300, 48, 300), (1, 16, 8), (3, 129, 1024)])
def test_products_are_those_of_rounded_activations_for_any_number_of_rows(
    ops: Ops, kind: torch.dtype, shape: tuple[int, int, int]
) -> None:
    rows, outputs, inputs = shape
    torch.manual_seed(0)
    weight, x = torch.randn(outputs, inputs).to(kind), torch.randn(rows, inputs)
    bound = ops.linear(Dense(weight))
    assert bound.choice.name == "cpu.linear_bf16"
    found = bound.matmul(x)
    assert distance(found, x.bfloat16().double() @ weight.bfloat16().double().T) < 5e-7
    for first in range(0, rows, 7):  # alone and in small batches: the same bits
        some = slice(first, min(first + 1 + first % 9, rows))
        assert torch.equal(bound.matmul(x[some].contiguous()), found[some])
    assert torch.equal(bound.layout().values, weight)


@needs_bf16
def test_products_in_bfloat16_pass_on_what_is_not_a_number(ops: Ops) -> None:
    weight, x = torch.ones(32, 64, dtype=torch.bfloat16), torch.ones(3, 64)
    x[1, 5], x[2, 6] = float("nan"), float("inf")
    found = ops.linear(Dense(weight)).matmul(x)
    assert torch.equal(found[0], torch.full((32,), 64.0))
    assert found[1].isnan().all() and found[2].isinf().all()


def attend(ops: Ops, q: Tensor, k: Tensor, v: Tensor, lengths: list[int], size: int) -> Tensor:
    tokens, heads, width = q.shape
    batch = sequence_batch(lengths, size, ops)
    pages = sequence_pages(num_pages(lengths, size), size, heads, width, ops)
    pages.k.fill_(float("nan"))  # what earlier tiles left behind the keys
    pages.v.fill_(float("nan"))
    none = ops.empty(tokens, 0)
    turned = ops.rope_and_cache(q.clone(), k, v, none, none, batch, pages)
    return ops.attention(turned, pages, batch, scale=width**-0.5, causal=False)


@needs_bf16
@pytest.mark.parametrize("width", [8, 64, 72, 80, 104, 128])
def test_attention_is_as_close_to_float64_as_torchs_in_bfloat16(ops: Ops, width: int) -> None:
    lengths, heads = [1, 50, 257, 128, 3], 2
    torch.manual_seed(1)
    q, k, v = (torch.randn(sum(lengths), heads, width) for _ in range(3))
    found = attend(ops, q, k, v, lengths, 16)
    first = 0
    for length in lengths:
        rows = slice(first, first + length)
        first += length
        own = [x[rows].transpose(0, 1).double() for x in (q, k, v)]
        expected = torch.nn.functional.scaled_dot_product_attention(*own)
        half = torch.nn.functional.scaled_dot_product_attention(*(x.bfloat16() for x in own))
        turned = found[rows].view(length, heads, width).transpose(0, 1)
        assert distance(turned, expected) <= 1.1 * distance(half, expected)
        alone = attend(ops, q[rows], k[rows], v[rows], [length], 16)
        assert torch.equal(alone, found[rows])


@needs_bf16
@pytest.mark.parametrize(("slots", "width", "room"), [(24, 64, 64), (16, 72, 72), (8, 40, 48)])
def test_pages_without_whole_vectors_are_read_without_rounding(
    ops: Ops, slots: int, width: int, room: int
) -> None:
    """Pages of another number of slots, or whose values lie one directly behind the other."""
    torch.manual_seed(2)
    lengths, heads = [40, 7], 2
    q, k, v = (torch.randn(sum(lengths), heads, width) for _ in range(3))
    found = []
    for rounding in (True, False):
        batch = sequence_batch(lengths, slots, ops)
        count = num_pages(lengths, slots)
        turned = torch.zeros(count, heads, width, slots, dtype=torch.bfloat16)
        values = torch.zeros(count, heads, slots, room, dtype=torch.bfloat16)[..., :width]
        kind = KV_TYPES["bfloat16"]
        pages = KVPages(turned.transpose(2, 3), values, kind, kind)
        none = ops.empty(len(q), 0)
        asked = ops.rope_and_cache(q.clone(), k, v, none, none, batch, pages)
        run = ops if rounding else Ops(num_threads=1)
        found.append(run.attention(asked, pages, batch, scale=width**-0.5, causal=False))
    assert ops.rounded and torch.equal(*found)


@needs_bf16
def test_kernels_in_bfloat16_say_what_they_do_not_run() -> None:
    backend = open_backend("cpu", 1)
    linear, attention = (backend.implementations(op)[0] for op in ("linear", "attention"))
    assert isinstance(linear, RoundedLinear) and isinstance(attention, RoundedAttention)
    why = linear.reject(Problem("linear", layout="dense", format="float32", rounded=True))
    assert why == "dense float32: expected float16, bfloat16"
    about = {"head_dim": 64, "rounded": True}
    why = attention.reject(Problem("attention", kv_dtype="float32", format="both ways", **about))
    assert why == "both ways attention over pages of float32: expected both ways over bfloat16"
    why = attention.reject(Problem("attention", kv_dtype="bfloat16", **about))
    assert why == "causal attention over pages of bfloat16: expected both ways over bfloat16"
    backend.close()


@pytest.mark.parametrize("level", [level for level in levels() if level != "avx512_bf16"])
def test_levels_without_products_in_bfloat16_have_no_such_kernels(level: str) -> None:
    backend = open_backend("cpu", 1, level)
    assert not backend.multiplies_bf16
    names = {one.name for op in ("linear", "attention") for one in backend.implementations(op)}
    assert not any("bf16" in name for name in names)
    backend.close()


def test_only_those_who_ask_get_rounded_activations() -> None:
    """Products of text models keep their bits on a CPU that multiplies bfloat16."""
    weight = torch.randn(32, 64).bfloat16()
    for compute in ("auto", "exact"):
        ops = Ops(num_threads=1, compute=compute)
        assert not ops.rounded
        assert ops.rounding().rounded == (compute == "auto" and "avx512_bf16" in levels())
        choice = ops.linear(Dense(weight)).choice
        assert "bf16" not in choice.name
        assert not any("bf16" in name for name, _ in choice.declined)
        ops.close()
