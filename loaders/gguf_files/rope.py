"""The rotary scaling of a GGUF file as the ``rope_scaling`` of a Hugging Face config."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from sdk.loaders.gguf_files.metadata import Keys
from sdk.loaders.gguf_files.reader import GgufFile
from sdk.loaders.model_shapes import LIMITS
from sdk.quant.errors import CheckpointError, UnsupportedError

_ORIGINAL = "original_context_length"
_TYPES = ("none", "linear", "yarn", "longrope")


def rope_scaling(
    file: GgufFile, keys: Keys, rotary: int, *, log_multiplier: bool = False
) -> dict[str, Any] | None:
    """``rope_scaling`` of the config; None for plain rotary embeddings.

    ``rotary``: the rotated dimensions of a head. ``log_multiplier``: the key of YaRN's
    ``mscale_all_dim`` is read. As in llama.cpp a factor without a type scales
    linearly, ``rope.scale_linear`` is the first name of the factor, and ``attn_factor`` multiplies
    cos and sin whatever the type. Divisors of each frequency (Llama 3's scaling), and a linear
    scaling with an ``attn_factor``, become ``{"rope_type": "freq_factors", "factors": [...]}``.

    Raises:
        CheckpointError: an unknown type, or factors that are missing, not positive or of a wrong
            shape.
        UnsupportedError: a combination that llama.cpp's versions read in different ways.
    """
    kind = keys.text("rope.scaling.type", "linear")
    if kind not in _TYPES:
        raise keys.fail("rope.scaling.type", kind, ", ".join(_TYPES))
    factor = 1.0 if kind == "none" else _factor(keys)
    attention = _positive(keys, "rope.scaling.attn_factor") or 1.0
    _check_yarn(keys, kind, log_multiplier)
    for name in ("rope_freqs.weight", "rope_factors_long.weight"):
        if kind == "yarn" and name in file.tensors:
            raise _both(file, name)
    if "rope_freqs.weight" in file.tensors:
        factors = [factor * value for value in _factors(file, "rope_freqs.weight", rotary)]
        return _by_frequency(factors, attention)
    if "rope_factors_long.weight" in file.tensors or "rope_factors_short.weight" in file.tensors:
        both = {
            f"{which}_factor": [
                factor * value for value in _factors(file, f"rope_factors_{which}.weight", rotary)
            ]
            for which in ("long", "short")
        }
        return {"rope_type": "longrope", **both} | _optional(
            keys, attention_factor="attn_factor", original_max_position_embeddings=_ORIGINAL
        )
    if kind == "longrope":
        raise CheckpointError(
            f"{file.path}: rope.scaling.type is longrope, "
            "but rope_factors_long.weight and rope_factors_short.weight are missing"
        )
    if kind == "yarn":
        found = {"rope_type": "yarn", "factor": factor} | _optional(
            keys,
            original_max_position_embeddings=_ORIGINAL,
            beta_fast="yarn_beta_fast",
            beta_slow="yarn_beta_slow",
        )
        if attention != 1.0:
            found["attention_factor"] = attention * yarn_attention(factor)
        if log_multiplier and (every := keys.number("rope.scaling.yarn_log_multiplier")):
            found |= {"mscale": 1.0, "mscale_all_dim": every}
        return found
    if attention != 1.0:
        return _by_frequency([factor] * (rotary // 2), attention)
    return None if factor == 1.0 else {"rope_type": "linear", "factor": factor}


def sliding_rope(keys: Keys, config: dict[str, Any], *, scaled: bool) -> None:
    """Give the sliding layers of a config their rotary embedding.

    ``scaled``: whether the scaling of the other layers is theirs too, as in most models. If not,
    theirs is always stated: the class of OLMo 3 has a base of its own for them.
    """
    local = _positive(keys, "rope.freq_base_swa") or config["rope_theta"]
    if not config["sliding_window"] or (scaled and local == config["rope_theta"]):
        return
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    own = scaling if scaled else {"rope_type": "default"}
    config["rope_scaling"] = None
    config["rope_parameters"] = {
        "full_attention": {**scaling, "rope_theta": config["rope_theta"]},
        "sliding_attention": {**own, "rope_theta": local},
    }


def yarn_attention(factor: float) -> float:
    """The factor of cos and sin that YaRN has by itself."""
    return 1.0 if factor <= 1 else 0.1 * math.log(factor) + 1.0


def _factor(keys: Keys) -> float:
    """How much longer the context is; llama.cpp reads 0 as 1."""
    for name in ("rope.scaling.factor", "rope.scale_linear"):
        if (found := keys.number(name)) is not None:
            if found < 0:
                raise keys.fail(name, found, "a positive number")
            return found or 1.0
    return 1.0


def _positive(keys: Keys, name: str) -> float | None:
    found = keys.number(name)
    if found is not None and found <= 0:
        raise keys.fail(name, found, "a positive number")
    return found


def _by_frequency(factors: list[float], attention: float) -> dict[str, Any]:
    found: dict[str, Any] = {"rope_type": "freq_factors", "factors": factors}
    return found if attention == 1.0 else found | {"attention_factor": attention}


def _check_yarn(keys: Keys, kind: str, log_multiplier: bool) -> None:
    """:raises UnsupportedError: a key of YaRN that versions of llama.cpp read differently, or only
    for models that are not read here."""
    mixed = (1.0, -1.0) if kind == "yarn" else (0.0, -1.0)
    neutral = {"yarn_ext_factor": mixed, "yarn_attn_factor": (1.0,)}
    if not log_multiplier:
        neutral["yarn_log_multiplier"] = (0.0,)
    for name, values in neutral.items():
        found = keys.number(f"rope.scaling.{name}")
        if found is not None and found not in values:
            raise UnsupportedError(
                f"{keys.source}: {keys.architecture}.rope.scaling.{name}: expected {values[0]:g}, "
                f"found {found:g}: versions of llama.cpp read it in different ways, so it is not "
                "known what the model needs"
            )


def _both(file: GgufFile, name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{file.path}: rope.scaling.type is yarn: expected no tensor {name!r} beside it, found "
        "one: YaRN with other factors of frequencies is not supported"
    )


def _optional(keys: Keys, **names: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for ours, theirs in names.items():
        if theirs == _ORIGINAL:
            value: float = keys.integer(
                f"rope.scaling.{theirs}", LIMITS["max_position_embeddings"], 0
            )
        else:
            value = _positive(keys, f"rope.scaling.{theirs}") or 0
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
