"""The native matrix products, at every SIMD level this CPU has, against decode() and float64.

Measured NMSE: 1e-14 to 1e-13 for the fp32 paths, and for 8-bit activations against their own
float64 model; about 1e-4 against unrounded activations.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.cpu import CpuBackend, levels, open_backend
from sdk.kernels.cpu.packed_linear import PackedLinear
from sdk.kernels.cpu.packed_weight import int8_table
from sdk.kernels.cpu.weight_memory import MAPPING_BYTES
from sdk.kernels.errors import KernelError
from sdk.kernels.reference.decode import decode, pack_codes
from sdk.kernels.registry import linear_problem
from sdk.kernels.weights.layouts import (
    BLOCK_TYPES,
    E2M1,
    IQ4,
    TABLE_BITS,
    Affine,
    Blocks,
    Dense,
    Float8,
    Layout,
)
from tests.kernels.plain_kernels import SEVERAL_LEVELS, plain_kernels

#: The last is multiplied in two groups of rows.
BATCHES = (1, 2, 7, 16, 33, 100, 261)
#: (rows, columns, group): tails of rows and of columns, every kind of group.
SHAPES = (
    (33, 96, 32),
    (48, 200, 16),
    (17, 256, 64),
    (40, 384, 128),
    (20, 77, 77),
    (16, 130, 32),
    (5, 8, 1000),
)
#: The tables of bitsandbytes' 4-bit types. Sources: QLoRA (Dettmers et al., 2023), appendix E, and
#: bitsandbytes' create_fp4_map.
NF4 = (
    *(-1.0, -0.6961928, -0.52507305, -0.39491749, -0.28444138, -0.18477343, -0.09105004, 0.0),
    *(0.0795803, 0.1609302, 0.2461123, 0.33791524, 0.44070983, 0.562617, 0.72295684, 1.0),
)
FP4 = (
    *(0.0, 0.0052083333, 0.6666667, 1.0, 0.3333333, 0.5, 0.1666667, 0.25),
    *(0.0, -0.0052083333, -0.6666667, -1.0, -0.3333333, -0.5, -0.1666667, -0.25),
)
KINDS = ("zero", "zeros", "minus", "floats")
#: (rows, columns, group, scales to a super scale): ends of rows inside, beside and at its ends.
NESTED = ((37, 576, 64, 256), (40, 192, 16, 16), (33, 1024, 32, 8), (16, 64, 64, 256))
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
#: (rows, columns, scale block): per tensor, per channel, 2-D with short blocks at both ends.
SCALED = ((37, 77, (37, 77)), (37, 77, (1, 77)), (40, 300, (128, 128)), (50, 70, (24, 20)))
#: The same, with scales that are powers of two.
POWERS = ((37, 70, (1, 32)), (40, 300, (128, 128)), (37, 77, (37, 77)))


def kernels(backend: CpuBackend) -> tuple[PackedLinear, PackedLinear]:
    rounding, _, exact, _ = plain_kernels(backend, "linear")
    return rounding, exact


def multiply(kernel: PackedLinear, packed: Any, x: Tensor) -> Tensor:
    out = torch.full((x.shape[0], packed.facts.shape[0]), float("nan"))
    kernel.matmul(packed, x, out)
    return out


def tables(cases: Any, rows: int) -> list[Layout]:
    """Codes of every width that index a table, every type of scales, one and two levels of them."""
    e8m0, e4m3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
    found: list[Layout] = [
        cases.table(rows, k, bits, group, dtype, values=range(-5, (1 << bits) - 5), seed=bits + i)
        for bits in TABLE_BITS
        for i, (k, group, dtype) in enumerate(
            [(96, 32, torch.float16), (200, 16, torch.float32), (256, 64, torch.bfloat16)]
        )
    ]
    found += [cases.table(rows, 160, 4, 32, e8m0, values=E2M1)]
    found += [cases.table(rows, k, 4, 16, e4m3, k, values=E2M1) for k in (80, 256)]
    found += [cases.table(rows, 8192, 4, 4096, torch.float32, values=IQ4)]
    found += [cases.table(rows, 77, 4, 77, torch.float32, values=IQ4)]
    found += [cases.table(rows, 512, 3, group, torch.uint8, 256) for group in (16, 32)]
    found += [cases.table(rows, 600, 4, 32, torch.uint8, 256, values=IQ4)]
    return found + [cases.nested(*facts) for facts in NESTED]


def scaled(cases: Any) -> list[Layout]:
    """8-bit floats with every kind of scales."""
    found = [cases.float8(n, k, block, dtype) for n, k, block in SCALED for dtype in FLOAT8]
    return found + [cases.float8(n, k, block, powers=True) for n, k, block in POWERS]


@pytest.fixture
def weights(cases: Any) -> list[Layout]:
    """Every bit width, group, zero-point kind and scale type, signed codes, blocks and dense."""
    found: list[Layout] = [
        cases.affine(n, k, bits, group, kind, FLOATS[(bits + i) % 3], seed=bits)
        for bits in range(2, 9)
        for kind in KINDS
        for i, (n, k, group) in enumerate(SHAPES)
    ]
    found += [cases.affine(33, 96, 8, 32, kind, signed=True) for kind in ("zero", "minus")]
    found += [cases.blocks(37, 512, name) for name in BLOCK_TYPES]
    found += tables(cases, 37)
    found += [cases.dense(37, 77, dtype) for dtype in (*FLOATS, *FLOAT8)]
    found += scaled(cases)
    return found


#: (rows, columns, bits, rows of scales): more than a vector, fewer, and over the end of one.
REPEATING = ((48, 70, 4, 16), (64, 33, 3, 32), (36, 96, 8, 9), (40, 130, 2, 20), (21, 64, 5, 7))


def test_scales_of_every_column_that_repeat_over_the_rows_are_exact(
    backend: CpuBackend, cases: Any
) -> None:
    rounding, kernel = kernels(backend)
    for n, k, bits, rows in REPEATING:
        for kind in KINDS:
            weight: Affine = cases.repeating(n, k, bits, rows, kind)
            assert rounding.reject(linear_problem(weight, "auto", 8)) is not None
            assert kernel.reject(linear_problem(weight, "auto", 8)) is None
            packed, value = kernel.pack(weight), decode(weight)
            assert torch.equal(
                value[rows], decode(replace(weight, codes=weight.codes.roll(-rows, 0)))[0]
            )
            assert cases.same(kernel.unpack(packed), weight)
            found = torch.empty(n, k)
            kernel.rows(packed, torch.arange(n), found)
            assert torch.equal(found, value)
            x = cases.activations(9, k)
            out = multiply(kernel, packed, x)
            assert cases.nmse(out, x.double() @ value.double().T) < 1e-12
            assert torch.equal(multiply(kernel, packed, x[:1]), out[:1])


def test_packing_keeps_every_bit(backend: CpuBackend, cases: Any, weights: list[Layout]) -> None:
    kernel, _ = kernels(backend)
    for weight in weights:
        assert cases.same(kernel.unpack(kernel.pack(weight)), weight), weight.shape


@pytest.mark.parametrize("rows", [1, 15, 16, 33])
def test_packing_keeps_every_bit_at_the_edges_of_a_tile(
    backend: CpuBackend, cases: Any, rows: int
) -> None:
    """One row, one group, rows beside a multiple of 16, columns beside those of 8 and 32."""
    found: list[Layout] = [
        cases.affine(rows, k, bits, 32, signed=bits == 8 and k == 33)
        for bits in range(2, 9)
        for k in (1, 7, 8, 9, 31, 32, 33, 257)
    ]
    found += [
        cases.blocks(rows, count * BLOCK_TYPES[name].elements, name)
        for name in BLOCK_TYPES
        for count in (1, 3)
    ]
    found += [cases.dense(rows, k, dtype) for k in (1, 255, 256, 257) for dtype in FLOATS]
    kernel, _ = kernels(backend)
    for weight in found:
        packed = kernel.pack(weight)
        assert cases.same(kernel.unpack(packed), weight), weight.shape
        ids, out = torch.arange(rows), torch.empty(rows, weight.shape[1])
        kernel.rows(packed, ids, out)
        assert torch.equal(out, decode(weight)), weight.shape


def test_rows_equal_the_reference_bit_for_bit(backend: CpuBackend, weights: list[Layout]) -> None:
    kernel, _ = kernels(backend)
    for weight in weights:
        ids = torch.tensor([weight.shape[0] - 1, 0, 3, 3])
        out = torch.empty(4, weight.shape[1])
        kernel.rows(kernel.pack(weight), ids, out)
        assert torch.equal(out, decode(weight)[ids])


def test_exact_products_match_float64(
    backend: CpuBackend, cases: Any, weights: list[Layout]
) -> None:
    _, kernel = kernels(backend)
    for weight in weights:
        x = cases.activations(7, weight.shape[1])
        out = multiply(kernel, kernel.pack(weight), x)
        assert cases.nmse(out, x.double() @ decode(weight).double().T) < 1e-12


def stepped(weight: Layout) -> Layout:
    """The weight with the table that integer products use."""
    if not isinstance(weight, Affine) or weight.table is None:
        return weight
    step, steps = int8_table(weight.table)
    return replace(weight, table=torch.tensor(steps) * step)


def test_rounded_products_match_the_float64_model_of_the_rounding(
    backend: CpuBackend, cases: Any, weights: list[Layout]
) -> None:
    kernel, _ = kernels(backend)
    for weight in weights:
        if isinstance(weight, Dense | Float8):
            continue
        x = cases.activations(7, weight.shape[1])
        out = multiply(kernel, kernel.pack(weight), x)
        assert cases.nmse(out, cases.rounded(x) @ decode(stepped(weight)).double().T) < 1e-12


def test_tables_of_the_formats_lose_less_as_integers_than_activations_do(cases: Any) -> None:
    """Exact but for NF4 and FP4, whose error is a fifth and a tenth of the activations' (1e-4)."""
    exact = [E2M1, IQ4, (-1.0, 1.0), (*range(-15, 16, 2),)]
    exact += [tuple(v / 8 for v in (-43, -25, -8, 8, 25, 43, 0, 0))]
    exact += [tuple(v / 4 for v in (4, 12, 20, 28, 36, 44, 52, 62, *range(-4, -36, -4)))]
    for values in exact:
        table = torch.tensor(values, dtype=torch.float32)
        step, steps = int8_table(table)
        torch.testing.assert_close(torch.tensor(steps) * step, table, rtol=1e-7, atol=0)
    normal = torch.randn(4000, 64, generator=torch.Generator().manual_seed(2))
    normal /= normal.abs().amax(dim=1, keepdim=True)
    for values, bound in ((NF4, 2.5e-5), (FP4, 1.5e-5)):
        table = torch.tensor(values)
        step, steps = int8_table(table)
        assert max(steps) <= 127 and min(steps) >= -127
        codes = (normal.unsqueeze(2) - table).abs().argmin(dim=2)
        assert cases.nmse((torch.tensor(steps) * step)[codes], table[codes]) < bound


