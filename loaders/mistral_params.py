"""Folders as Mistral publishes them: ``params.json`` beside ``consolidated.safetensors``.

Tensors are called as in Meta's Llama (``layers.0.attention.wq.weight``), and the rows of q and k
lie so that rotary pairs are neighbours: ``file[h, 2 j + i] = hf[h, i * d / 2 + j]``. 8-bit floats
have a scale per tensor (``qscale_weight``). Source: mistral-inference 1.6 (args.py,
transformer.py), and what transformers' convert_mistral_weights_to_hf.py makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from sdk.quant.errors import CheckpointError, UnsupportedError
from sdk.quant.weight import PackedWeight, Weight, concat

FILE = "params.json"
#: Our names of the numbers every model has.
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
#: Keys that change nothing here; of a model that also sees or hears, the language model is run.
_NOTES = {"causal", "max_batch_size", "model_parallel", "vision_encoder", "multimodal"}
#: What vLLM takes where a file does not say it.
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
    """The ``config.json`` that says the same.

    Raises:
        CheckpointError: a number is missing.
        UnsupportedError: a key that is not known, or asks for something that is not run.
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
                f"{source}: moe is {str(experts)[:80]}, expected num_experts and "
                "num_experts_per_tok alone"
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
        raise UnsupportedError(f"{source}: {', '.join(others)[:200]}: not known, or not run")
    return config


def spelled_as_ours(name: str) -> str:
    """The name of a tensor as models of the Hugging Face spell it; others stay as they are."""
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
    """The rows of q or k as the Hugging Face has them: of every head the first of all pairs, then
    the second."""
    rows = weight.shape[0] // heads
    starts = [head * rows + i for head in range(heads) for i in (0, 1)]
    return concat([weight.take_rows(start, rows // 2, 2) for start in starts])
