"""Rounding without data by the native kernels, some rows at a time and in several threads.

The results have the bits of the other modules here, which are the reference. What kernels do not
round (see :meth:`RowRounder.reject`), and matrices whose scales do not fit into float16, are left
to those.
"""

from __future__ import annotations

from dataclasses import replace

from sdk.kernels.cpu.weight_rounding import Method, RoundingRule, RowRounder
from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.layouts import E2M1, Affine, Float8, Layout, Pieces
from sdk.quant.methods import float4, float8, hqq
from sdk.quant.methods.integers import (
    LARGEST_SCALE,
    LEAST_OF_HALVES,
    Steps,
    check_integers,
    group_of,
    packed_affine,
)
from sdk.quant.scheme import Scheme
from sdk.quant.spec import QuantSpec


def rounded(pieces: Pieces, scheme: Scheme, rounder: RowRounder) -> Layout | None:
    """The matrix by a scheme without data; ``None``: the reference must do it.

    Raises what ``pieces`` raises. :raises QuantizationError: an unknown type.
    """
    if scheme.method == "fp8":
        return _float8(pieces, scheme.share, rounder)
    if scheme.method == "float4":
        return _float4(pieces, scheme.text == "nvfp4", rounder)
    return rounded_integers(pieces, scheme.spec, rounder, zeros_fitted=scheme.method == "hqq")


def rounded_integers(
    pieces: Pieces, spec: QuantSpec, rounder: RowRounder, *, zeros_fitted: bool = False
) -> Affine | None:
    """The matrix rounded to nearest, or by HQQ (``zeros_fitted``)."""
    check_integers(spec)
    rows, columns = pieces.shape
    group = group_of(spec, columns)
    method = Method.HQQ if zeros_fitted else Method.INTEGERS
    rule = RoundingRule(method, spec.bits, group, symmetric=spec.symmetric)
    if rounder.reject(pieces, rule):
        return None
    grid = (rows, -(-columns // group))
    codes = rounder.codes(rows, -(-columns * spec.bits // 8))
    scale, zero = torch.empty(grid, dtype=torch.float16), torch.empty(grid)
    largest = rounder.run(pieces, rule, codes, scale, zero)
    if largest is None or not LEAST_OF_HALVES <= largest <= LARGEST_SCALE:
        return None
    if zeros_fitted:
        return hqq.as_stored(codes, scale, zero, spec, columns)
    return packed_affine(codes, Steps(scale.to(torch.float32), zero), spec, columns)


def _largest(pieces: Pieces, rounder: RowRounder) -> float | None:
    return rounder.run(pieces, RoundingRule(Method.LARGEST, 8, pieces.shape[1]))


def _float8(pieces: Pieces, share: str, rounder: RowRounder) -> Float8 | None:
    rows, columns = pieces.shape
    block = float8.block_of(share, pieces.shape)
    height, wide = (1, columns) if share == "tensor" else block
    rule = RoundingRule(Method.E4M3, 8, wide, height)
    if rounder.reject(pieces, rule):
        return None
    values = rounder.codes(rows, columns)
    scale = torch.empty(-(-rows // block[0]), -(-columns // block[1]))
    largest: float | None = 0.0
    if share == "tensor":
        largest = _largest(pieces, rounder)
        if not largest:
            return None
        rule = replace(rule, factor=largest)
        scale.fill_(largest).div_(float8.LARGEST)
    if rounder.run(pieces, rule, values, scale) is None:
        return None
    return Float8(values.view(torch.float8_e4m3fn), scale, block)


def _float4(pieces: Pieces, nested: bool, rounder: RowRounder) -> Affine | None:
    rows, columns = pieces.shape
    group = float4.NV_GROUP if nested else float4.MX_GROUP
    rule = RoundingRule(Method.E2M1, 4, group)
    if rounder.reject(pieces, rule):
        return None
    factor = 0.0
    if nested:
        largest = _largest(pieces, rounder)
        if largest is None:
            return None
        factor = float4.factor_of(largest)
        rule = replace(rule, factor=factor)
    codes = rounder.codes(rows, columns // 2)
    scale = torch.empty(rows, columns // group, dtype=torch.uint8)
    if rounder.run(pieces, rule, codes, scale) is None:
        return None
    table = torch.tensor(E2M1)
    if not nested:
        stored = scale.view(torch.float8_e8m0fnu)
        return Affine((rows, columns), 4, group, codes, stored, table=table, name="mxfp4")
    return float4.nested(codes, scale.view(torch.float8_e4m3fn), factor, columns)
