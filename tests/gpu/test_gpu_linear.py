"""Products with packed weights on the GPU's kernels, interpreted, against the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime import interpreter

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import product_one
from sdk.kernels.gpu.dense import multiply, wide_sums
from sdk.kernels.gpu.elementwise import ACTIVATIONS
from sdk.kernels.gpu.linear import TritonLinear
from sdk.kernels.gpu.packing import pack
from sdk.kernels.gpu.scratch import COUNTERS
from sdk.kernels.gpu.shares import Sharing
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.norm import GatedActivation as ReferenceGated
from sdk.kernels.weights.layouts import BLOCK_TYPES, E2M1, Affine, Blocks, Layout, on_device

E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FEW = Tuning(programs=4)

#: name -> (rows, columns, layout): odd numbers of rows, columns that fill no whole unit, one group.
LAYOUTS: dict[str, tuple[int, int, Callable[[Any, int, int], Layout]]] = {
    "int4-g32-minus": (35, 96, lambda c, n, k: c.affine(n, k, 4, 32, "minus")),
    "int4-g64-zero": (70, 192, lambda c, n, k: c.affine(n, k, 4, 64, "zero", torch.bfloat16)),
    "int4-g128-zeros": (33, 256, lambda c, n, k: c.affine(n, k, 4, 128, "zeros")),
    "int4-g256-zeros": (16, 512, lambda c, n, k: c.affine(n, k, 4, 256, "zeros", torch.float32)),
    "int4-channel-zeros": (19, 224, lambda c, n, k: c.affine(n, k, 4, 224, "zeros")),
    "int4-one-group": (5, 32, lambda c, n, k: c.affine(n, k, 4, 128, "zero")),
    "int4-short-last-group": (17, 176, lambda c, n, k: c.affine(n, k, 4, 64, "zeros")),
    "int2-g32-zeros": (21, 288, lambda c, n, k: c.affine(n, k, 2, 32, "zeros")),
    "int3-g64-zero": (35, 256, lambda c, n, k: c.affine(n, k, 3, 64, "zero")),
    "int5-g32-zeros": (20, 160, lambda c, n, k: c.affine(n, k, 5, 32, "zeros")),
    "int6-g48-minus": (20, 192, lambda c, n, k: c.affine(n, k, 6, 48, "minus")),
    "int6-g16-tail-floats": (20, 80, lambda c, n, k: c.affine(n, k, 6, 16, "floats")),
    "int7-g64-zeros": (20, 128, lambda c, n, k: c.affine(n, k, 7, 64, "zeros")),
    "int8-channel": (37, 200, lambda c, n, k: c.affine(n, k, 8, k, "zero", signed=True)),
    "int8-g128-zeros": (16, 256, lambda c, n, k: c.affine(n, k, 8, 128, "zeros")),
    "int2-g32-floats": (21, 96, lambda c, n, k: c.affine(n, k, 2, 32, "floats")),
    "int4-channel-floats": (21, 96, lambda c, n, k: c.affine(n, k, 4, k, "floats")),
    "nested-like": (18, 192, lambda c, n, k: c.nested(n, k, 64, 4)),
    "nf4-like": (18, 192, lambda c, n, k: c.table(n, k, 4, 64)),
    "mxfp4": (18, 128, lambda c, n, k: c.table(n, k, 4, 32, E8M0, values=E2M1)),
    "nvfp4": (18, 128, lambda c, n, k: c.table(n, k, 4, 16, E4M3, 128, values=E2M1)),
    "iq3-like": (18, 512, lambda c, n, k: c.table(n, k, 3, 32, torch.uint8, 256)),
    "iq1-like": (18, 512, lambda c, n, k: c.table(n, k, 1, 32, torch.uint8, 256)),
    "fp8-tensor": (20, 96, lambda c, n, k: c.float8(n, k, (n, k))),
    "fp8-channel": (20, 96, lambda c, n, k: c.float8(n, k, (1, k))),
    "fp8-blocks": (150, 160, lambda c, n, k: c.float8(n, k, (128, 128))),
    "mxfp8": (20, 96, lambda c, n, k: c.float8(n, k, (1, 32), powers=True)),
    "fp8-e5m2": (20, 96, lambda c, n, k: c.float8(n, k, (1, k), torch.float8_e5m2)),
    **{
        name: (19, 512 if kind.elements == 256 else 96, lambda c, n, k, t=name: c.blocks(n, k, t))
        for name, kind in BLOCK_TYPES.items()
    },
}


def made(cases: Any, name: str) -> Layout:
    n, k, make = LAYOUTS[name]
    return make(cases, n, k)


def product(linear: TritonLinear, layout: Layout, x: Tensor) -> Tensor:
    out = torch.full((x.shape[0], layout.shape[0]), float("nan"))
    linear.matmul(linear.pack(layout), x, out)
    return out


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("name", LAYOUTS)
def test_packing_keeps_every_bit_and_decoded_rows_equal_the_reference(
    cases: Any, name: str
) -> None:
    layout = made(cases, name)
    linear = TritonLinear(torch.float16, FEW)
    packed = linear.pack(layout)
    assert cases.same(linear.unpack(packed), layout)
    ids = torch.tensor([layout.shape[0] - 1, 0, 3, 3])
    out = torch.empty(4, layout.shape[1])
    linear.rows(packed, ids, out)
    assert torch.equal(out, decode(layout)[ids])


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_weight_is_packed_and_decoded_on_its_own_device(cases: Any, name: str) -> None:
    # meta stands for a GPU: what mixes it with tensors of the CPU raises
    layout = on_device(made(cases, name), torch.device("meta"))
    assert decode(layout).device.type == "meta"
    if getattr(layout, "table", None) is None:  # whose contents decide which table it is
        packed = pack(layout)  # type: ignore[arg-type]
        tensors = (packed.scale, *packed.planes, packed.minus, packed.zeros, packed.super_scale)
        assert {part.device.type for part in tensors if part is not None} == {"meta"}


@pytest.mark.quick_cases(9)
@pytest.mark.parametrize("tokens", [1, 7, pytest.param(33, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_products_equal_float64_of_the_rounded_inputs(cases: Any, name: str, tokens: int) -> None:
    layout = made(cases, name)
    x = cases.activations(tokens, layout.shape[1])
    found = product(TritonLinear(torch.float16, FEW), layout, x)
    # One token is not rounded; tables are rounded to float16 as x is.
    expected = (x if tokens == 1 else x.half()).double() @ decode(layout).double().t()
    assert distance(found, expected) < (5e-4 if "like" in name else 2e-6)


@pytest.mark.parametrize("turned", [False, True], ids=["by rows", "by columns"])
def test_both_orders_of_a_look_up_give_the_same(
    cases: Any, monkeypatch: pytest.MonkeyPatch, turned: bool
) -> None:
    """Which one is used depends on the version of Triton."""
    monkeypatch.setattr(product_one, "_TURNED", tl.constexpr(turned))
    layout = made(cases, "nf4-like")
    x = cases.activations(1, layout.shape[1])
    found = product(TritonLinear(torch.float16, FEW), layout, x)
    assert distance(found, x.double() @ decode(layout).double().t()) < 5e-4


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "kind",
    [
        *("minus", "floats"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("zero", "zeros")),
    ],
)
@pytest.mark.parametrize("group", [16, 32, 48])
def test_columns_that_fill_no_unit_are_multiplied_once(cases: Any, group: int, kind: str) -> None:
    """The last unit of 32 columns has 8, 16 or 24 of them: with groups of 16 or 48 two chunks,
    the second of which may have none."""
    for bits, k in ((4, 72), (2, 80), (6, 88)):
        layout = cases.affine(8, k, bits, group, kind)
        x = cases.activations(2, k)
        found = product(TritonLinear(torch.float16, FEW), layout, x)
        assert distance(found, x.half().double() @ decode(layout).double().t()) < 2e-6, (bits, k)


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 3])
def test_without_matrix_instructions_a_few_tokens_are_multiplied_one_by_one(
    cases: Any, split: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sdk.kernels.gpu.linear.old_card", lambda device: True)
    layout = made(cases, "q4_k")
    x = cases.activations(8, layout.shape[1])
    linear = TritonLinear(torch.float16, Tuning(programs=split))
    found = product(linear, layout, x)
    alone = torch.cat([product(linear, layout, row[None]) for row in x])
    assert torch.equal(found, alone)
    assert distance(found, x.double() @ decode(layout).double().t()) < 2e-6


@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("dtype", [E4M3, torch.float8_e5m2])
def test_weights_that_are_no_numbers_give_results_that_are_none(
    cases: Any, dtype: torch.dtype, tokens: int
) -> None:
    layout = cases.float8(20, 96, (1, 96), dtype)
    codes = layout.values.view(torch.uint8)
    codes[3, 17], codes[19, 40] = 0x7F, 0xFF  # NaN in both types
    if dtype == torch.float8_e5m2:
        codes[7, 5] = 0x7C  # infinite
    x = cases.activations(tokens, 96)
    found = product(TritonLinear(torch.float16, FEW), layout, x)
    wrong = found.isfinite().logical_not().any(0).nonzero().flatten().tolist()
    assert wrong == ([3, 7, 19] if dtype == torch.float8_e5m2 else [3, 19])
    assert pack(layout).nans and not pack(cases.float8(20, 96, (1, 96), dtype)).nans


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    "name",
    [
        *("int4-g64-zero", "int2-g32-floats", "int4-channel-floats", "nf4-like", "nested-like"),
        *("q4_k", "q6_k", "fp8-blocks"),
    ],
)
def test_exact_products_round_nothing(cases: Any, name: str) -> None:
    layout = made(cases, name)
    x = cases.activations(7, layout.shape[1])
    found = product(TritonLinear(torch.float32, FEW), layout, x)
    assert distance(found, x.double() @ decode(layout).double().t()) < 1e-6


@pytest.mark.parametrize("name", ["int4-g128-zeros", "int8-channel", "mxfp4", "q4_0"])
def test_products_in_bfloat16_equal_float64_of_the_rounded_inputs(cases: Any, name: str) -> None:
    layout = made(cases, name)
    x = cases.activations(9, layout.shape[1]).bfloat16()
    found = product(TritonLinear(torch.bfloat16, FEW), layout, x)
    assert distance(found, x.double() @ decode(layout).double().t()) < 2e-6


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("name", ["q4_0", "q5_1", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k"])
def test_blocks_mean_what_the_gguf_package_says(cases: Any, name: str) -> None:
    layout = made(cases, name)
    assert isinstance(layout, Blocks)
    kind = gguf.GGMLQuantizationType[name.upper()]
    w = torch.from_numpy(np.array(gguf.quants.dequantize(layout.data.numpy(), kind)))
    x = cases.activations(1, layout.shape[1])
    assert distance(
        product(TritonLinear(torch.float16, FEW), layout, x), x.double() @ w.double().t()
    ) < (2e-6)


def test_four_bit_codes_written_by_hand() -> None:
    codes = torch.zeros(2, 16, dtype=torch.uint8)
    codes[0, 0], codes[1, 15] = 0x21, 0xF0  # w[0, 0] = 1, w[0, 1] = 2, w[1, 31] = 15
    scale = torch.tensor([[0.5], [2.0]])
    w = Affine((2, 32), 4, 32, codes, scale, zero=8)
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 1], x[0, 31] = 1.0, 10.0, 100.0
    # (1 - 8) * 0.5 * 1 + (2 - 8) * 0.5 * 10 + (0 - 8) * 0.5 * 100, and the like with 2
    assert product(TritonLinear(torch.float16, FEW), w, x).tolist() == [[-433.5, 1224.0]]


@pytest.mark.parametrize("name", ["int4-g64-zero", "q4_k", "fp8-blocks"])
def test_many_tokens_are_multiplied_with_a_decoded_weight(cases: Any, name: str) -> None:
    layout = made(cases, name)
    x = cases.activations(9, layout.shape[1])
    found = product(TritonLinear(torch.float16, replace(FEW, dense_from=9)), layout, x)
    expected = x.half().double() @ decode(layout).half().double().t()
    assert distance(found, expected) < 1e-3  # the library rounds its result to float16


@pytest.mark.parametrize(
    "name",
    ["int4-g32-minus", "int8-g128-zeros", pytest.param("q4_k", marks=pytest.mark.slow)],
)
def test_with_a_fixed_order_a_row_does_not_depend_on_the_others(cases: Any, name: str) -> None:
    layout = made(cases, name)
    linear = TritonLinear(torch.float16, replace(FEW, dense_from=8), fixed=True)
    x = cases.activations(19, layout.shape[1])
    together = product(linear, layout, x)
    for rows in (slice(0, 1), slice(3, 5), slice(0, 18)):
        assert torch.equal(product(linear, layout, x[rows]), together[rows])


@pytest.mark.slow
def test_shares_of_the_columns_add_up_into_strided_rows(cases: Any) -> None:
    layout = cases.affine(35, 1024, 4, 128, "zeros")
    tiles = [(99, Tiles(16, 16, 3, 4, 3))]
    linear = TritonLinear(
        torch.float16, replace(FEW, table={("linear", "int4g128z", 35, 1024): tiles})
    )
    wide = torch.zeros(5, 50)
    for tokens in (1, 5):
        x = cases.activations(tokens, 1024)
        linear.matmul(linear.pack(layout), x, wide[:tokens, 10:45])
        expected = (x if tokens == 1 else x.half()).double() @ decode(layout).double().t()
        assert distance(wide[:tokens, 10:45], expected) < 2e-6
    assert not wide[:, :10].any()
    assert not wide[:, 45:].any()


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs run from the last to the first."""
    builder = interpreter.interpreter_builder
    forwards = builder.set_grid_idx

    def set_grid_idx(*place: int) -> None:
        forwards(*(count - 1 - i for count, i in zip(builder.grid_dim, place, strict=True)))

    monkeypatch.setattr(builder, "set_grid_idx", set_grid_idx)


