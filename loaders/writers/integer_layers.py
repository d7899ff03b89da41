"""Packed layers as tensors of GPTQ, AWQ, HQQ and compressed-tensors: the inverse of the readers.

``loaders/formats`` explains each tensor. Codes are bit streams along K in memory as in
GPTQ and compressed-tensors, so that writing them is a view, or a transposition, of words.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.kernels.weights.layouts import Affine, Float8, Layout
from sdk.loaders.formats.bit_streams import packed_matrix, unpacked
from sdk.quant.errors import QuantizationError
from sdk.quant.permuted import Permuted

#: The output, of eight neighbouring ones, in each nibble of an AWQ word.
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
#: HQQ: the name of a packing and the codes per word.
_HQQ_PACKINGS = {8: ("8bit_u8", 1), 4: ("4bit_u8", 2), 2: ("2bit_u8", 4), 3: ("3bit_32", 10)}
_LOST = "expected columns in their original order: the format cannot store another one"


def gptq_tensors(weight: Layout | Permuted) -> dict[str, Tensor]:
    """``.qweight``, ``.qzeros``, ``.scales`` and ``.g_idx``, zero points as in its version 2."""
    order = None
    if isinstance(weight, Permuted):
        order = weight.order.long()
        weight = weight.layout
    layout = _affine(weight)
    columns = layout.shape[1]
    codes = layout.codes
    groups = torch.arange(columns, dtype=torch.int32) // layout.group
    if order is not None:
        back = torch.argsort(order)
        whole = unpacked(codes.numpy(), layout.bits, columns)[:, back.numpy()]
        codes = torch.from_numpy(packed_matrix(whole, layout.bits))
        groups = groups[back]
    return {
        ".qweight": _words(codes).t().contiguous(),
        ".qzeros": _words(_packed(_zeros(layout).T, layout.bits)),
        ".scales": layout.scale.t().contiguous(),
        ".g_idx": groups,
    }


def awq_tensors(weight: Layout | Permuted) -> dict[str, Tensor]:
    """``.qweight``, ``.qzeros`` and ``.scales`` of the order called gemm.

    :raises QuantizationError: not 4 bits, or a number of outputs that is not a multiple of 8.
    """
    layout = _affine(weight)
    rows, columns = layout.shape
    if rows % 8 or layout.bits != 4:
        raise QuantizationError(
            f"AWQ: expected 4 bits and a multiple of 8 outputs, found {layout.bits} bits and "
            f"{rows} outputs"
        )
    codes = unpacked(layout.codes.numpy(), 4, columns)
    return {
        ".qweight": _awq_words(codes.T),
        ".qzeros": _awq_words(_zeros(layout).T),
        ".scales": layout.scale.t().contiguous(),
    }


def hqq_tensors(weight: Layout | Permuted) -> dict[str, Tensor]:
    """HQQ: ``.W_q`` with ``.scale``, ``.zero`` and their parameters, groups along axis 1."""
    assert isinstance(weight, Affine)
    rows, columns = weight.shape
    if weight.minus is None:  # the embedding
        zero = torch.from_numpy(_zeros(weight)).to(torch.float32)
    else:
        zero = weight.minus.to(torch.float32) / weight.scale.to(torch.float32)
    packing, per_word = _HQQ_PACKINGS[weight.bits]
    groups = unpacked(weight.codes.numpy(), weight.bits, columns).reshape(-1, weight.group)
    kind = np.int32 if weight.bits == 3 else np.uint8
    short = -len(groups) % per_word
    runs = np.pad(groups, ((0, short), (0, 0))).reshape(per_word, -1, weight.group).astype(kind)
    words = np.zeros(runs.shape[1:], kind)
    for i, run in enumerate(runs):  # the first run of groups is in the highest bits
        words |= run << kind(weight.bits * (per_word - 1 - i))
    found = {
        ".W_q": torch.from_numpy(words),
        ".scale": weight.scale.reshape(-1, 1),
        ".zero": zero.reshape(-1, 1),
        ".shape": torch.tensor([rows, columns], dtype=torch.int64),
        ".packing": torch.tensor(list(packing.encode()), dtype=torch.uint8),
    }
    numbers = {".nbits": weight.bits, ".group_size": weight.group, ".axis": 1}
    return found | {ending: torch.tensor(number) for ending, number in numbers.items()}


def packed_tensors(weight: Layout | Permuted) -> dict[str, Tensor]:
    """compressed-tensors' pack-quantized: ``.weight_packed``, ``.weight_scale``, ..."""
    layout = _affine(weight)
    found = {
        ".weight_packed": _words(layout.codes),
        ".weight_scale": layout.scale,
        ".weight_shape": torch.tensor(layout.shape, dtype=torch.int64),
    }
    if layout.zeros is not None:
        along_outputs = _words(_packed(_zeros(layout).T, layout.bits))
        found[".weight_zero_point"] = along_outputs.t().contiguous()
    return found


