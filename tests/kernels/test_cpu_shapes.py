"""Weights of any shape at every SIMD level: the right result, or an error that says why not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from sdk.kernels.backend import Problem
from sdk.kernels.cpu import CpuBackend
from sdk.kernels.cpu.packed_linear import PackedLinear
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu.packing import pack as gpu_pack
from sdk.kernels.operators.ops import Ops
from sdk.kernels.reference.decode import decode
from sdk.kernels.registry import facts_of
from sdk.kernels.weights.layouts import BLOCK_TYPES, Affine, Blocks, Dense, Float8, Layout
from tests.kernels.plain_kernels import plain_kernels

KINDS = ["zero", "zeros", "minus", "floats"]
few = settings(max_examples=60, deadline=None, derandomize=True)


@st.composite
def affine_facts(draw: st.DrawFn) -> dict[str, Any]:
    """Rows and columns from 1, so most have tails; groups that divide nothing; all code types."""
    bits = draw(st.integers(2, 8))
    signed = bits == 8 and draw(st.booleans())
    k = draw(st.one_of(st.integers(1, 70), st.integers(71, 300)))
    groups = st.sampled_from([16, 32, 48, 64, 128, k, k + 5])
    return {
        "n": draw(st.integers(1, 40)),
        "k": k,
        "bits": bits,
        "group": draw(groups),
        "kind": draw(st.sampled_from(["zero", "minus"] if signed else KINDS)),
        "scale": draw(st.sampled_from([torch.float16, torch.bfloat16, torch.float32])),
        "signed": signed,
        "seed": draw(st.integers(0, 99)),
    }


@st.composite
def float8_facts(draw: st.DrawFn) -> dict[str, Any]:
    n, k = draw(st.integers(1, 40)), draw(st.integers(1, 150))
    return {
        "n": n,
        "k": k,
        "block": (draw(st.sampled_from([1, 3, 16, 32, n, n + 9])), draw(st.integers(1, k + 9))),
        "dtype": draw(st.sampled_from([torch.float8_e4m3fn, torch.float8_e5m2])),
        "powers": draw(st.booleans()),
        "seed": draw(st.integers(0, 99)),
    }


def multiply(kernel: PackedLinear, packed: Any, x: Tensor, rows: int) -> Tensor:
    out = torch.full((x.shape[0], rows), float("nan"))
    kernel.matmul(packed, x, out)
    return out


def check(backend: CpuBackend, cases: Any, weight: Layout, m: int, size: Tensor) -> None:
    """``size [N, K]`` bounds what the kernel adds up: the tolerance is relative to it."""
    rounding, _, exact, _ = plain_kernels(backend, "linear")
    rows, columns = weight.shape
    packed, value = rounding.pack(weight), decode(weight)
    assert cases.same(rounding.unpack(packed), weight)
    ids = torch.arange(rows).flip(0)
    gathered = torch.empty(rows, columns)
    rounding.rows(packed, ids, gathered)
    assert torch.equal(gathered, value[ids])
    x = cases.activations(m, columns)
    seen = x if isinstance(weight, Dense | Float8) else cases.rounded(x)
    for kernel, used in ((rounding, seen), (exact, x)):
        out = multiply(kernel, packed, x, rows)
        error = (out.double() - used.double() @ value.double().T).abs()
        assert bool((error <= 1e-6 * (used.abs().double() @ size.double().T)).all())
        if m:
            assert torch.equal(multiply(kernel, packed, x[-1:], rows), out[-1:])


@few
@given(facts=affine_facts(), m=st.integers(0, 9))
def test_affine_weights_of_any_shape_are_right(
    backend: CpuBackend, cases: Any, facts: dict[str, Any], m: int
) -> None:
    weight: Affine = cases.affine(**facts)
    problem = Problem(
        "linear", layout="affine", bits=weight.bits, group=weight.group, in_features=facts["k"]
    )
    assert plain_kernels(backend, "linear")[0].reject(problem) is None
    largest = weight.scale.float().abs().max() * (1 << weight.bits)
    check(backend, cases, weight, m, torch.full(weight.shape, float(largest)))


@few
@given(facts=float8_facts(), m=st.integers(0, 9))
def test_8_bit_floats_of_any_shape_are_right(
    backend: CpuBackend, cases: Any, facts: dict[str, Any], m: int
) -> None:
    weight: Float8 = cases.float8(**facts)
    check(backend, cases, weight, m, decode(weight).abs())


@pytest.mark.quick_cases(32)
@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (15, 512), (17, 768)])
def test_blocks_of_any_number_of_rows_are_right(
    backend: CpuBackend, cases: Any, type: str, n: int, k: int
) -> None:
    weight = cases.blocks(n, k, type)
    for m in (0, 1, 5, 16):
        check(backend, cases, weight, m, torch.ones(n, k))


@pytest.mark.quick_cases(32)
@pytest.mark.parametrize("type", BLOCK_TYPES)
@pytest.mark.parametrize(("n", "k"), [(1, 256), (17, 768), (64, 2048)])
def test_a_plan_knows_what_packed_blocks_take(
    backend: CpuBackend, cases: Any, type: str, n: int, k: int
) -> None:
    (linear,) = (x for x in plain_kernels(backend, "linear") if x.name == "cpu.linear")
    blocks = cases.blocks(n, k, type)
    assert facts_of("cpu").held_bytes(type, n, k) == linear.nbytes(linear.pack(blocks))
    assert facts_of("cuda:0").held_bytes(type, n, k) == gpu_pack(blocks).nbytes
    assert facts_of("cpu").held_bytes("f16", n, k) is None
    assert facts_of("cuda").held_bytes("f16", n, k) is None


def test_a_group_the_native_kernels_decline_runs_on_the_reference(cases: Any) -> None:
    ops = Ops(num_threads=1)
    for weight in (cases.affine(9, 60, 4, 24), cases.affine(9, 60, 1, 32, "zero")):
        bound = ops.linear(weight)
        assert bound.choice.name == "reference.linear"
        x = cases.activations(3, 60)
        assert cases.nmse(bound.matmul(x), x.double() @ decode(weight).double().T) < 1e-12
    ops.close()


def _broken(cases: Any) -> list[tuple[Layout, str]]:
    w: Affine = cases.affine(9, 70, 4, 32, "zeros")
    b: Blocks = cases.blocks(9, 256, "q3_k")
    f: Float8 = cases.float8(9, 70, (4, 32))
    n: Affine = cases.nested(9, 576)
    assert w.zeros is not None and n.scale_table is not None and n.super_scale is not None
    return [
        (replace(w, codes=w.codes[:, 1:]), r"affine codes: .*\[9, 35\], found .*\[9, 34\]"),
        (replace(w, codes=w.codes.short()), r"affine codes: .*found torch\.int16"),
        (replace(w, scale=w.scale[:, :2]), r"affine scale: .*\[9, 3\], found .*\[9, 2\]"),
        (replace(w, scale=w.scale.double()), r"affine scale: .*found torch\.float64"),
        (replace(w, zeros=w.zeros[:8]), r"affine zeros: .*\[9, 2\], found .*\[8, 2\]"),
        (replace(w, zeros=w.zeros.short()), r"affine zeros: expected torch\.uint8"),
        (replace(w, zeros=w.zeros.half()), r"affine zeros: .*\[9, 3\], found .*\[9, 2\]"),
        (replace(n, super_group=96), "a power of two of them, .* found 576 columns and 96"),
        (replace(n, super_group=32), "found 576 columns and 32"),
        (replace(n, scale_offset=None), "a power of two of them, and offsets"),
        (replace(n, scale_table=n.scale_table[1:]), r"scale_table: .*\[256\], found .*\[255\]"),
        (replace(n, super_scale=n.super_scale[1:]), r"super_scale: .*\[1\], found .*\[0\]"),
        (replace(n, scale=n.scale.float()), r"affine scale: expected torch\.uint8"),
        (replace(w, zeros=None, minus=w.scale[0]), r"affine minus: .*found torch\.float16 \[3\]"),
        (replace(w, minus=w.scale), "expected zeros or minus, found both"),
        (replace(w, bits=9), "expected 1 to 8 bits and groups from 1, found 9 and 32"),
        (replace(w, group=0), "found 4 and 0"),
        (replace(w, shape=(0, 70)), r"expected rows and columns, found \[0, 70\]"),
        (replace(b, data=b.data[:, :109]), r"blocks: .*\[9, 110\], found .*\[9, 109\]"),
        (replace(b, shape=(9, 200)), "found 200 columns of 'q3_k'"),
        (replace(b, type="q9_k"), "found 256 columns of 'q9_k'"),
        (replace(f, scale=f.scale[1:]), r"float8 scale: .*\[3, 3\], found .*\[2, 3\]"),
        (replace(f, values=f.values.float()), "float8 values: expected torch.float8_e4m3fn or"),
        (replace(f, block=(0, 32)), r"float8 block: expected sizes from 1, found \(0, 32\)"),
        (Dense(torch.zeros(2, 2, 2)), r"dense values: .*\[2, 2\], found .*\[2, 2, 2\]"),
        (Dense(torch.zeros(2, 2).int()), r"dense values: .*found torch\.int32"),
    ]


def test_a_layout_that_contradicts_itself_is_refused(backend: CpuBackend, cases: Any) -> None:
    kernel = plain_kernels(backend, "linear")[0]
    for weight, message in _broken(cases):
        with pytest.raises(KernelError, match=message):
            kernel.pack(weight)
