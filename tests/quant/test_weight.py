"""A weight keeps its value through cutting, joining and binding, whatever its layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sdk.kernels.errors import KernelError
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import pack_codes, unpack_codes
from sdk.kernels.weights.layouts import BLOCK_TYPES, E2M1, Affine, Blocks, Dense, Float8
from sdk.quant.errors import AlignmentError
from sdk.quant.weight import (
    AffineWeight,
    BlockWeight,
    DenseWeight,
    Float8Weight,
    StackedWeight,
    Weight,
    concat,
    weight_of,
)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def affine(
    rows: int = 48,
    columns: int = 256,
    bits: int = 4,
    group: int = 32,
    kind: str = "minus",
    seed: int = 0,
) -> AffineWeight:
    rng = _random(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=rng, dtype=torch.uint8)
    groups = -(-columns // group)
    scale = torch.rand(rows, groups, generator=rng).half() / 8
    points = torch.randint(0, 2**bits, (rows, groups), generator=rng)
    options: dict[str, object] = {
        "zero": {"zero": 2 ** (bits - 1)},
        "zeros": {"zeros": pack_codes(points.byte(), bits)},
        "floats": {"zeros": (points + 0.25).half()},
        "minus": {"minus": torch.rand(rows, groups, generator=rng).half()},
    }[kind]
    return AffineWeight(
        Affine((rows, columns), bits, group, pack_codes(codes, bits), scale, **options)
    )


def blocks(kind: str, rows: int = 16, columns: int = 512, seed: int = 0) -> BlockWeight:
    facts = BLOCK_TYPES[kind]
    count = rows * columns // facts.elements
    rng = _random(seed)
    data = torch.randint(0, 256, (count, facts.nbytes), generator=rng, dtype=torch.uint8)
    small = (torch.rand(count, 2, generator=rng) / 100).half().view(torch.uint8)
    if kind == "mxfp4":
        data[:, 0] = 120
    elif kind in ("q3_k", "q6_k"):
        data[:, -2:] = small[:, :2]
    else:
        first = 80 if kind == "q2_k" else 0
        data[:, first : first + 4] = small
    return BlockWeight(Blocks((rows, columns), kind, data.reshape(rows, -1)))


def table(kind: str, seed: int = 0, rows: int = 48) -> Weight:
    """``nf4``: one level of scales; ``nvfp4``: 8-bit floats and a factor per row; ``iq3_s``: 8-bit
    integers and a float16 per 128 values (256 in files)."""
    rng = _random(seed)
    codes = torch.randint(0, 256, (rows, 128), generator=rng, dtype=torch.uint8)
    values = torch.linspace(-1, 1, 16) if kind == "nf4" else torch.tensor(E2M1)
    one = Affine((rows, 256), 4, 64, codes, torch.rand(rows, 4, generator=rng), table=values)
    if kind == "nvfp4":
        scale = torch.rand(rows, 16, generator=rng).to(E4M3)
        factor = torch.rand(rows, 1, generator=rng)
        one = replace(one, group=16, scale=scale, super_scale=factor, super_group=256)
    if kind == "iq3_s":
        scale = torch.randint(0, 32, (rows, 8), generator=rng).byte()
        supers = torch.rand(rows, 2, generator=rng).half()
        one = replace(one, group=32, scale=scale, super_scale=supers, super_group=128)
    if kind == "nested":  # nf4 whose scales are codes, 32 of them (8 rows) to a super scale
        scale = torch.randint(0, 256, (rows, 4), generator=rng).byte()
        one = replace(
            one,
            scale=scale,
            super_scale=torch.rand(rows // 8, generator=rng),
            super_group=32 * 64,
            scale_table=torch.linspace(-1, 1, 256) ** 3,
            scale_offset=torch.rand(rows, generator=rng),
        )
        kind = "nf4"
    return weight_of(replace(one, name=kind))


def dense(dtype: torch.dtype, seed: int = 0) -> DenseWeight:
    return DenseWeight(Dense(torch.randn(24, 256, generator=_random(seed)).to(dtype)))


def float8(block: tuple[int, int], dtype: torch.dtype, seed: int = 0, rows: int = 24) -> Weight:
    rng = _random(seed)
    values = torch.randn(rows, 256, generator=rng).to(dtype)
    grid = (-(-rows // block[0]), -(-256 // block[1]))
    return weight_of(Float8(values, torch.rand(grid, generator=rng) / 8, block))


E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MAKERS: dict[str, Callable[[int], Weight]] = {
    "f32": lambda seed: dense(torch.float32, seed),
    "f16": lambda seed: dense(torch.float16, seed),
    "bf16": lambda seed: dense(torch.bfloat16, seed),
    "fp8": lambda seed: dense(E4M3, seed),
    "fp8_e5m2": lambda seed: dense(E5M2, seed),
    "fp8-tensor": lambda seed: float8((24, 256), E4M3, seed),
    "fp8-channel": lambda seed: float8((1, 256), E5M2, seed),
    "fp8-block": lambda seed: float8((16, 128), E4M3, seed),
    "fp8-whole-blocks": lambda seed: float8((8, 128), E4M3, seed),
    **{
        name: lambda seed, name=name: table(name, seed)
        for name in ("nf4", "nvfp4", "iq3_s", "nested")
    },
    **{name: lambda seed, name=name: blocks(name, seed=seed) for name in BLOCK_TYPES},
    **{
        f"w{bits}-{kind}": lambda seed, bits=bits, kind=kind: affine(
            bits=bits, kind=kind, seed=seed
        )
        for bits in range(2, 9)
        for kind in ("zero", "zeros", "floats", "minus")
    },
}
every_layout = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS.keys())


@every_layout
def test_cutting_a_weight_cuts_its_value(make: Callable[[int], Weight]) -> None:
    weight = make(1)
    value = weight.dequantize()
    assert value.shape == weight.shape and value.dtype == torch.float32
    assert torch.equal(weight.narrow("out", 3, 7).dequantize(), value[3:10])
    half = weight.shape[1] // 2
    assert torch.equal(weight.narrow("in", half, half).dequantize(), value[:, half:])
    assert torch.equal(
        weight.narrow("in", half, half).narrow("out", 5, 2).dequantize(), value[5:7, half:]
    )


@every_layout
def test_binding_changes_neither_value_nor_rows(make: Callable[[int], Weight]) -> None:
    weight = make(2)
    value = weight.dequantize()
    ids = torch.tensor([0, 5, 5, weight.shape[0] - 1])
    assert torch.equal(weight.rows(ids), value[ids])
    ops = Ops(num_threads=1)
    weight.bind(ops)
    assert torch.equal(weight.dequantize(), value)
    assert torch.equal(weight.rows(ids), value[ids])
    assert len(weight.choices()) == 1
    ops.close()


@every_layout
def test_rows_change_places_where_they_share_no_scales(make: Callable[[int], Weight]) -> None:
    """In turns within each run of 4 rows; scales of blocks of 8 and 16 rows stay where they are."""
    weight = make(4)
    value, size = weight.dequantize(), weight.nbytes
    order = torch.arange(weight.shape[0]).view(-1, 2, 2).transpose(1, 2).flatten()
    found = weight.reordered(order)
    if isinstance(weight.layout, Affine) and weight.layout.scale_table is not None:  # type: ignore[attr-defined]
        assert found is None
        return
    assert found is not None and type(found) is type(weight)
    assert torch.equal(found.dequantize(), value[order]) and found.nbytes == size
    assert torch.equal(weight.dequantize(), value)


def test_rows_stay_where_scales_would_have_to_be_copied() -> None:
    apart = torch.arange(23, -1, -1)  # rows of one block would be in two
    assert float8((16, 128), E4M3).reordered(apart) is None
    assert float8((1, 256), E4M3).reordered(apart) is not None
    across = affine(rows=48, columns=64, group=1)
    layout = across.layout
    assert isinstance(layout, Affine) and layout.minus is not None
    shared = AffineWeight(replace(layout, scale=layout.scale[:12], minus=layout.minus[:12]))
    assert shared.reordered(torch.arange(48)) is None
    stack = concat([affine(seed=1), blocks("q6_k", columns=256, seed=2)])
    order = torch.cat([torch.arange(47, -1, -1), torch.arange(48, 64)])
    moved = stack.reordered(order)
    assert moved is not None
    assert torch.equal(moved.dequantize(), stack.dequantize()[order])
    assert stack.reordered(torch.arange(63, -1, -1)) is None  # out of its part
    assert concat([affine(seed=1), table("nested")]).reordered(torch.arange(96)) is None


@every_layout
def test_an_exact_product_is_the_product_of_the_value(make: Callable[[int], Weight]) -> None:
    weight = make(3)
    value = weight.dequantize().double()
    ops = Ops(num_threads=1, compute="exact")
    weight.bind(ops)
    x = torch.randn(5, weight.shape[1], generator=_random(9))
    expected = x.double() @ value.T
    error = (weight.matmul(x).double() - expected).square().sum() / expected.square().sum()
    assert error < 1e-10
    ops.close()


@every_layout
def test_like_weights_join_into_one_and_keep_their_values(make: Callable[[int], Weight]) -> None:
    parts = [make(4), make(5), make(6)]
    joined = concat(parts)
    assert not isinstance(joined, StackedWeight)
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert concat(parts[:1]) is parts[0]


def _stack() -> tuple[Weight, Tensor]:
    parts = [affine(seed=1), blocks("q6_k", columns=256, seed=2), affine(bits=8, seed=3)]
    return concat(parts), torch.cat([part.dequantize() for part in parts])


def test_unlike_weights_are_stacked_and_behave_as_one() -> None:
    weight, value = _stack()
    assert isinstance(weight, StackedWeight) and weight.shape == value.shape
    assert str(weight.spec) == "w4a16g32+q6_k+w8a16g32"
    for start, count in ((0, 48), (40, 20), (47, 18), (0, weight.shape[0])):
        assert torch.equal(
            weight.narrow("out", start, count).dequantize(), value[start : start + count]
        )
    ops = Ops(num_threads=1, compute="exact")
    weight.bind(ops)
    ids = torch.tensor([100, 0, 50, 63, 64, 47, 48])
    assert torch.equal(weight.rows(ids), value[ids])
    x = torch.randn(3, 256, generator=_random(1))
    torch.testing.assert_close(weight.matmul(x), x @ value.T, rtol=1e-4, atol=1e-4)
    assert weight.nbytes == sum(part.nbytes for part in weight.parts)
    assert len(weight.choices()) == 3
    ops.close()


def test_a_stack_of_one_kind_reports_that_kind() -> None:
    assert str(StackedWeight([affine(), affine()]).spec) == "w4a16g32"


def test_neighbours_that_agree_are_joined_beside_one_that_does_not() -> None:
    q, k, v = blocks("q4_k", 32), blocks("q4_k", 16, seed=1), blocks("q6_k", 16, seed=2)
    stack = concat([q, k, v])
    assert isinstance(stack, StackedWeight)
    assert [part.shape for part in stack.parts] == [(48, 512), (16, 512)]
    value = torch.cat([part.dequantize() for part in (q, k, v)])
    assert torch.equal(stack.dequantize(), value)
    apart = concat([q, v, k])
    assert isinstance(apart, StackedWeight) and len(apart.parts) == 3


def test_affine_weights_that_differ_in_one_fact_are_not_joined() -> None:
    a = affine(kind="zero")
    assert isinstance(concat([a, affine(kind="minus")]), StackedWeight)
    assert isinstance(concat([affine(kind="zeros"), affine(kind="floats")]), StackedWeight)
    assert isinstance(concat([a, affine(group=64)]), StackedWeight)
    assert isinstance(concat([dense(torch.float16), dense(torch.float32)]), StackedWeight)
    assert isinstance(
        concat([blocks("q4_k", columns=256), blocks("q6_k", columns=256)]), StackedWeight
    )


@pytest.mark.parametrize(("side", "start", "count"), [("in", 16, 32), ("in", 0, 40)])
def test_a_cut_through_a_group_is_refused(side: str, start: int, count: int) -> None:
    with pytest.raises(AlignmentError, match="cut through a group: expected multiples of 32"):
        affine().narrow(side, start, count)  # type: ignore[arg-type]


def test_one_group_for_the_whole_row_may_be_cut_anywhere() -> None:
    weight = affine(group=256, kind="zeros")
    assert torch.equal(weight.narrow("in", 6, 100).dequantize(), weight.dequantize()[:, 6:106])


@every_layout
def test_a_dequantized_weight_is_a_copy(make: Callable[[int], Weight]) -> None:
    weight = make(7)
    value = weight.dequantize()
    kept = value.clone()
    value.zero_()
    assert torch.equal(weight.dequantize(), kept)


def test_a_cut_through_a_group_of_either_level_is_refused() -> None:
    with pytest.raises(AlignmentError, match=r"multiples of 128 \(iq3_s\)"):
        table("iq3_s").narrow("in", 64, 128)
    with pytest.raises(AlignmentError, match=r"multiples of 16 \(nvfp4\)"):
        table("nvfp4").narrow("in", 8, 16)


def nested(rows: int) -> Weight:
    """Rows of 4 scales, 32 of them to a super scale."""
    weight = table("nested", seed=rows, rows=rows + -rows % 8)
    return weight.narrow("out", 0, rows)


def test_super_scales_that_would_run_on_into_the_next_part_are_for_fewer_scales() -> None:
    parts = [nested(14), nested(18), nested(5)]  # 56 and 72 scales: both are eights
    joined = concat(parts)
    assert isinstance(joined, AffineWeight) and joined.layout.super_group == 8 * 64
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    assert isinstance(concat([nested(13), nested(8)]), StackedWeight)


def test_rows_keep_their_nested_scales_where_they_begin_with_a_super_scale() -> None:
    weight = nested(24)
    cut = weight.narrow("out", 8, 11)
    assert cut.layout.super_group == 32 * 64 and cut.layout.super_scale.shape == (2,)  # type: ignore[attr-defined]
    assert torch.equal(cut.dequantize(), weight.dequantize()[8:19])


def test_tables_of_unlike_values_are_not_joined() -> None:
    parts = [table("nf4"), table("nvfp4")]
    assert isinstance(concat(parts), StackedWeight) and str(concat(parts).spec) == "nf4+nvfp4"
    layout = parts[0].layout  # type: ignore[attr-defined]
    other = weight_of(replace(layout, table=layout.table * 2))
    assert isinstance(concat([parts[0], other]), StackedWeight)


def test_a_cut_through_a_block_is_refused() -> None:
    with pytest.raises(AlignmentError, match="multiples of 256"):
        blocks("q4_k").narrow("in", 128, 256)
    with pytest.raises(AlignmentError, match=r"multiples of 128 \(fp8\)"):
        float8((16, 128), E4M3).narrow("in", 0, 64)


def test_8_bit_floats_of_unlike_blocks_join_when_their_columns_agree() -> None:
    parts = [float8((24, 256), E4M3, 1), float8((1, 256), E4M3, 2), float8((8, 999), E4M3, 3)]
    joined = concat(parts)
    assert isinstance(joined, Float8Weight) and str(joined.spec) == "fp8"
    assert torch.equal(joined.dequantize(), torch.cat([part.dequantize() for part in parts]))
    kept = concat([float8((8, 128), E4M3, 1), float8((8, 128), E4M3, 2)]).layout  # type: ignore[attr-defined]
    assert kept.block == (8, 128) and kept.scale.shape == (6, 2)
    assert isinstance(concat([parts[0], float8((24, 128), E4M3)]), StackedWeight)
    assert isinstance(concat([parts[0], float8((24, 256), E5M2)]), StackedWeight)


def test_scales_that_do_not_fit_8_bit_floats_are_refused() -> None:
    values = torch.zeros(24, 256).to(E4M3)
    for scale in (torch.ones(2, 2), torch.ones(3, 1), torch.ones(3, 2).half()):
        with pytest.raises(KernelError, match=r"float8 scale: expected .* \[3, 2\], found"):
            weight_of(Float8(values, scale, (8, 128)))


@pytest.mark.parametrize("make", [affine, lambda: _stack()[0]])
def test_a_cut_outside_the_weight_is_refused(make: Callable[[], Weight]) -> None:
    weight = make()
    for start, count in ((-1, 4), (0, 0), (weight.shape[0] - 1, 2)):
        with pytest.raises(AlignmentError, match="cannot cut out features"):
            weight.narrow("out", start, count)


def test_weights_of_different_width_cannot_be_joined() -> None:
    with pytest.raises(AlignmentError, match=r"different in features: \[256, 512\]"):
        concat([affine(), affine(columns=512)])


def test_a_dense_weight_in_an_odd_type_is_refused() -> None:
    with pytest.raises(AlignmentError, match=r"found torch\.float64"):
        weight_of(Dense(torch.zeros(2, 2, dtype=torch.float64)))


def test_odd_bit_widths_straddle_bytes_and_come_back() -> None:
    for bits in range(1, 9):
        for count in (1, 7, 8, 37):
            codes = torch.randint(0, 2**bits, (3, count), generator=_random(bits)).byte()
            packed = pack_codes(codes, bits)
            assert packed.shape[1] == -(-count * bits // 8)
            assert torch.equal(unpack_codes(packed, bits, count), codes)


def test_hand_written_bytes_decode_as_the_layout_says() -> None:
    # 3 bits, LSB first: codes 1..8 are the stream 0b...; 4 bits: low nibble first.
    assert unpack_codes(torch.tensor([[0b11_010_001]]).byte(), 3, 2).tolist() == [[1, 2]]
    assert unpack_codes(torch.tensor([[0x21, 0x43]]).byte(), 4, 4).tolist() == [[1, 2, 3, 4]]
    weight = AffineWeight(
        Affine(
            (1, 4), 4, 2, torch.tensor([[0x21, 0x43]]).byte(), torch.tensor([[2.0, 10.0]]), zero=1
        )
    )
    assert weight.dequantize().tolist() == [[0.0, 2.0, 20.0, 30.0]]


def test_products_and_rows_check_their_arguments() -> None:
    ops = Ops(num_threads=1)
    weight = affine()
    weight.bind(ops)
    with pytest.raises(KernelError, match=r"linear x: .* \[any, 256\], found .* \[2, 255\]"):
        weight.matmul(torch.zeros(2, 255))
    with pytest.raises(KernelError, match=r"expected ids in 0\.\.47, found 48"):
        weight.rows(torch.tensor([0, 48]))
    with pytest.raises(KernelError, match="found -1"):
        weight.rows(torch.tensor([-1]))
    assert weight.matmul(torch.zeros(0, 256)).shape == (0, 48)
    assert weight.rows(torch.zeros(0, dtype=torch.int64)).shape == (0, 256)
    ops.close()
