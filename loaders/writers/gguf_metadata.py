"""Makes the metadata of a GGUF file from a Hugging Face config; the inverse of
gguf_files/config."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.loaders.gguf_files.keys import eps_key
from sdk.loaders.gguf_files.rope import yarn_attention
from sdk.loaders.model_shapes import num_experts
from sdk.models.architecture import Architecture, GgufRules, architecture, architectures
from sdk.models.configs.experts import NAMES, shared_width
from sdk.quant.errors import UnsupportedError

_REQUIRED = {
    "num_hidden_layers": "block_count",
    "max_position_embeddings": "context_length",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "vocab_size": "vocab_size",
}


def architecture_of(config: Mapping[str, Any], source: str) -> tuple[Architecture, GgufRules]:
    """:raises UnsupportedError: the model cannot be written as a GGUF file."""
    found = architecture(config["model_type"])
    if found is None or found.gguf is None:
        written = (own for own in architectures() if own.gguf is not None and own.config.causal)
        supported = ", ".join(own.model_type for own in written)
        raise UnsupportedError(
            f"{source}: models of type {config['model_type']} cannot be written as GGUF files; "
            f"expected one of {supported}"
        )
    others = (rules for rules in found.more_gguf if rules.writes and rules.writes(config))
    return found, next(others, found.gguf)


def model_metadata(config: Mapping[str, Any], source: str) -> dict[str, Any]:
    """Everything except the tokenizer.

    :raises UnsupportedError: the model has something that a GGUF file cannot express.
    """
    own, rules = architecture_of(config, source)
    name = rules.name
    for key, wanted in rules.only.items():
        if (found := config.get(key, wanted)) != wanted:
            raise UnsupportedError(
                f"{source}: {own.model_type} is written as a GGUF file only with {key} {wanted}, "
                f"found {str(found)[:40]}: llama.cpp has no other one"
            )
    given = dict(config)
    heads = given["num_attention_heads"]
    if given.get("num_key_value_heads") is None:
        given["num_key_value_heads"] = heads
    if given.get("head_dim") is None:
        given["head_dim"] = given["hidden_size"] // heads
    facts: dict[str, Any] = {theirs: int(given[ours]) for ours, theirs in _REQUIRED.items()}
    facts["attention.value_length"] = facts["attention.key_length"]
    eps = own.config.norm_eps
    facts[eps_key(own)] = float(given[eps] if isinstance(eps, str) else eps)
    facts |= _rope(given, name, source) | _experts(given, own, rules)
    if given.get("sliding_window") and given.get("use_sliding_window", True):
        facts["attention.sliding_window"] = int(given["sliding_window"])
    for cap in ("attn_logit_softcapping", "final_logit_softcapping"):
        if given.get(cap) and cap in rules.keys:
            facts[cap] = float(given[cap])
    if rules.write is not None:
        facts |= rules.write(given, source)
    metadata: dict[str, Any] = {"general.architecture": name, "general.quantization_version": 2}
    return metadata | {f"{name}.{key}": value for key, value in facts.items()}


def _experts(config: Mapping[str, Any], own: Architecture, rules: GgufRules) -> dict[str, Any]:
    """The keys of a mixture of experts; none for other models."""
    if own.config.expert_width is None:
        return {}

    def of(fact: str, default: Any) -> Any:
        names = [name for name in NAMES[fact] if name in own.config.keys]
        found = (given.get(name) for given in (config, own.config.defaults) for name in names)
        return next((value for value in found if value is not None), default)

    facts = {
        "expert_count": num_experts(config) or 0,
        "expert_used_count": int(of("per_token", 0)),
        "expert_feed_forward_length": int(config[own.config.expert_width]),
    }
    if rules.expert_gating == 2:  # files leave out what llama.cpp computes anyway
        facts |= {"expert_gating_func": 2, "expert_weights_norm": bool(of("normalized", True))}
    others: dict[str, tuple[Any, Any]] = {  # and what a file without the key means
        "expert_weights_scale": (float(of("scale", 1.0)), 1.0),
        "expert_group_count": (int(of("groups", 1)), 1),
        "expert_group_used_count": (int(of("groups_used", 1)), 1),
        "expert_shared_count": (int(of("shared", 0)), 0),
        "expert_shared_feed_forward_length": (shared_width(config, own), 0),
        "leading_dense_block_count": (int(of("dense", 0)), 0),
    }
    return facts | {key: value for key, (value, usual) in others.items() if value != usual}


def _parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings of the layers that do not slide, of transformers 4 or 5."""
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(found.get("full_attention"), Mapping):
        found = found["full_attention"]
    return {"rope_theta": config.get("rope_theta", 10000.0), **found}