def shared(layout: Layout, split: int, *, fixed: bool = False) -> TritonLinear:
    """With ``split`` programs for each tile, whatever the number of tokens."""
    tiles, (n, k) = [(99, Tiles(16, 16, split, 4, 3))], layout.shape
    return TritonLinear(
        torch.float16, replace(FEW, table={("linear", "int4g128z", n, k): tiles}), fixed=fixed
    )


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("tokens", [1, 18])
def test_the_order_in_which_programs_end_changes_no_bit(
    cases: Any, request: pytest.FixtureRequest, tokens: int
) -> None:
    layout = cases.affine(35, 1024, 4, 128, "zeros")
    x = cases.activations(tokens, 1024)
    linear = shared(layout, 5)
    packed = linear.pack(layout)
    found, again = torch.empty(tokens, 35), torch.empty(tokens, 35)
    linear.matmul(packed, x, found)
    request.getfixturevalue("backwards")
    linear.matmul(packed, x, again)
    assert torch.equal(found, again)
    counters = linear._sharing.arguments(2, 1, 1, 1, x.device)["counters"]
    assert not counters.any()  # as the next product needs them


def test_shares_of_more_tiles_than_there_are_counters_are_refused() -> None:
    sharing, tiles = Sharing(), COUNTERS + 1
    with pytest.raises(KernelError, match=f"at most {COUNTERS} tiles, found {tiles}"):
        sharing.arguments(2, 1, 16, tiles, torch.device("cpu"))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("activation", "split", "tokens"),
    [
        *(("silu", split, tokens) for split in (1, 3) for tokens in (1, 18, 40)),
        *((activation, 3, 18) for activation in ACTIVATIONS[1:]),
    ],
)
def test_gate_and_up_leave_the_product_as_one(
    cases: Any, activation: str, split: int, tokens: int
) -> None:
    layout = cases.affine(2 * 37, 512, 4, 128, "zeros")  # 37: the last tile is not full
    linear = shared(layout, split).tuned(replace(shared(layout, split)._tuning, dense_from=40))
    packed = linear.pack(layout)
    x = cases.activations(tokens, 512).half()
    wide, out = torch.empty(tokens, 2 * 37), torch.zeros(tokens, 50)
    linear.matmul(packed, x, wide)
    linear.matmul(packed, x, out[:, 10:47], activation)
    expected = torch.empty(tokens, 37)
    ReferenceGated().run(wide, activation, expected)
    torch.testing.assert_close(out[:, 10:47], expected, rtol=1e-5, atol=1e-6 * wide.abs().max())
    assert not out[:, :10].any() and not out[:, 47:].any()


