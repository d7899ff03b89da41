"""GGUF blocks in safetensors files (``quant_method: gguf``), as gptqmodel writes them.

``P.qweight`` is uint8 ``[N, bytes per row]``: the rows of a GGUF tensor, one block after another.
The type follows from ``bits`` and ``format`` (4 and ``q_k_m``: Q4_K) of the config or of a rule for
single layers. Rows whose length is not a multiple of the block are padded with zeros. Source:
gptqmodel 5, `nn_modules/qlinear/gguf.py` and `quantization/config.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sdk.kernels.lazy_torch import torch
from sdk.kernels.weights.layouts import Dense, Layout
from sdk.loaders.formats.gguf_decode import decode_matrix
from sdk.loaders.formats.gguf_types import GGUF_TYPES, GgufType
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError
from sdk.quant.weight import weight_of

ENDINGS = (".qweight",)
COMPANIONS: tuple[str, ...] = ()
#: By bits: the format without its quality (q_k_m is q_k) -> GGUF's name.
_TYPES = {
    (1, "q_0_g128"): "Q1_0", (4, "q_0"): "Q4_0", (8, "q_0"): "Q8_0",
    (4, "q_k"): "Q4_K", (5, "q_k"): "Q5_K", (6, "q_k"): "Q6_K",
}  # fmt: skip
#: gptqmodel's default format, if a config has only bits.
_DEFAULTS = {4: "q_0", 5: "q_k", 6: "q_k", 8: "q_0"}
_BY_NAME = {kind.name: kind for kind in GGUF_TYPES.values()}


def settings(config: Mapping[str, Any], source: str) -> tuple[GgufType, ...]:
    """The types that layers may have, the most common one first.

    Raises:
        CheckpointError: bits and format do not name a type.
    """
    rules = config.get("dynamic") or {}
    if not isinstance(rules, Mapping):
        raise CheckpointError(f"{source}: dynamic is {str(rules)[:80]}, expected an object")
    found = [_type(config, config, source)]
    found += [_type(rule, config, source) for rule in rules.values() if isinstance(rule, Mapping)]
    return tuple(dict.fromkeys(found))


def _type(rule: Mapping[str, Any], config: Mapping[str, Any], source: str) -> GgufType:
    bits, given = rule.get("bits", config.get("bits")), rule.get("format", config.get("format"))
    spelled = re.fullmatch(r"q([1-8])_(0_g128|0|k)(_[sml])?", str(bits).lower())
    if spelled is not None:  # one word for both: q4_k_m
        bits, given = int(spelled[1]), f"q_{spelled[2]}"
    elif given in (None, "gguf"):
        given = _DEFAULTS.get(bits) if isinstance(bits, int) else None
    key = bits, re.sub(r"_[sml]$", "", str(given).lower())
    name = _TYPES.get(key) if isinstance(bits, int) else None
    if name is None:
        known = ", ".join(f"{b} and {f}" for b, f in _TYPES)
        raise CheckpointError(
            f"{source}: bits {str(rule.get('bits'))[:20]} and format {str(given)[:20]!r} do not "
            f"name a GGUF type; expected one of {known}"
        )
    return _BY_NAME[name]


def outline(layer: StoredLayer, settings: tuple[GgufType, ...]) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    kind, rows, columns = _sizes(layer, settings)
    return (rows, columns), kind.name if columns % kind.elements == 0 else "f32"


def decode(layer: StoredLayer, settings: tuple[GgufType, ...]) -> Layout:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    kind, rows, columns = _sizes(layer, settings)
    data = layer.read(".qweight", ("U8",)).numpy()
    padded = data.shape[1] // kind.nbytes * kind.elements
    layout = decode_matrix(kind, data, padded, f"{layer.name}.qweight")
    if padded == columns:
        return layout
    layer.warn(f"rows of {columns} values in blocks of {kind.elements}: kept in memory as floats")
    values = torch.empty(rows, columns)
    weight = weight_of(layout)
    step = max((1 << 20) // padded, 1)  # 4 MiB of floats in addition to the result
    for start in range(0, rows, step):
        part = weight.narrow("out", start, min(step, rows - start)).dequantize()
        values[start : start + step] = part[:, :columns]
    return Dense(values)


def _sizes(layer: StoredLayer, kinds: tuple[GgufType, ...]) -> tuple[GgufType, int, int]:
    """The type of a layer, and its rows and columns."""
    shape = layer.stored(".qweight").shape
    if len(shape) != 2:
        raise layer.fail(".qweight", f"shape {list(shape)}, expected a matrix")
    rows, width = shape
    columns = None if layer.shape is None else layer.shape[1]
    fitting = [
        kind
        for kind in kinds
        if width % kind.nbytes == 0
        and (columns is None or -(-columns // kind.elements) == width // kind.nbytes)
    ]
    if len(fitting) != 1:
        names = " or ".join(kind.name for kind in fitting or kinds)
        what = "but several fit" if fitting else "which do not fit"
        raise layer.fail(".qweight", f"expected rows of {names}, {what} {width} bytes per row")
    found = fitting[0]
    columns = width // found.nbytes * found.elements if columns is None else columns
    layer.check_shape(".qweight", (rows, columns))
    return found, rows, columns
