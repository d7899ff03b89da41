"""Activations rounded as files ask for, on the GPU's kernels."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from sdk.kernels.gpu import linear_as_file, scratch
from sdk.kernels.gpu.byte_rows import ByteRows, multiplies_bytes
from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile, bytes_of_card, sums_are_short
from sdk.kernels.gpu.packing import Packed
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import ActivationScheme, Affine, Float8
from tests.gpu import short_sums

#: The interpreter computes what a mask or ``where`` leaves out, too, and numpy says so.
pytestmark = pytest.mark.filterwarnings("ignore:invalid value encountered")
FEW = Tuning(programs=4)
BOTH = ("int", "e4m3")
#: Few tokens; more than one tile of rows and tokens; shares of K; many tokens.
TILES = [
    *(Tiles(64, 16, 1, 4, 3), Tiles(64, 64, 3, 4, 3)),
    *(Tiles(128, 128, 1, 8, 3), Tiles(256, 128, 1, 8, 3)),
]


def integers(
    cases: Any, scheme: ActivationScheme, columns: int = 256, rows: int = 37, signed: bool = True
) -> Affine:
    """Weights with one scale for a row."""
    layout = cases.affine(rows, columns, 8, columns, "zero", torch.float32, signed=signed)
    return replace(layout, inputs=scheme)


def floats(
    cases: Any, scheme: ActivationScheme, columns: int = 192, rows: int = 20, height: int = 1
) -> Float8:
    """Weights with one scale for this many rows."""
    return replace(cases.float8(rows, columns, (height, columns)), inputs=scheme)


def blocks(cases: Any, columns: int = 392, rows: int = 150, rule: Any = "plain") -> Float8:
    """Weights with a scale for 128 rows and columns, for activations with one for 128 columns."""
    scheme = ActivationScheme("e4m3", group=128, rule=rule)
    return replace(cases.float8(rows, columns, (128, 128)), inputs=scheme)


MAKES = {"int": integers, "e4m3": floats}


def hard_rows(cases: Any, rows: int, columns: int) -> Tensor:
    """Ordinary rows, a large one, one of zeros, one too small for a scale."""
    x: Tensor = cases.activations(rows, columns)
    x[1] *= 300
    x[2], x[3] = 0.0, x[3] * 1e-33
    return x


def product(linear: TritonLinearAsFile, layout: Affine | Float8, x: Tensor) -> Tensor:
    packed = linear.pack(layout)
    assert isinstance(packed, ByteRows)
    out = torch.full((x.shape[0], layout.shape[0]), 7.0)
    linear.matmul(packed, x, out)
    return out


def as_defined(layout: Affine | Float8, x: Tensor) -> Tensor:
    assert layout.inputs is not None
    return fake_quantize(x, layout.inputs).double() @ decode(layout).double().t()


def with_tiles(layout: Affine | Float8, tiles: Tiles) -> Tuning:
    """A table with these tiles for every number of tokens."""
    kind = "e4m38" if isinstance(layout, Float8) else "int8"
    assert layout.inputs is not None
    name = f"{kind}g{layout.inputs.group or layout.shape[1]}"
    return replace(FEW, table={("linear_bytes", name, *layout.shape): [(1 << 20, tiles)]})


@pytest.mark.quick_cases(6)
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "numbers",
    [{}, {"static": 0.03}, {"limit": 2.5}, {"rule": "power"}],
    ids=["dynamic", "static", "limited", "power"],
)
@pytest.mark.parametrize("tokens", [4, 17])
def test_bytes_are_multiplied_as_the_definition_rounds_them(
    cases: Any, kind: Any, numbers: dict[str, Any], tokens: int
) -> None:
    layout = MAKES[kind](cases, ActivationScheme(kind, **numbers))
    x = hard_rows(cases, tokens, layout.shape[1])
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    expected = as_defined(layout, x)
    errors = (found - expected).norm(dim=1)
    assert (errors <= 1e-6 * expected.norm(dim=1)).all()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 64, 96), (150, 133, 392), (9, 5, 130)])
def test_every_tile_multiplies_all_columns_of_its_rows_and_tokens_and_no_more(
    cases: Any, kind: Any, tiles: Tiles, tokens: int, rows: int, columns: int
) -> None:
    layout = MAKES[kind](cases, ActivationScheme(kind), columns, rows)
    linear = TritonLinearAsFile(with_tiles(layout, tiles), BOTH)
    x, packed = cases.activations(tokens, columns), linear.pack(layout)
    wide = torch.full((tokens + 2, rows + 4), 7.0)
    linear.matmul(packed, x, wide[1:-1, 2:-2])
    found, expected = wide[1:-1, 2:-2], as_defined(layout, x)
    assert ((found - expected).norm(dim=1) <= 1e-6 * expected.norm(dim=1)).all()
    wide[1:-1, 2:-2] = 7.0
    assert bool((wide == 7.0).all())


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("tiles", TILES, ids=str)
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "rule"), [(1, 64, 130, "power"), (140, 150, 392, "plain")]
)
def test_scales_of_128_columns_are_applied_to_their_sums(
    cases: Any, tiles: Tiles, tokens: int, rows: int, columns: int, rule: str
) -> None:
    layout = blocks(cases, columns, rows, rule)
    x = cases.activations(tokens, columns)
    if tokens > 3:
        x = hard_rows(cases, tokens, columns)
        x[4, 128:256] = 0.0
    found = product(TritonLinearAsFile(with_tiles(layout, tiles), BOTH), layout, x)
    expected = as_defined(layout, x)
    assert ((found - expected).norm(dim=1) <= 1e-6 * expected.norm(dim=1)).all()


def test_experts_with_scales_of_128_columns_multiply_the_rows_routed_to_them(cases: Any) -> None:
    layouts = [
        replace(blocks(cases, 256, 40), values=cases.float8(40, 256, (128, 128), seed=i).values)
        for i in range(3)
    ]
    linear = TritonLinearAsFile(FEW, BOTH)
    group = linear.group([linear.pack(layout) for layout in layouts])
    assert group is not None
    ops = Ops("cpu", backends=("reference",))
    routes = ops.moe.route(torch.randn(20, 3), 2)
    ops.close()
    x, out = cases.activations(20, 256), torch.empty(40, 40)
    linear.matmul_routed(group, x, routes, True, out)
    for expert, layout in enumerate(layouts):
        mine = slice(int(routes.starts[expert]), int(routes.starts[expert + 1]))
        expected = as_defined(layout, x[routes.tokens[mine].long()])
        assert (out[mine] - expected).norm() < 1e-6 * expected.norm()


def test_weights_of_bytes_that_differ_in_more_than_values_are_not_taken_as_one(cases: Any) -> None:
    linear = TritonLinearAsFile(FEW, BOTH)
    scheme = ActivationScheme("e4m3")
    first = linear.pack(floats(cases, scheme, height=8, rows=16))
    for other in (
        floats(cases, scheme, height=9, rows=16),
        floats(cases, scheme, height=16, rows=16),
        floats(cases, ActivationScheme("e4m3", static=0.5), height=8, rows=16),
        replace(cases.float8(16, 192, (8, 192), torch.float8_e5m2), inputs=scheme),
    ):
        assert linear.group([first, linear.pack(other)]) is None
    assert linear.group([first, first]) is not None


def test_a_row_that_is_rounded_in_two_loads_has_one_scale(cases: Any) -> None:
    layout = integers(cases, ActivationScheme("int"), columns=16384 + 30, rows=3)
    x = cases.activations(2, layout.shape[1])
    x[0, -1], x[1, 0] = 100.0, 200.0
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    expected = as_defined(layout, x)
    assert ((found - expected).norm(dim=1) <= 1e-6 * expected.norm(dim=1)).all()


def test_unsigned_codes_are_128_more_than_the_bytes_that_are_multiplied(cases: Any) -> None:
    layout = integers(cases, ActivationScheme("int"), signed=False)
    assert layout.zero == 128
    x = cases.activations(3, 256)
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    assert (found - as_defined(layout, x)).norm() < 1e-6 * found.norm()


def test_one_scale_for_all_rows_follows_the_sum_too(cases: Any) -> None:
    layout = floats(cases, ActivationScheme("e4m3"), height=20)
    x = cases.activations(3, 192)
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    assert (found - as_defined(layout, x)).norm() < 1e-6 * found.norm()


def test_many_tokens_are_rounded_and_multiplied_some_at_a_time(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = integers(cases, ActivationScheme("int"))
    linear, x = TritonLinearAsFile(FEW, BOTH), cases.activations(40, 256)
    whole = product(linear, layout, x)
    monkeypatch.setattr(scratch, "SCRATCH", 4 * 256 * 17)
    assert torch.equal(product(linear, layout, x), whole)


def test_sums_of_floats_may_be_left_to_the_matrix_units(
    cases: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear_as_file, "sums_are_short", lambda device: False)
    layout = floats(cases, ActivationScheme("e4m3"), columns=392)
    x = cases.activations(5, 392)
    found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
    assert (found - as_defined(layout, x)).norm() < 1e-6 * found.norm()


def normal_floats(columns: int) -> Float8:
    """Weights as they are quantized: normal, with the largest of a row at the end of the codes."""
    w = torch.randn(16, columns, generator=torch.Generator().manual_seed(3))
    scale = w.abs().amax(1, keepdim=True) / 448
    values = (w / scale).to(torch.float8_e4m3fn)
    return Float8(values, scale, (1, columns), inputs=ActivationScheme("e4m3"))


@pytest.mark.parametrize("columns", [1024, 4096, pytest.param(14336, marks=pytest.mark.slow)])
@pytest.mark.parametrize("mean", [0.0, 0.5])
def test_on_matrix_units_with_short_sums_the_error_does_not_grow_with_k(
    cases: Any, monkeypatch: pytest.MonkeyPatch, columns: int, mean: float
) -> None:
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", short_sums.create_dot)
    layout = normal_floats(columns)
    if mean:
        layout = replace(layout, values=(layout.values.float() + 40).to(torch.float8_e4m3fn))
    x = cases.activations(4, columns) + mean
    expected = as_defined(layout, x)

    def error() -> float:
        linear = TritonLinearAsFile(with_tiles(layout, TILES[0]), BOTH)
        return float((product(linear, layout, x) - expected).norm() / expected.norm())

    # the tolerance of product_bytes.py
    assert 1e-5 < error() < 5e-4
    monkeypatch.setattr(linear_as_file, "sums_are_short", lambda device: False)
    assert error() > 5e-4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("kind", [*BOTH, "e4m3 per 128"])
def test_with_a_fixed_order_a_row_does_not_depend_on_the_others(cases: Any, kind: Any) -> None:
    columns = 1040
    if kind in BOTH:
        layout = MAKES[kind](cases, ActivationScheme(kind), columns)
    else:
        layout = blocks(cases, columns, 20)
    linear = TritonLinearAsFile(replace(FEW, programs=16), BOTH, fixed=True)
    x = cases.activations(70, columns)
    together = product(linear, layout, x)
    for rows in (slice(0, 1), slice(3, 5), slice(0, 20)):
        assert torch.equal(product(linear, layout, x[rows]), together[rows])


def test_a_row_that_is_not_finite_is_not_a_number(cases: Any) -> None:
    for layout in (
        integers(cases, ActivationScheme("int")),
        floats(cases, ActivationScheme("e4m3")),
        blocks(cases),
    ):
        x = cases.activations(3, layout.shape[1])
        x[0, 7], x[2, 3] = math.inf, math.nan
        found = product(TritonLinearAsFile(FEW, BOTH), layout, x)
        assert found[0].isnan().all()
        assert found[1].isfinite().all()
        assert found[2].isnan().all()


@pytest.mark.parametrize("columns", [96, 130])
def test_weights_of_bytes_keep_every_bit(cases: Any, columns: int) -> None:
    linear = TritonLinearAsFile(FEW, BOTH)
    ids = torch.tensor([19, 0, 3, 3])
    for layout in (
        integers(cases, ActivationScheme("int"), columns, 20),
        integers(cases, ActivationScheme("int"), columns, 20, signed=False),
        floats(cases, ActivationScheme("e4m3"), columns),
        floats(cases, ActivationScheme("e4m3"), columns, height=8),
        blocks(cases, 16 + columns, 20),
    ):
        packed = linear.pack(layout)
        assert isinstance(packed, ByteRows)
        k = layout.shape[1]
        assert linear.nbytes(packed) == 20 * -(-k // 16) * 16 + packed.scale.nbytes
        assert cases.same(linear.unpack(packed), layout)
        out = torch.empty(4, k)
        linear.rows(packed, ids, out)
        assert torch.equal(out, decode(layout)[ids])


def test_the_rule_takes_the_tiles_that_load_least(cases: Any) -> None:
    tuning = Tuning(programs=4 * 132, doubled=("int",))
    w = TritonLinearAsFile(tuning, BOTH).pack(integers(cases, ActivationScheme("int"), 4096, 1024))

    def found(tuning: Tuning, tokens: int, experts: int = 1) -> tuple[int, int, int]:
        tiles = tuning.tiles(w, tokens, "linear_bytes", experts)
        return tiles.block_n, tiles.block_m, tiles.split

    assert found(tuning, 2) == (64, 16, 8)
    assert found(tuning, 100) == (64, 128, 8)
    assert found(tuning, 100, 4) == (64, 128, 8)  # 32 tiles of 128 rows
    assert found(tuning, 100, 16) == (128, 128, 1)  # 128
    # 136 tiles of 128 rows take two rounds, 68 of 256 rows a longer one
    assert found(tuning, 128 * 16) == (128, 128, 1)
    assert found(tuning, 128 * 17) == (256, 128, 1)
    assert found(replace(tuning, doubled=()), 128 * 17) == (64, 128, 1)
    assert found(replace(tuning, doubled=()), 128 * 33) == (128, 128, 1)


@pytest.mark.parametrize(
    ("capability", "short"), [((8, 9), True), ((9, 0), True), ((10, 0), False), ((12, 0), True)]
)
def test_blackwell_s_data_center_cards_have_long_sums(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], short: bool
) -> None:
    monkeypatch.setattr(linear_as_file, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert sums_are_short(torch.device("cuda")) == short


@pytest.mark.parametrize(
    ("capability", "amd", "codes"),
    [
        ((7, 5), False, ()),
        ((8, 0), False, ("int",)),
        ((8, 9), False, BOTH),
        ((12, 0), False, BOTH),
        ((9, 4), True, ("int",)),
    ],
)
def test_a_card_multiplies_the_bytes_it_has_instructions_for(
    capability: tuple[int, int], amd: bool, codes: tuple[str, ...]
) -> None:
    assert bytes_of_card(capability, amd=amd) == codes


@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("int", symmetric=False),
        ActivationScheme("int", group=64),
        ActivationScheme("int", 4),
        ActivationScheme("e4m3", group=128),
        ActivationScheme("e4m3", group=32, rule="mx"),
        ActivationScheme("e4m3", rule="nv"),
    ],
    ids=str,
)
def test_other_schemes_are_not_multiplied_as_bytes(cases: Any, scheme: ActivationScheme) -> None:
    for layout in (integers(cases, scheme), floats(cases, scheme)):
        assert not multiplies_bytes(layout, BOTH)


def test_weights_or_cards_of_another_kind_do_not_multiply_bytes(cases: Any) -> None:
    whole, eight = ActivationScheme("int"), ActivationScheme("e4m3")
    others = [
        cases.affine(20, 256, 4, 256, "zero"),
        cases.affine(20, 256, 8, 128, "zero", signed=True),
        cases.affine(20, 256, 8, 256, "zeros"),
        cases.affine(20, 256, 8, 256, "minus"),
        replace(cases.affine(20, 256, 8, 256, "zero"), zero=127),
        cases.float8(20, 192, (1, 192), torch.float8_e5m2),
        cases.float8(20, 192, (1, 192), powers=True),
        cases.float8(20, 256, (128, 128)),
        cases.float8(20, 256, (64, 128)),
    ]
    for layout in others:
        assert not multiplies_bytes(replace(layout, inputs=whole), BOTH)
        assert not multiplies_bytes(replace(layout, inputs=eight), BOTH)
    assert not multiplies_bytes(cases.blocks(20, 256, "q8_0"), BOTH)
    assert not multiplies_bytes(replace(integers(cases, whole), inputs=None), BOTH)
    for scheme in (ActivationScheme("e4m3", group=64), ActivationScheme("int", group=128)):
        assert not multiplies_bytes(replace(blocks(cases), inputs=scheme), BOTH)
    low = replace(cases.float8(20, 256, (64, 128)), inputs=blocks(cases).inputs)
    assert not multiplies_bytes(low, BOTH)
    layout = floats(cases, eight)
    assert not multiplies_bytes(layout, ("int",))
    assert isinstance(TritonLinearAsFile(FEW, ("int",)).pack(layout), Packed)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    "scheme",
    [
        ActivationScheme("int"),
        ActivationScheme("int", static=0.03, zero=-40, symmetric=False),
        ActivationScheme("e4m3", group=32),
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens", [1, 5])
def test_a_file_gets_its_rounding_unless_exact_is_asked_for(
    cases: Any, scheme: ActivationScheme, tokens: int
) -> None:
    weights = [cases.affine(20, 96, 8, 96, "zero", signed=True), cases.float8(20, 96, (1, 96))]
    for layout in (replace(weight, inputs=scheme) for weight in weights):
        x = cases.activations(tokens, 96)
        for compute, name in (("auto", "gpu.linear_as_file"), ("exact", "gpu.linear_exact")):
            ops = Ops("cpu", compute=compute, backends=("gpu", "reference"))  # type: ignore[arg-type]
            bound = ops.linear(layout)
            assert bound.choice.name == name
            given = fake_quantize(x, scheme) if compute == "auto" else x
            expected = given.double() @ decode(layout).double().t()
            assert (bound.matmul(x) - expected).norm() < 1e-5 * expected.norm()
            assert cases.same(bound.layout(), layout)
            ops.close()