def test_products_of_8_bit_floats_are_those_of_their_float32_values(
    backend: CpuBackend, cases: Any
) -> None:
    kernel, _ = kernels(backend)
    found: list[Layout] = [cases.dense(37, 77, dtype) for dtype in FLOAT8]
    found += scaled(cases)
    for weight in found:
        x = cases.activations(5, weight.shape[1])
        out = multiply(kernel, kernel.pack(weight), x)
        assert torch.equal(out, multiply(kernel, kernel.pack(Dense(decode(weight))), x))


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_8_bit_float_has_its_value(backend: CpuBackend, dtype: torch.dtype) -> None:
    kernel, _ = kernels(backend)
    values = torch.arange(256, dtype=torch.uint8).view(dtype).view(256, 1)
    for weight in (Dense(values), Float8(values, torch.full((1, 1), 0.3), (256, 1))):
        packed, expected = kernel.pack(weight), decode(weight)
        rows = torch.empty(256, 1)
        kernel.rows(packed, torch.arange(256), rows)
        for found in (rows, multiply(kernel, packed, torch.ones(1, 1)).T):
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_rounding_activations_costs_little(backend: CpuBackend, cases: Any) -> None:
    """1 / (12 * 127^2) times a block's squared peak-to-rms ratio; of 16 bits, where there are."""
    rounded, wide, exact, _ = plain_kernels(backend, "linear")
    for weight in (cases.affine(64, 1536, 4, 32, "zero"), cases.blocks(37, 512, "q6_k")):
        x = cases.activations(33, weight.shape[1])
        peaks = x.clone()
        peaks[:, 64:96] *= 30  # one block with nearly all of the error, as language models have

        def error(kernel: PackedLinear, x: Tensor, weight: Layout = weight) -> float:
            out = multiply(kernel, kernel.pack(weight), x)
            return float(cases.nmse(out, x.double() @ decode(weight).double().T))

        assert 1e-6 < error(rounded, x) < 2e-4
        assert error(wide, x) < 0.75 * error(rounded, x)  # half of the blocks are rounded twice
        assert error(wide, peaks) < 0.1 * error(rounded, peaks)
        assert error(exact, x) < 1e-12


