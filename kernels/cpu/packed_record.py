"""Packed weights as plain values and bytes, and back: what the cache of weights keeps.

The values are those of JSON. They hold no address; the library's hash is part of a file's key
(sdk/engine/weight_cache), so that a file never meets a library with another layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.kernels.backend import Problem
from sdk.kernels.context import Context
from sdk.kernels.cpu.library import WeightCheck, WeightView
from sdk.kernels.cpu.packed_linear import PackedLinear
from sdk.kernels.cpu.packed_weight import Packed, point
from sdk.kernels.errors import KernelError
from sdk.kernels.lazy_torch import Tensor, torch, type_name
from sdk.kernels.registry import choose
from sdk.kernels.weights.bound import BoundLinear
from sdk.kernels.weights.layouts import ActivationScheme, Affine, Blocks, Dense, Float8, Layout

#: The tensors of a packed weight, in the order of their places in a file.
_TENSORS = (
    *("codes", "scale", "minus", "zeros", "super_scale", "super_minus", "table"),
    *("scale_table", "scale_offset"),
)
_POINTERS = (*_TENSORS, "check")


def record_of(bound: BoundLinear) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """The record of a weight without its tensors, and these. ``None``: it cannot be kept, because
    it is not packed for the native kernels, its bytes are in a file of its own, or a kernel failed
    its check here."""
    packed, kernel = bound.packed, bound.choice.implementation
    if not isinstance(kernel, PackedLinear) or packed.file is not None:
        return None
    if choose(bound.context.backends, bound.problem).name != kernel.name:
        return None
    view = WeightView.from_buffer_copy(packed.view)
    for name in _POINTERS:
        setattr(view, name, None)
    tensors = {name: part for name in _TENSORS if (part := getattr(packed, name)) is not None}
    if not all(part.is_contiguous() for part in tensors.values()):
        return None
    return {
        "view": bytes(view).hex(),
        "halves": packed.view.minus is not None and packed.minus is None,
        "facts": _facts(packed.facts),
        "kernel": kernel.name,
        "problem": {one.name: getattr(bound.problem, one.name) for one in fields(Problem)},
    }, tensors


def bound_of(
    record: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    check: WeightCheck,
    context: Context,
) -> BoundLinear:
    """The inverse of :func:`record_of`: the weight with tensors that lie elsewhere.

    :raises KernelError: this engine chooses another kernel.
    """
    problem = Problem(**record["problem"])
    choice = choose(context.backends, problem)
    if choice.name != record["kernel"]:
        raise KernelError(f"expected {record['kernel']} for {problem}, found {choice.name}")
    view = WeightView.from_buffer_copy(bytes.fromhex(record["view"]))
    view.check = ctypes.addressof(check)
    parts: dict[str, Any] = dict(tensors)
    packed = Packed(facts_of(record["facts"]), view, kept=check, **parts)
    point(packed)
    if record["halves"]:
        view.minus = view.scale
    return BoundLinear(choice, packed, packed.facts.shape, context, problem)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The memory of a contiguous tensor."""
    if not tensor.nbytes:
        return np.empty(0, np.uint8)
    memory: Any = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    found: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
    return found


def tensor_of(data: NDArray[np.uint8], dtype: str, shape: tuple[int, ...]) -> Tensor:
    """A tensor in the memory of ``data``."""
    return torch.from_numpy(data).view(getattr(torch, dtype)).view(*shape)


def _facts(layout: Layout) -> dict[str, Any]:
    match layout:
        case Dense():
            return {"kind": "dense", "shape": layout.shape, "type": type_name(layout.values.dtype)}
        case Float8():
            return {
                "kind": "float8",
                "shape": layout.shape,
                "type": type_name(layout.values.dtype),
                "scales": [*layout.scale.shape, type_name(layout.scale.dtype)],
                "block": layout.block,
                "inputs": _plain(layout.inputs),
            }
        case Blocks():
            return {"kind": "blocks", "shape": layout.shape, "type": layout.type}
        case Affine():
            names = ("bits", "group", "zero", "signed", "super_group", "name")
            return {
                "kind": "affine",
                "shape": layout.shape,
                **{name: getattr(layout, name) for name in names},
                "scales": type_name(layout.scale.dtype),
                "table": None if layout.table is None else layout.table.tolist(),
                "inputs": _plain(layout.inputs),
            }


def facts_of(found: Mapping[str, Any]) -> Layout:
    """The layout of a record, without data."""
    rows, columns = found["shape"]
    shape = rows, columns
    match found["kind"]:
        case "dense":
            return Dense(_shape_only(found["type"], *shape))
        case "float8":
            high, wide, kind = found["scales"]
            return Float8(
                _shape_only(found["type"], *shape),
                _shape_only(kind, high, wide),
                tuple(found["block"]),
                _scheme(found["inputs"]),
            )
        case "blocks":
            return Blocks(shape, found["type"], torch.empty((0, 0), dtype=torch.uint8))
        case _:
            names = ("bits", "group", "zero", "signed", "super_group", "name")
            table = found["table"]
            return Affine(
                shape,
                codes=torch.empty((0, 0), dtype=torch.uint8),
                scale=torch.empty((0, 0), dtype=getattr(torch, found["scales"])),
                table=None if table is None else torch.tensor(table, dtype=torch.float32),
                inputs=_scheme(found["inputs"]),
                **{name: found[name] for name in names},
            )


def _shape_only(kind: str, rows: int, columns: int) -> Tensor:
    one = torch.empty((1, columns), dtype=getattr(torch, kind))
    return one.to("meta").expand(rows, columns)


def _plain(scheme: ActivationScheme | None) -> dict[str, Any] | None:
    if scheme is None:
        return None
    return {one.name: getattr(scheme, one.name) for one in fields(ActivationScheme)}


def _scheme(found: Mapping[str, Any] | None) -> ActivationScheme | None:
    return None if found is None else ActivationScheme(**found)
