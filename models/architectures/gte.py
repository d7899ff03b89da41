"""GTE ("new"): a BERT with rotary embeddings and a gated MLP.

Zhang et al., "mGTE" (2024), arXiv 2407.19669; transformers' modeling_gte.py. Published files of
gte-base-en-v1.5, gte-multilingual-base and snowflake-arctic-embed-m-v2.0 bring their own code,
whose ``model_type`` is ``new`` or ``gte``. llama.cpp has no such model, so there are no GGUF files.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    EmbeddingRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.bert import IGNORED, NORMS
from sdk.models.configs.derived import every_head_has_keys
from sdk.models.configs.head_rules import HeadRules
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from sdk.models.configs.fields import Fields


def derived_rotary(theta: float) -> Callable[[dict[str, Any]], None]:
    """What a config of an encoder does not say: it has no head to tie. ``theta``: the rotary base
    where it has none."""

    def derived(config: dict[str, Any]) -> None:
        every_head_has_keys(config)
        config["tie_word_embeddings"] = True
        config.setdefault("eos_token_id", None)
        if not config.get("rope_parameters") and config.get("rope_theta") is None:
            config["rope_theta"] = theta

    return derived


def _derived(config: dict[str, Any]) -> None:
    # of the published code, of transformers' class
    theta = 10_000.0 if config.get("model_type") == "new" else 160_000.0
    derived_rotary(theta)(config)


def _rotation(parameters: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """NTK of the published code, whatever the length: the base times the factor, and each angle
    divided by ``factor ** (2 / head_dim)`` (https://kexue.fm/archives/9706)."""
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "ntk":
        return parameters
    factor: Any = parameters.get("factor")
    theta: Any = parameters["rope_theta"]
    numbers = all(type(one) in (int, float) for one in (factor, theta))
    if not numbers or parameters.get("mixed_b") is not None or not factor > 1:
        raise UnsupportedError(
            "config: rope_scaling: expected type ntk with a factor above 1 and no mixed_b, found "
            f"{str(dict(parameters))[:120]}: another one is not supported for gte"
        )
    return {
        "rope_type": "linear",
        "rope_theta": theta * factor,
        "factor": factor ** (2.0 / head_dim),
    }


def _biases(fields: Fields) -> Biases:
    return Biases(qkv=True, output=True, down=True)


ARCHITECTURE = Architecture(
    "gte",
    aliases=("new",),
    layer=LayerRules(norms=NORMS, norm=LAYER_NORM, post_norm=True),
    config=ConfigRules(
        keys=("type_vocab_size",),
        ignored=(*IGNORED, "pack_qkv", "unpad_inputs", "use_memory_efficient_attention"),
        defaults={"hidden_act": "gelu", "type_vocab_size": 1, "layer_norm_eps": 1e-12},
        stated=("hidden_act", "type_vocab_size"),
        fixed={
            "position_embedding_type": "rope",
            "layer_norm_type": "layer_norm",
            "logn_attention_scale": False,
            "logn_attention_clip1": False,
        },
        biases=_biases,
        causal=False,
        norm_eps="layer_norm_eps",
        rotation=_rotation,
        derived=_derived,
    ),
    tensors=TensorRules(
        names={
            "model.layers": ("new.encoder.layer", "gte.encoder.layer", "gte.layers"),
            "model.embed_tokens": "new.embeddings.word_embeddings",
            "model.embed_types": "new.embeddings.token_type_embeddings",
            "model.embed_norm": "new.embeddings.LayerNorm",
            "self_attn.qkv_proj": "attention.qkv_proj",
            "self_attn.q_proj": "attention.q_proj",
            "self_attn.k_proj": "attention.k_proj",
            "self_attn.v_proj": "attention.v_proj",
            "self_attn.o_proj": "attention.o_proj",
            "mlp.gate_up_proj": "mlp.up_gate_proj",
            "post_attention_layernorm": "attn_ln",
            "post_feedforward_layernorm": "mlp_ln",
        },
        up_before_gate=True,
    ),
    embedding=EmbeddingRules(norm=True, types=True),
    head=HeadRules(("new.pooler.dense", "gte.pooler.dense", "pooler.dense")),
)
