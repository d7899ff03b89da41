"""Jina Embeddings v3: an XLM-RoBERTa with rotary embeddings.

Sturua et al. (2024), arXiv 2409.10173; transformers' modeling_jina_embeddings_v3.py. Its adapters,
one for each task, are files of their own (docs/lora.md). Published weights that hold all of them,
with code of their own, are refused (:mod:`sdk.models.architectures.roberta`).
"""

from __future__ import annotations

from sdk.models.architecture import (
    Architecture,
    ConfigRules,
    EmbeddingRules,
    GgufRules,
    TensorRules,
)
from sdk.models.architectures import bert, roberta
from sdk.models.architectures.gte import derived_rotary

ARCHITECTURE = Architecture(
    "jina_embeddings_v3",
    layer=bert.LAYER,
    config=ConfigRules(
        keys=("type_vocab_size",),
        ignored=bert.IGNORED,
        defaults={"hidden_act": "gelu", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
        stated=("hidden_act", "type_vocab_size"),
        biases=bert.all_biases,
        causal=False,
        norm_eps="layer_norm_eps",
        derived=derived_rotary(20_000.0),
    ),
    gguf=GgufRules("jina-bert-v3", tensors=bert.GGUF_TENSORS, read=bert.read_gguf),
    tensors=TensorRules(
        names={
            "model.layers": ("roberta.encoder.layers", "roberta.layers"),
            "model.embed_tokens": "roberta.embeddings.word_embeddings",
            "model.embed_types": "roberta.embeddings.token_type_embeddings",
            "model.embed_norm": "roberta.emb_ln",
            "self_attn.qkv_proj": "mixer.Wqkv",
            "self_attn.o_proj": "mixer.out_proj",
            "mlp.up_proj": "mlp.fc1",
            "mlp.down_proj": "mlp.fc2",
            "post_attention_layernorm": "norm1",
            "post_feedforward_layernorm": "norm2",
        }
    ),
    embedding=EmbeddingRules(norm=True, types=True),
    head=roberta.HEAD,
)
