"""Files that say how activations are rounded, against the forward passes of what wrote them.

``logits_act`` of a golden are llm-compressor's, in float32. Our definition of the rounding, put
into transformers' model, and our kernels give them to 1e-6, but for positions where another order
of additions moved a number over the edge between two codes, and what attends to those. Of 24
positions 22, 24 and 23 agree through transformers, 5, 24 and 23 through our kernels: with int8 per
token the lowest code is such an edge in every other row, because the row's own largest magnitude
is -127.5 steps.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sdk.kernels.reference.fake_quantize import fake_quantize
from sdk.kernels.weights.layouts import ActivationScheme
from sdk.loaders.open import open_checkpoint

GOLDEN = Path(__file__).parents[1] / "golden"
#: The scheme, and how far our logits may be: measured 2.2e-2, 7e-7, 1.3e-3 of their norm.
NAMED = {
    "ct-w8a8-int8": (ActivationScheme("int"), 3e-2),
    "ct-fp8-dynamic": (ActivationScheme("e4m3"), 5e-3),
    "ct-fp8-block": (ActivationScheme("e4m3", group=128), 5e-3),
}


def _golden(name: str) -> tuple[Tensor, Tensor, Tensor]:
    with np.load(GOLDEN / name / "golden.npz") as golden:
        parts = [torch.from_numpy(golden[key]) for key in ("prompt", "logits", "logits_act")]
    return parts[0], parts[1], parts[2]


def _distances(found: Tensor, expected: Tensor) -> Tensor:
    """Of each position, over the norm of its expected logits."""
    found = found - found.mean(-1, keepdim=True)
    expected = expected - expected.mean(-1, keepdim=True)
    return (found - expected).norm(dim=-1) / expected.norm(dim=-1)


def _distance(found: Tensor, expected: Tensor) -> float:
    return float(_distances(found, expected).square().mean().sqrt())


@pytest.mark.parametrize("name", NAMED)
def test_the_definition_is_the_rounding_of_the_writing_library(name: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    prompt, _, expected = _golden(name)
    checkpoint = open_checkpoint(GOLDEN / name)
    config = LlamaConfig.from_pretrained(GOLDEN / name, attn_implementation="eager")
    config.quantization_config = None
    model = LlamaForCausalLM(config).float().eval()
    for path, module in model.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = checkpoint.weight(path).dequantize()
            if path != "lm_head":
                module.register_forward_pre_hook(_rounding(NAMED[name][0]))
        elif hasattr(module, "weight"):
            stored = checkpoint.tensor(f"{path}.weight")
            module.weight.data = stored.float()
    checkpoint.close()
    with torch.inference_mode():
        found = model(prompt[None]).logits[0]
    assert _distance(found, expected) < NAMED[name][1]
    assert float(_distances(found, expected).min()) < 1e-5


def _rounding(scheme: ActivationScheme) -> Callable[..., tuple[Tensor]]:
    def before(module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        x = args[0]
        return (fake_quantize(x.reshape(-1, x.shape[-1]), scheme).reshape(x.shape),)

    return before


@pytest.mark.parametrize("name", NAMED)
def test_logits_are_near_those_of_the_writing_library(
    name: str, logits_of: Callable[..., Tensor]
) -> None:
    prompt, plain, expected = _golden(name)
    found = logits_of(GOLDEN / name, prompt, "auto", len(prompt))
    assert _distance(found, expected) < NAMED[name][1]
    assert _distance(found, expected) < 0.8 * _distance(plain, expected)
    assert float(_distances(found, expected).min()) < 1e-5
    assert _distance(logits_of(GOLDEN / name, prompt, "exact", len(prompt)), plain) < 1e-5


def test_two_spellings_of_one_scheme_give_the_same_logits(logits_of: Callable[..., Tensor]) -> None:
    prompt = _golden("ct-fp8-block")[0]
    found = [logits_of(GOLDEN / name, prompt, "auto", 9) for name in ("fp8-block", "ct-fp8-block")]
    assert torch.equal(*found)
