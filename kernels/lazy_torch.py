"""``torch`` and ``Tensor`` for modules that run on a CPU without torch: see ``sdk.kernels.host``.

While torch is not imported, ``torch`` has the names below, and any other name imports torch. From
then on all names are torch's. So these modules must not keep torch's objects in constants, defaults
or decorators, which are evaluated when they are imported.

For type checkers both names are torch's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.kernels.host import functions
from sdk.kernels.host.dtypes import DTYPES, device_of
from sdk.kernels.host.tensor import HostTensor, real
from sdk.kernels.host.torch_import import (
    import_torch as import_torch,
    loaded_torch,
    one_mode,
    torch_module,
)


class _Unraised(Exception):
    """``torch.OutOfMemoryError``, which nothing raises without torch."""


class _Names:
    """torch or one of its modules, and what stands for its names while torch is not imported."""

    def __init__(self, path: str, without_torch: dict[str, Any]) -> None:
        self._path = path
        self._parents = path.split(".")[:-1]
        self._without_torch = without_torch

    def __getattr__(self, name: str) -> Any:
        torch = loaded_torch()
        if torch is None:
            if name in self._without_torch:
                return self._without_torch[name]
            torch = torch_module(f"torch.{self._path}{name}")
        for part in self._parents:  # an attrgetter for each access would take 0.4 us more
            torch = getattr(torch, part)
        return getattr(torch, name)


def as_torch(x: Any) -> Any:
    """For callbacks of users: a tensor of torch over the same memory. Imports torch."""
    return real(x)


def loaded() -> bool:
    """Whether torch is imported."""
    return loaded_torch() is not None


def type_name(dtype: object) -> str:
    """A type's name, such as ``float16``: a key that torch's and the host's types share."""
    return str(dtype).removeprefix("torch.")


if TYPE_CHECKING:
    import torch as torch
    from torch import Tensor as Tensor
else:

    class _TensorType(type):
        def __instancecheck__(cls, x: object) -> bool:
            if isinstance(x, HostTensor):
                return True
            torch = loaded_torch()
            return torch is not None and isinstance(x, torch.Tensor)

    class Tensor(metaclass=_TensorType):
        """For annotations and ``isinstance``: torch's tensors and those of the host."""

    torch = _Names(
        "",
        {
            **{name: getattr(functions, name) for name in functions.__all__},
            **DTYPES,
            "inference_mode": one_mode,  # there are no gradients to be left out
            "device": device_of,
            "contiguous_format": None,
            "OutOfMemoryError": _Unraised,
            "nn": _Names("nn.", {"functional": _Names("nn.functional.", {"pad": functions.pad})}),
            "version": _Names("version.", {"cuda": None, "hip": None}),
        },
    )
