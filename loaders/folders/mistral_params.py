"""Folders in Mistral's own format: ``params.json`` with ``consolidated.safetensors``.

Tensors are named as in Meta's Llama (``layers.0.attention.wq.weight``), and the rows of q and k are
ordered so that rotary pairs are neighbours: ``file[h, 2 j + i] = hf[h, i * d / 2 + j]``. 8-bit
floats have a scale per tensor (``qscale_weight``). Sources: mistral-inference 1.6 (args.py,
transformer.py) and transformers' convert_mistral_weights_to_hf.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import PackedWeight, Weight, concat

FILE = "params.json"
#: Hugging Face's names of the numbers that every model has.
_NEEDED = {
    "dim": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "norm_eps": "rms_norm_eps",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "rope_theta": "rope_theta",
    "sliding_window": "sliding_window",
    "tied_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "max_position_embeddings": "max_position_embeddings",
}
#: Keys that have no effect here; of a multimodal model, only the language model is loaded.
_NOTES = {"causal", "max_batch_size", "model_parallel", "vision_encoder", "multimodal"}
#: vLLM's defaults for missing values.
_POSITIONS = 128_000

_TOP = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
_PARTS = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.gate": "mlp.gate",
    "w1": "gate_proj",
    "w2": "down_proj",
    "w3": "up_proj",
}
_LAYER = re.compile(
    r"layers\.(\d+)\.(?:feed_forward\.(?P<expert>experts\.\d+\.)?(?P<part>w[123])|(?P<own>"
    r"attention\.w[qkvo]|attention_norm|ffn_norm|feed_forward\.gate))\.(\w+)"
)


def config_of(params: Mapping[str, Any], source: str) -> dict[str, Any]:
    """The equivalent ``config.json``.

    Raises:
        CheckpointError: a number is missing.
        UnsupportedError: a key is unknown or not supported.
    """
    missing = [key for key in _NEEDED if key not in params]
    if missing:
        raise CheckpointError(f"{source}: {', '.join(missing)} missing")
    config = {ours: params[key] for key, ours in _NEEDED.items()}
    config |= {"sliding_window": None, "max_position_embeddings": _POSITIONS}
    config |= {ours: params[key] for key, ours in _OPTIONAL.items() if params.get(key) is not None}
    experts, floats = params.get("moe"), params.get("quantization")
    config["model_type"] = "mistral" if experts is None else "mixtral"
    if experts is not None:
        counts = isinstance(experts, Mapping) and set(experts) == {
            "num_experts",
            "num_experts_per_tok",
        }
        if not counts:
            raise UnsupportedError(
                f"{source}: moe is {str(experts)[:80]}, expected only num_experts and "
                "num_experts_per_tok"
            )
        config["num_local_experts"] = experts["num_experts"]
        config["num_experts_per_tok"] = experts["num_experts_per_tok"]
    if floats is not None:
        kind = floats.get("qformat_weight") if isinstance(floats, Mapping) else None
        if kind != "fp8_e4m3":
            raise UnsupportedError(
                f"{source}: quantization is {str(floats)[:80]}, expected a qformat_weight of "
                "fp8_e4m3"
            )
        config["quantization_config"] = {"quant_method": "fp8"}
    known = {*_NEEDED, *_OPTIONAL, *_NOTES, "moe", "quantization"}
    others = [key for key, value in params.items() if key not in known and value]
    if params.get("causal", True) is not True:
        others.append("causal")
    if others:
        raise UnsupportedError(f"{source}: {', '.join(others)[:200]}: unknown or not supported")
    return config


def spelled_as_ours(name: str) -> str:
    """The Hugging Face name of a tensor; names of other forms are returned unchanged."""
    stem, _, ending = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{ending}"
    found = _LAYER.fullmatch(name)
    if found is None:
        return name
    own, ending = found["own"], found[5]
    ours = _PARTS[own] if own else f"mlp.{found['expert'] or ''}{_PARTS[found['part']]}"
    return f"model.layers.{found[1]}.{ours}.{ending}"


def halves_apart(weight: PackedWeight, heads: int) -> Weight:
    """The rows of q or k in Hugging Face's order: in each head, first the first elements of all
    rotary pairs, then the second ones."""
    rows = weight.shape[0] // heads
    starts = [head * rows + i for head in range(heads) for i in (0, 1)]
    return concat([weight.take_rows(start, rows // 2, 2) for start in starts])
