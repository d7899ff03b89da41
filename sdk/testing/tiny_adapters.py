"""``tiny_adapter``: writes a LoRA adapter with random factors for a model."""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike, fspath
from pathlib import Path

from sdk.api.errors import RequestError
from sdk.loaders.writers.peft_writer import LINEAR, random_adapter_for
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

    :raises RequestError: an argument is wrong.
    :raises CheckpointError: the model cannot be read, or has none of the targets.
    """
    if type(rank) is not int or rank < 1:
        raise RequestError(f"rank: expected an integer > 0, found {safe_repr(rank)}")
    target = Path(folder).expanduser()
    return random_adapter_for(fspath(model), target, rank, seed=seed, scale=scale, targets=targets)