def test_a_block_is_rounded_twice_where_its_step_is_above_the_rows_average(
    backend: CpuBackend,
) -> None:
    """Multiplied by the identity, a row shows how each of its blocks was rounded."""
    wide = plain_kernels(backend, "linear")[1]
    codes = (torch.eye(96) * 8 + 8).clamp(max=15)  # 8, and 15 on the diagonal: 0 and 7
    weight = Affine(
        (96, 96), 4, 32, pack_codes(codes.to(torch.uint8), 4), torch.ones(96, 3), zero=8
    )
    x = torch.rand(1, 96, generator=torch.Generator().manual_seed(5)) + 0.5
    x[:, 32:64] *= 3
    off = (multiply(wide, wide.pack(weight), x) / 7 - x).abs().view(3, 32).amax(dim=1)
    steps = x.view(3, 32).amax(dim=1) / 127
    assert off[1] < steps[1] / 200
    assert steps[0] / 10 < off[0] <= steps[0]
    assert steps[2] / 10 < off[2] <= steps[2]


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("index", [0, 1, 2], ids=["a8", "a16", "exact"])
def test_a_row_has_the_same_bits_in_every_batch(
    backend: CpuBackend, cases: Any, index: int
) -> None:
    kernel = plain_kernels(backend, "linear")[index]
    single = open_backend("cpu", 1, backend.runtime.level)
    alone = plain_kernels(single, "linear")[index]
    wide: list[Layout] = [
        cases.affine(37, 200, bits, 32, "zeros") for bits in (2, 3, 4, 5, 6, 7, 8)
    ]
    wide += [cases.blocks(37, 512, name) for name in ("iq4_nl", "iq4_xs", "mxfp4")]
    wide += tables(cases, 37)
    wide += [cases.affine(37, 200, 6, 16), cases.blocks(37, 512, "q6_k")]
    wide += [cases.blocks(37, 512, "q2_k"), cases.blocks(37, 512, "q3_k")]
    # 40 blocks of k in two panels, the second of which begins inside a super group
    wide += [cases.blocks(37, 1280, name) for name in ("q4_k", "q5_k", "q6_k", "iq4_xs")]
    wide += [cases.dense(37, 77, dtype) for dtype in (*FLOATS, *FLOAT8)]
    wide += [cases.float8(50, 300, (128, 128)), cases.float8(600, 500, (1, 500))]
    wide += [cases.float8(50, 300, (1, 32), powers=True)]
    wide += [cases.affine(700, 576, 4, 32)]  # large enough for every thread
    for weight in wide:
        packed = kernel.pack(weight)
        x = cases.activations(max(BATCHES), weight.shape[1])
        full = multiply(kernel, packed, x)
        for m in BATCHES:
            assert torch.equal(multiply(kernel, packed, x[:m]), full[:m])
        shifted = torch.cat((x[50:], x[:50]))
        assert torch.equal(multiply(kernel, packed, shifted), torch.cat((full[50:], full[:50])))
        assert torch.equal(multiply(alone, alone.pack(weight), x), full)
    single.close()


