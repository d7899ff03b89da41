"""Tiny models of transformers' classes with recurrent states, in folders."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

_SIZES = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
#: Attention between short convolutions, and between gated delta nets.
HYBRIDS = {
    "lfm2": lambda: transformers.Lfm2ForCausalLM(
        transformers.Lfm2Config(
            **_SIZES, layer_types=["conv", "full_attention", "conv"], block_auto_adjust_ff_dim=False
        )
    ),
    "qwen3_5": lambda: transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(
            **_SIZES,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=16,
            linear_value_head_dim=24,
            layer_types=["linear_attention", "full_attention", "linear_attention"],
        )
    ),
}


def tiny_hybrid(name: str, folder: Path) -> Path:
    """Write one with random weights, whose answers have many different tokens."""
    torch.manual_seed(3)
    model = HYBRIDS[name]()
    for weight in model.parameters():
        weight.data.mul_(4)
    model.save_pretrained(folder)
    return folder
