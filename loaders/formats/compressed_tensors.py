"""compressed-tensors (``quant_method: compressed-tensors``), as llm-compressor writes them.

====================== ============================================================================
``P.weight_packed``    int32 ``[N, ceil(K * bits / 32)]``: integers plus ``2 ** (bits - 1)``, one
                       bit stream per row; or uint8 ``[N, K / 2]``: 4-bit floats, low half first
``P.weight``           int8, or 8-bit floats ``[N, K]``
``P.weight_scale``     per tensor, row, group or block; bytes 2^(e - 127) in the MX formats
``weight_zero_point``  int8 ``[N, groups]``, or int32, packed along the rows like the weights
``weight_global_scale`` of NVFP4: divides the scales
``P.weight_g_idx``     the group of every column; -1: not used
``P.input_scale``      float ``[1]``, if activations have a static scale; ``input_zero_point``
                       int8 ``[1]``, if not symmetric; NVFP4 has an ``input_global_scale``
====================== ============================================================================

A layer's format is determined by which of these tensors it has. A group of ``config_groups`` must
describe it. The layers that a group applies to (``targets``) matter only if groups of one kind
quantize activations differently. Source: the compressed-tensors 0.19 package. Scales keep the
file's type and are never rounded.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.weights.layouts import Affine, Layout
from sdk.loaders.formats import scales
from sdk.loaders.formats.activations import ActivationConfig, activation_config, with_activations
from sdk.loaders.formats.bit_streams import Bytes, in_order, packed_matrix, unpacked
from sdk.loaders.formats.float4 import mxfp4, nvfp4
from sdk.loaders.formats.integers import signed_matrix
from sdk.loaders.formats.scales import (
    EXPONENTS,
    FLOAT8,
    float8,
    floats,
    matrix,
    number,
    numerics,
    row_groups,
)
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.permuted import Permuted

logger = logging.getLogger("sdk")

ENDINGS = (".weight_packed", ".weight_scale")
_INPUTS = (".input_scale", ".input_zero_point", ".input_global_scale")
COMPANIONS = (
    *(".weight", ".weight_shape", ".weight_zero_point", ".weight_global_scale", ".weight_g_idx"),
    *_INPUTS,
)
_LONGEST = 200
#: Syntax of targets that name many layers: ``re:.*(gate|up)_proj$``.
_PATTERN = re.compile(r"[\w.*+?|()\[\]\\$^-]{1,200}")
_INT32, _INT8, _BYTES = ("I32",), ("I8",), ("U8",)

_FORMATS = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision"),
)


@dataclass(frozen=True, slots=True)
class Scheme:
    """One entry of ``config_groups``: its weights, activations and layers.

    ``group`` is a number of columns and ``block`` rows and columns, if the entry has them."""

    kind: str
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    inputs: ActivationConfig | None = None
    targets: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.bits}-bit {self.kind}"


@dataclass(frozen=True, slots=True)
class Settings:
    """The entries of ``config_groups``; without any, the tensors alone decide."""

    schemes: tuple[Scheme, ...] = ()

    def bits_of(self, kind: str) -> list[int]:
        return sorted({scheme.bits for scheme in self.schemes if scheme.kind == kind})

    def inputs_of(self, name: str, kind: str, bits: int) -> ActivationConfig | None:
        """How the layer's activations are quantized, from the entries that describe its weights."""
        said = [s for s in self.schemes if (s.kind, s.bits) == (kind, bits)]
        if len({s.inputs for s in said}) > 1:
            said = [s for s in said if any(_is_target(name, t) for t in s.targets)] or said
        return said[0].inputs if said else None

    def groups_of(self, columns: int) -> set[int]:
        """Possible numbers of columns per scale; the whole row if no entry has groups."""
        return {scheme.group or columns for scheme in self.schemes}

    def blocks_of(self, columns: int) -> list[tuple[int, int]]:
        groups = [(1, size) for size in sorted(self.groups_of(columns))]
        return [scheme.block for scheme in self.schemes if scheme.block is not None] + groups


