"""DistilBERT: a BERT without token types.

Sanh et al., "DistilBERT" (2019), arXiv 1910.01108; transformers' modeling_distilbert.py.
"""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, EmbeddingRules, TensorRules
from sdk.models.architectures import bert
from sdk.models.configs.head_rules import HeadRules

ARCHITECTURE = Architecture(
    "distilbert",
    layer=bert.LAYER,
    config=ConfigRules(
        ignored=("dropout", "qa_dropout", "seq_classif_dropout"),
        defaults={"hidden_act": "gelu"},
        stated=("hidden_act",),
        unrotated=bert.no_rotation,
        fixed={"sinusoidal_pos_embds": False},  # of training: the table is in the files
        biases=bert.all_biases,
        causal=False,
        norm_eps=1e-12,
        names={
            "hidden_size": "dim",
            "num_attention_heads": "n_heads",
            "num_hidden_layers": "n_layers",
            "intermediate_size": "hidden_dim",
            "hidden_act": "activation",
        },
        derived=bert.derived,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "distilbert.transformer.layer",
            "model.embed_tokens": "distilbert.embeddings.word_embeddings",
            "model.embed_positions": "distilbert.embeddings.position_embeddings",
            "model.embed_norm": "distilbert.embeddings.LayerNorm",
            "self_attn.q_proj": "attention.q_lin",
            "self_attn.k_proj": "attention.k_lin",
            "self_attn.v_proj": "attention.v_lin",
            "self_attn.o_proj": "attention.out_lin",
            "mlp.up_proj": "ffn.lin1",
            "mlp.down_proj": "ffn.lin2",
            "post_attention_layernorm": "sa_layer_norm",
            "post_feedforward_layernorm": "output_layer_norm",
        }
    ),
    embedding=EmbeddingRules(positions=0, norm=True),
    head=HeadRules(("pre_classifier",), activation="ReLU"),
)
