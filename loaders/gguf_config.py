"""GGUF metadata to the config dict of the Hugging Face model it was made from.

Metadata keys carry the architecture in front: ``llama.block_count``. Numbers stored as float32 are
read back as the shortest decimal that rounds to them (1e-05, not 9.999999747378752e-06), which is
what the original config said. What the file leaves out is what llama.cpp assumes for that
architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from sdk.loaders.gguf_metadata import Keys, shortest
from sdk.loaders.gguf_reader import GgufFile
from sdk.loaders.gguf_rope import rope_scaling
from sdk.loaders.model_shapes import LIMITS, check_config
from sdk.loaders.other_kinds import check_gguf_kind
from sdk.quant.errors import CheckpointError, UnsupportedError

#: GGUF architecture -> Hugging Face model_type. A sliding window turns llama into mistral.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
    "olmo2": "olmo2",
    "granite": "granite",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
}
MAX_EXPERTS = 1024
#: Those that may have experts: llama is then Mixtral.
_WITH_EXPERTS = ("llama", "qwen3moe", "gpt-oss")
#: How a router's logits become weights: a softmax over all, or over the chosen ones.
_GATING = {"llama": 1, "qwen3moe": 1, "gpt-oss": 3}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def architecture(file: GgufFile) -> str:
    """The architecture of a file.

    Raises:
        CheckpointError: the file does not say.
        UnsupportedError: one that is not run.
    """
    check_gguf_kind(file.path, file.metadata)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path}: general.architecture is {name!r}, expected a name")
    if name not in MODEL_TYPES:
        raise UnsupportedError(
            f"{file.path}: the architecture {name[:80]!r} is not run from GGUF files; those that "
            f"are: {', '.join(MODEL_TYPES)}. If transformers knows the model, open its folder of "
            "safetensors files instead"
        )
    if Keys(file, name).integer("expert_count", (0, MAX_EXPERTS), 0) and name not in _WITH_EXPERTS:
        raise UnsupportedError(f"{file.path}: {name} is not run as a mixture of experts")
    return name


def build_config(file: GgufFile) -> dict[str, Any]:
    """The config of the model in ``file``.

    Raises:
        CheckpointError: a number is missing, impossible or contradicts another.
        UnsupportedError: the model needs what is not run.
    """
    name = architecture(file)
    keys = Keys(file, name)
    config: dict[str, Any] = {
        "model_type": MODEL_TYPES[name],
        **_sizes(keys),
        "max_position_embeddings": keys.integer(
            "context_length", LIMITS["max_position_embeddings"]
        ),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "hidden_act": "silu",
        "sliding_window": keys.integer("attention.sliding_window", (0, 1 << 31), 0) or None,
    }
    if config["rms_norm_eps"] is None:
        raise keys.fail("attention.layer_norm_rms_epsilon", "missing", "a number")
    width = config["head_dim"]
    rotary = keys.integer("rope.dimension_count", LIMITS["head_dim"], width)
    if rotary > width or rotary % 2:
        raise keys.fail("rope.dimension_count", rotary, f"an even number up to {width}")
    if rotary != width:
        config["partial_rotary_factor"] = rotary / width
    config["rope_scaling"] = rope_scaling(file, keys, rotary)
    config.update(_experts(keys, name))
    if name in _SPECIAL:
        _SPECIAL[name](config, keys)
    config.update(_token_ids(file, config["vocab_size"]))
    check_config(config, str(file.path))
    return config


def _experts(keys: Keys, name: str) -> dict[str, Any]:
    """What a mixture of experts adds; nothing for other models."""
    count = keys.integer("expert_count", (0, MAX_EXPERTS), 0)
    if not count:
        if name in ("qwen3moe", "gpt-oss"):
            raise keys.fail("expert_count", count, f"1 to {MAX_EXPERTS}")
        return {}
    run = {"expert_gating_func": _GATING[name], "expert_group_count": 1}
    for key in (*run, "expert_shared_count", "leading_dense_block_count"):
        value = keys.integer(key, (0, 1 << 16), 0)
        if value not in (0, run.get(key, 0)):
            raise UnsupportedError(f"{keys.source}: {name} with {key} {value} is not run")
    scale = keys.number("expert_weights_scale", 1.0)
    if scale not in (0.0, 1.0):
        raise UnsupportedError(
            f"{keys.source}: {name} with expert_weights_scale {scale} is not run"
        )
    wide = keys.integer("expert_feed_forward_length", LIMITS["intermediate_size"], 0)
    used = keys.integer("expert_used_count", (1, count))
    found: dict[str, Any] = {"num_local_experts": count, "num_experts_per_tok": used}
    if name == "qwen3moe":
        return found | {"moe_intermediate_size": wide, "norm_topk_prob": True} if wide else found
    return found | {"intermediate_size": wide} if wide else found


def _sizes(keys: Keys) -> dict[str, int]:
    layers = keys.integer("block_count", LIMITS["num_hidden_layers"])
    hidden = keys.integer("embedding_length", LIMITS["hidden_size"])
    heads = keys.per_layer("attention.head_count", "num_attention_heads", layers)
    if keys.get("attention.key_length") is None and hidden % heads:
        raise keys.fail("attention.head_count", heads, f"a divisor of {hidden}")
    width = keys.integer("attention.key_length", LIMITS["head_dim"], hidden // heads)
    values = keys.integer("attention.value_length", LIMITS["head_dim"], width)
    if values != width:
        raise UnsupportedError(
            f"{keys.source}: keys of length {width} with values of length {values} are not run"
        )
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": _width(keys, layers),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.per_layer(
            "attention.head_count_kv", "num_key_value_heads", layers, heads
        ),
        "head_dim": width,
    }


def _width(keys: Keys, layers: int) -> int:
    """Of the MLP; a file whose layers all have experts may not say."""
    experts = keys.integer("expert_feed_forward_length", LIMITS["intermediate_size"], 0)
    return keys.per_layer("feed_forward_length", "intermediate_size", layers, experts or None)


# -- what single architectures add -----------------------------------------------------------------


def _llama(config: dict[str, Any], keys: Keys) -> None:
    if "num_local_experts" in config:
        config["model_type"] = "mixtral"
    elif config["sliding_window"]:
        config["model_type"] = "mistral"


def _gemma2(config: dict[str, Any], keys: Keys) -> None:
    config["sliding_window"] = config["sliding_window"] or 4096
    config["attn_logit_softcapping"] = keys.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
    _gemma(config, keys, period=2, largest=46)


def _gemma3(config: dict[str, Any], keys: Keys) -> None:
    config["attn_logit_softcapping"] = None
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping")
    _gemma(config, keys, period=6, largest=62)
    # Scaled (or not) for the global layers only; the local ones have a base of their own.
    local = keys.number("rope.freq_base_swa", 10000.0)
    config["rope_local_base_freq"] = local
    scaling = config["rope_scaling"] or {"rope_type": "default"}
    config["rope_parameters"] = {
        "full_attention": {"rope_theta": config["rope_theta"], **scaling},
        "sliding_attention": {"rope_type": "default", "rope_theta": local},
    }


def _gemma(config: dict[str, Any], keys: Keys, period: int, largest: int) -> None:
    config["hidden_activation"] = config["hidden_act"] = "gelu_pytorch_tanh"
    config["layer_types"] = _layer_types(config, keys, period)
    # The 27B models divide by the square root of hidden size / heads, all others of the head size;
    # the files do not say, the number of layers does.
    by_heads = config["num_hidden_layers"] == largest
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if by_heads else config["head_dim"]
    )


def _phi3(config: dict[str, Any], keys: Keys) -> None:
    original = keys.integer(
        "rope.scaling.original_context_length",
        LIMITS["max_position_embeddings"],
        config["max_position_embeddings"],
    )
    config["original_max_position_embeddings"] = original


def _olmo2(config: dict[str, Any], keys: Keys) -> None:
    if config["sliding_window"]:
        config["model_type"] = "olmo3"
        config["layer_types"] = _layer_types(config, keys, 4)


def _granite(config: dict[str, Any], keys: Keys) -> None:
    config["attention_multiplier"] = keys.number("attention.scale") or config["head_dim"] ** -0.5
    config["embedding_multiplier"] = keys.number("embedding_scale") or 1.0
    config["residual_multiplier"] = keys.number("residual_scale") or 1.0
    config["logits_scaling"] = keys.number("logit_scale") or 1.0


def _gpt_oss(config: dict[str, Any], keys: Keys) -> None:
    config["layer_types"] = _layer_types(config, keys, 2)
    if config["rope_scaling"]:
        config["rope_scaling"]["truncate"] = False


_SPECIAL: Mapping[str, Callable[[dict[str, Any], Keys], None]] = {
    "llama": _llama,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "phi3": _phi3,
    "olmo2": _olmo2,
    "granite": _granite,
    "gpt-oss": _gpt_oss,
}


def _layer_types(config: dict[str, Any], keys: Keys, period: int) -> list[str]:
    """Local and global layers: stored per layer, as "every n-th is global", or not at all."""
    layers = config["num_hidden_layers"]
    pattern = keys.get("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if pattern.shape != (layers,):
            raise keys.fail("attention.sliding_window_pattern", pattern, f"{layers} values")
        local = [bool(value) for value in pattern]
    else:
        period = keys.integer("attention.sliding_window_pattern", (1, 512), period)
        local = [(index + 1) % period != 0 for index in range(layers)]
    if not config["sliding_window"]:
        local = [False] * layers
    return ["sliding_attention" if value else "full_attention" for value in local]


# -- vocabulary ------------------------------------------------------------------------------------


def _vocab_size(file: GgufFile) -> int:
    """The rows of the embedding, which the vocabulary must match."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{file.path}: the matrix token_embd.weight is missing")
    rows = embedding.shape[0]
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    if tokens is None:
        return rows
    for key in ("tokens", "scores", "token_type"):
        values = file.metadata.get(f"tokenizer.ggml.{key}")
        if values is None:
            continue
        if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str):
            raise CheckpointError(f"{file.path}: tokenizer.ggml.{key} is not an array")
        if len(values) != rows:
            raise CheckpointError(
                f"{file.path}: tokenizer.ggml.{key} has {len(values)} entries, "
                f"token_embd.weight has {rows} rows"
            )
    return rows


def _token_ids(file: GgufFile, vocab_size: int) -> dict[str, int]:
    found: dict[str, int] = {}
    names = {"bos": "bos", "eos": "eos", "padding": "pad", "eot": "eot", "eom": "eom"}
    for theirs, ours in names.items():
        key = f"tokenizer.ggml.{theirs}_token_id"
        value = file.metadata.get(key)
        if value is None:
            continue
        if type(value) is not int or not 0 <= value < vocab_size:
            raise CheckpointError(
                f"{file.path}: {key} is {value!r}, expected 0 to {vocab_size - 1}"
            )
        found[f"{ours}_token_id"] = value
    return found


def build_generation_config(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling defaults and end tokens, as ``generation_config.json`` would hold them."""
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        value = file.metadata.get(key)
        if type(value) is int:
            found[name] = value
        elif isinstance(value, float) and math.isfinite(shortest(value)):
            found[name] = shortest(value)
    ends = [
        config[f"{name}_token_id"] for name in ("eos", "eot", "eom") if f"{name}_token_id" in config
    ]
    if ends:
        found["eos_token_id"] = list(dict.fromkeys(ends))
    return found
