"""The limits of a config's numbers, and the shapes that tensors have by a config.

A config comes from an untrusted file: a number is checked against these limits before it sizes a
list or a tensor. The limits are several times what the largest published models use.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sdk.models.architecture import Architecture, LayerRules, architecture
from sdk.models.configs.experts import LATENT, NAMES, shared_width
from sdk.models.configs.fields import Fields, without_null
from sdk.models.configs.sliding import sliding_windows
from sdk.quant.caches import AttentionCache
from sdk.quant.checkpoint import VISION_ROOT
from sdk.quant.errors import CheckpointError

MAX_LAYERS = 512
#: Names of recurrent mixers in a path.
_MIXERS = (".conv.", ".linear_attn.", ".mamba.", ".rwkv.", ".mlp.shift")
#: Ends of names of a mixer that is called as attention is (Kimi's).
_OF_DELTA = ("_conv1d.weight", ".self_attn.A", ".dt_bias")
#: Inclusive ranges of the integers of a config, by Hugging Face's names.
LIMITS: dict[str, tuple[int, int]] = {
    "num_hidden_layers": (1, MAX_LAYERS),
    "hidden_size": (1, 1 << 20),
    "intermediate_size": (1, 1 << 22),
    "num_attention_heads": (1, 4096),
    "num_key_value_heads": (1, 4096),
    "head_dim": (1, 1 << 14),
    "vocab_size": (1, 1 << 24),
    "max_position_embeddings": (1, 1 << 31),
    "sliding_window": (0, 1 << 31),  # 0: none (qwen2_moe)
    "num_local_experts": (1, 1024),
    "num_experts": (1, 1024),
    "n_routed_experts": (1, 1024),
    "moe_num_experts": (1, 1024),
    "num_experts_per_tok": (1, 1024),
    "moe_intermediate_size": (1, 1 << 22),
}
_POSITIVE_NUMBERS = ("rms_norm_eps", "rope_theta", "rope_local_base_freq", "query_pre_attn_scalar")


class _Sizes(NamedTuple):
    """What the shapes of tensors are made of. ``queries``, ``keys``, ``values`` and ``results`` of
    attention: features of all heads."""

    hidden: int
    intermediate: int
    vocab: int
    heads: int
    head_dim: int
    queries: int
    keys: int
    values: int
    results: int
    experts: int | None


def check_config(config: Mapping[str, Any], source: str) -> None:
    """Check the numbers of a config; absent and null ones are ignored.

    Raises:
        CheckpointError: names ``source``, the key, the allowed range and the value found.
    """
    known = architecture(config.get("model_type"))
    for key, (low, high) in LIMITS.items():
        value = config.get(key)
        may_lack = known is not None and known.config.has_experts is not None
        if value == 0 and may_lack and key in NAMES["count"]:
            continue  # dense Granite 4, whose number of experts is 0
        # Some models differ from layer to layer and give a list.
        for item in value[:MAX_LAYERS] if isinstance(value, list) else [value]:
            if item is not None and (type(item) is not int or not low <= item <= high):
                raise CheckpointError(f"{source}: {key} is {item!r}, expected {low} to {high}")
    for key in _POSITIVE_NUMBERS:
        value = config.get(key)
        each = value[:MAX_LAYERS] if isinstance(value, list) else [value]  # as above
        for item in each:
            number = isinstance(item, int | float) and math.isfinite(item) and item > 0
            if item is not None and not number:
                raise CheckpointError(f"{source}: {key} is {value!r}, expected a positive number")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads:
        raise CheckpointError(
            f"{source}: {heads} attention heads are not a multiple of {kv_heads} key/value heads"
        )


def head_dim(config: Mapping[str, Any]) -> int:
    """The length of one head: ``head_dim``, or the hidden size divided by the heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def num_experts(config: Mapping[str, Any]) -> int | None:
    """Experts of a layer; None for a model without experts."""
    found = next((config[name] for name in NAMES["count"] if config.get(name)), None)
    if isinstance(found, list):  # one for each layer, checked to be the same
        found = found[0]
    return found if isinstance(found, int) else None