@SEVERAL_LEVELS
def test_the_levels_agree(cases: Any) -> None:
    """Integer dots are exact and each output sums its groups in order: with a fused multiply-add
    the bits are equal; the portable level rounds twice."""
    weights = [cases.affine(33, 1000, bits, 32, kind) for bits in range(2, 9) for kind in KINDS]
    weights += [cases.affine(33, 1000, bits, 16, "zeros") for bits in (4, 8)]
    weights += [cases.affine(33, 96, 8, 32, kind, signed=True) for kind in ("zero", "minus")]
    weights += [cases.blocks(33, 1024, name) for name in ("q4_k", "q5_k", "q6_k")]
    weights += [cases.blocks(33, 1024, name) for name in ("iq4_nl", "iq4_xs", "mxfp4")]
    weights += tables(cases, 33)
    weights += [cases.dense(33, 1000, dtype) for dtype in FLOATS]
    backends = {level: open_backend("cpu", 1, level) for level in levels()}
    for weight in weights:
        x = cases.activations(9, weight.shape[1])
        for index in range(3):
            outs = {}
            for level, backend in backends.items():
                kernel = plain_kernels(backend, "linear")[index]
                outs[level] = multiply(kernel, kernel.pack(weight), x)
            portable = [outs.pop("portable")] if "portable" in outs else []
            fused = list(outs.values())
            assert all(torch.equal(out, fused[0]) for out in fused), weight.shape
            assert all(cases.nmse(one, out) < 1e-12 for one in portable for out in fused)
    for backend in backends.values():
        backend.close()


