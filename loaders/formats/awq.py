"""AWQ folders: 4-bit codes in groups along the input, in the orders of three programs.

``gemm`` (nearly all files): ``P.qweight`` int32 ``[K, N / 8]``, nibble i of a word is output
``8 c + (0, 2, 4, 6, 1, 3, 5, 7)[i]``; ``P.qzeros`` int32 ``[G, N / 8]`` the same; ``P.scales``
``[G, N]``. ``gemv``: int32 ``[N, K / 8]`` and ``[N, W]``, nibbles in order, ``P.scales``
``[N, 8 W]``, W padded for its kernel. In both, ``w = scales * (code - zero)``.
``gemv_fast`` and ``llm-awq``: int16 ``[N / 4, K]``, ``P.scales`` and minus the zero points times
the scales (``P.qzeros`` or ``P.scaled_zeros``) ``[8 W, N]``, ``w = scales * code + qzeros``.

AWQ's scales of the inputs are already folded into the weights and the norms before them. Source:
AutoAWQ 0.2.9 (modules/linear/gemm.py, gemv.py, gemv_fast.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Affine
from sdk.loaders.formats.bit_streams import (
    Bytes,
    all_finite,
    packed,
    packed_matrix,
    turned_floats,
    unpacked,
)
from sdk.loaders.formats.quantized import unsupported
from sdk.loaders.formats.qweight import SCALE_TYPES, expect_order, integer
from sdk.loaders.formats.stored_layer import StoredLayer

ENDINGS = (".qweight",)
COMPANIONS = (".qzeros", ".scales", ".scaled_zeros")
MAX_GROUP = 1 << 22
BITS = 4
#: The output that each nibble of a word belongs to, lowest nibble first.
_NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
#: Orders by ``version``; some versions name a kernel, not a file format.
_VERSIONS = {
    "gemm": "gemm", "exllama": "gemm", "exllamav2": "gemm", "ipex": "gemm", "gemv": "gemv",
    "gemv_fast": "gemv_fast", "llm_awq": "gemv_fast",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Settings:
    """The contents of ``quantization_config``; None: not given, the shapes decide."""

    group: int | None
    order: str | None
    has_zeros: bool


def settings(config: Mapping[str, Any], source: str) -> Settings:
    """
    Raises:
        CheckpointError: a number is out of range.
        UnsupportedError: not 4 bits, or the order of a particular GPU kernel.
    """
    bits = integer(config, ("bits", "w_bit"), source, 1, 16)
    if bits not in (None, BITS):
        raise unsupported(source, f"AWQ with {bits} bits")
    version = config.get("version") or config.get("format")
    order = None
    if version is not None:
        order = _VERSIONS.get(str(version).lower().replace("-", "_"))
        if order is None:
            raise unsupported(source, f"AWQ of version {str(version)[:40]!r}")
    group = integer(config, ("group_size", "q_group_size"), source, -1, MAX_GROUP)
    return Settings(group, order, config.get("zero_point") is not False)


def outline(layer: StoredLayer, settings: Settings) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    _, shape, group = _sizes(layer, settings)
    return shape, "awq-w4" + (f"g{group}" if group < shape[1] else "")


def decode(layer: StoredLayer, settings: Settings) -> Affine:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    order, (rows, columns), group = _sizes(layer, settings)
    groups = -(-columns // group)
    scales = layer.read(".scales", SCALE_TYPES)
    codes = layer.read(".qweight", ("I16",) if order == "gemv_fast" else ("I32",)).numpy()
    zero, zeros, minus = 0, None, None
    if order == "gemv_fast":
        ending = ".qzeros" if layer.has(".qzeros") else ".scaled_zeros"
        added = layer.read(ending, ("F16", "F32"), layer.stored(".scales").shape)[:groups]
        if not all_finite(added):
            raise layer.fail(ending, "a zero point is not a finite number")
        minus = torch.from_numpy(np.negative(added.numpy().T.copy()))
        scales, stream = turned_floats(scales[:groups]), _one_by_one(codes)
    else:
        zero, zeros = _zeros(layer, settings, order, rows, groups)
        if order == "gemv":
            scales, stream = scales[:, :groups].contiguous(), codes.view(np.uint8)
        else:
            scales, stream = turned_floats(scales), _along_inputs(codes.view(np.uint32))
    if not all_finite(scales):
        raise layer.fail(".scales", "a scale is not a finite number")
    return Affine(
        (rows, columns),
        BITS,
        group,
        torch.from_numpy(stream),
        scales,
        zero,
        zeros,
        minus,
    )


def _sizes(layer: StoredLayer, settings: Settings) -> tuple[str, tuple[int, int], int]:
    """The order of the codes, ``(N, K)`` and the length of a group."""
    order = expect_order(layer, ("gemm", "gemv", "gemv_fast"), "awq")
    if settings.order not in (None, order):
        raise layer.fail(
            ".qweight",
            f"has the shapes of AWQ ({order}), but quantization_config has version "
            f"{settings.order}",
        )
    high, wide = layer.stored(".qweight").shape
    shape = {"gemm": (8 * wide, high), "gemv": (high, 8 * wide), "gemv_fast": (4 * high, wide)}[
        order
    ]
    layer.check_shape(".qweight", shape)
    columns = shape[1]
    if not shape[0] * columns:
        raise layer.fail(".qweight", f"holds {shape[0]} rows of {columns} columns")
    found = layer.stored(".scales").shape[1 if order == "gemv" else 0]
    group = settings.group
    if group is None and order == "gemm" and found and columns % found == 0:
        group = columns // found
    if group is None:
        raise layer.fail(
            ".scales", f"{found} groups of {columns} columns, quantization_config has no group_size"
        )
    group = columns if group == -1 else min(group, columns)
    groups = -(-columns // group)
    if found != groups if order == "gemm" else not groups <= found <= groups + 31:
        raise layer.fail(
            ".scales",
            f"{found} groups of {columns} columns, but quantization_config has group_size {group}",
        )
    if order == "gemv_fast" and columns % 64:
        raise layer.fail(".qweight", f"{columns} columns, expected a multiple of 64")
    return order, shape, group


def _zeros(
    layer: StoredLayer, settings: Settings, order: str, rows: int, groups: int
) -> tuple[int, Tensor | None]:
    """One zero point for all groups, or one per group, packed as in ``Affine``."""
    if not settings.has_zeros and not layer.has(".qzeros"):
        return 1 << (BITS - 1), None
    if order == "gemv":
        shape = (rows, layer.stored(".scales").shape[1] // 8)
        words = np.ascontiguousarray(layer.read(".qzeros", ("I32",), shape).numpy())
        zeros = unpacked(words.view(np.uint8), BITS, groups)
    else:
        words = layer.read(".qzeros", ("I32",), (groups, rows // 8)).numpy().view(np.uint32)
        zeros = np.empty((rows, groups), np.uint8)
        for i, output in enumerate(_NIBBLES):
            zeros[output::8] = ((words >> np.uint32(BITS * i)) & np.uint32(15)).T
    if bool((zeros == zeros[0, 0]).all()):
        return int(zeros[0, 0]), None
    return 0, torch.from_numpy(packed_matrix(zeros, BITS))


def _along_inputs(words: NDArray[np.uint32]) -> Bytes:
    """gemm's words ``[K, N / 8]`` -> bit streams along K, uint8 ``[N, ceil(K / 2)]``."""
    inputs, wide = words.shape
    if inputs % 2:
        words = np.pad(words, ((0, 1), (0, 0)))
    low, high = words[0::2], words[1::2]
    out = np.empty((wide * 8, len(low)), np.uint8)
    for i, output in enumerate(_NIBBLES):
        shift, mask = np.uint32(BITS * i), np.uint32(15)
        pairs = ((low >> shift) & mask) | (((high >> shift) & mask) << np.uint32(BITS))
        out[output::8] = pairs.astype(np.uint8).T
    return out


def _one_by_one(words: NDArray[np.int16]) -> Bytes:
    """gemv_fast's words ``[N / 4, K]`` -> bit streams along K, uint8 ``[N, K / 2]``.

    A run of 64 words holds 64 columns of four rows, one row after another. 32 columns of a row are
    stored as ``[4, 2, 4]``: the column is 8 times the last index, plus twice the first, plus the
    middle one.
    """
    high, columns = words.shape
    codes = unpacked(words.view(np.uint8), BITS, 4 * columns)
    codes = codes.reshape(high, columns // 64, 4, 64).transpose(0, 2, 1, 3)
    runs = codes.reshape(4 * high, columns // 32, 4, 2, 4).transpose(0, 1, 4, 2, 3)
    return packed(runs.reshape(4 * high, columns), BITS)