def experts_transposed(config: Mapping[str, Any], name: str, stored: tuple[int, ...]) -> bool:
    """Whether a float tensor with all experts of a layer, of shape ``stored``, is ``[E, in, out]``
    in this file."""
    known = architecture(config.get("model_type"))
    if known is None or len(stored) != 3:
        return False
    if known.tensors.experts_by_rows:
        return name.endswith("down_proj")
    if known.tensors.experts_transposed == "sometimes":
        return stored != _experts_shape(config, name)
    return known.tensors.experts_transposed == "always"


def _experts_shape(config: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    """The shape of one expert's tensor (``….experts.3.up_proj``), or of one with all experts,
    ``[E, out, in]``."""
    hidden = config.get(LATENT) or config["hidden_size"]
    known = architecture(config.get("model_type"))
    key = known and known.config.expert_width
    inner = config.get(key or "moe_intermediate_size") or config["intermediate_size"]
    part = name.partition(".experts.")[2]
    number, _, own = part.partition(".")
    joined = not number.isdecimal()
    if joined:
        own = part
    stem = own.removesuffix("_bias").removesuffix(".bias")
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }
    shape: tuple[int, ...] | None = shapes.get(stem)
    if shape is None:
        return None
    if own != stem:
        shape = shape[:1]
    return (num_experts(config) or 0, *shape) if joined else shape


def expected_shape(
    config: Mapping[str, Any], name: str, stored: tuple[int, ...] = ()
) -> tuple[int, ...] | None:
    """The shape of tensor ``name`` (Hugging Face's, without ``.weight``); None when not known.

    ``stored``: the file's, where files of a model differ and either shape is right.
    """
    known = architecture(config.get("model_type"))
    if known is None or name.startswith(VISION_ROOT):  # a tower knows
        return None
    if any(mixer in name for mixer in _MIXERS):
        return None  # the mixer knows
    if known.config.latent is not None and ".self_attn." in name:
        return None  # latent attention knows
    hidden, heads = config.get("hidden_size"), _heads_of(config, name)
    widths = (known.config.dense_width, "intermediate_size", known.config.expert_width)
    inner = next((config[key] for key in widths if key and config.get(key)), None)
    vocab = config.get("vocab_size")
    if not (hidden and heads and inner and vocab):
        return None
    if ".experts." in name:
        shape = _experts_shape(config, name)
        if shape is None or len(shape) != 3:
            return shape
        turned = (shape[0], shape[2], shape[1])
        how = known.tensors.experts_transposed
        if stored and known.tensors.experts_by_rows:
            return turned if name.endswith("down_proj") else shape
        return turned if how == "always" or (how == "sometimes" and stored != shape) else shape
    if ".shared_experts." in name:
        inner = shared_width(config, known)
    cache, own_width = _layer_sizes(config, known, name)
    sizes = _Sizes(
        hidden=hidden,
        intermediate=own_width or inner,
        vocab=vocab,
        heads=heads,
        head_dim=cache.key_dim,
        queries=heads * cache.key_dim,
        keys=cache.kv_heads * cache.key_dim,
        values=cache.kv_heads * cache.value_dim,
        results=heads * cache.value_dim,
        experts=num_experts(config),
    )
    path, _, stem = name.removesuffix(".bias").rpartition(".")
    narrow = hidden
    if known.embedding.projected:
        narrow = config.get("embedding_size") or hidden
    gate = known.layer.output_gate
    if gate is not None and path.endswith("self_attn") and stem == gate.projection:
        if known.config.gate_per_head is not None:
            return None  # attention knows
        rows = sizes.queries * 2 if gate.with_queries else sizes.queries
        shape = (heads if gate.per_head else rows, hidden)
    else:
        shape = _llama_shape(sizes, stem, known.layer)
    tokens_alone = known.embedding.projected == "tokens"
    if shape is not None and (stem.startswith("embed_") or (tokens_alone and stem == "lm_head")):
        shape = (*shape[:-1], narrow)
    first, positions = known.embedding.positions, config.get("max_position_embeddings")
    if stem == "embed_positions" and first is not None and isinstance(positions, int):
        # With "after padding" the config counts the rows before position 0 too.
        width = hidden if tokens_alone else narrow
        shape = (positions + (first if isinstance(first, int) else 0), width)
    return shape[:1] if shape is not None and name.endswith(".bias") else shape


