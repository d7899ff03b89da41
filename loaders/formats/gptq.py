"""GPTQ folders: integers along the input, a scale and a zero point per group and output.

``P.qweight`` int32 ``[K b / 32, N]``: column n is one bit stream over the rows, lowest bit first,
for any number of bits. ``P.qzeros`` int32 ``[G, N b / 32]``: the same along N. ``P.scales``
``[G, N]``, and ``P.g_idx`` int32 ``[K]``, the group of each column, if columns were sorted by
importance (``desc_act``)::

    w[n, k] = scales[g, n] * (code[n, k] - zero[g, n])         g = g_idx[k], or k // group_size

The first version (``checkpoint_format: gptq``) stores zero points minus 1, the second stores them
unchanged. Some files are labelled with the wrong version, but only if all zero points are the
middle, 2^(b-1), which is recognized in both forms. The first version subtracts the 1 from a whole
word, so that a zero point of 0 borrows from its neighbour; here it is added to the word again.
``gptq_p`` (always for 5, 6 and 7 bits) stores 32 codes at a time in planes, see ``bit_streams``.
Sources: AutoGPTQ 0.7.1, GPTQModel 7.7 and its docs/gptq_planar.md.
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
    all_finite,
    in_order,
    packed_matrix,
    turned,
    turned_floats,
    unpacked,
    without_planes,
)
from sdk.loaders.formats.quantized import unsupported
from sdk.loaders.formats.qweight import SCALE_TYPES, expect_order, integer
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.permuted import Permuted

ENDINGS = (".qweight",)
COMPANIONS = (".qzeros", ".scales", ".g_idx")
#: The largest group allowed: no matrix has more columns.
MAX_GROUP = 1 << 22
_GPU_ORDERS = ("marlin", "bitblas")
_PLANAR_ONLY = (5, 6, 7)


@dataclass(frozen=True, slots=True)
class Settings:
    """The contents of ``quantization_config``.

    ``bits`` and ``groups`` (-1: the whole row) begin with the value of most layers, followed by the
    overrides for single layers; shapes show which one a layer has. ``symmetric``: None if it is not
    given, or not for all layers.
    """

    bits: tuple[int, ...]
    groups: tuple[int, ...]
    symmetric: bool | None
    sorted_columns: bool
    minus_one: bool
    planar: bool


@dataclass(frozen=True, slots=True)
class _Sizes:
    rows: int
    columns: int
    bits: int
    group: int
    groups: int


def settings(config: Mapping[str, Any], source: str) -> Settings:
    """
    Raises:
        CheckpointError: a number or name is missing or invalid.
        UnsupportedError: the codes are in the order of a particular GPU kernel.
    """
    given = config.get("checkpoint_format") or config.get("format") or "gptq"
    order = str(given).lower()
    if order in _GPU_ORDERS or config.get("is_marlin_format"):
        kernel = order if order in _GPU_ORDERS else "marlin"
        raise unsupported(source, f"GPTQ in the order of the GPU kernel {kernel}")
    if order not in ("gptq", "gptq_v2", "gptq_p"):
        raise CheckpointError(
            f"{source}: checkpoint_format is {str(given)[:40]!r}, expected gptq, gptq_v2 or gptq_p"
        )
    found = layer_settings(
        config, config.get("dynamic"), source, (order == "gptq", order[-1] == "p")
    )
    wide = [bits for bits in found.bits if bits in _PLANAR_ONLY]
    if wide and not found.planar:
        raise CheckpointError(
            f"{source}: {wide[0]} bits with checkpoint_format {order}, expected gptq_p, the only "
            "format with such codes"
        )
    return found


def layer_settings(
    config: Mapping[str, Any], overrides: Any, source: str, version: tuple[bool, bool]
) -> Settings:
    """The numbers of a config, and the ``overrides`` for single layers by pattern.

    Args:
        version: whether 1 was subtracted from zero points, and whether codes are in planes.
    """
    bits = integer(config, ("bits", "w_bit"), source, 2, 8)
    group = integer(config, ("group_size", "q_group_size"), source, -1, MAX_GROUP)
    if bits is None or group is None:
        raise CheckpointError(
            f"{source}: {'bits' if bits is None else 'group_size'} is missing in "
            "quantization_config (or quantize_config.json)"
        )
    symmetric = config.get("sym")
    all_bits, groups = [bits], [group]
    if overrides is not None and not isinstance(overrides, Mapping):
        raise CheckpointError(
            f"{source}: the overrides for single layers are {str(overrides)[:80]}, expected an "
            "object"
        )
    for own in (overrides or {}).values():
        if not isinstance(own, Mapping) or own.get("bits") in (16, 32):
            continue  # a layer that is not quantized
        all_bits.append(integer(own, ("bits", "w_bit"), source, 2, 8) or bits)
        groups.append(integer(own, ("group_size",), source, -1, MAX_GROUP) or group)
        if own.get("sym", symmetric) != symmetric:
            symmetric = None
    return Settings(
        tuple(dict.fromkeys(all_bits)),
        tuple(dict.fromkeys(groups)),
        symmetric if isinstance(symmetric, bool) else None,
        bool(config.get("desc_act")),
        *version,
    )


def outline(layer: StoredLayer, settings: Settings) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    sizes = _sizes(layer, settings)
    group = "" if sizes.groups == 1 else f"g{sizes.group}"
    return (sizes.rows, sizes.columns), f"gptq-w{sizes.bits}{group}"


def decode(layer: StoredLayer, settings: Settings) -> Affine | Permuted:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    sizes = _sizes(layer, settings)
    order = _order(layer, sizes, settings)
    scales = layer.read(".scales", SCALE_TYPES, (sizes.groups, sizes.rows))
    if not all_finite(scales):
        raise layer.fail(".scales", "a scale is not a finite number")
    zero, zeros = _zeros(layer, sizes, settings)
    codes = turned(layer.read(".qweight", ("I32",)))
    if settings.planar:
        codes = without_planes(codes, sizes.bits)
    if order is not None:
        codes = in_order(codes, sizes.bits, order)
    width = -(-sizes.columns * sizes.bits // 8)
    weight = Affine(
        (sizes.rows, sizes.columns),
        sizes.bits,
        sizes.group,
        torch.from_numpy(codes[:, :width]),
        turned_floats(scales),
        zero,
        zeros,
    )
    if order is None:
        return weight
    return Permuted(weight, torch.from_numpy(order.astype(np.int32)))


def _sizes(layer: StoredLayer, settings: Settings) -> _Sizes:
    expect_order(layer, ("gptq",), "gptq")
    words, rows = layer.stored(".qweight").shape
    groups = layer.stored(".scales").shape[0]
    if layer.shape is not None:
        columns = layer.shape[1]
    elif layer.has(".g_idx"):
        columns = layer.stored(".g_idx").shape[0]
    else:
        columns = words * 32 // settings.bits[0]
    layer.check_shape(".qweight", (rows, columns))
    if not rows * columns * groups:
        raise layer.fail(".qweight", f"{rows} rows of {columns} columns in {groups} groups")
    bits = [b for b in settings.bits if -(-columns * b // 32) == words]
    if not bits:
        raise layer.fail(
            ".qweight",
            f"{words} words hold {columns} columns at {words * 32 / max(columns, 1):.3g} bits, "
            f"but quantization_config has bits {' or '.join(map(str, settings.bits))}",
        )
    given = [columns if g == -1 else g for g in settings.groups]
    group = [g for g in given if -(-columns // g) == groups]
    if not group:
        raise layer.fail(
            ".scales",
            f"{groups} groups of {columns} columns, but quantization_config has group_size "
            f"{' or '.join(map(str, settings.groups))}",
        )
    if settings.planar and (rows % 32 or columns % 32):
        raise layer.fail(".qweight", f"[{rows}, {columns}] in planes, expected multiples of 32")
    return _Sizes(rows, columns, bits[0], min(group[0], columns), groups)


def _order(layer: StoredLayer, sizes: _Sizes, settings: Settings) -> NDArray[np.intp] | None:
    """The order that sorts the columns by group; None if they are already sorted."""
    if not layer.has(".g_idx"):
        if settings.sorted_columns and sizes.groups > 1:
            raise layer.fail(
                ".g_idx", "missing, but quantization_config has desc_act: the groups are unknown"
            )
        return None
    groups = layer.read(".g_idx", ("I32", "I64"), (sizes.columns,)).numpy()
    low, high = int(groups.min()), int(groups.max())
    if low < 0 or high >= sizes.groups:
        bad = low if low < 0 else high
        raise layer.fail(".g_idx", f"group {bad}, expected 0 to {sizes.groups - 1}")
    runs = np.arange(sizes.columns) // sizes.group
    if np.array_equal(groups, runs):
        return None
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], runs):
        largest = int(np.bincount(groups).max())
        raise UnsupportedError(
            f"{layer.fail('.g_idx', f'groups of up to {largest} columns')}, "
            f"expected {sizes.group} in each: groups of different sizes are not supported"
        )
    return order


def _zeros(layer: StoredLayer, sizes: _Sizes, settings: Settings) -> tuple[int, Tensor | None]:
    """One zero point for all groups, or one per group, packed as in ``Affine``."""
    bits, middle = sizes.bits, 1 << (sizes.bits - 1)
    width = -(-sizes.rows * bits // 32)
    words = layer.read(".qzeros", ("I32",), (sizes.groups, width)).numpy()
    stored = _fields(words, sizes, settings)
    uniform = bool((stored == stored[0, 0]).all())
    if settings.symmetric or (uniform and int(stored[0, 0]) in (middle - 1, middle)):
        if not uniform:
            layer.warn("sym is true, but the zero points differ: the middle is used for all")
        return middle, None
    if settings.minus_one:
        last = words.view(np.uint32) >> np.uint32(32 - 2 * bits)
        if bits in (2, 4, 8) and bool((last == (1 << 2 * bits) - 1).any()):
            layer.warn(
                "zero points end in ones, as AutoGPTQ wrote them if one was 0: its neighbours "
                "are lost; quantize the model again (AutoGPTQ issues 325 and 354)"
            )
        if bits == 3:  # no program subtracts the 1 from words that share a field
            stored = (stored + np.uint8(1)) & np.uint8(7)
        else:
            ones = np.uint32(sum(1 << i for i in range(0, 32, bits)))
            stored = _fields(words.view(np.uint32) + ones, sizes, settings)
        if bool((stored == stored[0, 0]).all()):
            return int(stored[0, 0]), None
    elif uniform:
        return int(stored[0, 0]), None
    return 0, torch.from_numpy(packed_matrix(np.ascontiguousarray(stored.T), bits))


def _fields(words: NDArray[Any], sizes: _Sizes, settings: Settings) -> NDArray[np.uint8]:
    """Words ``[G, N b / 32]`` -> uint8 ``[G, N]``."""
    streams = np.ascontiguousarray(words).view(np.uint8)
    if settings.planar:
        streams = without_planes(streams, sizes.bits)
    return unpacked(streams, sizes.bits, sizes.rows)