def _rope(config: Mapping[str, Any], name: str, source: str) -> dict[str, Any]:
    given = _parameters(config)
    kind = given.get("rope_type") or given.get("type") or "default"
    width = config["head_dim"]
    share = config.get("partial_rotary_factor") or given.get("partial_rotary_factor") or 1.0
    facts: dict[str, Any] = {
        "rope.freq_base": float(given["rope_theta"]),
        "rope.dimension_count": int(width * share),
    }
    local = (config.get("rope_parameters") or {}).get("sliding_attention")
    if isinstance(local, Mapping):
        facts["rope.freq_base_swa"] = float(local["rope_theta"])
    elif config.get("rope_local_base_freq"):
        facts["rope.freq_base_swa"] = float(config["rope_local_base_freq"])
    if kind == "freq_factors" and given.get("attention_factor"):
        return facts | {"rope.scaling.attn_factor": float(given["attention_factor"])}
    if kind in ("default", "llama3", "freq_factors"):
        return facts
    if kind == "linear":
        return facts | {
            "rope.scaling.type": "linear",
            "rope.scaling.factor": float(given["factor"]),
        }
    if kind == "yarn":
        return facts | _yarn(config, given)
    if kind == "longrope":
        original = _original_context(config, given)
        stretch = config["max_position_embeddings"] / original
        found = 1.0 if stretch <= 1 else math.sqrt(1 + math.log(stretch) / math.log(original))
        return facts | {
            "rope.scaling.original_context_length": original,
            "rope.scaling.attn_factor": float(given.get("attention_factor") or found),
        }
    raise UnsupportedError(
        f"{source}: rope_type: expected default, linear, llama3, longrope or yarn for a GGUF file "
        f"of {name}, found {kind!r}"
    )


def _yarn(config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    original = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = float(given["factor"])
    facts: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": factor,
        "rope.scaling.original_context_length": int(original),
    }
    for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
        if given.get(ours) is not None:
            facts[f"rope.scaling.{theirs}"] = float(given[ours])
    attention = given.get("attention_factor")
    if attention is None and given.get("mscale") and given.get("mscale_all_dim"):
        attention = math.prod(
            (0.1 * float(given[name]) * math.log(factor) + 1.0) ** power if factor > 1 else 1.0
            for name, power in (("mscale", 1), ("mscale_all_dim", -1))
        )
    if attention is not None:
        facts["rope.scaling.attn_factor"] = float(attention) / yarn_attention(factor)
    return facts


def _original_context(config: Mapping[str, Any], given: Mapping[str, Any]) -> int:
    found = given.get("original_max_position_embeddings")
    found = found or config.get("original_max_position_embeddings")
    return int(found or config["max_position_embeddings"])


def rope_factors(config: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """The divisors of the frequencies, by tensor names; empty for most models."""
    given = _parameters(config)
    kind = given.get("rope_type") or given.get("type")
    if kind == "llama3":
        return {"rope_freqs.weight": _llama3_factors(config, given)}
    if kind == "freq_factors":
        return {"rope_freqs.weight": np.array(given["factors"], np.float32)}
    if kind == "longrope":
        return {
            f"rope_factors_{which}.weight": np.array(given[f"{which}_factor"], np.float32)
            for which in ("long", "short")
        }
    return {}


def _llama3_factors(config: Mapping[str, Any], given: Mapping[str, Any]) -> NDArray[np.float32]:
    """Long waves are stretched by ``factor``, short ones kept, those between interpolated."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    low, high = float(given["low_freq_factor"]), float(given["high_freq_factor"])
    original, factor = float(given["original_max_position_embeddings"]), float(given["factor"])
    found = []
    for i in range(0, width, 2):
        wave = 2 * math.pi * float(given["rope_theta"]) ** (i / width)
        if wave < original / high:
            found.append(1.0)
        elif wave > original / low:
            found.append(factor)
        else:
            smooth = (original / wave - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)
