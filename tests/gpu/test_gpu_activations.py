"""Activations of 16 bits between the kernels, interpreted: rounded once, by the kernel that writes.

Kernels compute in float32, so a 16-bit result is the float32 result for the same inputs, rounded to
the nearest: equal bits, for every operator and both types. From the reference, which computes in
another order, it may be away by one rounding more: half a step of the type, ``2^-8`` of the value
in bfloat16 (8 significant bits) and ``2^-11`` in float16 (11), and the float32 error besides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.engine.rank.kv_cache import KVCache
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.linear import TritonLinear
from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.kv.pages import KVPages
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from sdk.kernels.weights.layouts import ActivationScheme
from sdk.quant.spec import KVSpec

SHORT = [torch.bfloat16, torch.float16]
#: Half a step of a type, as a share of the value: it has this many significant bits.
HALF_STEP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
TOKENS, WIDTH = 5, 96


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.fixture(params=SHORT, ids=["bfloat16", "float16"])
def short(request: pytest.FixtureRequest) -> torch.dtype:
    found: torch.dtype = request.param
    return found


def opened(backend: str, dtype: torch.dtype) -> Ops:
    return Ops("cpu", backends=(backend, "reference"), num_threads=1, activations=dtype)


@pytest.fixture
def ops(short: torch.dtype) -> Iterator[Ops]:
    made = opened("gpu", short)
    yield made
    made.close()


@pytest.fixture(scope="module")
def oracle() -> Iterator[Ops]:
    made = opened("reference", torch.float32)
    yield made
    made.close()


Case = Callable[[Ops, Tensor], Tensor]
WEIGHT = numbers(WIDTH, seed=3)
#: Of x ``[5, 96]``: what has the type of its input.
LIKE_INPUT: dict[str, Case] = {
    "norm": lambda ops, x: ops.norm(x, Norm(WEIGHT, 1e-5)),
    "norm of heads in wider rows": lambda ops, x: ops.norm(
        x.view(TOKENS, 6, 16)[:, 1:4], Norm(WEIGHT[:16], 1e-5)
    ),
    "layer norm": lambda ops, x: ops.norm(x, Norm(WEIGHT, 1e-5, WEIGHT, centred=True)),
    "relu2": lambda ops, x: ops.activation(x.clone(), "relu2"),
    "xielu": lambda ops, x: ops.activation(x.clone(), "xielu", None, (0.75, 1.25, 0.5, -1e-6)),
    "gated silu": lambda ops, x: ops.gated_activation(x, "silu"),
    "gated gelu_tanh": lambda ops, x: ops.gated_activation(x, "gelu_tanh"),
    "gated gelu": lambda ops, x: ops.gated_activation(x, "gelu"),
    "gated clamped_swiglu": lambda ops, x: ops.gated_activation(x * 4, "clamped_swiglu"),
    "gate": lambda ops, x: ops.gate(x.clone(), x.flip(1) * 4, "sigmoid"),
    "gate of heads in wider rows": lambda ops, x: ops.gate(
        x.clone(), (x * 32)[:, 5:11], "softplus"
    ),
    "add": lambda ops, x: ops.add(x.clone(), x * 2),
    "add_bias": lambda ops, x: ops.add_bias(x.clone(), WEIGHT),
    "scale": lambda ops, x: ops.scale(x.clone(), 1.7),
    "select_rows": lambda ops, x: ops.select_rows(x, torch.tensor([4, 0, 4])),
    "take_columns": lambda ops, x: ops.take_columns(x, torch.arange(WIDTH - 1, -1, -1).int()),
}


def expect_near(found: Tensor, wanted: Tensor) -> None:
    """``wanted`` float32; 1e-6 is what float32 may be away itself (see the kernels' modules)."""
    allowed = wanted.abs() * (HALF_STEP[found.dtype] * 1.01) + 1e-6 * wanted.abs().max()
    assert bool(((found.float() - wanted).abs() <= allowed).all())


@pytest.mark.parametrize("name", LIKE_INPUT)
def test_an_operator_rounds_its_float32_result_once(
    ops: Ops, oracle: Ops, short: torch.dtype, name: str
) -> None:
    x = numbers(TOKENS, WIDTH).to(short)
    found = LIKE_INPUT[name](ops, x)
    wide = LIKE_INPUT[name](ops, x.float()).to(short)
    assert found.dtype == short
    assert torch.equal(found, wide)
    expect_near(found, LIKE_INPUT[name](oracle, x.float()))


def test_the_residual_stays_float32_and_its_norm_is_short_unless_asked(
    ops: Ops, oracle: Ops, short: torch.dtype
) -> None:
    delta, residual = numbers(TOKENS, WIDTH), numbers(TOKENS, WIDTH, seed=1, scale=100.0)
    for x in (delta, delta.to(short)):
        norm, sums = ops.add_norm(x, residual.clone(), Norm(WEIGHT, 1e-5))
        wanted, expected = oracle.add_norm(x.float(), residual.clone(), Norm(WEIGHT, 1e-5))
        assert (norm.dtype, sums.dtype) == (short, torch.float32)
        assert torch.equal(sums, expected)
        expect_near(norm, wanted)
    wide, _ = ops.add_norm(delta, residual.clone(), Norm(WEIGHT, 1e-5), wide=True)
    assert wide.dtype == torch.float32
    norm, _ = ops.add_norm(delta, residual.clone(), Norm(WEIGHT, 1e-5))
    assert torch.equal(norm, wide.to(short))


KINDS = ("float16", "bfloat16", "int4")


def pages_of(kind: str) -> KVPages:
    spec = KVSpec(1, 2, 32, 16, kind)
    return KVCache(spec, 4, keys_transposed=False).layers[0]


def batch_of(counts: list[int], lengths: list[int]) -> AttentionBatch:
    tokens = sum(counts)
    return AttentionBatch(
        positions=torch.zeros(tokens, dtype=torch.int64),
        query_start=torch.tensor([0, *counts]).cumsum(0).int(),
        context_len=torch.tensor(lengths).int(),
        page_table=torch.tensor([[1, 2], [3, 0]]).int(),
        slots=torch.zeros(tokens, dtype=torch.int64),
        page_size=16,
        max_query_len=max(counts),
        max_context_len=max(lengths),
    )


def attended(ops: Ops, qkv: Tensor, kind: str) -> tuple[list[Tensor], KVPages]:
    """Prompts of 5 and 3 tokens, then one token each: what attention returns, and the pages."""
    pages, found = pages_of(kind), []
    for begin, counts, lengths in ((0, [5, 3], [5, 3]), (8, [1, 1], [6, 4])):
        batch = batch_of(counts, lengths)
        ops.find_places(batch)
        heads = qkv[begin : begin + sum(counts)].clone().view(-1, 8, 32)
        q, k, v = heads.split([4, 2, 2], dim=1)
        angles = ops.rope_angles(batch.positions, torch.linspace(1, 0.01, 16), 1.0)
        ops.rope_and_cache(q, k, v, *angles, batch, pages)
        found += [heads, ops.attention(q, pages, batch, scale=0.2)]
    return found, pages


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", KINDS)
def test_queries_keys_and_values_of_16_bits_are_turned_stored_and_attended(
    ops: Ops, oracle: Ops, short: torch.dtype, kind: str
) -> None:
    qkv = numbers(10, 256).to(short)
    found, pages = attended(ops, qkv, kind)
    _, wide = attended(ops, qkv.float(), kind)
    for mine, same in ((pages.k, wide.k), (pages.v, wide.v)):
        assert torch.equal(mine.view(torch.uint8), same.view(torch.uint8))
    # Queries are mixed in sums of 32 with int4, whose float32 error is theirs.
    wanted, _ = attended(oracle, qkv.float(), kind)
    for mine, same in zip(found[0::2], wanted[0::2], strict=True):
        assert mine.dtype == short
        expect_near(mine, same)
    # Scores are off by the half steps of q and of the operands, of which float16 has the finer.
    coarsest = max(HALF_STEP[short], HALF_STEP[torch.bfloat16 if kind == "bfloat16" else short])
    for mine, same in zip(found[1::2], wanted[1::2], strict=True):
        assert mine.dtype == short
        assert (mine.float() - same).norm() < 4 * coarsest * same.norm()


def test_attention_of_16_bit_queries_is_that_of_the_same_queries_in_float32(
    ops: Ops, short: torch.dtype
) -> None:
    pages = pages_of("float16")
    attended(ops, numbers(10, 256).to(short), "float16")
    pages.k.copy_(numbers(*pages.k.shape, seed=5))
    pages.v.copy_(numbers(*pages.v.shape, seed=6))
    for counts, lengths in (([5, 3], [5, 3]), ([1, 1], [6, 4])):
        batch = batch_of(counts, lengths)
        q = numbers(sum(counts), 4, 32, seed=7).to(short)
        found = ops.attention(q, pages, batch, scale=0.2, window=3)
        wide = ops.attention(q.float(), pages, batch, scale=0.2, window=3)
        assert torch.equal(found, wide.to(short))


def test_parts_of_a_long_context_are_joined_in_float32(ops: Ops, short: torch.dtype) -> None:
    spec = KVSpec(1, 1, 32, 64, "float16")
    pages = KVCache(spec, 10, keys_transposed=False).layers[0]
    pages.k.copy_(numbers(*pages.k.shape, seed=5))
    pages.v.copy_(numbers(*pages.v.shape, seed=6))
    batch = replace(
        batch_of([1], [600]), page_table=torch.arange(10).int().view(1, -1), page_size=64
    )
    q = numbers(1, 4, 32, seed=7).to(short)
    found = ops.attention(q, pages, batch, scale=0.2)
    assert torch.equal(found, ops.attention(q.float(), pages, batch, scale=0.2).to(short))


def kernels(short: torch.dtype) -> dict[str, tuple[TritonLinear, Any]]:
    tuning = Tuning(programs=4)
    return {
        "int4 with minima": (TritonLinear(short, tuning), lambda c: c.affine(35, 96)),
        "int4 in two shares": (
            TritonLinear(
                short,
                replace(tuning, table={("linear", "int4g32", 35, 256): [(99, SHARES)]}),
            ),
            lambda c: c.affine(35, 256, kind="zero"),
        ),
        "q6_k": (TritonLinear(short, tuning), lambda c: c.blocks(35, 256, "q6_k")),
        "e4m3 rounded as the file says": (
            TritonLinearAsFile(tuning, ("int", "e4m3")),
            lambda c: replace(c.float8(35, 96, (1, 96)), inputs=ActivationScheme("e4m3")),
        ),
    }


SHARES = Tiles(16, 16, 2, 4, 3)


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("name", list(kernels(torch.float16)))
def test_a_product_written_in_16_bits_is_the_float32_one_rounded(
    cases: Any, short: torch.dtype, name: str, tokens: int
) -> None:
    kernel, make = kernels(short)[name]
    packed = kernel.pack(make(cases))
    x = cases.activations(tokens, packed.shape[1]).to(short)
    wide = torch.empty(tokens, 35)
    kernel.matmul(packed, x, wide)
    narrow = torch.full((tokens, 50), 7.0, dtype=short)
    kernel.matmul(packed, x, narrow[:, 10:45])
    assert torch.equal(narrow[:, 10:45], wide.to(short))
    assert bool((narrow[:, :10] == 7).all()) and bool((narrow[:, 45:] == 7).all())


@pytest.mark.parametrize("name", ["int4-g32", "bfloat16"])
def test_experts_read_and_write_16_bits_and_are_summed_in_float32(
    cases: Any, ops: Ops, oracle: Ops, short: torch.dtype, name: str
) -> None:
    layouts = [
        cases.affine(48, 96, 4, 32, "zero", seed=i)
        if name == "int4-g32"
        else cases.dense(48, 96, torch.bfloat16, seed=i)
        for i in range(4)
    ]
    x, logits = cases.activations(TOKENS, 96).to(short), numbers(TOKENS, 4, seed=2)
    bias = numbers(4, 48, seed=4)

    def summed(ops: Ops, x: Tensor) -> tuple[Tensor, Tensor]:
        group = ops.moe.group([ops.linear(layout) for layout in layouts])
        assert group is not None
        routes = ops.moe.route(logits, 2)
        rows = ops.moe.add_owners_bias(group.matmul(x, routes, by_token=True), bias, routes)
        return rows, ops.moe.combine(rows, routes)

    rows, total = summed(ops, x)
    _, wanted = summed(oracle, x.float())
    assert (rows.dtype, total.dtype) == (short, torch.float32)
    # Rounded are each product, its sum with the bias and, for plain weights, x to their type.
    steps = 2 * HALF_STEP[short] + (HALF_STEP[torch.bfloat16] if name == "bfloat16" else 0)
    assert (total - wanted).norm() < steps * wanted.norm()


def test_backends_that_know_float32_only_are_passed_over_by_name(short: torch.dtype) -> None:
    ops = Ops("cpu", num_threads=1, activations=short)
    assert ops.context.backend_names == ("gpu", "reference")
    name = str(short).removeprefix("torch.")
    declined = dict(ops.context.declined_backends)["cpu"]
    assert declined == f"its operators do not support {name} activations"
    ops.close()


def test_other_types_of_activations_are_refused() -> None:
    with pytest.raises(KernelError, match=r"activations: expected one of .*, found float64"):
        opened("gpu", torch.float64)


def test_the_reference_takes_16_bits_where_a_kernel_declines(
    cases: Any, short: torch.dtype, oracle: Ops
) -> None:
    ops = opened("reference", short)
    x = numbers(TOKENS, WIDTH).to(short)
    for case in LIKE_INPUT.values():
        expect_near(case(ops, x), case(oracle, x.float()))
    bound, wide = ops.linear(cases.affine(35, WIDTH)), oracle.linear(cases.affine(35, WIDTH))
    out = ops.empty(TOKENS, 35, dtype=short)
    expect_near(bound.matmul(x, out), wide.matmul(x.float()))
    for kind in KINDS:
        found, _ = attended(ops, numbers(10, 256).to(short), kind)
        wanted, _ = attended(oracle, numbers(10, 256).to(short).float(), kind)
        assert (found[1].float() - wanted[1]).norm() < 4 * HALF_STEP[short] * wanted[1].norm()
    ops.close()
