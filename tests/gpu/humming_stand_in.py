"""A stand-in for the package ``humming-kernels``, with its calls that are used, on a CPU."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.reference.decode import unpack_codes


@dataclass(kw_only=True)
class Schema:
    """The package's ``HummingWeightSchema``, by its fields that are used."""

    b_dtype: str
    weight_scale_group_size: int = 0


class Method:
    """The package's ``HummingLayerMethod``: it moves the weight to a layout of its own."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        self.factor = 1.0

    def prepare_layer_meta(
        self, layer: Any, *, shape_n: int, shape_k: int, weight_schema: Schema,
        torch_dtype: torch.dtype,
    ) -> None:  # fmt: skip
        bits = int(weight_schema.b_dtype.removeprefix("uint"))
        assert shape_n % 64 == 0 and shape_k % 32 == 0
        assert layer.weight.dtype == torch.int32
        assert layer.weight.shape == (shape_n, shape_k * bits // 32)
        groups = shape_k // (weight_schema.weight_scale_group_size or shape_k)
        assert layer.weight_scale.shape == (shape_n, groups)
        assert layer.weight_scale.dtype == torch_dtype
        layer.meta = bits, shape_k

    def transform_humming_layer(self, layer: Any) -> None:
        for name in ("weight", "weight_scale"):
            turned = getattr(layer, name).t().contiguous()
            setattr(layer, name, torch.nn.Parameter(turned, requires_grad=False))

    def forward_layer(self, layer: Any, *, inputs: Tensor, outputs: Tensor) -> Tensor:
        assert inputs.dtype == outputs.dtype == layer.weight_scale.dtype
        assert inputs.is_contiguous() and outputs.is_contiguous()
        assert layer.locks.dtype == torch.int32 and not layer.locks.any()
        self.calls.append(len(inputs))
        bits, k = layer.meta
        words = layer.weight.t().contiguous()
        codes = unpack_codes(words.view(torch.uint8).view(len(words), -1), bits, k).float()
        scale = layer.weight_scale.t().float()
        scale = scale.repeat_interleave(k // scale.shape[1], dim=1)
        values = (codes - (1 << bits - 1)) * scale * self.factor
        return outputs.copy_(inputs.float() @ values.t())


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> Method:
    made = Method()
    monkeypatch.setattr("sdk.kernels.self_check._ROWS", 64)  # as on a card: whole weights
    for name, given in (
        ("humming", {}),
        ("humming.layer", {"HummingLayerMethod": made}),
        ("humming.schema", {"HummingWeightSchema": Schema}),
    ):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(given)
        monkeypatch.setitem(sys.modules, name, module)
    return made
