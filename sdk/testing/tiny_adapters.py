"""``tiny_adapter``: writes a LoRA adapter with random factors for a model."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

from sdk.errors import RequestError
from sdk.loaders.model_shapes import expected_shape
from sdk.loaders.open import open_checkpoint
from sdk.loaders.writers.peft_writer import ATTENTION, LINEAR, write_random_adapter
from sdk.quant.safe_repr import safe_repr


def tiny_adapter(
    folder: str | PathLike[str],
    model: str | PathLike[str],
    *,
    rank: int = 4,
    seed: int = 0,
    scale: float = 1.0,
    targets: Sequence[str] = LINEAR,
) -> Path:
    """Write a PEFT folder for ``model`` and return its path for ``lora_request``.

    The same arguments write the same factors. ``targets``: the matrices of a block that it
    changes; ``scale``: how much, next to the model's own random weights.

    :raises RequestError: an argument is wrong, or the model has none of the targets.
    """
    if type(rank) is not int or rank < 1:
        raise RequestError(f"rank: expected an integer > 0, found {safe_repr(rank)}")
    checkpoint = open_checkpoint(fspath(model))
    try:
        config = checkpoint.config
        paths = [
            f"model.layers.{layer}.{'self_attn' if name in ATTENTION else 'mlp'}.{name}"
            for layer in range(int(config["num_hidden_layers"]))
            for name in targets
        ]
        shapes = {path: expected_shape(config, path) for path in paths if checkpoint.has(path)}
    finally:
        checkpoint.close()
    matrices = {path: (shape[0], shape[1]) for path, shape in shapes.items() if shape is not None}
    if not matrices:
        raise RequestError(
            f"targets: expected names of matrices of the model, found {safe_repr(list(targets))}"
        )
    target = Path(folder).expanduser()
    return write_random_adapter(target, matrices, rank, seed=seed, scale=scale)
