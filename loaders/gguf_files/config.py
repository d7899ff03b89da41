"""Makes the config of a Hugging Face model from the metadata of a GGUF file.

Metadata keys begin with the architecture: ``llama.block_count``. Numbers stored as float32 are read
back as the shortest decimal that rounds to them (1e-05, not 9.999999747378752e-06), which is what
the original config had. Keys that a file leaves out get llama.cpp's defaults of that architecture.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sdk.loaders.gguf_files.keys import check_keys, eps_key
from sdk.loaders.gguf_files.metadata import MAX_EXPERTS, Keys, shortest
from sdk.loaders.gguf_files.reader import GgufFile
from sdk.loaders.gguf_files.rope import rope_scaling, sliding_rope
from sdk.loaders.model_shapes import LIMITS, check_config
from sdk.loaders.other_kinds import check_gguf_kind, unknown_architecture
from sdk.models.architecture import Architecture, GgufRules, gguf_architecture
from sdk.models.configs.experts import key_of
from sdk.quant.errors import CheckpointError, UnsupportedError

_ATTENTION_BIAS = re.compile(r"blk\.\d+\.attn_(q|k|v|qkv|output)\.bias")
_MLP_BIAS = re.compile(r"blk\.\d+\.ffn_(gate|up|down)\.bias")
#: Counts of a mixture of experts, by fact (:data:`sdk.models.configs.experts.NAMES`): the key, and
#: the value that a model without the fact has.
_EXPERT_COUNTS = {
    "groups": ("expert_group_count", 1),
    "groups_used": ("expert_group_used_count", 1),
    "shared": ("expert_shared_count", 0),
    "shared_width": ("expert_shared_feed_forward_length", 0),
    "dense": ("leading_dense_block_count", 0),
}
_SAMPLING = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


def file_architecture(file: GgufFile) -> tuple[Architecture, GgufRules]:
    """The architecture of a file, and how the file holds it.

    Raises:
        CheckpointError: the file names no architecture.
        UnsupportedError: the architecture is not supported.
    """
    check_gguf_kind(file.path, file.metadata)
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        raise CheckpointError(f"{file.path}: general.architecture is {name!r}, expected a name")
    keys = Keys(file, name)
    found = gguf_architecture(name, keys)
    if found is None:
        raise unknown_architecture(file.path, name)
    if keys.expert_count and found[0].config.expert_width is None:
        raise UnsupportedError(f"{file.path}: {name} is not supported as a mixture of experts")
    return found


def build_config(file: GgufFile) -> dict[str, Any]:
    """The config of the model in ``file``.

    Raises:
        CheckpointError: a number is missing, impossible or contradicts another.
        UnsupportedError: the model needs something that is not supported.
    """
    own, rules = file_architecture(file)
    keys = Keys(file, rules.name)
    unread_keys(file, own, rules)
    config: dict[str, Any] = {
        "model_type": own.model_type,
        **_sizes(keys, own, rules),
        "max_position_embeddings": keys.integer(
            "context_length", LIMITS["max_position_embeddings"]
        ),
        **_norm_eps(keys, own, rules),
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        # Any of them: llama.cpp adds each bias that is there, and so do the layers here.
        "attention_bias": any(map(_ATTENTION_BIAS.fullmatch, file.tensors)),
        "mlp_bias": any(map(_MLP_BIAS.fullmatch, file.tensors)),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
        "hidden_act": "silu",
        "sliding_window": keys.integer("attention.sliding_window", (0, 1 << 31), 0) or None,
    }
    width = config["head_dim"]
    rotary = keys.integer("rope.dimension_count", LIMITS["head_dim"], width)
    if rotary > width or rotary % 2:
        raise keys.fail("rope.dimension_count", rotary, f"an even number up to {width}")
    if rotary != width or "partial_rotary_factor" in own.config.defaults:
        config["partial_rotary_factor"] = rotary / width
    config["rope_scaling"] = rope_scaling(
        file, keys, rotary, log_multiplier=rules.yarn_log_multiplier
    )
    config.update(_experts(keys, own, rules))
    if own.embedding.types:
        types = file.tensors.get("token_types.weight")
        config["type_vocab_size"] = 0 if types is None else types.shape[0]
    if rules.read is not None:
        rules.read(config, keys)
    _read_directions(config, keys, own)
    if rules.slides:
        sliding_rope(keys, config, scaled=rules.slides == "scaled")
    config.update(_classes(file, own, keys))
    config.update(_token_ids(file, config["vocab_size"]))
    check_config(config, str(file.path))
    return config


def _read_directions(config: dict[str, Any], keys: Keys, own: Architecture) -> None:
    """Whether tokens see those after them too; of models that always do, a file says so."""
    both = config.get("use_bidirectional_attention") is True or not own.config.causal
    causal = keys.flag("attention.causal", not both)
    key = f"{keys.source}: {keys.architecture}.attention.causal"
    if both and causal:
        raise UnsupportedError(f"{key}: expected false, found true: the model is an encoder")
    if both or causal:
        return
    if config.get("sliding_window"):
        raise UnsupportedError(
            f"{key}: expected true, found false: with a sliding window, which llama.cpp then "
            "applies to earlier tokens alone"
        )
    config["is_causal"] = False


def unread_keys(file: GgufFile, own: Architecture, rules: GgufRules) -> list[str]:
    """The keys of the architecture that nothing reads: see :func:`check_keys`."""
    experts = own.config.expert_width is not None
    return check_keys(file.metadata, rules, experts, str(file.path))


def _norm_eps(keys: Keys, own: Architecture, rules: GgufRules) -> dict[str, float]:
    """The eps of norms, under the config's key; none where the model's code fixes it."""
    key, other = eps_key(own), "attention.layer_norm_epsilon"
    if keys.get(key) is None and other in rules.keys:
        key = other
    found, name = keys.number(key), own.config.norm_eps
    if found is None:
        raise keys.fail(key, "missing", "a number")
    if isinstance(name, str):
        return {name: found}
    if found != name:
        raise UnsupportedError(
            f"{keys.source}: {keys.architecture}.{key}: expected {name}, found {found}: the code "
            f"of {own.model_type} has no other eps"
        )
    return {}


#: llama.cpp's poolings before a classification head.
_POOLINGS = {1: "mean", 2: "cls"}


def _classes(file: GgufFile, own: Architecture, keys: Keys) -> dict[str, Any]:
    """The keys of a classification head (llama.cpp's rerankers); none for other models."""
    head = file.tensors.get("cls.output.weight")
    if head is None:
        return {}
    key = f"{keys.architecture}.classifier.output_labels"
    labels = file.metadata.get(key)
    if labels is None:
        labels = [f"LABEL_{index}" for index in range(head.shape[0])]
    named = isinstance(labels, list) and all(isinstance(label, str) for label in labels)
    if not named or len(labels) != head.shape[0]:
        found = str(labels)[:80]
        raise CheckpointError(
            f"{file.path}: {key} is {found}, expected {head.shape[0]} names, one for each row of "
            "cls.output.weight"
        )
    name = f"{own.model_type.title()}ForSequenceClassification"
    classes: dict[str, Any] = {"architectures": [name], "id2label": dict(enumerate(labels))}
    key = f"{keys.architecture}.classifier.pooling_type"
    pooling = file.metadata.get(key)
    if pooling is None:
        return classes
    if not isinstance(pooling, int) or pooling not in _POOLINGS:
        raise CheckpointError(f"{file.path}: {key} is {pooling}, expected 1 (mean) or 2 (cls)")
    return {**classes, "classifier_pooling": _POOLINGS[pooling]}


def _experts(keys: Keys, own: Architecture, rules: GgufRules) -> dict[str, Any]:
    """The keys of a mixture of experts; none for other models."""
    if own.config.expert_width is None:
        return {}
    count = keys.expert_count
    if not count and own.config.has_experts is not None:
        return {key_of("count", own.config.keys) or "num_local_experts": 0}
    if not count:
        raise keys.fail("expert_count", count, f"1 to {MAX_EXPERTS}")
    known = own.config.keys
    gating = keys.integer("expert_gating_func", (0, 1 << 16), 0)
    own_gating = rules.expert_gating
    allowed = own_gating if isinstance(own_gating, tuple) else (own_gating,)
    if gating not in (0, *allowed):
        raise UnsupportedError(
            f"{keys.source}: {rules.name}.expert_gating_func is {gating}, expected {allowed[0]}: "
            "other mixtures of experts are not supported"
        )
    found: dict[str, Any] = {
        key_of("count", known) or "num_local_experts": count,
        key_of("per_token", known) or "num_experts_per_tok": keys.integer(
            "expert_used_count", (1, count)
        ),
    }
    wide = keys.integer("expert_feed_forward_length", LIMITS["intermediate_size"], 0)
    if wide:
        found[own.config.expert_width] = wide
    values: dict[str, tuple[str, Any, tuple[Any, ...]]] = {
        "normalized": ("expert_weights_norm", keys.flag("expert_weights_norm", False), (True,)),
        "scale": ("expert_weights_scale", keys.number("expert_weights_scale") or 1.0, (1.0,)),
        **{
            fact: (key, keys.integer(key, (0, 1 << 20), 0) or least, (least,))
            for fact, (key, least) in _EXPERT_COUNTS.items()
        },
    }
    if key_of("shared", known) is not None:  # what the count says; some converters write another
        values.pop("shared_width")
    for fact, (key, value, neutral) in values.items():
        name = key_of(fact, known)
        if name is not None:
            found[name] = value
        elif value not in neutral and keys.get(key) is not None and key not in rules.keys:
            raise UnsupportedError(
                f"{keys.source}: {rules.name}.{key} is {value}, expected {neutral[0]}: other "
                "mixtures of experts are not supported"
            )
    return found


def _sizes(keys: Keys, own: Architecture, rules: GgufRules) -> dict[str, Any]:
    blocks = keys.integer("block_count", LIMITS["num_hidden_layers"])
    ahead = 0  # blocks of multi-token prediction, which come last
    if "nextn_predict_layers" in rules.keys:
        ahead = keys.integer("nextn_predict_layers", (0, blocks - 1), 0)
    layers = blocks - ahead
    keys.ahead = ahead
    hidden = keys.integer("embedding_length", LIMITS["hidden_size"])
    name, key = "num_attention_heads", "attention.head_count"
    each: dict[str, Any] = {}
    mixes = bool(own.config.kinds)  # layers may lack attention, or an MLP
    if f"{name}_per_layer" in own.config.keys:
        each[f"{name}_per_layer"] = found = keys.each_layer(key, name, layers)
        heads = max(found)
    else:
        heads = keys.per_layer(key, name, layers, 1 if mixes else None, some=mixes)
    if keys.get("attention.key_length") is None and hidden % heads:
        raise keys.fail("attention.head_count", heads, f"a divisor of {hidden}")
    width = keys.integer("attention.key_length", LIMITS["head_dim"], hidden // heads)
    values = keys.integer("attention.value_length", LIMITS["head_dim"], width)
    if "v_head_dim" in own.config.keys and own.config.latent is None:
        each["v_head_dim"] = values
    elif values != width and own.config.latent is None:
        raise UnsupportedError(
            f"{keys.source}: attention.value_length is {values}, expected attention.key_length "
            f"{width}: different lengths are not supported"
        )
    return {
        **each,
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        **_widths(keys, own, layers, 4 * hidden if mixes else None),
        "num_attention_heads": heads,
        **_kv_heads(keys, own, layers, heads, some=mixes),
        "head_dim": width,
    }


def _kv_heads(
    keys: Keys, own: Architecture, layers: int, heads: int, *, some: bool
) -> dict[str, Any]:
    name, key = "num_key_value_heads", "attention.head_count_kv"
    if own.config.caches is None:
        return {name: keys.per_layer(key, name, layers, heads, some=some)}
    each = keys.each_layer(key, name, layers, some=some)
    return {name: max(1, *each), f"{name}_per_layer": each}


def _widths(keys: Keys, own: Architecture, layers: int, none: int | None) -> dict[str, Any]:
    name = "intermediate_size"
    if own.config.widths is None:
        return {name: _width(keys, layers, none)}
    each = keys.each_layer("feed_forward_length", name, layers, some=none is not None)
    return {name: max(1, *each), f"{name}_per_layer": each}


def _width(keys: Keys, layers: int, none: int | None) -> int:
    """The width of the MLP; files whose layers all have experts may leave it out. ``none``: that of
    a model whose layers may have none."""
    experts = keys.integer("expert_feed_forward_length", LIMITS["intermediate_size"], 0)
    return keys.per_layer(
        "feed_forward_length",
        "intermediate_size",
        layers,
        experts or none,
        some=none is not None,
    )


# -- vocabulary ------------------------------------------------------------------------------------


def _vocab_size(file: GgufFile) -> int:
    """The rows of the embedding; the vocabulary must have as many tokens."""
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
    """Sampling defaults and end tokens, as in a ``generation_config.json``."""
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
