"""How much of real weights each scheme keeps: SmolLM2, two of its layers, against known numbers.

The bounds are what independent implementations leave over all 210 matrices (relative RMSE), and the
order of schemes is theirs too. The file's weights lie on a Q4_1 grid, so nothing on that grid is
asked for. What the errors do to the model's answers was measured apart (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sdk.loaders.open import open_checkpoint
from sdk.quant.quantize import quantize_without_data, to_blocks
from sdk.quant.scheme import Scheme
from sdk.quant.weight import weight_of

#: Relative RMSE over the model, from best to worst.
KNOWN = {
    "q8_0": 0.0056, "rtn-w8s": 0.0085, "fp8-channel": 0.0263, "fp8-tensor": 0.0265,
    "q5_0": 0.0442, "q4_0": 0.0872, "rtn-w4g64": 0.0943, "rtn-w4g64s": 0.1083, "rtn-w4": 0.1324,
}  # fmt: skip
#: Two layers are not all thirty.
ROOM = 1.12


@pytest.fixture(scope="module")
def matrices(smollm2: Path) -> dict[str, Tensor]:
    checkpoint = open_checkpoint(smollm2)
    names = [
        f"model.layers.{layer}.{part}"
        for layer in (3, 20)
        for part in ("self_attn.q_proj", "self_attn.v_proj", "mlp.up_proj", "mlp.down_proj")
    ]
    found = {name: checkpoint.weight(name).dequantize() for name in names}
    checkpoint.close()
    return found


def _made(scheme: str) -> Callable[[str, Tensor], Tensor]:
    if scheme.startswith("q"):
        return lambda name, weight: weight_of(to_blocks(name, weight, scheme)).dequantize()
    parsed = Scheme.parse(scheme)
    return lambda name, weight: weight_of(quantize_without_data(name, weight, parsed)).dequantize()


def _error(make: Callable[[str, Tensor], Tensor], matrices: dict[str, Tensor]) -> float:
    off = sum(float((make(n, w) - w).square().sum()) for n, w in matrices.items())
    return (off / sum(float(w.square().sum()) for w in matrices.values())) ** 0.5


@pytest.mark.model
def test_real_weights_lose_no_more_than_elsewhere(matrices: dict[str, Tensor]) -> None:
    found = {scheme: _error(_made(scheme), matrices) for scheme in KNOWN}
    for scheme, known in KNOWN.items():
        assert found[scheme] < ROOM * known, scheme
    assert sorted(found, key=found.__getitem__) == list(found)


@pytest.mark.model
def test_hqq_keeps_more_of_real_weights_than_rounding(matrices: dict[str, Tensor]) -> None:
    """0.0737 against 0.0937 over the model, and a divergence of 0.201 against 0.287."""
    hqq, plain = (_error(_made(f"{method}-w4g64"), matrices) for method in ("hqq", "rtn"))
    assert hqq < 0.85 * plain


@pytest.mark.model
def test_zeros_stay_zeros_and_scales_stay_finite_on_real_weights(
    matrices: dict[str, Tensor],
) -> None:
    name, weight = next(iter(matrices.items()))
    weight = weight.clone()
    weight[:64] = 0
    for scheme in ("q4_0", "q8_0", "rtn-w4g64", "hqq-w4g64", "fp8-channel", "rtn-w8s"):
        found = _made(scheme)(name, weight)
        assert bool(found.isfinite().all()), scheme
        assert torch.equal(found[:64], weight[:64]), scheme
