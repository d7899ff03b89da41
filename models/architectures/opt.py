"""OPT: GPT-2's layers with ReLU, and learned positions whose table begins with two unused rows.

OPT-350m is post-norm, and the embeddings of its tokens are narrower than its layers. Zhang et al.,
"OPT" (2022), arXiv 2205.01068; transformers' modeling_opt.py. There are no GGUF files: llama.cpp
does not know the model.
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
    Norms,
    TensorRules,
)
from sdk.models.architectures.gpt2 import no_rotation
from sdk.models.configs.derived import every_head_has_keys

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _biases(fields: Fields) -> Biases:
    every = fields.flag("enable_bias", default=True)
    return Biases(every, every, every)


def _post_norm(fields: Fields) -> bool:
    return not fields.flag("do_layer_norm_before", default=True)


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    config.setdefault("embedding_size", config.get("hidden_size"))


ARCHITECTURE = Architecture(
    "opt",
    layer=LayerRules(
        norm=LAYER_NORM,
        gated=False,
        post_norms=Norms(None, "input_layernorm", None, "post_attention_layernorm"),
    ),
    config=ConfigRules(
        keys=("enable_bias", "do_layer_norm_before", "embedding_size"),
        ignored=("dropout", "layerdrop", "init_std", "activation_dropout", "output_projection"),
        defaults={"hidden_act": "relu", "tie_word_embeddings": True},
        fixed={"layer_norm_elementwise_affine": True, "_remove_final_layer_norm": False},
        unrotated=no_rotation,
        biases=_biases,
        norm_eps=1e-5,  # torch's default
        names={
            "intermediate_size": "ffn_dim",
            "hidden_act": "activation_function",
            "embedding_size": "word_embed_proj_dim",
        },
        post_norm=_post_norm,
        derived=_derived,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "model.decoder.layers",
            "model.embed_tokens": "model.decoder.embed_tokens",
            "model.embed_positions": "model.decoder.embed_positions",
            "model.embed_project": "model.decoder.project_in",
            "model.project_out": "model.decoder.project_out",
            "model.norm": "model.decoder.final_layer_norm",
            "self_attn.o_proj": "self_attn.out_proj",
            "mlp.up_proj": "fc1",
            "mlp.down_proj": "fc2",
            "input_layernorm": "self_attn_layer_norm",
            "post_attention_layernorm": "final_layer_norm",
        },
    ),
    embedding=EmbeddingRules(positions=2, projected="tokens"),
)
