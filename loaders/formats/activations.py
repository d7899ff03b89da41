"""Quantized activations (W8A8 and the like) as checkpoints describe them.

A config describes them for many layers (``ActivationConfig``). Static scales are tensors of each
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from sdk.kernels.weights.layouts import ActivationScheme, Affine, Float8, Layout
from sdk.loaders.formats.scales import number
from sdk.loaders.formats.stored_layer import StoredLayer
from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.permuted import Permuted

#: Names of types of scales that are powers of two.
_POWERS = ("torch.uint8", "uint8", "torch.float8_e8m0fnu")


@dataclass(frozen=True, slots=True)
class ActivationConfig:
    """The scheme of many layers; each adds its static scale or, with the rule ``nv``, a factor."""

    scheme: ActivationScheme
    static: bool = False

    def of(
        self,
        layer: StoredLayer,
        scale: str = ".input_scale",
        zero: str = ".input_zero_point",
        factor: str = ".input_global_scale",
    ) -> ActivationScheme:
        """The scheme of a layer, with the scale and zero point from its tensors of these endings.

        Raises:
            CheckpointError: one of them is missing or not a positive number.
        """
        if self.static:
            static, point = positive(layer, scale), 0
            if not self.scheme.symmetric:
                point = _zero_point(layer, zero, 1 << self.scheme.bits - 1)
            return replace(self.scheme, static=static, zero=point)
        if self.scheme.rule == "nv":
            return replace(self.scheme, factor=positive(layer, factor))
        return self.scheme


def positive(layer: StoredLayer, ending: str) -> float:
    """The positive number in a tensor of one element, a scale of activations."""
    found = number(layer, ending)
    if not 2.0**-126 <= found <= 2.0**126:
        raise layer.fail(ending, f"is {found}, expected a positive number")
    return found


def _zero_point(layer: StoredLayer, ending: str, half: int) -> int:
    found = layer.read(ending, ("I8", "I32"))
    if found.numel() != 1:
        raise layer.fail(ending, f"shape {list(found.shape)}, expected one number")
    if not -half <= int(found) < half:
        raise layer.fail(ending, f"is {int(found)}, expected {-half} to {half - 1}")
    return int(found)


def with_activations(
    layer: StoredLayer, packed: Layout | Permuted, scheme: ActivationScheme | None
) -> Layout | Permuted:
    """``packed``, with its activations quantized by ``scheme``."""
    if isinstance(packed, Permuted):
        if scheme is not None and scheme.group and scheme.static is None:
            layer.warn("columns are sorted by group (act-order): activations are not quantized")
            return packed
        assert isinstance(packed.layout, Affine)
        return replace(packed, layout=replace(packed.layout, inputs=scheme))
    assert isinstance(packed, Affine | Float8)
    return replace(packed, inputs=scheme)


def activation_config(said: Any, source: str) -> ActivationConfig | None:
    """``input_activations`` of compressed-tensors; None if activations are not quantized.

    One scale for all tokens of a step would make a token's result depend on the others, so such
    scales (``dynamic`` with the strategy ``tensor``) are computed per token instead.

    Raises:
        CheckpointError: a field is invalid.
        UnsupportedError: a kind of quantization that is not supported.
    """
    if said is None:
        return None
    if not isinstance(said, Mapping):
        raise CheckpointError(f"{source} is {str(said)[:80]}, expected an object")
    bits, kind = said.get("num_bits", 8), said.get("type", "int")
    if bits == 16:
        return None
    if type(bits) is not int or (kind == "int" and not 2 <= bits <= 8):
        raise CheckpointError(f"{source}.num_bits is {str(bits)[:80]}, expected 2 to 8 or 16")
    if kind not in ("int", "float") or (kind == "float" and bits not in (4, 8)):
        raise UnsupportedError(
            f"{source}: activations of {bits} bits and type {str(kind)[:80]!r} are not supported, "
            "expected int, or float with 4 or 8 bits"
        )
    codes: Literal["int", "e4m3", "e2m1"] = "int"
    if kind == "float":
        codes = "e4m3" if bits == 8 else "e2m1"
    scheme = ActivationScheme(codes, bits, symmetric=said.get("symmetric", True) is not False)
    strategy = said.get("strategy", "tensor")
    if not said.get("dynamic", False):
        if strategy not in ("tensor", None):
            raise _not_supported(source, f"the strategy {str(strategy)[:80]!r} with static scales")
        return ActivationConfig(scheme, static=True)
    if strategy in ("token", "tensor", None):
        return ActivationConfig(scheme)
    if strategy not in ("group", "tensor_group"):
        raise _not_supported(source, f"the strategy {str(strategy)[:80]!r}")
    group = said.get("group_size")
    if type(group) is not int or not 1 <= group < 2**31:
        raise CheckpointError(f"{source}.group_size is {str(group)[:80]}, expected 1 or more")
    scheme = replace(scheme, group=group)
    if strategy == "tensor_group":
        return ActivationConfig(replace(scheme, rule="nv"))
    powers = str(said.get("scale_dtype")) in _POWERS or bits == 4
    return ActivationConfig(replace(scheme, rule="mx") if kind == "float" and powers else scheme)


def _not_supported(source: str, what: str) -> UnsupportedError:
    return UnsupportedError(
        f"{source}: {what} is not supported for activations, expected the strategy token or group, "
        "or tensor with static scales"
    )
