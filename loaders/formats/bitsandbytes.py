"""bitsandbytes (``quant_method: bitsandbytes``): LLM.int8 and the 4-bit types nf4 and fp4.

LLM.int8: ``P.weight`` int8 ``[N, K]``, ``P.SCB`` float32 ``[N]``; a weight is ``code * SCB / 127``.
4 bits: ``P.weight`` uint8 ``[N * K / 2, 1]``, the flattened matrix with the even element in the
high half of a byte; and the tensors ``P.weight.*``: ``quant_map`` (values of the 16 codes),
``absmax`` (the scale of every ``blocksize`` elements), ``quant_state.bitsandbytes__nf4`` (JSON).
With double quantization ``absmax`` holds codes too: ``nested_quant_map[code] * nested_absmax[i //
nested_blocksize] + nested_offset``; it stays packed. Source: bitsandbytes 0.50.

Activations are not quantized as in LLM.int8, which keeps columns in float16 if any token of a step
exceeds 6.0 there: a token's result would depend on the others. Files do not ask for it, so these
weights are treated like the integers of any file that does not mention activations.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.weights.layouts import Affine, Dense, Layout
from sdk.loaders.formats import scales
from sdk.loaders.formats.scales import floats, matrix
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.loaders.json_file import parse_json
from sdk.quant.errors import CheckpointError

_STATE = ".weight.quant_state.bitsandbytes__"
ENDINGS = (".SCB", f"{_STATE}nf4", f"{_STATE}fp4")
COMPANIONS = (
    *(".weight", ".weight_format", ".weight.absmax", ".weight.quant_map"),
    *(".weight.nested_absmax", ".weight.nested_quant_map"),
)
#: Types in which the bytes of a 4-bit matrix may be stored (others do that for sharding).
_STORAGE = ("U8", "BF16", "F16", "F32")
#: The JSON has some 170 bytes.
_MAX_STATE = 4096
_DTYPES = ("float32", "float16", "bfloat16")
_NAMES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
#: Weights dequantized at a time: few enough that torch uses one thread (quant/join.py).
_CHUNK = 1 << 15


def settings(config: Mapping[str, Any], source: str) -> None:
    """Nothing: every layer describes itself."""


def outline(layer: StoredLayer, settings: None) -> tuple[tuple[int, int], str]:
    """See :class:`sdk.loaders.formats.stored_layer.Format`."""
    if layer.has(".SCB"):
        return scales.outline(layer, ".weight", ("I8",)), "w8"
    kind = "nf4" if layer.has(f"{_STATE}nf4") else "fp4"
    state = _state(layer, kind)
    return state.shape, kind if state.stays_packed else _NAMES[type_name(state.dtype)]


def decode(layer: StoredLayer, settings: None) -> Layout:
    """The layout of a layer.

    Raises:
        CheckpointError: its tensors disagree with one another or with its description.
    """
    if layer.has(".SCB"):
        return _int8(layer)
    kind = "nf4" if layer.has(f"{_STATE}nf4") else "fp4"
    return _four_bits(layer, kind)


def _int8(layer: StoredLayer) -> Affine:
    values = matrix(layer, ".weight", ("I8",))
    if layer.has(".weight_format"):
        order = layer.read(".weight_format", ("U8",))
        if order.numel() != 1 or int(order) != 0:
            raise layer.fail(
                ".weight_format",
                f"is {order.flatten()[:4].tolist()}, expected 0: other formats are for particular "
                "GPUs; save the model again with a newer bitsandbytes",
            )
    scale = floats(layer, ".SCB").to(torch.float32)
    if scale.shape != values.shape[:1]:
        raise layer.fail(
            ".SCB", f"shape {list(scale.shape)}, expected [{values.shape[0]}], one per row"
        )
    shape = (values.shape[0], values.shape[1])
    codes, scale = values.view(torch.uint8), (scale / 127).reshape(-1, 1)
    return Affine(shape, 8, shape[1], codes, scale, signed=True)


@dataclass(frozen=True, slots=True)
class _State:
    """The JSON of a 4-bit matrix: its shape and block sizes."""

    shape: tuple[int, int]
    block: int
    dtype: torch.dtype
    nested_block: int
    nested_offset: float

    @property
    def stays_packed(self) -> bool:
        """Whether every block is inside a row."""
        return self.shape[1] % self.block == 0


def _four_bits(layer: StoredLayer, kind: str) -> Layout:
    state = _state(layer, kind)
    rows, columns = state.shape
    count = rows * columns
    packed = layer.read(".weight", _STORAGE).flatten().view(torch.uint8)
    if packed.numel() != -(-count // 2):
        raise layer.fail(
            ".weight",
            f"{packed.numel()} bytes, expected {-(-count // 2)} for {list(state.shape)} 4-bit "
            "weights",
        )
    table = floats(layer, ".weight.quant_map").to(torch.float32)
    if tuple(table.shape) != (16,):
        raise layer.fail(".weight.quant_map", f"shape {list(table.shape)}, expected [16]")
    scale = _absmax(layer, state, -(-count // state.block))
    if not state.stays_packed:
        # Blocks that continue in the next row fit no layout; common models have no such sizes
        # (K % 64 != 0). The values are those bitsandbytes computes with.
        name = _NAMES[type_name(state.dtype)]
        layer.warn(f"blocks cross row ends: stored in memory as {name}, not 4 bits")
        return Dense(_values(packed.numpy(), table.numpy(), scale.values(), state))
    codes = packed.numpy().reshape(rows, columns // 2)
    weight = Affine(
        state.shape,
        4,
        state.block,
        torch.from_numpy(codes << 4 | codes >> 4),
        torch.from_numpy(scale.stored).reshape(rows, columns // state.block),
        table=table,
        name=kind,
    )
    if scale.meanings is None:
        return weight
    return replace(
        weight,
        super_scale=torch.from_numpy(scale.supers),
        super_group=scale.share * state.block,
        scale_table=torch.from_numpy(scale.meanings),
        scale_offset=torch.full((rows,), scale.offset),
    )


def _values(
    packed: NDArray[np.uint8], table: NDArray[np.float32], scale: NDArray[np.float32], state: _State
) -> Tensor:
    count = state.shape[0] * state.shape[1]
    values = torch.empty(count, dtype=state.dtype)
    for start in range(0, count, _CHUNK):
        stop = min(start + _CHUNK, count)
        pairs = packed[start // 2 : -(-stop // 2)]
        codes = np.stack((pairs >> 4, pairs & 15), axis=1).reshape(-1)[: stop - start]
        of = np.arange(start, stop) // state.block
        values[start:stop] = torch.from_numpy(table[codes] * scale[of])
    return values.reshape(state.shape)


@dataclass(frozen=True, slots=True)
class _Absmax:
    """The scales of all blocks: float32 ``stored``; or codes, whose values are ``meanings``, and
    of which ``share`` have one of the scales ``supers``.
    """

    stored: NDArray[Any]
    meanings: NDArray[np.float32] | None
    supers: NDArray[np.float32]
    share: int
    offset: float

    def values(self) -> NDArray[np.float32]:
        if self.meanings is None:
            return self.stored
        supers = self.supers[np.arange(len(self.stored)) // self.share]
        return np.asarray(self.meanings[self.stored] * supers + np.float32(self.offset), np.float32)


def _absmax(layer: StoredLayer, state: _State, blocks: int) -> _Absmax:
    ending = ".weight.absmax"
    stored = layer.read(ending, ("U8", "F32"))
    if tuple(stored.shape) != (blocks,):
        raise layer.fail(ending, f"shape {list(stored.shape)}, expected [{blocks}]")
    if stored.dtype == torch.float32:
        single = np.array(floats(layer, ending).numpy())
        return _Absmax(single, None, single, 1, 0.0)
    supers = floats(layer, ".weight.nested_absmax").to(torch.float32).numpy()
    meanings = floats(layer, ".weight.nested_quant_map").to(torch.float32).numpy()
    if not state.nested_block:
        raise layer.fail(
            ending, "the scales are quantized, but quant_state has no nested_blocksize"
        )
    expected = {
        ".weight.nested_absmax": (supers, -(-blocks // state.nested_block)),
        ".weight.nested_quant_map": (meanings, 256),
    }
    for name, (values, size) in expected.items():
        if values.shape != (size,):
            raise layer.fail(name, f"shape {list(values.shape)}, expected [{size}]")
    return _Absmax(
        stored.numpy(), meanings, supers, state.nested_block, float(np.float32(state.nested_offset))
    )


def _state(layer: StoredLayer, kind: str) -> _State:
    ending = _STATE + kind
    stored = layer.read(ending, ("U8",))
    if stored.dim() != 1 or not 0 < stored.numel() <= _MAX_STATE:
        raise layer.fail(
            ending, f"shape {list(stored.shape)}, expected 1 to {_MAX_STATE} bytes of JSON"
        )
    try:
        state = parse_json(stored.numpy().tobytes(), "quant_state")
    except CheckpointError as error:
        raise layer.fail(ending, str(error)) from None

    def expect(key: str, sound: bool, wanted: str) -> None:
        if not sound:
            raise layer.fail(ending, f"{key} is {str(state.get(key))[:80]}, expected {wanted}")

    shape: Any = state.get("shape")
    block: Any = state.get("blocksize")
    sizes = isinstance(shape, list) and all(type(size) is int and size > 0 for size in shape)
    expect("shape", sizes and len(shape) == 2, "two sizes")
    layer.check_shape(ending, tuple(shape))
    expect("quant_type", state.get("quant_type") == kind, kind)
    expect("blocksize", _is_block(block), "a power of two from 16 to 65536")
    expect("dtype", str(state.get("dtype")) in _DTYPES, " or ".join(_DTYPES))
    nested, offset = state.get("nested_blocksize", 0), state.get("nested_offset", 0.0)
    expect("nested_blocksize", nested == 0 or _is_block(nested), "a power of two from 16 to 65536")
    expect("nested_dtype", state.get("nested_dtype", "float32") == "float32", "float32")
    number = type(offset) in (int, float) and math.isfinite(offset)
    expect("nested_offset", number, "a finite number")
    return _State(tuple(shape), block, getattr(torch, state["dtype"]), nested, float(offset))


def _is_block(size: Any) -> bool:
    return type(size) is int and 16 <= size <= 65536 and size & size - 1 == 0
