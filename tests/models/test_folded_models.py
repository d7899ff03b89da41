"""AWQ and SmoothQuant on layers whose norms, blocks or MLPs are not a Llama's: the factors that are
taken from one matrix are in what precedes it, or the answers would be others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.kernels.operators.ops import Ops
from sdk.loaders.open import open_checkpoint
from sdk.models.auto import build_model
from sdk.models.parallel import Mesh
from sdk.quantizing import quantize
from tests.models.conftest import Paged, expected_logits, prompt, tiny

#: One norm for both blocks; norms with biases, stored minus 1, and no gate; norms without weights
#: and clamped values; an activation with numbers of its own.
MODELS: dict[str, dict[str, Any]] = {
    "cohere": {"logit_scale": 0.5},
    "nemotron": {"mlp_bias": True},
    "olmo": {"clip_qkv": 1.5},
    "apertus": {},
}


def loudest(model: Any) -> None:
    """A few columns of every input are much larger, as in trained models: factors are not 1."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter[::17] += 4.0
            if name.endswith(("up_proj.weight", "fc1.weight", "v_proj.weight")):
                parameter[::13] *= 4.0


def error(model: Any, folder: Path, scheme: str) -> float:
    """How far a quantized model's logits are from transformers', as a share of those."""
    text = [prompt(48, seed) for seed in range(4)]
    data = None if scheme == "int4" else text
    how: dict[str, Any] = {"sequences": 4, "tokens": 48, "num_threads": 1}
    made = quantize(folder / "plain", folder / scheme, scheme, calibration=data, **how)
    ops = Ops(num_threads=1, compute="exact")
    checkpoint = open_checkpoint(made)
    found = Paged(build_model(checkpoint, Mesh(), ops, max_model_len=64)).run("a", text[0])
    assert checkpoint.unused() == []
    ops.close()
    wanted = expected_logits(model, text[0])
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_a_folded_model_answers_as_the_original(name: str, tmp_path: Path) -> None:
    model = tiny(name, **MODELS[name], hidden_size=128, intermediate_size=256, head_dim=32)
    loudest(model)
    model.save_pretrained(tmp_path / "plain")
    # 8 bits lose 0.02 to 0.05 of random weights, 4 bits half; a factor in the wrong place, all
    errors = {one: error(model, tmp_path, one) for one in ("smoothquant", "awq", "int4")}
    assert errors["smoothquant"] < 0.06
    assert errors["awq"] < 1.25 * errors["int4"]
