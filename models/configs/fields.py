"""Typed reads of a model's config: a value of the right type and range, or an error by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NoReturn

from sdk.quant.errors import CheckpointError, UnsupportedError

if TYPE_CHECKING:
    from sdk.kernels.operators.mlp_activations import Activation

#: Names in configs, and what computes them.
ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": "silu",
        "swish": "silu",
        "gelu": "gelu",
        "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_new": "gelu_tanh",
        "gelu_tanh": "gelu_tanh",
        "relu": "relu",
        "relu2": "relu2",
    }
)
#: ``x * sigmoid(1.702 x)`` is SiLU with this slope: ``silu(1.702 x) / 1.702``.
_QUICK_GELU = 1.702
MAX_LAYERS = 512
#: Larger counts come from damaged files. The limits bound what a bad file can make us allocate.
MAX_WIDTH = 1 << 20
MAX_VOCAB = 1 << 24
MAX_POSITION = 1 << 27
MAX_EXPERTS = 1024


def activation_named(found: str, key: str) -> Activation:
    """The activation with this name in a config.

    :raises UnsupportedError: there is none; names the ``key``.
    """
    if found not in ACTIVATIONS:
        raise UnsupportedError(
            f"config: {key}: expected one of {sorted(ACTIVATIONS)}, found {found!r}"
        )
    return ACTIVATIONS[found]


def sloped_activation(found: str, key: str) -> tuple[Activation, float]:
    """The same with its slope, of an MLP without a gate, which computes ``act(slope * x) / slope``.

    :raises UnsupportedError: there is none; names the ``key``.
    """
    if found == "quick_gelu":
        return "silu", _QUICK_GELU
    return activation_named(found, key), 1.0


class Fields:
    """The values of a config, or of an object in it; ``where`` comes first in messages."""

    def __init__(self, values: Mapping[str, Any], where: str = "config") -> None:
        self.values = values
        self.where = where

    def fail(self, name: str, expected: str, found: object) -> NoReturn:
        raise CheckpointError(f"{self.where}: {name}: expected {expected}, found {found!r}")

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def text(self, name: str, default: str | None = None) -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str) or not value:
            self.fail(name, "a name", value)
        return value

    def count(self, name: str, limit: int, default: int | None = None) -> int:
        """An integer in ``1..limit``."""
        value = self.values.get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= limit:
            self.fail(name, f"an integer in 1..{limit}", value)
        return value

    def positive(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """A number in a range that later powers and logarithms can handle."""
        value = self.values.get(name, default)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not max(above, 1e-30) <= value <= 1e30 or value == above:
            self.fail(name, f"a number above {above:g}", value)
        return float(value)

    def optional_positive(self, name: str) -> float | None:
        return self.positive(name) if self.has(name) else None

    def flag(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            self.fail(name, "true or false", value)
        return value

    def mapping(self, name: str) -> dict[str, Any]:
        """A nested object; empty when absent."""
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            self.fail(name, "an object", value)
        return without_null(value)

    def factors(self, name: str, length: int) -> tuple[float, ...]:
        """``length`` numbers above 0."""
        value = self.values.get(name)
        if not isinstance(value, (list, tuple)) or len(value) != length:
            found = len(value) if isinstance(value, (list, tuple)) else value
            self.fail(name, f"a list of {length} numbers", found)
        numbers = Fields({str(i): x for i, x in enumerate(value)}, f"{self.where}: {name}")
        return tuple(numbers.positive(str(i)) for i in range(length))


def without_null(config: Mapping[str, Any]) -> dict[str, Any]:
    """JSON ``null`` means absent, except that it switches a soft cap off."""
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {key: value for key, value in config.items() if value is not None or key in caps}