def test_long_rows_and_large_batches_stay_exact(backend: CpuBackend, cases: Any) -> None:
    """Several passes over the activations: M x K is beyond the cache budget of one pass."""
    weight, x = cases.affine(20, 8192, 4, 128, "zeros"), cases.activations(100, 8192)
    for kernel, expected in zip(kernels(backend), (cases.rounded(x), x.double()), strict=True):
        out = multiply(kernel, kernel.pack(weight), x)
        assert cases.nmse(out, expected @ decode(weight).double().T) < 1e-12


def test_nan_and_infinity_reach_their_own_row_only(backend: CpuBackend, cases: Any) -> None:
    for kernel in plain_kernels(backend, "linear")[:2]:
        packed = kernel.pack(cases.affine(20, 96))
        x = cases.activations(4, 96)
        clean = multiply(kernel, packed, x)
        x[1, 3], x[2, 90] = float("nan"), float("inf")
        out = multiply(kernel, packed, x)
        assert out[1:3].isnan().all()
        assert torch.equal(out[0], clean[0]) and torch.equal(out[3], clean[3])


def test_zero_and_tiny_activations_give_zero(backend: CpuBackend, cases: Any) -> None:
    x = torch.zeros(2, 96)
    x[1] = 1e-39
    for kernel in plain_kernels(backend, "linear")[:2]:
        assert multiply(kernel, kernel.pack(cases.affine(20, 96)), x).abs().max() == 0


def test_packed_weights_take_at_most_four_percent_more(backend: CpuBackend, cases: Any) -> None:
    kernel, _ = kernels(backend)
    layouts = [cases.affine(256, 1024, bits, 32, "minus") for bits in range(2, 9)]
    layouts += [cases.affine(256, 1024, 4, 128, "zeros"), cases.affine(256, 1024, 3, 16, "zero")]
    layouts += [cases.blocks(256, 1024, name) for name in BLOCK_TYPES]
    layouts += [cases.dense(256, 1000, dtype) for dtype in (*FLOATS, *FLOAT8)]
    layouts += [cases.table(256, 1024, bits, 32, torch.uint8, 256) for bits in TABLE_BITS]
    layouts += [cases.table(256, 1024, 4, 16, torch.float8_e4m3fn, 1024)]
    layouts += [cases.table(256, 1024, 4, 32, torch.float8_e8m0fnu)]
    layouts += [cases.float8(256, 1024, block) for block in ((128, 128), (1, 1024), (256, 1024))]
    for layout in layouts:
        packed = kernel.pack(layout)
        assert layout.nbytes <= kernel.nbytes(packed) <= 1.04 * layout.nbytes
        assert packed.codes.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"layout": "affine", "bits": 9, "group": 32}, "9 bits: expected 2 to 8"),
        ({"layout": "affine", "bits": 1, "group": 32}, "1 bits: expected 2 to 8"),
        ({"layout": "affine", "format": "table", "bits": 2}, "a table of 2 bits: expected one of"),
        (
            {"layout": "affine", "bits": 4, "group": 16, "super_group": 48},
            "super group 48: expected a multiple of 32",
        ),
        ({"layout": "affine", "bits": 4, "group": 24}, "group 24: expected a multiple of 16"),
        ({"layout": "blocks", "format": "q8_k"}, "block type q8_k: expected q2_k, q3_k, q4_k"),
        ({"layout": "dense", "format": "float64"}, "dense float64: expected float32"),
        ({"layout": "float8", "format": "float16"}, "scaled float16: expected float8_e4m3fn"),
        ({"layout": "lut"}, "layout 'lut': expected dense, float8, affine or blocks"),
    ],
)
def test_what_the_kernels_cannot_run_is_declined(
    backend: CpuBackend, fields: dict[str, Any], reason: str
) -> None:
    for kernel in kernels(backend):
        found = kernel.reject(Problem("linear", in_features=576, out_features=64, **fields))
        assert found is not None and found.startswith(reason)


