"""Quantizes the matrices of one layer by the method of a scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from sdk.kernels.cpu.weight_rounding import RowRounder, pieces_of
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.reference.decode import decode
from sdk.kernels.weights.layouts import ActivationScheme, Affine, Blocks, Layout, Pieces
from sdk.quant.calibration import InputStatistics
from sdk.quant.errors import QuantizationError
from sdk.quant.methods.float4 import mxfp4, nvfp4
from sdk.quant.methods.float8 import to_float8
from sdk.quant.methods.gguf_blocks import one_scale_blocks
from sdk.quant.methods.gptq import gptq, gptq_blocks, gptq_rows
from sdk.quant.methods.hqq import hqq
from sdk.quant.methods.integers import round_rows, round_to_nearest
from sdk.quant.methods.k_quants import K_QUANTS, k_blocks
from sdk.quant.methods.native import rounded, rounded_integers
from sdk.quant.permuted import Permuted
from sdk.quant.scheme import Scheme
from sdk.quant.spec import QuantSpec
from sdk.quant.unread import float_pieces
from sdk.quant.weight import Weight

Packed = Layout | Permuted

#: Rows of an embedding that GPTQ processes at a time: 65 MB in float32 at 2048 columns.
ROWS_AT_ONCE = 8192


def check_finite(name: str, weight: Tensor) -> None:
    """:raises QuantizationError: the matrix ``name`` holds an infinity or NaN."""
    if not bool(weight.isfinite().all()):
        bad = int((~weight.isfinite()).sum())
        raise QuantizationError(f"{name}: expected finite numbers, found {bad} that are not")


def quantize_without_data(name: str, weight: Tensor, scheme: Scheme) -> Layout:
    """``weight``, float32 ``[N, K]``, quantized by RTN or HQQ, or to 4- or 8-bit floats.

    :raises QuantizationError: values are not finite, or rows do not divide into groups.
    """
    return quantize_pieces(name, pieces_of(weight), scheme, RowRounder())


def quantize_pieces(name: str, pieces: Pieces, scheme: Scheme, rounder: RowRounder) -> Layout:
    """:func:`quantize_without_data` of ``Dense`` rows that are read when they are rounded.

    Raises what ``pieces`` raises.
    """
    scheme.check(name, pieces.shape[1])
    found = rounded(pieces, scheme, rounder)
    if found is None:
        return by_reference(name, decode(pieces.whole()), scheme)
    if scheme.spec.activation_bits == 8:
        assert isinstance(found, Affine)
        return replace(found, inputs=ActivationScheme("int"))
    return found


def by_reference(name: str, weight: Tensor, scheme: Scheme) -> Layout:
    """What :func:`quantize_without_data` is defined to return, in torch."""
    check_finite(name, weight)
    if scheme.method == "fp8":
        # FP8 files usually ask for FP8 activations too. Here activations stay in float, because
        # SmolLM2's divergence from the original is 0.036 with FP8 activations, 0.020 without.
        return to_float8(weight, scheme.share)
    if scheme.method == "float4":
        return mxfp4(weight) if scheme.text == "mxfp4" else nvfp4(weight)
    if scheme.method == "hqq":
        return hqq(weight, scheme.spec)
    inputs = ActivationScheme("int") if scheme.spec.activation_bits == 8 else None
    return replace(round_to_nearest(weight, scheme.spec), inputs=inputs)


def quantize_rows(
    name: str,
    weight: Weight,
    spec: QuantSpec,
    gram: Tensor | None = None,
    rounder: RowRounder | None = None,
) -> Layout:
    """The embedding or head in integers, some rows at a time because it is the largest matrix.

    Uses GPTQ if the Gram matrix of its inputs is given, else rounds to nearest.

    :raises QuantizationError: values are not finite.
    """
    pieces = float_pieces(weight) if gram is None else None
    if pieces is not None:
        found = rounded_integers(pieces, spec, rounder or RowRounder())
        if found is not None:
            return found

    def values(start: int, end: int) -> Tensor:
        found = weight.narrow("out", start, end - start).dequantize()
        check_finite(name, found)
        return found

    if gram is None:
        return round_rows(values, weight.shape, spec)
    count = weight.shape[0]
    starts = range(0, count, ROWS_AT_ONCE)
    parts = (values(start, min(start + ROWS_AT_ONCE, count)) for start in starts)
    return gptq_rows(parts, gram, spec)


def to_blocks(name: str, weight: Tensor, kind: str, mean_square: Tensor | None = None) -> Blocks:
    """``weight``, float32 ``[N, K]``, in GGUF blocks of type ``kind``.

    ``mean_square`` of the layer's inputs, float32 ``[K]``, weights the errors.

    :raises QuantizationError: values are not finite, or rows are not whole blocks.
    """
    check_finite(name, weight)
    try:
        if kind in K_QUANTS:
            return k_blocks(weight, kind, mean_square)
        return one_scale_blocks(weight, kind, mean_square)
    except QuantizationError as error:
        raise QuantizationError(f"{name}: {error}") from error


def quantize_joined(
    weights: Mapping[str, Tensor],
    inputs: InputStatistics,
    scheme: Scheme,
    kind: QuantSpec,
) -> dict[str, Packed]:
    """Matrices ``[N_i, K]`` that read the same input, quantized together by GPTQ.

    The walk over the columns depends on the inputs alone, so joined matrices need only one.
    ``kind``: integers or a GGUF block type.

    :raises QuantizationError: as :func:`sdk.quant.methods.gptq.gptq`, with the matrices' names.
    """
    for name, weight in weights.items():
        check_finite(name, weight)
        scheme.check(name, weight.shape[1])
    whole = torch.cat(list(weights.values()))
    found: Packed
    try:
        if kind.kind == "int":
            found = gptq(whole, inputs.gram, kind, static=not scheme.sorted_columns)
        else:
            found = gptq_blocks(whole, inputs.gram, kind.name)
    except QuantizationError as error:
        raise QuantizationError(f"{' and '.join(weights)}: {error}") from error
    parts: dict[str, Packed] = {}
    start = 0
    for name, weight in weights.items():
        end = start + weight.shape[0]
        parts[name] = _rows(found, start, end)
        start = end
    return parts


def _rows(whole: Packed, start: int, end: int) -> Packed:
    from sdk.kernels.reference.linear import slice_rows

    if isinstance(whole, Permuted):
        return Permuted(slice_rows(whole.layout, start, end), whole.order)
    return slice_rows(whole, start, end)
