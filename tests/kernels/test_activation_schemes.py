"""Activations rounded as files ask for: the definition, native code at every level, who runs it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu import CpuBackend
from sdk.kernels.cpu.scheme_linear import SchemeLinear
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import E2M1, ActivationScheme, Affine, Float8, Layout
from tests.kernels.plain_kernels import FUSED, SEVERAL_FUSED, plain_kernels

Scheme = ActivationScheme
SCHEMES = (
    Scheme("int"),
    Scheme("int", 4),
    Scheme("int", rule="absmax"),
    Scheme("int", symmetric=False),
    Scheme("int", static=0.03),
    Scheme("int", static=0.03, zero=-40, symmetric=False),
    Scheme("int", group=64, symmetric=False),
    Scheme("int", group=24),
    Scheme("e4m3"),
    Scheme("e4m3", limit=3.0),
    Scheme("e4m3", static=0.02),
    Scheme("e4m3", group=128),
    Scheme("e4m3", group=128, rule="power"),
    Scheme("e4m3", group=32, rule="mx"),
    Scheme("e2m1", 4, group=32, rule="mx"),
    Scheme("e2m1", 4, group=16, rule="nv", factor=300.0),
)


def inputs(cases: Any, rows: int, columns: int) -> Tensor:
    """Ordinary rows, and hard ones: large, of one sign, zero, tiny, a few whole numbers."""
    x: Tensor = cases.activations(rows, columns)
    x[1] *= 300
    x[2], x[3] = x[2].abs(), -x[3].abs()
    x[4], x[5] = 0.0, x[5] * 1e-33
    x[6] = torch.arange(columns) % 5 - 2.0
    return x


def weights(cases: Any, scheme: ActivationScheme) -> list[Affine | Float8]:
    """Integers by row and by group with every kind of zero, a table, 8-bit floats."""
    found: list[Affine | Float8] = [
        cases.affine(33, 200, 8, 200, "zero", torch.float32, signed=True),
        cases.affine(40, 384, 4, 128, "zeros"),
        cases.affine(17, 900, 8, 900, "minus"),
        cases.table(37, 80, 4, 16, torch.float8_e4m3fn, 80, values=E2M1),
        cases.float8(40, 300, (1, 300)),
    ]
    return [replace(weight, inputs=scheme) for weight in found]


def native(backend: CpuBackend) -> SchemeLinear:
    found = plain_kernels(backend, "linear")[-1]
    assert isinstance(found, SchemeLinear)
    return found


def multiply(kernel: SchemeLinear, weight: Layout, x: Tensor) -> Tensor:
    out = torch.full((x.shape[0], weight.shape[0]), 7.0)
    kernel.matmul(kernel.pack(weight), x, out)
    return out


# ---- the definition -----------------------------------------------------------------------------


def test_integers_of_a_token_are_steps_of_its_largest_magnitude() -> None:
    x = torch.tensor([[-2.55, 2.55, 0.0101, 0.03], [0.0, 0.0, 0.0, 0.0]])
    step = x[0, 1] / 127.5
    assert torch.equal(
        fake_quantize(x, Scheme("int"))[0], torch.tensor([-128.0, 127.0, 1, 2]) * step
    )
    assert torch.equal(fake_quantize(x, Scheme("int"))[1], x[1])


def test_integers_without_symmetry_span_the_range_of_a_token() -> None:
    x = torch.tensor([[-1.0, 4.1, 0.0, 0.5]])
    step = torch.tensor(5.1) / 255  # -1 is -128: zero is -78
    found = fake_quantize(x, Scheme("int", symmetric=False))
    assert torch.equal(found, torch.tensor([[-50.0, 205.0, 0.0, 25.0]]) * step)


def test_static_integers_end_where_their_codes_do() -> None:
    x = torch.tensor([[-100.0, 100.0, 0.26, 0.24]])
    assert fake_quantize(x, Scheme("int", static=0.5)).tolist() == [[-64.0, 63.5, 0.5, 0.0]]
    moved = Scheme("int", static=0.5, zero=-100, symmetric=False)
    assert fake_quantize(x, moved).tolist() == [[-14.0, 100.0, 0.5, 0.0]]


def test_absmax_maps_the_largest_magnitude_to_the_largest_code() -> None:
    x = torch.tensor([[-254.0, 1.0, 2.9, 254.0]])
    assert fake_quantize(x, Scheme("int", rule="absmax")).tolist() == [[-254.0, 0.0, 2.0, 254.0]]


def test_8_bit_floats_are_those_of_torch(cases: Any) -> None:
    x = inputs(cases, 9, 256)
    peak = x.abs().amax(1, True)
    scale = torch.where(peak > 1e-30, peak, 1.0) / 448
    expected = (x / scale).to(torch.float8_e4m3fn).float() * scale
    expected[5] = 0
    assert torch.equal(fake_quantize(x, Scheme("e4m3")), expected)
    static = (x / 0.02).clamp(-448, 448).to(torch.float8_e4m3fn).float() * torch.tensor(0.02)
    assert torch.equal(fake_quantize(x, Scheme("e4m3", static=0.02)), static)


def test_a_limit_bounds_what_the_scale_is_made_of() -> None:
    x = torch.tensor([[448.0, 1.0, 100.0]])
    assert fake_quantize(x, Scheme("e4m3", limit=44.8)).tolist() == [
        [pytest.approx(44.8), pytest.approx(1.0, rel=0.06), pytest.approx(44.8)]
    ]


def test_4_bit_floats_are_the_nearest_and_even_between_two() -> None:
    halves = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0, -0.3, -5.1]])
    found = fake_quantize(halves, Scheme("e2m1", 4, group=32, rule="mx"))
    assert found.tolist() == [[0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0, -0.5, -6.0]]


@pytest.mark.parametrize(
    ("peak", "scale"), [(4.0, 1.0), (6.9, 1.0), (7.0, 2.0), (8.0, 2.0), (0.5, 0.125)]
)
def test_powers_of_two_of_microscaling_follow_the_largest_value(peak: float, scale: float) -> None:
    x = torch.tensor([[peak, 0.5 * scale]])
    found = fake_quantize(x, Scheme("e2m1", 4, group=32, rule="mx"))
    assert found[0, 1] == 0.5 * scale and found[0, 0] == min(round(peak / scale), 6) * scale


def test_scales_rounded_up_to_powers_lose_no_magnitude(cases: Any) -> None:
    x = cases.activations(5, 256)
    found = fake_quantize(x, Scheme("e4m3", group=128, rule="power"))
    peak = x.view(5, 2, 128).abs().amax(2, True)
    scale = 2.0 ** torch.ceil(torch.log2(peak / 448))
    expected = (x.view(5, 2, 128) / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(found, expected.view(5, 256))


def test_scales_of_sixteen_are_8_bit_floats_times_a_factor(cases: Any) -> None:
    x = cases.activations(3, 64)
    found = fake_quantize(x, Scheme("e2m1", 4, group=16, rule="nv", factor=100.0)).view(3, 4, 16)
    scale = x.view(3, 4, 16).abs().amax(2, True) / 6 * 100
    scale = scale.to(torch.float8_e4m3fn).float() / 100
    grid = torch.tensor(sorted(set(E2M1)))
    nearest = (x.view(3, 4, 16, 1) - grid * scale.unsqueeze(3)).abs().amin(3)
    assert torch.allclose((found - x.view(3, 4, 16)).abs(), nearest, atol=1e-6)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_what_is_no_number_spoils_its_group_alone(scheme: ActivationScheme, cases: Any) -> None:
    x = cases.activations(4, 200)
    x[1, 5], x[2, 70] = math.nan, -math.inf
    found = fake_quantize(x, scheme)
    assert found.isfinite().all(1).tolist() == [True, False, False, True]
    group = scheme.group or 200
    assert bool(found[1, group:].isfinite().all())


def test_schemes_that_make_no_sense_are_refused() -> None:
    for wrong in (
        {"static": 0.0}, {"static": math.nan}, {"static": -1.0}, {"static": math.inf}, {"bits": 9},
        {"factor": 0.0}, {"zero": 128}, {"group": -1}, {"limit": 0.0},
        {"rule": "absmax", "symmetric": False},
    ):  # fmt: skip
        with pytest.raises(KernelError, match="activation scheme"):
            Scheme("int", **wrong)  # type: ignore[arg-type]


# ---- native code --------------------------------------------------------------------------------


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_products_are_those_of_the_rounded_rows(
    backend: CpuBackend, cases: Any, scheme: ActivationScheme
) -> None:
    kernel = native(backend)
    for weight in weights(cases, scheme):
        x = inputs(cases, 21, weight.shape[1])
        found = multiply(kernel, weight, x)
        expected = fake_quantize(x, scheme).double() @ decode(weight).double().T
        assert cases.nmse(found, expected) < 1e-12
        for start, stop in ((0, 1), (2, 3), (1, 10), (4, 21)):
            assert torch.equal(multiply(kernel, weight, x[start:stop]), found[start:stop])
        assert cases.same(kernel.unpack(kernel.pack(weight)), weight)


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_rows_are_rounded_to_the_very_numbers_of_the_definition(
    backend: CpuBackend, cases: Any, scheme: ActivationScheme
) -> None:
    """Multiplied by 1 they come out as they are; a sum of two integers is rounded once more."""
    kernel, size = native(backend), 200
    ones = torch.eye(size).to(torch.float8_e4m3fn)
    plain = Float8(ones, torch.ones(1, 1), (size, size), scheme)
    codes = torch.eye(size, dtype=torch.uint8)
    whole = Affine((size, size), 8, size, codes, torch.ones(size, 1), signed=True, inputs=scheme)
    x = inputs(cases, 12, size)
    assert torch.equal(multiply(kernel, plain, x), fake_quantize(x, scheme))
    torch.testing.assert_close(
        multiply(kernel, whole, x), fake_quantize(x, scheme), rtol=2e-7, atol=0
    )


@pytest.mark.quick_cases(16)
@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_row_with_no_numbers_leaves_the_others_alone(
    backend: CpuBackend, cases: Any, scheme: ActivationScheme
) -> None:
    kernel = native(backend)
    for weight in weights(cases, scheme):
        x = cases.activations(9, weight.shape[1])
        clean = multiply(kernel, weight, x)
        x[2, 3], x[5, 70] = math.nan, math.inf
        found = multiply(kernel, weight, x)
        assert bool(found[[2, 5]].isnan().all())
        others = [0, 1, 3, 4, 6, 7, 8]
        assert torch.equal(found[others], clean[others])


@SEVERAL_FUSED
def test_the_levels_with_a_fused_multiply_add_agree(cases: Any) -> None:
    from sdk.kernels.cpu import open_backend

    x = inputs(cases, 13, 384)
    for scheme in SCHEMES:
        weight = replace(cases.affine(40, 384, 8, 384, "zero", signed=True), inputs=scheme)
        found = []
        for level in FUSED:
            opened = open_backend("cpu", 2, level)
            found.append(multiply(native(opened), weight, x))
            opened.close()
        assert all(torch.equal(each, found[0]) for each in found)


# ---- who runs it --------------------------------------------------------------------------------


@pytest.mark.parametrize("backends", [None, ["reference"]])
def test_a_file_gets_its_rounding_unless_exact_is_asked_for(
    backends: list[str] | None, cases: Any
) -> None:
    weight = replace(cases.affine(16, 64, 8, 64, "zero", signed=True), inputs=Scheme("int"))
    x, name = cases.activations(9, 64), "cpu" if backends is None else "reference"
    for compute, chosen in (("auto", "linear_as_file"), ("exact", "linear")):
        ops = Ops("cpu", compute=compute, num_threads=1, backends=backends)  # type: ignore[arg-type]
        linear = ops.linear(weight)
        assert linear.choice.name.startswith(f"{name}.{chosen}")
        given = fake_quantize(x, Scheme("int")) if compute == "auto" else x
        expected = given.double() @ decode(weight).double().T
        assert cases.nmse(linear.matmul(x), expected) < 1e-12
        assert torch.equal(linear.matmul(x[:1]), linear.matmul(x)[:1])
        declined = dict(linear.choice.declined).values()
        if compute == "auto":
            assert set(declined) == {"the file asks for activations in int8 per token"}
        assert cases.same(linear.layout(), weight)
        ops.close()


@pytest.mark.parametrize("codes", ["int", "e4m3"])
def test_experts_round_by_scales_of_their_own(cases: Any, codes: Any) -> None:
    """Eagerly, and in a recorded step whatever the number of tokens."""
    ops = Ops("cpu", num_threads=2)
    layouts = [
        replace(cases.affine(48, 64, 8, 64, seed=i), inputs=Scheme(codes, static=0.01 * (i + 1)))
        for i in range(5)
    ]
    linears = [ops.linear(layout) for layout in layouts]
    group = ops.moe.group(linears)
    assert group is not None
    buffer, logits = cases.activations(12, 64), cases.activations(12, 5, seed=2)

    def forward(tokens: int = 12) -> Tensor:
        routes = ops.moe.route(logits[:tokens], 2)
        return ops.moe.combine(group.matmul(buffer[:tokens], routes, by_token=True), routes)

    graph = ops.recording.capture(forward, tokens=12, outputs=1, requests=1)
    for tokens in (12, 1, 9):
        found = forward(tokens)
        routes = ops.moe.route(logits[:tokens], 2)
        each = torch.stack([linear.matmul(buffer[:tokens]) for linear in linears], 1)
        owners = routes.owners[routes.places.long()].long()
        chosen = each.gather(1, owners.unsqueeze(2).expand(-1, -1, 48))
        assert cases.nmse(found, (chosen * routes.weights.unsqueeze(2)).sum(1)) < 1e-12
        graph.replay(tokens=tokens, outputs=1, requests=1)
        assert torch.equal(graph.result[:tokens], found)
    ops.close()


def test_neighbours_that_round_otherwise_do_not_share_a_rounding(cases: Any) -> None:
    ops = Ops("cpu", num_threads=2)
    schemes = (Scheme("int"), Scheme("int", static=0.5), Scheme("e4m3"), Scheme("e4m3", group=32))
    linears = [
        ops.linear(replace(cases.affine(32, 64, 8, 64, "zero", signed=True), inputs=scheme))
        for scheme in (*schemes, schemes[0], schemes[0])
    ]
    x = cases.activations(6, 64)
    alone = [linear.matmul(x).clone() for linear in linears]
    graph = ops.recording.capture(
        lambda: [w.matmul(x) for w in linears], tokens=6, outputs=1, requests=1
    )
    graph.replay(tokens=6, outputs=1, requests=1)
    for found, expected in zip(graph.result, alone, strict=True):
        assert torch.equal(found, expected)
    ops.close()