def settings(config: Mapping[str, Any], source: str) -> Settings:
    """
    Raises:
        CheckpointError: a field is invalid.
        UnsupportedError: sparse or rotated weights, or an unknown format.
    """
    _check_plain(config, source)
    status = config.get("quantization_status", "compressed")
    if status != "compressed":
        raise UnsupportedError(
            f"{source}: quantization_status is {str(status)[:80]!r}, expected 'compressed'; save "
            "the model with save_compressed=True"
        )
    _check_format(config.get("format"), source)
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping):
        raise CheckpointError(f"{source}: config_groups is {str(groups)[:80]}, expected an object")
    schemes = [_scheme(group, f"{source}: config_groups.{name}") for name, group in groups.items()]
    rounding = [name for name, group in groups.items() if group.get("output_activations")]
    if rounding:
        logger.warning(
            "%s: output_activations of %d config_groups, such as %.80s, have no effect: outputs of "
            "layers stay in float",
            source,
            len(rounding),
            rounding[0],
        )
    return Settings(tuple(scheme for scheme in schemes if scheme is not None))


def _check_plain(config: Mapping[str, Any], source: str) -> None:
    """:raises UnsupportedError: the weights are sparse or rotated."""
    for field, key, plain in (
        ("sparsity_config", "format", (None, "dense")),
        ("transform_config", "config_groups", (None, {})),
    ):
        value = config.get(field) or {}
        if not isinstance(value, Mapping):
            raise CheckpointError(f"{source}: {field} is {str(value)[:80]}, expected an object")
        if value.get(key) not in plain:
            raise UnsupportedError(
                f"{source}: {field} has {key} {str(value[key])[:80]}: sparse and rotated weights "
                "are not supported; use a checkpoint that is only quantized"
            )


def _check_format(name: Any, source: str) -> None:
    if name is not None and name not in _FORMATS:
        raise UnsupportedError(
            f"{source}: the compressed-tensors format {str(name)[:80]!r} is not supported, "
            f"expected one of {', '.join(_FORMATS)}"
        )


def _scheme(group: Any, source: str) -> Scheme | None:
    if not isinstance(group, Mapping):
        raise CheckpointError(f"{source} is {str(group)[:80]}, expected an object")
    _check_format(group.get("format"), source)
    weights = group.get("weights")
    if weights is None:
        return None
    if not isinstance(weights, Mapping):
        raise CheckpointError(f"{source}.weights is {str(weights)[:80]}, expected an object")
    bits, kind = weights.get("num_bits", 8), weights.get("type", "int")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise CheckpointError(f"{source}.weights.num_bits is {bits!r}, expected 1 to 8")
    if kind not in ("int", "float"):
        raise CheckpointError(f"{source}.weights.type is {str(kind)[:80]!r}, expected int or float")
    size = weights.get("group_size")
    if size is not None and (type(size) is not int or (size < 1 and size != -1)):
        raise CheckpointError(
            f"{source}.weights.group_size is {str(size)[:80]}, expected 1 or more"
        )
    targets = group.get("targets")
    return Scheme(
        kind,
        bits,
        None if size == -1 else size,
        _block(weights.get("block_structure"), source),
        activation_config(group.get("input_activations"), f"{source}.input_activations"),
        tuple(str(target)[:1000] for target in targets) if isinstance(targets, list) else (),
    )


def _is_target(name: str, target: str) -> bool:
    """Whether ``target`` is the layer's name, or a pattern ``re:...`` for the beginning of names.

    Patterns that could take long, with repeated groups or many repetitions, match nothing.
    """
    if not target.startswith("re:"):
        return name == target
    pattern = target.removeprefix("re:")
    long = len(name) > _LONGEST or len(re.findall(r"[*+]", pattern)) > 3
    if long or not _PATTERN.fullmatch(pattern) or re.search(r"\)[*+?]", pattern):
        return False
    try:
        return re.match(pattern, name) is not None
    except re.error:
        return False


def _block(value: Any, source: str) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, str):  # "128x128" in files from before 2025
        value = [int(size) for size in value.split("x") if size.isdecimal() and len(size) < 9]
    sound = isinstance(value, list) and len(value) == 2
    if not sound or any(type(size) is not int or size < 1 for size in value):
        raise CheckpointError(
            f"{source}.weights.block_structure is {str(value)[:80]}, expected [rows, columns]"
        )
    return value[0], value[1]