def mixer_shape(name: str, stored: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape in a folder of a vector or a convolution of a recurrent mixer that a GGUF file has
    as ``stored``; ``None`` for other tensors."""
    if not any(mixer in name for mixer in _MIXERS) and not name.endswith(_OF_DELTA):
        return None
    if name.endswith((".conv.weight", "conv1d.weight")) and len(stored) > 1:
        return stored[0], 1, stored[-1]
    if name.endswith(".A") and stored[1:] > (1,):  # of Mamba-1, for each number of a state
        return stored
    return (math.prod(stored),)


def interleaved_heads(config: Mapping[str, Any], name: str) -> int:
    """The heads of the queries or keys that the matrix ``name`` makes."""
    key = "num_attention_heads" if "q_proj" in name else "num_key_value_heads"
    each, number = config.get(f"{key}_per_layer"), name.partition("layers.")[2].partition(".")[0]
    found: int | None = config.get(key) if each is None else each[int(number)]
    return found or int(config["num_attention_heads"])


def _layer_sizes(
    config: Mapping[str, Any], known: Architecture, name: str
) -> tuple[AttentionCache, int | None]:
    """The heads of keys and values of the layer that ``name`` is in, and the width of its MLP if
    layers differ in that."""
    width = head_dim(config)
    kv_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    usual = AttentionCache(kv_heads, width, width)
    number, layers = name.partition("layers.")[2].partition(".")[0], config["num_hidden_layers"]
    if not number.isdecimal() or int(number) >= layers:
        return usual, None
    layer, rules = int(number), known.config
    if rules.caches is None and rules.widths is None:
        return usual, None
    fields = Fields({**rules.defaults, **without_null(config)})
    windows = sliding_windows(fields, layers, rules.sliding, tuple(rules.kinds))
    caches = [usual] * layers if rules.caches is None else rules.caches(fields, windows)
    own = caches[layer]
    shared = ".experts." in name or ".shared_experts." in name
    widths = None if rules.widths is None or shared else rules.widths(fields, layers)
    cache = caches[own] if isinstance(own, int) else own
    assert isinstance(cache, AttentionCache)
    return cache, None if widths is None else widths[layer]


def _heads_of(config: Mapping[str, Any], name: str) -> Any:
    """The query heads of the layer that ``name`` is in."""
    each, (_, _, own) = config.get("num_attention_heads_per_layer"), name.partition("layers.")
    number = own.partition(".")[0]
    if isinstance(each, (list, tuple)) and number.isdecimal() and int(number) < len(each):
        return each[int(number)]
    return config.get("num_attention_heads")


def _qk_norms(sizes: _Sizes, layer: LayerRules) -> tuple[tuple[int, ...], tuple[int, ...]]:
    width = sizes.head_dim
    if layer.qk_norm == "each_head":
        return (sizes.heads, width), (sizes.keys // width, width)
    wide = layer.qk_norm == "width"
    return (sizes.queries if wide else width,), (sizes.keys if wide else width,)


def _llama_shape(sizes: _Sizes, stem: str, layer: LayerRules) -> tuple[int, ...] | None:
    """The shape that most architectures have, by the last part of a tensor's name."""
    hidden, inner, queries, keys = sizes.hidden, sizes.intermediate, sizes.queries, sizes.keys
    q_norm, k_norm = _qk_norms(sizes, layer)
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens": (sizes.vocab, hidden),
        "lm_head": (sizes.vocab, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (sizes.values, hidden),
        "qkv_proj": (queries + keys + sizes.values, hidden),
        "o_proj": (hidden, sizes.results),
        "q_norm": q_norm,
        "k_norm": k_norm,
        "sinks": (sizes.heads,),
        "alpha_p": (1,),
        "alpha_n": (1,),
        "beta": (),
        "eps": (),  # of xIELU
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "gate_up_proj": (2 * inner, hidden),
        "down_proj": (hidden, inner),
    }
    if sizes.experts is not None:
        shapes["gate"] = shapes["router"] = (sizes.experts, hidden)
        shapes["shared_expert_gate"] = (1, hidden)
    if stem in ("norm", "embed_norm") or stem.endswith("layernorm"):
        return (hidden,)
    return shapes.get(stem)
