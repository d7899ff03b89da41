"""Models with real shapes and random weights, made on the card without a file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdk.bench.gpu.card import Card
from sdk.bench.gpu.weights import affine, blocks
from sdk.kernels.weights.layouts import BLOCK_TYPES, Dense
from sdk.quant.checkpoint import TensorEntry
from sdk.quant.errors import CheckpointError
from sdk.quant.weight import Weight, weight_of

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}
_QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
}
_LLAMA_1B = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}
_LLAMA_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "hidden_act": "silu",
}


def qwen3_config(card: Card) -> dict[str, Any]:
    """The shapes of Qwen3-0.6B."""
    return _QWEN3 | (_TINY if card.tiny else {})


def llama_config(card: Card) -> dict[str, Any]:
    """The shapes of Llama-3.1-8B."""
    return _LLAMA_8B | (_TINY if card.tiny else {})


def small_llama_config(card: Card) -> dict[str, Any]:
    """The shapes of ``random-1b`` (sdk/bench/random_models.py), with a head of its own."""
    return _LLAMA_1B | (_TINY if card.tiny else {})


class RandomCheckpoint:
    """A :class:`sdk.quant.checkpoint.Checkpoint`, like a folder with this ``config``.

    ``kind`` of the matrices: ``bfloat16``; ``int4g128`` with an embedding in bfloat16; or a type of
    GGUF blocks, which the embedding has too.
    """

    format = "safetensors"
    tokenizer = None

    def __init__(self, card: Card, config: Mapping[str, Any], kind: str) -> None:
        self.path = Path(__file__).parent  # any folder without weights
        self.config = config
        self.generation_config: Mapping[str, Any] = {}
        self.kv_scales: Mapping[str, float] = {}
        self.processor: Mapping[str, Any] = {}
        self.on_bytes: Callable[[int, int], None] | None = None
        self._card = card
        self._kind = kind
        c = config
        hidden, wide = c["hidden_size"], c["intermediate_size"]
        queries = c["num_attention_heads"] * c["head_dim"]
        keys = c["num_key_value_heads"] * c["head_dim"]
        self._shapes = {
            "embed_tokens": (c["vocab_size"], hidden),
            "lm_head": (c["vocab_size"], hidden),
            "q_proj": (queries, hidden),
            "k_proj": (keys, hidden),
            "v_proj": (keys, hidden),
            "o_proj": (hidden, queries),
            "gate_proj": (wide, hidden),
            "up_proj": (wide, hidden),
            "down_proj": (hidden, wide),
        }
        if c["tie_word_embeddings"]:
            del self._shapes["lm_head"]

    def weight(self, name: str) -> Weight:
        matrix = name.rpartition(".")[2]
        if matrix not in self._shapes:
            raise CheckpointError(f"{name}: there is no such matrix in the random weights")
        n, k = self._shapes[matrix]
        if self._kind in BLOCK_TYPES:
            return weight_of(blocks(self._card, n, k, self._kind))
        if self._kind == "bfloat16" or matrix == "embed_tokens":
            return weight_of(Dense(self._card.matrix(n, k)))
        return weight_of(affine(self._card, n, k, 4, min(128, k)))

    def tensor(self, name: str) -> Tensor:
        """A norm of ones."""
        of_heads = name.endswith(("q_norm.weight", "k_norm.weight"))
        size = self.config["head_dim" if of_heads else "hidden_size"]
        return torch.ones(size, device=self._card.device)

    def has(self, name: str) -> bool:
        return name.rpartition(".")[2] in self._shapes or name.endswith("norm.weight")

    def alike(self, one: str, other: str) -> bool:
        return False

    def entries(self) -> Sequence[TensorEntry]:
        found = []
        for matrix, (n, k) in self._shapes.items():
            count = 1 if matrix in ("embed_tokens", "lm_head") else self.config["num_hidden_layers"]
            size = 2 * n * k
            if self._kind in BLOCK_TYPES:
                size = n * k // BLOCK_TYPES[self._kind].elements * BLOCK_TYPES[self._kind].nbytes
            elif self._kind == "int4g128" and matrix != "embed_tokens":
                size = n * k * 5 // 8  # with scales; rounded up
            found += [TensorEntry(f"{matrix}.{i}", (n, k), "BF16", size) for i in range(count)]
        return found

    def unused(self) -> list[str]:
        return []

    def close(self) -> None:
        """Nothing is open."""
