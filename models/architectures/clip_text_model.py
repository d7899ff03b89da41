"""The encoder of texts of CLIP: layers of GPT-2, whose last token is the vector of a text.

Radford et al. 2021, arXiv 2103.00020; transformers' modeling_clip.py. Its
encoder of images is in :mod:`sdk.models.vision.clip_dual`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    WITHOUT_HEAD,
    Architecture,
    ConfigRules,
    EmbeddingRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.bert import all_biases, derived, no_rotation
from sdk.models.configs.dual_rules import DualRules

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

#: Also of SigLIP.
LAYER = LayerRules(norm=LAYER_NORM, gated=False)
NAMES = {
    "model.layers": "text_model.encoder.layers",
    "model.embed_tokens": "text_model.embeddings.token_embedding",
    "model.embed_positions": "text_model.embeddings.position_embedding",
    "model.norm": "text_model.final_layer_norm",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
}
#: Published configs leave out what equals the defaults of transformers' class.
_DEFAULTS = {
    "vocab_size": 49408,
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "max_position_embeddings": 77,
    "hidden_act": "quick_gelu",
    "layer_norm_eps": 1e-5,
}


def text_rules(
    defaults: Mapping[str, Any], ignored: tuple[str, ...], *, causal: bool
) -> ConfigRules:
    """How the config of an encoder of texts is read whose class has these defaults."""
    return ConfigRules(
        ignored=(*ignored, "initializer_factor"),
        stated=(),
        unrotated=no_rotation,
        biases=all_biases,
        causal=causal,
        norm_eps="layer_norm_eps",
        derived=_with(defaults),
    )


def _with(defaults: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
    def complete(config: dict[str, Any]) -> None:
        for key, value in defaults.items():
            if config.get(key) is None:
                config[key] = value
        derived(config)
        config[WITHOUT_HEAD] = True

    return complete


ARCHITECTURE = Architecture(
    "clip_text_model",
    layer=LAYER,
    config=text_rules(_DEFAULTS, ("projection_dim",), causal=True),
    tensors=TensorRules(names=NAMES),
    embedding=EmbeddingRules(positions=0),
    dual=DualRules("text_projection", optional=True, until_end=True),
)