def outline(layer: StoredLayer, settings: Settings) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    if not layer.has(".weight_packed"):
        kind = layer.stored(".weight").dtype
        shape = scales.outline(layer, ".weight", ("I8", *FLOAT8))
        if kind == "I8":
            bits = (settings.bits_of("int") or [8])[-1]
            return shape, numerics(layer, ".weight_scale", bits, shape[1])
        powers = layer.stored(".weight_scale").dtype in EXPONENTS
        return shape, "mxfp8" if powers else FLOAT8[kind]
    rows, size = scales.outline(layer, ".weight_packed", ("I32", "U8"))
    if layer.stored(".weight_packed").dtype == "U8":
        return (rows, size * 2), "nvfp4" if layer.has(".weight_global_scale") else "mxfp4"
    shape = layer.shape or _stored_shape(layer) or (rows, size * 32 // 4)
    bits, _ = _width(layer, size, shape[1], settings)
    return shape, numerics(layer, ".weight_scale", bits, shape[1])


def decode(layer: StoredLayer, settings: Settings) -> Layout | Permuted:
    """The layout of a layer.

    Raises:
        CheckpointError: its tensors disagree with one another or with the settings.
    """
    for ending in _INPUTS:
        layer.skip(ending)
    packed, kind = _weights(layer, settings)
    layout = packed.layout if isinstance(packed, Permuted) else packed
    bits = layout.bits if isinstance(layout, Affine) else 8
    inputs = settings.inputs_of(layer.name, kind, bits)
    return with_activations(layer, packed, None if inputs is None else inputs.of(layer))


def _weights(layer: StoredLayer, settings: Settings) -> tuple[Layout | Permuted, str]:
    """The layout of a layer, and the kind of its codes, ``int`` or ``float``."""
    if not layer.has(".weight_packed"):
        return _unpacked(layer, settings)
    shape = scales.outline(layer, ".weight_packed", ("I32", "U8"))
    if layer.stored(".weight_packed").dtype == "I32":
        return _integers(layer, settings), "int"
    _expect(layer, ".weight_packed", settings, "float", 4)
    layer.check_shape(".weight_packed", (shape[0], shape[1] * 2))
    packed = layer.read(".weight_packed", _BYTES)
    if not layer.has(".weight_global_scale"):
        return mxfp4(layer, packed, ".weight_scale"), "float"
    factor = number(layer, ".weight_global_scale")
    if factor <= 0:
        raise layer.fail(".weight_global_scale", f"is {factor}, expected a positive number")
    return nvfp4(layer, packed, ".weight_scale", 1 / factor), "float"


def _unpacked(layer: StoredLayer, settings: Settings) -> tuple[Layout, str]:
    """One weight per byte, an integer or an 8-bit float."""
    values = matrix(layer, ".weight", ("I8", *FLOAT8))
    if values.dtype != torch.int8:
        _expect(layer, ".weight", settings, "float", 8)
        blocks = settings.blocks_of(values.shape[1])
        return float8(layer, values, ".weight", ".weight_scale", blocks), "float"
    shape = (values.shape[0], values.shape[1])
    scale, group = row_groups(
        layer, ".weight_scale", floats(layer, ".weight_scale"), shape, settings.groups_of(shape[1])
    )
    points = None
    if layer.has(".weight_zero_point"):
        points = layer.read(".weight_zero_point", _INT8)
    widths = settings.bits_of("int")
    layout = signed_matrix(layer, ".weight", values, scale, group, points, widths)
    _expect(layer, ".weight", settings, "int", layout.bits)
    return layout, "int"


def _expect(layer: StoredLayer, ending: str, settings: Settings, kind: str, bits: int) -> None:
    if settings.schemes and bits not in settings.bits_of(kind):
        said = ", ".join(sorted({str(scheme) for scheme in settings.schemes}))
        raise layer.fail(
            ending, f"holds {bits}-bit {kind} weights, but quantization_config describes {said}"
        )


def _integers(layer: StoredLayer, settings: Settings) -> Affine | Permuted:
    """Integers packed into words of 32 bits."""
    words = layer.read(".weight_packed", _INT32)
    shape = _stored_shape(layer) or layer.shape
    if shape is None or shape[0] != words.shape[0]:
        found = "there is no weight_shape" if shape is None else f"weight_shape is {list(shape)}"
        raise layer.fail(".weight_packed", f"has {words.shape[0]} rows, {found}")
    layer.check_shape(".weight_shape", shape)
    bits, whole = _width(layer, words.shape[1], shape[1], settings)
    if whole:
        codes = torch.from_numpy(packed_matrix(_spread(words, bits)[:, : shape[1]], bits))
    else:
        codes = words.view(torch.uint8)[:, : -(-shape[1] * bits // 8)]
    scale, group = row_groups(
        layer, ".weight_scale", floats(layer, ".weight_scale"), shape, settings.groups_of(shape[1])
    )
    layout = Affine(shape, bits, group, codes, scale, zero=1 << bits - 1)
    if layer.has(".weight_zero_point"):
        layout = replace(layout, zero=0, zeros=_zeros(layer, layout, whole))
    return _ordered(layer, layout) if layer.has(".weight_g_idx") else layout


def _stored_shape(layer: StoredLayer) -> tuple[int, int] | None:
    if not layer.has(".weight_shape"):
        return None
    sizes = [int(size) for size in layer.read(".weight_shape", ("I64", "I32")).flatten()[:9]]
    if len(sizes) != 2 or min(sizes) < 1:
        raise layer.fail(".weight_shape", f"is {sizes}, expected two sizes")
    return sizes[0], sizes[1]


def _width(layer: StoredLayer, words: int, columns: int, settings: Settings) -> tuple[int, bool]:
    """Bits of a code, and whether codes never straddle two words, as in older files."""
    said = settings.bits_of("int") if settings.schemes else range(1, 9)
    for bits in said:
        if -(-columns * bits // 32) == words:
            return bits, False
    for bits in said:
        if -(-columns // (32 // bits)) == words:
            return bits, True
    raise layer.fail(
        ".weight_packed",
        f"rows of {words} words for {columns} columns, which do not hold codes of "
        f"{' or '.join(str(bits) for bits in said) or 'no'} bits as quantization_config describes",
    )


def _spread(words: Tensor, bits: int) -> Bytes:
    """The ``32 // bits`` codes of each word, lowest first: ``[rows, codes]``."""
    source, mask = words.numpy().view("<u4"), (1 << bits) - 1
    codes = [source >> np.uint32(bits * i) & mask for i in range(32 // bits)]
    return np.stack(codes, axis=2).astype(np.uint8).reshape(len(source), -1)


def _zeros(layer: StoredLayer, layout: Affine, whole: bool) -> Tensor:
    """Zero points of unsigned codes, packed as in ``Affine``."""
    rows, groups = layout.scale.shape
    bits, ending = layout.bits, ".weight_zero_point"
    if layer.stored(ending).dtype == "I8":  # one per byte, as in older files
        points = layer.read(ending, _INT8, (rows, groups))
        zeros = points.numpy().view(np.uint8) + np.uint8(1 << bits - 1)
    else:
        size = -(-rows // (32 // bits)) if whole else -(-rows * bits // 32)
        words = layer.read(ending, _INT32, (size, groups)).t().contiguous()
        if whole:
            zeros = _spread(words, bits)[:, :rows].T
        else:
            zeros = unpacked(words.numpy().view(np.uint8), bits, rows).T
    if int(zeros.max()) >= 1 << bits:
        raise layer.fail(ending, f"a zero point is outside the range of {bits} bits")
    return torch.from_numpy(packed_matrix(np.ascontiguousarray(zeros), bits))


def _ordered(layer: StoredLayer, layout: Affine) -> Affine | Permuted:
    """Columns with a group index each (``actorder: group``), sorted by group."""
    columns, count = layout.shape[1], layout.scale.shape[1]
    groups = layer.read(".weight_g_idx", _INT32, (columns,)).numpy()
    if (groups == -1).all():
        return layout
    least, most = int(groups.min()), int(groups.max())
    if least < 0 or most >= count:
        raise layer.fail(
            ".weight_g_idx", f"groups from {least} to {most}, expected 0 to {count - 1}"
        )
    runs = np.arange(columns) // layout.group
    if np.array_equal(groups, runs):
        return layout
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], runs):
        raise layer.fail(
            ".weight_g_idx", f"groups of different sizes, expected {layout.group} columns in each"
        )
    codes = torch.from_numpy(in_order(layout.codes.numpy(), layout.bits, order))
    return Permuted(replace(layout, codes=codes), torch.from_numpy(order.astype(np.int32)))
