"""The rotary scaling of a GGUF file as the ``rope_scaling`` of a Hugging Face config."""

from __future__ import annotations

from typing import Any

import numpy as np

from sdk.loaders.gguf_metadata import Keys
from sdk.loaders.gguf_reader import GgufFile
from sdk.loaders.model_shapes import LIMITS
from sdk.quant.errors import CheckpointError

_ORIGINAL = "original_context_length"


def rope_scaling(file: GgufFile, keys: Keys, rotary: int) -> dict[str, Any] | None:
    """``rope_scaling`` of the config; None for plain rotary embeddings.

    ``rotary``: the rotated dimensions of a head. Llama 3's scaling becomes
    ``{"rope_type": "freq_factors", "factors": [...]}``, the divisors of each frequency.

    Raises:
        CheckpointError: an unknown type, or factors that are missing, not positive or of a wrong
            shape.
    """
    kind = keys.text("rope.scaling.type", "none")
    factor = keys.number("rope.scaling.factor") or 1.0  # llama.cpp reads 0 as 1
    if factor < 0:
        raise keys.fail("rope.scaling.factor", factor, "a positive number")
    if "rope_freqs.weight" in file.tensors:
        scale = factor if kind == "linear" else 1.0
        factors = [scale * value for value in _factors(file, "rope_freqs.weight", rotary)]
        return {"rope_type": "freq_factors", "factors": factors}
    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        scaling: dict[str, Any] = {
            "rope_type": "longrope",
            "long_factor": _factors(file, "rope_factors_long.weight", rotary),
            "short_factor": _factors(file, "rope_factors_short.weight", rotary),
        }
        return scaling | _optional(
            keys, attention_factor="attn_factor", original_max_position_embeddings=_ORIGINAL
        )
    if kind == "none" or (kind == "linear" and factor == 1.0):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return {"rope_type": "yarn", "factor": factor} | _optional(
            keys,
            original_max_position_embeddings=_ORIGINAL,
            attention_factor="yarn_attn_factor",
            beta_fast="yarn_beta_fast",
            beta_slow="yarn_beta_slow",
        )
    if kind == "longrope":
        raise CheckpointError(
            f"{file.path}: rope.scaling.type is longrope, "
            "but rope_factors_long.weight and rope_factors_short.weight are missing"
        )
    raise keys.fail("rope.scaling.type", kind, "none, linear, yarn or longrope")


def _optional(keys: Keys, **names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, theirs in names.items():
        if theirs == _ORIGINAL:
            value: float = keys.integer(
                f"rope.scaling.{theirs}", LIMITS["max_position_embeddings"], 0
            )
        else:
            value = keys.number(f"rope.scaling.{theirs}") or 0
        if value:
            found[ours] = value
    return found


def _factors(file: GgufFile, name: str, rotary: int) -> list[float]:
    """One positive float32 number per pair of rotated dimensions."""
    tensor = file.tensors.get(name)
    if tensor is None:
        raise CheckpointError(f"{file.path}: tensor {name!r} is missing")
    if tensor.shape != (rotary // 2,) or tensor.type.name != "F32":
        raise CheckpointError(
            f"{file.path}: tensor {name!r} is {tensor.type.name} {list(tensor.shape)}, "
            f"expected F32 [{rotary // 2}]"
        )
    values = file.data(name).reshape(-1).view("<f4")
    if not (np.isfinite(values) & (values > 0)).all():
        raise CheckpointError(f"{file.path}: tensor {name!r} holds a factor that is not positive")
    return [float(value) for value in values]
