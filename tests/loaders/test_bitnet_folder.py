"""BitNet's packed folders that are not read. Those that are: tests/models/test_bitnet.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.quant.errors import CheckpointError, UnsupportedError


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"quantization_mode": "online"},
            UnsupportedError,
            "expected 'offline', found 'online'",
        ),
        ({"quantization_mode": "later"}, CheckpointError, "expected 'offline' or 'online', found"),
        ({"linear_class": "linear"}, CheckpointError, "'bitlinear' or 'autobitlinear', found"),
        ({"use_rms_norm": True}, UnsupportedError, "use_rms_norm: expected false, found True"),
    ],
)
def test_settings_that_change_what_is_computed_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str, layers: Any
) -> None:
    with pytest.raises(error, match=message):
        layers.open({"quant_method": "bitnet", **settings}, {".weight": torch.zeros(32, 64)})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({".weight_scale": torch.zeros(1)}, "is 0.0, expected a positive number"),
        ({".weight_scale": torch.ones(2)}, "expected one number"),
        ({".weight": torch.full((8, 64), 3, dtype=torch.uint8)}, "a code is 3, expected 0 to 2"),
        ({".weight": torch.zeros(4, 64, dtype=torch.uint8)}, r"\[16, 64\], the config asks for"),
        ({".weight": torch.zeros(8, 64)}, "expected a matrix in U8"),
    ],
)
def test_damaged_tensors_are_refused(tensors: dict[str, Tensor], message: str, layers: Any) -> None:
    whole = {".weight": torch.zeros(8, 64, dtype=torch.uint8), ".weight_scale": torch.ones(1)}
    with pytest.raises(CheckpointError, match=message):
        layers.weight({"quant_method": "bitnet"}, {**whole, **tensors})
