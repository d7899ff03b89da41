"""What follows the encoder of texts of CLIP and SigLIP, and how its texts are read."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from sdk.loaders.folders.folder_file import folder_file
from sdk.loaders.json_file import read_json
from sdk.models.configs.dual_rules import DualRules
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.embedding_head import (
    Contrast,
    DenseStep,
    EmbeddingHead,
    Filling,
    NormalizeStep,
    Step,
)
from sdk.quant.errors import CheckpointError, UnsupportedError

_LIMIT = 8 << 20


def dual_head(checkpoint: Checkpoint, rules: DualRules, hidden_size: int) -> EmbeddingHead:
    """The head of a folder.

    :raises CheckpointError: a tensor is missing or has a wrong shape.
    :raises UnsupportedError: the tokenizer's settings do not say what fills texts up.
    """
    steps: list[Step] = []
    if checkpoint.has(rules.projection) or not rules.optional:
        steps.append(_projection(checkpoint, rules.projection, hidden_size))
    contrast = None
    if checkpoint.has("logit_scale"):
        bias = _number(checkpoint, "logit_bias") if rules.each else 0.0
        factor = math.exp(min(_number(checkpoint, "logit_scale"), 100.0))
        contrast = Contrast(factor, bias, rules.each)
    filling = None
    if rules.filled:
        filling = _filling(checkpoint.path, checkpoint.config["max_position_embeddings"])
    return EmbeddingHead(
        ("last",),
        (*steps, NormalizeStep()),
        max_tokens=None if filling is None else filling.length,
        contrast=contrast,
        filling=filling,
        until_end=rules.until_end,
        lower_case=rules.lower_case,
    )


def _projection(checkpoint: Checkpoint, name: str, hidden_size: int) -> DenseStep:
    weight = np.asarray(checkpoint.weight(name).dequantize().numpy(), np.float32)
    if weight.ndim != 2 or weight.shape[1] != hidden_size:
        raise CheckpointError(
            f"{checkpoint.path}: {name}: expected a matrix of {hidden_size} columns, found shape "
            f"{list(weight.shape)}"
        )
    bias = None
    if checkpoint.has(f"{name}.bias"):
        bias = np.asarray(checkpoint.tensor(f"{name}.bias").numpy(), np.float32)
        if bias.shape != weight.shape[:1]:
            raise CheckpointError(
                f"{checkpoint.path}: {name}.bias: expected shape {[len(weight)]}, found "
                f"{list(bias.shape)}"
            )
    return DenseStep(weight, bias, "Identity")


def _number(checkpoint: Checkpoint, name: str) -> float:
    found = np.asarray(checkpoint.tensor(name).numpy(), np.float64)
    if found.size != 1 or not np.isfinite(found).all():
        raise CheckpointError(
            f"{checkpoint.path}: {name}: expected one finite number, found shape "
            f"{list(found.shape)}"
        )
    return float(found.reshape(-1)[0])


def _filling(folder: Path, positions: int) -> Filling:
    """transformers fills texts up to the tokenizer's longest one."""
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = folder_file(folder, name)
        values |= {} if file is None else read_json(file, _LIMIT)
    token = values.get("pad_token")
    token = token.get("content") if isinstance(token, dict) else token
    most, side = values.get("model_max_length"), values.get("padding_side", "right")
    if not isinstance(token, str) or not token or side not in ("left", "right"):
        raise UnsupportedError(
            f"{folder}: tokenizer_config.json: expected pad_token, with which texts are filled up, "
            f"and padding_side 'left' or 'right', found {str(token)[:80]!r} and {str(side)[:80]!r}"
        )
    if isinstance(most, (int, float)) and 1 <= most < positions:
        positions = int(most)
    return Filling(positions, token, side == "left")
