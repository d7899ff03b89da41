"""Which GGUF tensor holds which parameter of the Hugging Face model.

Names that only some architectures have are in their :class:`~sdk.models.architecture.GgufRules`.
"""

from __future__ import annotations

import re

from sdk.loaders.next_token_names import GGUF_PARTS
from sdk.models.architecture import GgufRules

_TOP = {
    "model.embed_tokens": "token_embd",
    "model.embed_norm": "token_embd_norm",
    "model.embed_positions": "position_embd",
    "model.embed_types": "token_types",
    "model.embed_tokens_per_layer": "per_layer_token_embd",
    "model.per_layer_model_projection": "per_layer_model_proj",
    "model.per_layer_projection_norm": "per_layer_proj_norm",
    "model.altup_projections": "altup_proj",
    "model.altup_unembed_projections": "altup_unembd_proj",
    "model.norm": "output_norm",
    "lm_head": "output",
    "score": "cls.output",
    "classifier.dense": "cls",
    "classifier.norm": "cls.norm",
    "embedding_head.0": "dense_2",
    "embedding_head.1": "dense_3",
}
#: Inside a layer.
_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_a_proj": "attn_q_a",
    "self_attn.q_a_layernorm": "attn_q_a_norm",
    "self_attn.q_b_proj": "attn_q_b",
    "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa",
    "self_attn.kv_a_layernorm": "attn_kv_a_norm",
    "self_attn.kv_b_proj": "attn_kv_b",
    "self_attn.k_b_proj": "attn_k_b",
    "self_attn.v_b_proj": "attn_v_b",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
    "mlp.shared_experts.gate_proj": "ffn_gate_shexp",
    "mlp.shared_experts.up_proj": "ffn_up_shexp",
    "mlp.shared_experts.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **GGUF_PARTS,
}
_WHOLE = (".bias", ".scale")
#: A matrix with one row, which files have as a vector.
ONE_ROW = ".shared_expert_gate"
#: Parameters whose names here and in files have no ending.
_WITHOUT_ENDING = ("_bias", ".A", ".D")
LAYER_OF = re.compile(r"model\.layers\.(\d{1,4})\.(.+)")
_EXPERT = re.compile(r"(.+\.mlp\.experts|.+\.self_attn)\.(\d{1,4})\.(.+)")
#: Those of residual streams: see models/altup.py.
_STREAM = re.compile(r"(model\.altup_\w+)\.(\d{1,4})(\..+)?")
#: Tensors with a matrix for each expert, for each head of latent attention, or for each stream.
_STACKED = re.compile(r"_exps\.|\.attn_[kv]_b\.|^altup_")


def is_stacked(theirs: str) -> bool:
    """Whether a tensor has a matrix for each expert, head or stream."""
    return _STACKED.search(theirs) is not None


def expert_of(name: str) -> tuple[str, int | None]:
    """The name of the tensor with all experts, or heads, of a layer, or with all streams, and which
    of them ``name`` is."""
    if (stream := _STREAM.fullmatch(name)) is not None:
        return stream[1] + (stream[3] or ""), int(stream[2])
    match = _EXPERT.fullmatch(name)
    return (name, None) if match is None else (f"{match[1]}.{match[3]}", int(match[2]))


def single_expert(theirs: str, expert: int) -> str:
    """The tensor of one expert, in files with one per expert (those of 2023).

    ``blk.0.ffn_up_exps.weight`` -> ``blk.0.ffn_up.3.weight``.
    """
    return theirs.replace("_exps.", f".{expert}.")


def half_of_experts(theirs: str) -> tuple[str, int] | None:
    """The tensor that has gate and up of all experts, and which of them ``theirs`` is.

    ``blk.0.ffn_up_exps.weight`` -> ``blk.0.ffn_gate_up_exps.weight``, 1.
    """
    for index, part in enumerate(("gate", "up")):
        if f".ffn_{part}_exps." in theirs:
            return theirs.replace(f"_{part}_exps", "_gate_up_exps"), index
    return None


def gguf_name(rules: GgufRules, name: str) -> str | None:
    """The tensor that holds parameter ``name``; None if the architecture has no such parameter.

    ``name`` is a matrix without its suffix (``model.layers.0.mlp.up_proj``) or a plain tensor with
    it (``model.norm.weight``, ``model.layers.0.self_attn.q_proj.bias``).
    """
    stem, suffix = name, ".weight"
    for ending in (".weight", ".bias"):
        if name.endswith(ending):
            stem, suffix = name.removesuffix(ending), ending
    if stem in _TOP:
        return rules.tensors.get(stem, _TOP[stem]) + suffix
    whole = LAYER_OF.fullmatch(name)
    if whole is not None and stem != name and whole[2] in rules.tensors:
        return f"{rules.layers}.{int(whole[1])}.{rules.tensors[whole[2]]}"
    match = LAYER_OF.fullmatch(stem)
    if match is None:
        return None
    part = rules.tensors.get(match[2]) or _LAYER.get(match[2])
    if part is None:
        return None
    # some have their whole names there: biases of a router's choice and of time steps, factors
    ending = "" if part.endswith(_WHOLE) or stem.endswith(_WITHOUT_ENDING) else suffix
    return f"{rules.layers}.{int(match[1])}.{part}{ending}"
