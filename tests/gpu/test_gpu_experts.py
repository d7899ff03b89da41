"""Mixtures of experts on the GPU's kernels, interpreted: routing, and one launch for all rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.gpu import experts as gpu_experts, scratch
from sdk.kernels.gpu.dense import DenseLinear
from sdk.kernels.gpu.expert_tiles import offsets_of
from sdk.kernels.gpu.linear import TritonLinear
from sdk.kernels.gpu.linear_as_file import TritonLinearAsFile
from sdk.kernels.gpu.tuning import Tiles, Tuning
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.route_rule import RouteRule
from sdk.kernels.operators.routes import TILE_ROWS, Routes, most_tiles, tiles_at
from sdk.kernels.reference.decode import decode
from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import E2M1, ActivationScheme, Dense, Layout
from tests.routers import RULES, case

FEW = Tuning(programs=4)
EXPERTS, WIDTH, OUT = 5, 96, 35


@pytest.fixture(scope="module")
def gpu() -> Iterator[Ops]:
    opened = Ops("cpu", backends=["gpu"])
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def reference() -> Iterator[Ops]:
    opened = Ops("cpu", backends=["reference"])
    yield opened
    opened.close()


def logits(tokens: int, experts: int = EXPERTS, seed: int = 0) -> Tensor:
    return 3.0 * torch.randn(tokens, experts, generator=torch.Generator().manual_seed(seed))


def equal(found: Routes, wanted: Routes) -> None:
    for name in ("places", "tokens", "owners", "starts"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    count = int(wanted.active[-1])
    assert int(found.active[-1]) == count
    assert torch.equal(found.active[:count], wanted.active[:count])
    assert tiles_of(found) == tiles_of(wanted)


def tiles_of(routes: Routes) -> dict[int, list[list[int]]]:
    """The expert and the first row of every tile, by size."""
    assert routes.tiles is not None
    found = {}
    for size in TILE_ROWS:
        at = tiles_at(len(routes.owners), len(routes.starts) - 1, size)
        count = int(routes.tiles[at, 0])
        assert count <= most_tiles(len(routes.owners), len(routes.starts) - 1, size)
        found[size] = routes.tiles[at + 1 : at + 1 + count].tolist()
    return found


def test_tiles_are_those_of_experts_with_rows(gpu: Ops) -> None:
    chosen = torch.tensor([3] * 33 + [1] * 16 + [5]).view(-1, 1)
    routes = gpu.moe.routes(chosen, torch.ones(50, 1), 7)
    assert tiles_of(routes) == {
        16: [[1, 0], [3, 16], [3, 32], [3, 48], [5, 49]],
        32: [[1, 0], [3, 16], [3, 48], [5, 49]],
        64: [[1, 0], [3, 16], [5, 49]],
        128: [[1, 0], [3, 16], [5, 49]],
    }


@pytest.mark.parametrize(
    ("tokens", "experts", "k", "most"),
    [
        (5, 3, 3, 64),
        (33, 128, 4, 64),
        (450, 384, 5, 1024),
        pytest.param(2500, 64, 1, 1024, marks=pytest.mark.slow),
    ],
)
def test_rows_of_many_programs_are_in_the_order_of_experts_and_tokens(
    gpu: Ops, reference: Ops, monkeypatch: pytest.MonkeyPatch,
    tokens: int, experts: int, k: int, most: int,
) -> None:  # fmt: skip
    """``most`` rows of a program; half of the tokens want the first experts, none the last."""
    monkeypatch.setattr(gpu_experts, "_BLOCK", most)
    given = logits(tokens, experts)
    given[::2, :k] += 20.0
    given[:, experts // 2 + k :] -= 40.0
    chosen = given.topk(k, dim=1).indices
    weights = torch.ones(tokens, k)
    found = gpu.moe.routes(chosen, weights, experts)
    equal(found, reference.moe.routes(chosen, weights, experts))


@pytest.mark.parametrize(("tokens", "launches"), [(1, 1), (128, 1), (129, 2)])
def test_few_rows_are_grouped_in_one_launch(
    gpu: Ops, monkeypatch: pytest.MonkeyPatch, tokens: int, launches: int
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(gpu_experts, "run_kernel", lambda kernel, *_, **__: started.append(kernel))
    gpu.moe.routes(torch.zeros(tokens, 8), torch.ones(tokens, 8), 128)
    assert len(started) == launches


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    ("tokens", "experts", "k"),
    [(1, 60, 8), (3, 5, 1), pytest.param(130, 9, 8, marks=pytest.mark.slow)],
)
def test_tokens_are_routed_as_the_reference_routes_them(
    gpu: Ops, reference: Ops, tokens: int, experts: int, k: int, normalized: bool
) -> None:
    given = logits(tokens, experts)
    found = gpu.moe.route(given, k, RouteRule(normalized=normalized))
    wanted = reference.moe.route(given, k, RouteRule(normalized=normalized))
    equal(found, wanted)
    torch.testing.assert_close(found.weights, wanted.weights, rtol=1e-6, atol=1e-7)


def test_one_expert_may_have_all_rows_and_others_none(gpu: Ops, reference: Ops) -> None:
    given = torch.tensor([[0.0, 1.0, 5.0, 1.0, 0.0]]).repeat(9, 1)
    equal(gpu.moe.route(given, 1), reference.moe.route(given, 1))
    assert gpu.moe.route(given, 1).starts.tolist() == [0, 0, 0, 9, 9, 9]


def test_the_first_of_equal_experts_is_chosen(gpu: Ops) -> None:
    given = torch.tensor([[-0.0, 2.0, 2.0, 0.0, 2.0]])
    assert gpu.moe.route(given, 4).owners.tolist() == [0, 1, 2, 4]


def test_logits_that_are_no_numbers_choose_different_experts_that_exist(gpu: Ops) -> None:
    given = logits(4)
    given[1] = float("nan")
    given[2] = float("-inf")
    given[3] = -torch.tensor(float("nan"))
    routes = gpu.moe.route(given, 3)
    chosen = routes.owners[routes.places.long()]
    assert bool(((chosen >= 0) & (chosen < EXPERTS)).all())
    assert [len(set(row)) for row in chosen.tolist()] == [3] * 4
    assert routes.weights.isfinite().all(dim=1).tolist() == [True, False, False, False]


#: name -> layout of OUT x K with a seed; K is WIDTH, or 512 for those of 256 codes to a block.
LAYOUTS: dict[str, Any] = {
    "int4-minus": lambda c, s: c.affine(OUT, WIDTH, 4, 32, "minus", seed=s),
    "int4-zeros": lambda c, s: c.affine(OUT, WIDTH, 4, 32, "zeros", seed=s),
    "int4-channel-floats": lambda c, s: c.affine(OUT, WIDTH, 4, WIDTH, "floats", seed=s),
    "int3": lambda c, s: c.affine(OUT, WIDTH, 3, 32, "zero", seed=s),
    "int7": lambda c, s: c.affine(OUT, WIDTH, 7, 32, "zeros", seed=s),
    "int8-channel": lambda c, s: c.affine(OUT, WIDTH, 8, WIDTH, "zero", signed=True, seed=s),
    "nested-like": lambda c, s: c.nested(OUT, 192, 64, 4, seed=s),
    "nf4-like": lambda c, s: c.table(OUT, 192, 4, 64, seed=s),
    "mxfp4": lambda c, s: c.table(OUT, WIDTH, 4, 32, torch.float8_e8m0fnu, values=E2M1, seed=s),
    "nvfp4": lambda c, s: c.table(OUT, 128, 4, 16, torch.float8_e4m3fn, 128, values=E2M1, seed=s),
    "fp8-channel": lambda c, s: c.float8(OUT, WIDTH, (1, WIDTH), seed=s),
    "fp8-blocks": lambda c, s: c.float8(150, 160, (128, 128), seed=s),
    "q4_0": lambda c, s: c.blocks(OUT, WIDTH, "q4_0", seed=s),
    "q4_1": lambda c, s: c.blocks(OUT, WIDTH, "q4_1", seed=s),
    "q5_0": lambda c, s: c.blocks(OUT, WIDTH, "q5_0", seed=s),
    "q8_0": lambda c, s: c.blocks(OUT, WIDTH, "q8_0", seed=s),
    "q2_k": lambda c, s: c.blocks(OUT, 512, "q2_k", seed=s),
    "q3_k": lambda c, s: c.blocks(OUT, 512, "q3_k", seed=s),
    "q4_k": lambda c, s: c.blocks(OUT, 512, "q4_k", seed=s),
    "q6_k": lambda c, s: c.blocks(OUT, 512, "q6_k", seed=s),
    "iq4-like": lambda c, s: c.blocks(OUT, WIDTH, "iq4_nl", seed=s),
    "int4-tail-minus": lambda c, s: c.affine(OUT, 80, 4, 16, "minus", seed=s),
    "int6-tail-floats": lambda c, s: c.affine(OUT, 72, 6, 48, "floats", seed=s),
}


def check(
    linear: Any, layouts: list[Layout], x: Tensor, given: Tensor, routes: Routes, by_token: bool
) -> float:
    """The distance of the routed product of x from float64's of ``given``, x as rounded."""
    group = linear.group([linear.pack(layout) for layout in layouts])
    assert group is not None
    out = torch.full((routes.owners.shape[0], layouts[0].shape[0]), float("nan"))
    linear.matmul_routed(group, x, routes, by_token, out)
    source = given[routes.tokens.long()] if by_token else given
    wanted = torch.stack(
        [
            row.double() @ decode(layouts[e]).double().t()
            for row, e in zip(source, routes.owners, strict=True)
        ]
    )
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("tokens", "name"),
    [
        pytest.param(tokens, name, marks=() if number % 3 == tokens % 3 else pytest.mark.slow)
        for tokens in (1, 6)
        for number, name in enumerate(LAYOUTS)
    ],
)
def test_every_row_is_multiplied_with_the_weight_of_its_expert(
    reference: Ops, cases: Any, name: str, tokens: int
) -> None:
    layouts = [LAYOUTS[name](cases, seed) for seed in range(EXPERTS)]
    routes = reference.moe.route(logits(tokens), 2)
    x = cases.activations(tokens, layouts[0].shape[1])
    given = x if tokens == 1 else x.half()  # one token is not rounded
    found = check(TritonLinear(torch.float16, FEW), layouts, x, given, routes, True)
    assert found < (5e-4 if "like" in name else 2e-6)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("by_token", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tokens", "k"), [(1, 1), (1, 5), (3, 8), (40, 2), (70, 1)])
def test_rows_may_fall_on_experts_as_they_like(
    reference: Ops, cases: Any, tokens: int, k: int, by_token: bool
) -> None:
    count = max(EXPERTS, k)
    given = logits(tokens, count)
    given[: tokens // 2, 0] = 50.0  # half of the tokens want the first
    given[:, 1] = float("-inf")  # nobody wants the second unless he must
    routes = reference.moe.route(given, k)
    layouts = [cases.affine(OUT, WIDTH, 4, 32, "minus", seed=seed) for seed in range(count)]
    x = cases.activations(tokens if by_token else tokens * k, WIDTH)
    rounded_x = x if tokens == 1 else x.half()
    assert check(TritonLinear(torch.float16, FEW), layouts, x, rounded_x, routes, by_token) < 2e-6


@pytest.mark.slow
def test_shares_of_the_columns_are_added_for_experts_too(reference: Ops, cases: Any) -> None:
    tiles = [(99, Tiles(16, 16, 9, 4, 3))]  # two busy experts leave it four shares
    linear = TritonLinear(
        torch.float16, replace(FEW, table={("linear", "int4g128z", OUT, 1024): tiles})
    )
    layouts = [cases.affine(OUT, 1024, 4, 128, "zeros", seed=seed) for seed in range(2)]
    for tokens, shares in ((1, 8), (3, 4)):
        routes = reference.moe.route(logits(tokens, 2), 1)
        x = cases.activations(tokens, 1024)
        given = x if tokens == 1 else x.half()
        group = linear.group([linear.pack(layout) for layout in layouts])
        assert group is not None
        assert linear._tiles_of(group, routes, 1).split == shares
        assert check(linear, layouts, x, given, routes, True) < 2e-6


#: Formats whose decoded values need the scratch in different ways: minima, tables, two levels.
DECODED = ("int4-minus", "int4-channel-floats", "nested-like", "nf4-like", "fp8-blocks", "q6_k")


def decoded(
    reference: Ops,
    layouts: list[Layout],
    linear: TritonLinear,
    given: Tensor,
    x: Tensor,
    *,
    by_token: bool,
) -> float:
    """The distance from float64's product of x with weights that were rounded as x is."""
    routes = reference.moe.route(given, 2)
    group = linear.group([linear.pack(layout) for layout in layouts])
    assert group is not None
    out = torch.full((routes.owners.shape[0], layouts[0].shape[0]), float("nan"))
    linear.matmul_routed(group, x, routes, by_token, out)
    weights = torch.stack([decode(layout).half() for layout in layouts]).double()
    source = x.half().double()
    rows = source[routes.tokens.long()] if by_token else source
    wanted = torch.einsum("rk,rnk->rn", rows, weights[routes.owners.long()])
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("name", DECODED)
@pytest.mark.parametrize("by_token", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_large_prompt_decodes_each_expert_once(
    reference: Ops, cases: Any, monkeypatch: pytest.MonkeyPatch, name: str, by_token: bool
) -> None:
    layouts = [LAYOUTS[name](cases, seed) for seed in range(EXPERTS)]
    n, k = layouts[0].shape
    monkeypatch.setattr(scratch, "EXPERTS_SCRATCH", 2 * n * k * 2 + 100)  # two at a time
    given = logits(10)
    given[:, 2] = float("-inf")  # nobody wants the third
    linear = TritonLinear(torch.float16, replace(FEW, experts_dense_from=4))
    x = cases.activations(10 if by_token else 20, k)
    assert decoded(reference, layouts, linear, given, x, by_token=by_token) < 2e-6


def test_decoded_experts_of_any_size_begin_where_loads_may(reference: Ops, cases: Any) -> None:
    layouts = [cases.affine(OUT, 100, 4, 100, "zero", seed=seed) for seed in range(EXPERTS)]
    assert OUT * 100 % 16
    linear = TritonLinear(torch.float16, replace(FEW, experts_dense_from=4))
    x = cases.activations(10, 100)
    assert decoded(reference, layouts, linear, logits(10), x, by_token=True) < 2e-6


@pytest.mark.slow
def test_experts_are_decoded_from_as_many_rows_of_each_as_the_card_s_table_says(
    reference: Ops, cases: Any
) -> None:
    layouts = [LAYOUTS["q6_k"](cases, seed) for seed in range(EXPERTS)]
    x = cases.activations(10, 512)

    def distance(linear: TritonLinear) -> float:
        return decoded(reference, layouts, linear, logits(10), x, by_token=True)

    assert distance(TritonLinear(torch.float16, replace(FEW, experts_dense_from=4))) < 2e-6
    # weights that were not rounded: the experts have four rows each on average
    assert distance(TritonLinear(torch.float16, replace(FEW, experts_dense_from=5))) > 1e-5
    for exact in (True, False):
        dtype = torch.float32 if exact else torch.float16
        linear = TritonLinear(dtype, replace(FEW, experts_dense_from=1), fixed=not exact)
        assert distance(linear) > 1e-5


@pytest.mark.parametrize("tokens", [1, 9, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_experts_of_plain_floats_go_in_one_launch(
    reference: Ops, cases: Any, dtype: torch.dtype, tokens: int
) -> None:
    layouts: list[Layout] = [cases.dense(OUT, 80, dtype, seed=seed) for seed in range(EXPERTS)]
    routes = reference.moe.route(logits(tokens), 2)
    x = cases.activations(tokens, 80).to(dtype).float()  # the interpreter cuts bfloat16 off
    assert check(DenseLinear(), layouts, x, x, routes, True) < 2e-6


def test_many_rows_of_plain_floats_take_large_tiles(reference: Ops, cases: Any) -> None:
    layouts: list[Layout] = [cases.dense(150, 80, torch.float16, seed=seed) for seed in range(2)]
    routes = reference.moe.route(logits(150, 2), 2)
    x = cases.activations(150, 80)
    assert check(DenseLinear(), layouts, x, x.half(), routes, True) < 2e-6


def test_experts_have_measured_tiles_of_their_own(cases: Any, reference: Ops) -> None:
    one, many = Tiles(16, 16, 3, 1, 2), Tiles(32, 16, 4, 2, 2)
    table = {("linear", "int4g128z", OUT, 1024): [(99, one)]}
    table |= {("linear_experts", "int4g128z", OUT, 1024): [(4, many)]}
    layouts = [cases.affine(OUT, 1024, 4, 128, "zeros", seed=seed) for seed in range(2)]
    for fixed in (False, True):
        linear = TritonLinear(torch.float16, replace(FEW, table=table), fixed=fixed)
        group = linear.group([linear.pack(layout) for layout in layouts])
        assert group is not None
        routes = reference.moe.route(logits(3, 2), 2)
        assert linear._tiles_of(group, routes, 2) == many._replace(split=1 if fixed else 4)
        wide = reference.moe.route(logits(9, 2), 2)
        # three shares of one are too many of two
        other = (many if fixed else one)._replace(split=1)
        assert linear._tiles_of(group, wide, 2) == other


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize(
    ("kind", "scheme"),
    [
        ("int", ActivationScheme("int")),
        ("e4m3", ActivationScheme("e4m3")),
        ("e4m3", ActivationScheme("e4m3", group=32)),  # its product is float32's
    ],
)
def test_experts_round_their_inputs_as_the_file_asks(
    reference: Ops, cases: Any, kind: str, scheme: ActivationScheme, tokens: int
) -> None:
    def layout(seed: int) -> Layout:
        if kind == "e4m3":
            return replace(cases.float8(OUT, 128, (1, 128), seed=seed), inputs=scheme)
        made = cases.affine(OUT, 128, 8, 128, "zero", torch.float32, True, seed)
        return replace(made, inputs=scheme)

    layouts = [layout(seed) for seed in range(EXPERTS)]
    routes = reference.moe.route(logits(tokens), 2)
    x = cases.activations(tokens, 128)
    linear = TritonLinearAsFile(FEW, ("int", "e4m3"))
    assert check(linear, layouts, x, fake_quantize(x, scheme), routes, True) < 1e-5


def test_experts_unlike_each_other_are_not_taken_as_one(cases: Any) -> None:
    linear = TritonLinear(torch.float16, FEW)
    pack = linear.pack
    plain = cases.affine(OUT, WIDTH, 4, 32, "zero")
    assert linear.group([pack(plain), pack(cases.affine(OUT, WIDTH, 4, 32, "zeros"))]) is None
    assert linear.group([pack(plain), pack(replace(plain, scale=plain.scale.float()))]) is None
    tables = [cases.table(OUT, WIDTH), cases.table(OUT, WIDTH, values=range(16))]
    assert linear.group([pack(table) for table in tables]) is None
    as_file = TritonLinearAsFile(FEW, ("int",))
    static = [
        replace(cases.float8(OUT, WIDTH, (1, WIDTH)), inputs=ActivationScheme("e4m3", static=s))
        for s in (0.5, 0.25)
    ]
    assert as_file.group([as_file.pack(layout) for layout in static]) is None
    shifted = Dense(torch.zeros(OUT * 64 + 1)[1:].view(OUT, 64))  # not at a multiple of 64 bytes
    assert DenseLinear().group([shifted, shifted]) is None


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.slow
def test_with_a_fixed_order_a_row_does_not_depend_on_the_others(
    reference: Ops, cases: Any, exact: bool
) -> None:
    layouts = [cases.affine(OUT, 256, 4, 32, "minus", seed=seed) for seed in range(EXPERTS)]
    linear = TritonLinear(torch.float32 if exact else torch.float16, FEW, fixed=True)
    group = linear.group([linear.pack(layout) for layout in layouts])
    given, x = logits(40), cases.activations(40, 256)

    def run(rows: slice) -> Tensor:
        routes = reference.moe.route(given[rows], 2)
        out = torch.empty(routes.owners.shape[0], OUT)
        linear.matmul_routed(group, x[rows].contiguous(), routes, True, out)
        return out[routes.places.long()]

    together = run(slice(0, 40))
    for rows in (slice(0, 1), slice(3, 5), slice(0, 30)):
        assert torch.equal(run(rows), together[rows])


def test_a_mixture_is_the_reference_s(gpu: Ops, reference: Ops, cases: Any) -> None:
    layouts = [cases.affine(OUT, WIDTH, 4, 32, "zeros", seed=seed) for seed in range(EXPERTS)]
    bias, x = torch.randn(EXPERTS, OUT), cases.activations(12, WIDTH)

    def mixture(ops: Ops) -> Tensor:
        bound = ops.moe.group([ops.linear(layout) for layout in layouts])
        assert bound is not None
        routes = ops.moe.route(logits(12), 2)
        y = ops.moe.add_owners_bias(bound.matmul(x, routes, by_token=True), bias, routes)
        return ops.moe.combine(y, routes)

    found, wanted = mixture(gpu), mixture(reference)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-3  # inputs are rounded to float16


def test_words_at_odd_distances_are_not_grouped() -> None:
    """Kernels are told that the distances are multiples of 16 elements."""
    memory = torch.zeros(3 * 64 + 8, dtype=torch.int32)
    near = [{"w0": memory[begin : begin + 64], "scale": memory[:4]} for begin in (0, 64, 128)]
    found = offsets_of(near)
    assert found is not None and found.tolist() == [[0, 0], [64, 0], [128, 0]]
    assert offsets_of([near[0], {**near[1], "w0": memory[72:136]}]) is None
    assert offsets_of([near[0], {**near[1], "scale": memory[5:9]}]) is not None


@pytest.mark.parametrize("name", RULES)
def test_the_routers_of_published_models_choose_and_weigh(gpu: Ops, name: str) -> None:
    given, bias, chosen, weights = case(name, 5, 12, 3)
    routes = gpu.moe.route(given, 3, RULES[name][0], bias=bias)
    assert torch.equal(routes.owners[routes.places.long()], chosen)
    torch.testing.assert_close(routes.weights, weights, rtol=2e-6, atol=0)
    given[1], given[2], given[3, :5] = float("nan"), float("-inf"), float("inf")
    routes = gpu.moe.route(given, 3, RULES[name][0], bias=bias)
    found = routes.owners[routes.places.long()]
    assert bool(((found >= 0) & (found < 12)).all())
    assert [len(set(row)) for row in found.tolist()] == [3] * 5


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_added_last(gpu: Ops, reference: Ops, gated: bool) -> None:
    given, shared = torch.randn(12, 70), torch.randn(6, 70)
    gate = torch.randn(6, 1) if gated else None
    found = gpu.moe.combine(given, gpu.moe.route(logits(6), 2), shared, gate)
    wanted = reference.moe.combine(given, reference.moe.route(logits(6), 2), shared, gate)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