def test_exact_compute_is_left_to_the_exact_kernel(backend: CpuBackend) -> None:
    problem = Problem("linear", compute="exact", layout="affine", bits=4, group=32)
    rounding, exact = kernels(backend)
    assert rounding.reject(problem) == "quantizes activations to 8 bits, compute is exact"
    assert exact.reject(problem) is None


def test_wrong_arguments_raise(backend: CpuBackend, cases: Any) -> None:
    kernel, _ = kernels(backend)
    weight: Affine = cases.affine(16, 32, 8, 32, "zeros")
    packed = kernel.pack(weight)
    with pytest.raises(
        KernelError, match=r"linear x: expected float32 on cpu, found torch.float64"
    ):
        kernel.matmul(packed, torch.zeros(1, 32, dtype=torch.float64), torch.zeros(1, 16))
    with pytest.raises(KernelError, match=r"rows: expected int64 ids, found torch\.int32"):
        kernel.rows(packed, torch.zeros(1, dtype=torch.int32), torch.zeros(1, 32))
    signed = Affine((16, 32), 8, 32, weight.codes, weight.scale, zeros=weight.zeros, signed=True)
    with pytest.raises(KernelError, match="signed codes must have 8 bits and no zero points"):
        kernel.pack(signed)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_weights_cut_from_larger_ones_pack_the_same(
    backend: CpuBackend, cases: Any, name: str
) -> None:
    """Views with strides, as narrow() makes them."""
    kernel, _ = kernels(backend)
    kind = BLOCK_TYPES[name]
    whole: Blocks = cases.blocks(20, 2 * kind.elements, name)
    cut = Blocks((20, kind.elements), name, whole.data[:, kind.nbytes :])
    assert cases.same(kernel.unpack(kernel.pack(cut)), cut)


def test_every_power_of_two_is_a_scale(backend: CpuBackend) -> None:
    powers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).view(256, 1)
    codes = torch.full((256, 16), 0x11, dtype=torch.uint8)  # 1: the value is the scale
    weight = Affine((256, 32), 4, 32, codes, powers, table=torch.arange(16.0))
    kernel, exact = kernels(backend)
    packed, expected = kernel.pack(weight), decode(weight)
    rows = torch.empty(256, 32)
    kernel.rows(packed, torch.arange(256), rows)
    x = torch.zeros(1, 32)
    x[0, 5] = 1
    for found in (rows[:, 5:6], multiply(exact, packed, x).T):
        torch.testing.assert_close(found, expected[:, 5:6], rtol=0, atol=0, equal_nan=True)


def test_packed_weights_share_mappings_that_end_with_the_last_of_them(
    backend: CpuBackend, cases: Any
) -> None:
    kernel, _ = kernels(backend)
    first, second = (kernel.pack(cases.affine(32, 64, 4, 32)) for _ in range(2))
    assert 0 < second.codes.data_ptr() - first.codes.data_ptr() < MAPPING_BYTES
    large = kernel.pack(cases.dense(16, MAPPING_BYTES // 64 + 1, torch.float32))
    assert large.codes.nbytes > MAPPING_BYTES
    again = kernel.pack(cases.affine(32, 64, 4, 32))
    del second, large
    for packed in (first, again):
        assert cases.same(kernel.unpack(packed), cases.affine(32, 64, 4, 32))


def test_a_weight_takes_the_place_of_one_that_is_gone(backend: CpuBackend, cases: Any) -> None:
    """Experts that move between ranks do not make memory grow."""
    kernel, _ = kernels(backend)
    kept = kernel.pack(cases.affine(32, 64, 4, 32, seed=1))
    seen = set()
    for seed in range(2, 8):
        packed = kernel.pack(cases.affine(32, 64, 4, 32, seed=seed))
        assert cases.same(kernel.unpack(packed), cases.affine(32, 64, 4, 32, seed=seed))
        seen.add(packed.codes.data_ptr())
        del packed
    assert len(seen) == 1
    assert cases.same(kernel.unpack(kept), cases.affine(32, 64, 4, 32, seed=1))
    codes = kernel.pack(cases.affine(32, 64, 4, 32, seed=1)).codes
    again = kernel.pack(cases.affine(32, 64, 4, 32, seed=2)).codes
    assert codes.data_ptr() != again.data_ptr()  # a tensor of it is still there
