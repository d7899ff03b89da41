"""``torch`` and ``Tensor`` for modules that run on a CPU without torch.

As long as nobody in the process has imported torch, ``torch`` has the few names of
``host_tensor.py``, and any other name imports torch. From then on all names are torch's. So these
modules must not keep torch's objects in constants, defaults or decorators, which are evaluated when
they are imported (tests/structure/test_without_torch.py).

For type checkers both names are torch's (``lazy_torch.pyi``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import ContextDecorator, nullcontext
from types import SimpleNamespace
from typing import Any

from sdk.kernels import host_tensor
from sdk.kernels.host_tensor import HostDtype, HostTensor, device_of, loaded_torch, torch_module


class inference_mode(ContextDecorator):
    """``torch.inference_mode``; without torch there are no gradients to be left out."""

    def __init__(self, mode: bool = True) -> None:
        self._entered: list[Any] = []

    def __enter__(self) -> None:
        torch = loaded_torch()
        context = nullcontext() if torch is None else torch.inference_mode()
        self._entered.append(context)
        context.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._entered.pop().__exit__(*error)


class _Unraised(Exception):
    """``torch.OutOfMemoryError``, which nothing raises without torch."""


_FUNCTIONS = (
    *("from_numpy", "empty", "zeros", "ones", "full", "empty_like", "zeros_like", "full_like"),
    *("tensor", "arange", "cat", "stack", "where", "equal", "maximum", "minimum", "isfinite"),
    "is_tensor",
)
#: What a host tensor's type may have been given to once torch is imported.
_MAKERS = (
    "empty",
    "zeros",
    "ones",
    "full",
    "empty_like",
    "zeros_like",
    "tensor",
    "arange",
    "randn",
)
_HOST: dict[str, Any] = {name: getattr(host_tensor, name) for name in _FUNCTIONS}
_HOST |= host_tensor._DTYPES
_HOST |= {
    "inference_mode": inference_mode,
    "no_grad": inference_mode,
    "device": device_of,
    "contiguous_format": None,
    "OutOfMemoryError": _Unraised,
    "nn": SimpleNamespace(functional=SimpleNamespace(pad=host_tensor.pad)),
    "version": SimpleNamespace(cuda=None, hip=None),
}


class _Names:
    """See the module."""

    def __getattr__(self, name: str) -> Any:
        torch = loaded_torch()
        if torch is not None:
            return _translated(getattr(torch, name)) if name in _MAKERS else getattr(torch, name)
        found = _HOST.get(name, _HOST)
        return getattr(torch_module(), name) if found is _HOST else found


@functools.cache
def _translated(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that also takes types of host tensors, which objects made before torch
    was imported may have kept."""

    @functools.wraps(function)
    def translated(*given: Any, **named: Any) -> Any:
        if any(isinstance(x, HostDtype | host_tensor.HostDevice) for x in named.values()):
            named = host_tensor.real(named)
        return function(*given, **named)

    return translated


class _TensorType(type):
    def __instancecheck__(cls, x: object) -> bool:
        if isinstance(x, HostTensor):
            return True
        torch = loaded_torch()
        return torch is not None and isinstance(x, torch.Tensor)


class Tensor(metaclass=_TensorType):
    """For annotations and ``isinstance``: torch's tensors and those of the host."""


def loaded() -> bool:
    """Whether torch is imported."""
    return loaded_torch() is not None


def type_name(dtype: Any) -> str:
    """A type's name, such as ``float16``: a key that torch's and the host's types share."""
    return str(dtype).removeprefix("torch.")


torch: Any = _Names()
