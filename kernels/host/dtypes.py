"""Types of numbers and the device of host tensors, equal to torch's of the same name."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdk.kernels.host.torch_import import loaded_torch, torch_module

CPU = "cpu"
_INTEGERS = ("uint8", "int8", "int16", "int32", "int64", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "float32", "float64")
#: Floats that numpy does not know, and the integers of their size that they are stored as.
_SHORT_FLOATS = {
    "bfloat16": "uint16",
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
        "uint8",
    ),
}


class HostDtype:
    """A type of numbers. ``storage``: numpy's type of their memory."""

    __slots__ = ("is_floating_point", "itemsize", "name", "storage")

    def __init__(self, name: str) -> None:
        self.name = name
        self.storage: np.dtype[Any] = np.dtype(_SHORT_FLOATS.get(name, name))
        self.itemsize: int = self.storage.itemsize
        self.is_floating_point = name in _FLOATS or name in _SHORT_FLOATS

    @property
    def computes(self) -> bool:
        """Whether numpy computes with it."""
        return self.name not in _SHORT_FLOATS

    def __eq__(self, other: object) -> bool:
        return self is other or str(other) == str(self)

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"torch.{self.name}"

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype_of, (self.name,)


DTYPES = {name: HostDtype(name) for name in ("bool", *_INTEGERS, *_FLOATS, *_SHORT_FLOATS)}
#: By numpy's type.
BY_STORAGE = {dtype.storage: dtype for dtype in DTYPES.values() if dtype.computes}


def dtype_of(name: str) -> Any:
    """The type of that name: torch's, once torch is imported."""
    torch = loaded_torch()
    return DTYPES[name] if torch is None else getattr(torch, name)


def host_dtype(dtype: Any) -> HostDtype:
    """The type of a host tensor for one of either kind."""
    return dtype if isinstance(dtype, HostDtype) else DTYPES[str(dtype).removeprefix("torch.")]


class HostDevice(str):
    """The CPU, equal to ``torch.device("cpu")``. Functions of torch take it, as they take texts."""

    __slots__ = ()
    type = CPU
    index = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other or str(other) == CPU

    def __hash__(self) -> int:
        return hash(CPU)

    def __repr__(self) -> str:
        return "device(type='cpu')"


_HOST = HostDevice(CPU)


def device_of(device: Any = CPU, index: int | None = None) -> Any:
    """``torch.device(device)``; any but the CPU imports torch."""
    if loaded_torch() is None and str(device) == CPU and index is None:
        return _HOST
    torch = torch_module(f"the device {device}")
    return torch.device(*([str(device)] if index is None else [str(device), index]))