@pytest.mark.quick_cases(13)
@pytest.mark.parametrize("name", LAYOUTS)
def test_packed_weights_are_hardly_larger_than_their_files(cases: Any, name: str) -> None:
    _, _, make = LAYOUTS[name]
    layout = make(cases, 256, 512)
    size = TritonLinear(torch.float16, FEW).pack(layout).nbytes / layout.nbytes
    assert size <= (1.037 if name == "q3_k" else 1.03)


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (Problem("linear", compute="exact", layout="blocks", format="q4_0"), "compute is exact"),
        (Problem("linear", layout="affine", bits=2, format="table"), "a table of 2 bits"),
        (Problem("linear", layout="affine", bits=9), "9 bits: expected 1 to 8"),
        (Problem("linear", layout="affine", bits=4, group=24, in_features=96), "group 24"),
        (Problem("linear", layout="float8", group=24, in_features=96), "blocks of 24 columns"),
        (Problem("linear", layout="blocks", format="q9_9"), "block type q9_9"),
        (Problem("linear", layout="dense", format="float16"), "layout 'dense'"),
        (Problem("linear", layout="float8", inputs="e4m3 static"), "activations in e4m3 static"),
    ],
)
def test_what_the_kernels_cannot_do_is_declined_with_a_reason(
    problem: Problem, reason: str
) -> None:
    declined = TritonLinear(torch.float16, FEW).reject(problem)
    assert declined is not None
    assert reason in declined


def test_sums_are_rounded_only_where_the_library_has_them_in_16_bits() -> None:
    assert wide_sums(torch.device("meta"), torch.float16)
    assert not wide_sums(torch.device("cpu"), torch.float16)  # as with an old torch on a card
    x, w = torch.randn(3, 64).half(), torch.randn(5, 64).half()
    out = torch.empty(3, 5)
    multiply(x, w, out)
    assert torch.equal(out, (x @ w.t()).float())
