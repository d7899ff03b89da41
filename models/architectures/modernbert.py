"""ModernBERT: norms before blocks, GeGLU, and windows in all but every third layer.

Warner et al., "Smarter, Better, Faster, Longer" (2024), arXiv 2412.13663; transformers'
modeling_modernbert.py. The first layer's attention reads the embeddings, which have a norm, as they
are. Layers with a window have a rotary base of their own.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    NormKind,
    Norms,
    TensorRules,
)
from sdk.models.configs.derived import every_head_has_keys
from sdk.models.configs.head_rules import HeadRules
from sdk.quant.errors import UnsupportedError

_FULL, _LOCAL = "full_attention", "sliding_attention"
#: Rotary bases where a config has none.
_THETA = {_FULL: 160_000.0, _LOCAL: 10_000.0}


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    config["tie_word_embeddings"] = True
    layers, every = config.get("num_hidden_layers"), config.get("global_attn_every_n_layers", 3)
    if config.get("layer_types") is None and type(layers) is int and type(every) is int and every:
        config["layer_types"] = [_LOCAL if i % every else _FULL for i in range(min(layers, 512))]
    width = config.get("local_attention", 128)
    config["sliding_window"] = width // 2 if type(width) is int else width
    if not config.get("rope_parameters"):
        own = {_FULL: config.get("global_rope_theta"), _LOCAL: config.get("local_rope_theta")}
        config["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": own[kind] or theta}
            for kind, theta in _THETA.items()
        }


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    found = keys.get("hidden_activation")
    config["hidden_activation"] = {"geglu": "gelu", "swiglu": "silu"}.get(found, found) or "gelu"
    if config["hidden_activation"] != "gelu" and keys.has_tensor("cls.weight"):
        raise UnsupportedError(
            f"{keys.source}: cls.weight: expected a classification head only where "
            f"modern-bert.hidden_activation is gelu, found {str(found)[:40]}: the file does not "
            "say the head's activation, and llama.cpp applies gelu whatever the model has. Use "
            "the model's folder"
        )
    config["local_attention"] = config.pop("sliding_window")
    config["global_attn_every_n_layers"] = keys.integer(
        "attention.sliding_window_pattern", (1, 512), 3
    )
    if config["local_attention"] is None:
        config["layer_types"] = [_FULL] * config["num_hidden_layers"]
    theta = config.pop("rope_theta")
    config["global_rope_theta"] = theta
    config["local_rope_theta"] = keys.number("rope.freq_base_swa", theta)
    config["rope_parameters"] = None


ARCHITECTURE = Architecture(
    "modernbert",
    layer=LayerRules(
        norms=Norms("input_layernorm", None, "post_attention_layernorm", None),
        norm=NormKind(centred=True),
        first_norm=False,
    ),
    config=ConfigRules(
        keys=(
            *("attention_bias", "mlp_bias", "hidden_activation", "layer_types", "sliding_window"),
            *("local_attention", "global_attn_every_n_layers", "global_rope_theta"),
            "local_rope_theta",
        ),
        ignored=(
            *("embedding_dropout", "mlp_dropout", "classifier_pooling", "classifier_dropout"),
            *("classifier_bias", "classifier_activation", "deterministic_flash_attn"),
            *("sparse_prediction", "sparse_pred_ignore_index", "decoder_bias", "cls_token_id"),
            *("initializer_cutoff_factor", "reference_compile", "repad_logits_with_grad"),
            *("position_embedding_type", "layer_norm_eps"),  # of BERT's class
        ),
        defaults={"hidden_activation": "gelu", "norm_eps": 1e-5},
        stated=("hidden_activation", "local_attention"),
        fixed={"norm_bias": False},
        causal=False,
        norm_eps="norm_eps",
        derived=_derived,
    ),
    gguf=GgufRules(
        "modern-bert",
        tensors={"mlp.gate_up_proj": "ffn_up"},
        read=_read_gguf,
        keys=("hidden_activation", "attention.sliding_window_pattern", "rope.freq_base_swa"),
    ),
    tensors=TensorRules(
        names={
            "model.layers": "model.layers",
            "model.embed_tokens": "model.embeddings.tok_embeddings",
            "model.embed_norm": "model.embeddings.norm",
            "model.norm": "model.final_norm",
            "self_attn.qkv_proj": "attn.Wqkv",
            "self_attn.o_proj": "attn.Wo",
            "mlp.gate_up_proj": "mlp.Wi",
            "mlp.down_proj": "mlp.Wo",
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "mlp_norm",
        }
    ),
    embedding=EmbeddingRules(norm=True),
    head=HeadRules(
        ("head.dense",),
        activation="=classifier_activation",
        norm=("head.norm",),
        pooling="=classifier_pooling",
        on_tokens=True,
        gguf_activation="GELU",
    ),
)
