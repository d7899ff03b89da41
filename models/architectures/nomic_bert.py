"""nomic-bert: a BERT with rotary embeddings in place of positions, and SwiGLU without biases.

Nussbaum et al., "Nomic Embed" (2024), arXiv 2402.01613; transformers' modeling_nomic_bert.py.
Published configs have GPT-2's names for sizes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    ConfigRules,
    EmbeddingRules,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.bert import GGUF_TENSORS, IGNORED, NORMS
from sdk.models.configs.derived import every_head_has_keys
from sdk.models.configs.head_rules import HeadRules
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Keys of published configs, ours to theirs.
NAMES = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "intermediate_size": "n_inner",
    "max_position_embeddings": "n_positions",
    "layer_norm_eps": "layer_norm_epsilon",
    "rope_theta": "rotary_emb_base",
}
#: What the code of published files could also do: the values with which it does what is here.
ONLY: dict[str, tuple[Any, ...]] = {
    "activation_function": ("swiglu",),
    "prenorm": (False,),
    "rotary_emb_fraction": (1, 1.0),
    "rotary_emb_interleaved": (False,),
    "rotary_emb_scale_base": (None,),
    "qkv_proj_bias": (False,),
    "mlp_fc1_bias": (False,),
    "mlp_fc2_bias": (False,),
    "use_rms_norm": (False, None),
    "parallel_block": (False,),
    "scale_attn_weights": (True,),
    "causal": (False,),
    "moe_every_n_layers": (0, None),
}

#: Keys of published configs without an effect.
KEYS_IGNORED = (
    *IGNORED,
    *("add_pooling_layer", "parallel_block_tied_norm"),
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "mlp_fc2_dropout", "dense_seq_output"),
    *("fused_bias_fc", "fused_dropout_add_ln", "pad_vocab_size_multiple", "use_flash_attn"),
    *("use_xentropy", "last_layer_subset", "max_trained_positions", "n_ctx"),
    *("reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx", "summary_activation"),
    *("summary_first_dropout", "summary_proj_to_labels", "summary_type"),
    *("summary_use_proj", "rotary_scaling_factor"),
)


def check_only(config: dict[str, Any], only: Mapping[str, tuple[Any, ...]], model: str) -> None:
    """:raises UnsupportedError: a key has another value than those that are computed."""
    for key, allowed in only.items():
        found = config.get(key, allowed[0])
        if found not in allowed:
            raise UnsupportedError(
                f"config: {key}: expected {allowed[0]}, found {str(found)[:80]}: another value is "
                f"not supported for {model}"
            )


def _derived(config: dict[str, Any]) -> None:
    check_only(config, ONLY, "nomic_bert")
    if "activation_function" in config:
        config.setdefault("hidden_act", "silu")
    every_head_has_keys(config)
    config["tie_word_embeddings"] = True
    config.setdefault("eos_token_id", None)
    if not config.get("rope_parameters"):
        config.setdefault("rope_theta", 1000.0)


ARCHITECTURE = Architecture(
    "nomic_bert",
    layer=LayerRules(norms=NORMS, norm=LAYER_NORM, post_norm=True),
    config=ConfigRules(
        keys=("type_vocab_size", *ONLY),
        ignored=KEYS_IGNORED,
        defaults={"hidden_act": "silu", "type_vocab_size": 2, "layer_norm_eps": 1e-12},
        stated=("hidden_act", "type_vocab_size"),
        causal=False,
        norm_eps="layer_norm_eps",
        names=NAMES,
        derived=_derived,
    ),
    gguf=GgufRules("nomic-bert", tensors=GGUF_TENSORS),
    tensors=TensorRules(
        names={
            "model.layers": ("nomic_bert.encoder.layers", "nomic_bert.layers"),
            "model.embed_tokens": "nomic_bert.embeddings.word_embeddings",
            "model.embed_types": "nomic_bert.embeddings.token_type_embeddings",
            "model.embed_norm": "nomic_bert.emb_ln",
            "self_attn.qkv_proj": "attn.Wqkv",
            "self_attn.o_proj": "attn.out_proj",
            "mlp.up_proj": "mlp.fc11",
            "mlp.gate_proj": "mlp.fc12",
            "mlp.down_proj": "mlp.fc2",
            "post_attention_layernorm": "norm1",
            "post_feedforward_layernorm": "norm2",
        }
    ),
    embedding=EmbeddingRules(norm=True, types=True),
    head=HeadRules(("nomic_bert.pooler.dense", "pooler.dense")),
)
