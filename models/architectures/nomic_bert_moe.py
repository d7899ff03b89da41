"""nomic-embed-text-v2: a BERT with rotary embeddings, and experts in every second layer.

Nussbaum and Duderstadt (2025), arXiv 2502.07972. transformers' class has no experts: the facts are
those of the code beside the weights. GGUF files lack the bias of a layer's experts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.kernels.operators.route_rule import RouteRule
from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    ConfigRules,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures import bert, nomic_bert
from sdk.models.configs.derived import every_head_has_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

#: What the code could also do: the values with which it does what is here.
_ONLY: dict[str, tuple[Any, ...]] = {
    **nomic_bert.ONLY,
    "activation_function": ("gelu",),
    "qkv_proj_bias": (True,),
    "mlp_fc1_bias": (True,),
    "mlp_fc2_bias": (True,),
    "num_shared_experts": (0, None),
    "moe_normalize_expert_weights": (False, 0, None),
    "expert_choice_router": (False, None),
}
_ONLY.pop("moe_every_n_layers")


def _claims(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "nomic_bert" and bool(config.get("moe_every_n_layers"))


def _derived(config: dict[str, Any]) -> None:
    nomic_bert.check_only(config, _ONLY, "nomic_bert_moe")
    every_head_has_keys(config)
    config["tie_word_embeddings"] = True
    config.setdefault("eos_token_id", None)
    config.setdefault("rope_theta", 10_000.0)
    layers, every = config.get("num_hidden_layers"), config.get("moe_every_n_layers")
    if type(layers) is int and type(every) is int and every > 0:
        config["mlp_layer_types"] = [
            "sparse" if i % every == 1 else "dense" for i in range(min(layers, 512))
        ]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["moe_every_n_layers"] = keys.integer("moe_every_n_layers", (1, 512))


ARCHITECTURE = Architecture(
    "nomic_bert_moe",
    layer=LayerRules(
        norms=bert.NORMS,
        norm=LAYER_NORM,
        gated=False,
        post_norm=True,
        route=RouteRule(normalized=False),
        experts_bias=True,
    ),
    config=ConfigRules(
        keys=(
            *("type_vocab_size", "num_experts", "moe_top_k", "moe_every_n_layers"),
            *("mlp_layer_types", *_ONLY),
        ),
        ignored=(*nomic_bert.KEYS_IGNORED, "moe_impl", "moe_resid_pdrop", "ffn_div"),
        defaults={"hidden_act": "gelu", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        stated=(),
        expert_width="intermediate_size",
        activation=lambda fields: "gelu",
        biases=bert.all_biases,
        causal=False,
        norm_eps="layer_norm_eps",
        names=nomic_bert.NAMES,
        derived=_derived,
    ),
    gguf=GgufRules(
        "nomic-bert-moe",
        tensors=bert.GGUF_TENSORS,
        read=_read_gguf,
        keys=("moe_every_n_layers",),
    ),
    tensors=TensorRules(
        names={
            "model.layers": "encoder.layers",
            "model.embed_tokens": "embeddings.word_embeddings",
            "model.embed_types": "embeddings.token_type_embeddings",
            "model.embed_norm": "emb_ln",
            "self_attn.qkv_proj": "attn.Wqkv",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "mlp.gate": "mlp.router.layer",
            "mlp.experts.up_proj": "mlp.experts.mlp.w1",
            "mlp.experts.down_proj": "mlp.experts.mlp.w2",
            "post_attention_layernorm": "norm1",
            "post_feedforward_layernorm": "norm2",
        },
        experts_by_rows=True,
    ),
    embedding=EmbeddingRules(norm=True, types=True),
    claims=_claims,
)