def int8_tensors(weight: Layout | Permuted) -> dict[str, Tensor]:
    """compressed-tensors' int-quantized: ``.weight`` int8 and ``.weight_scale``."""
    layout = _affine(weight)
    assert layout.bits == 8 and layout.zeros is None and layout.zero == 128
    signed = (layout.codes.numpy() ^ np.uint8(128)).view(np.int8)  # 0 .. 255 to -128 .. 127
    return {".weight": torch.from_numpy(signed), ".weight_scale": layout.scale}


def float8_tensors(weight: Layout | Permuted) -> dict[str, Tensor]:
    """compressed-tensors' float-quantized: ``.weight`` and ``.weight_scale``."""
    assert isinstance(weight, Float8)
    per_tensor = weight.scale.numel() == 1 and weight.block == weight.shape
    scale = weight.scale.reshape(1) if per_tensor else weight.scale
    return {".weight": weight.values, ".weight_scale": scale}


def float4_tensors(weight: Layout | Permuted) -> dict[str, Tensor]:
    """compressed-tensors' nvfp4- and mxfp4-pack-quantized: ``.weight_packed``, its scales."""
    assert isinstance(weight, Affine) and weight.table is not None
    found = {".weight_packed": weight.codes, ".weight_scale": weight.scale}
    if weight.super_scale is None:
        return {**found, ".weight_scale": weight.scale.view(torch.uint8)}
    return found | {".weight_global_scale": 1 / weight.super_scale[0]}


def _affine(weight: Layout | Permuted) -> Affine:
    if isinstance(weight, Permuted):
        raise QuantizationError(_LOST)
    assert isinstance(weight, Affine) and weight.minus is None and weight.table is None
    return weight


def _zeros(layout: Affine) -> NDArray[np.uint8]:
    """Zero points of all groups, ``[N, G]``."""
    if layout.zeros is not None:
        return unpacked(layout.zeros.numpy(), layout.bits, layout.scale.shape[1])
    return np.full(tuple(layout.scale.shape), layout.zero, np.uint8)


def _packed(codes: NDArray[np.uint8], bits: int) -> Tensor:
    return torch.from_numpy(packed_matrix(np.ascontiguousarray(codes), bits))


def _words(streams: Tensor) -> Tensor:
    """Bytes ``[M, n]`` as int32 ``[M, ceil(n / 4)]``."""
    padded = np.pad(streams.numpy(), ((0, 0), (0, -streams.shape[1] % 4)))
    return torch.from_numpy(np.ascontiguousarray(padded).view(np.int32))


def _awq_words(codes: NDArray[np.uint8]) -> Tensor:
    """Codes ``[M, N]`` below 16 to int32 ``[M, N / 8]``."""
    eights = np.ascontiguousarray(codes).reshape(len(codes), -1, 8)[:, :, _AWQ_ORDER]
    words = np.zeros(eights.shape[:2], np.uint32)
    for i in range(8):
        words |= eights[:, :, i].astype(np.uint32) << np.uint32(4 * i)
    return torch.from_numpy(words.view(np.int32))
