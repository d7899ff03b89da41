"""Architectures without a file of their own run through transformers on our pages and linears."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.conftest import Paged, checkpoint_of, expected_logits, prompt, tiny

OTHERS: dict[str, dict[str, Any]] = {
    "stablelm": {"partial_rotary_factor": 0.5, "use_qkv_bias": True},
    "gpt_neox": {"num_key_value_heads": 4},
    "starcoder2": {"sliding_window": 9},
    "olmo": {"clip_qkv": 2.0},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"sliding_window": 7, "num_hidden_layers": 5},
    "gpt2": {"num_key_value_heads": 4, "n_inner": 128},
    "opt": {"num_key_value_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64},
    "glm": {},
    "exaone4": {},
    "gpt_oss": {},
    "phi": {},
}


@pytest.mark.parametrize("name", OTHERS)
def test_x(name: str, load: Callable[..., Any]) -> None:
    oracle = tiny(name, **OTHERS[name])
    checkpoint = checkpoint_of(oracle)
    model = load(checkpoint)
    print(checkpoint.unused())
    ids = prompt(41, 1)
    e = expected_logits(oracle, ids)
    found = Paged(model).run("a", ids)
    print(e.std(), (e - found).abs().max())
    assert (e - found).abs().max() < 1e-4
    assert torch.equal(Paged(model).run("a", ids, [3, 17, 40]), found)
