"""SigLIP's tower, which several families have (Zhai et al. 2023, arXiv 2303.15343).

transformers' modeling_siglip.py: LayerNorms, an MLP without a gate, biases, learned positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import LAYER_NORM, LayerRules
from sdk.models.configs.fields import Fields
from sdk.models.vision.config import encoder_config, square_tiles

if TYPE_CHECKING:
    from sdk.models.vision.config import EncoderSpec

LAYER = LayerRules(norm=LAYER_NORM, gated=False)
#: Spellings of transformers 4 and 5.
PREFIXES = {"vision_tower.vision_model.": "tower.", "vision_tower.": "tower."}
LAYERS = "tower.encoder.layers"
WHOLE_NAMES = {
    "patches": "tower.embeddings.patch_embedding",
    "positions.weight": "tower.embeddings.position_embedding.weight",
    "norm": "tower.post_layernorm",
    "pooling": "tower.head",  # makes one vector of an image, which no text model reads
}
LAYER_NAMES = {
    "input_layernorm": "layer_norm1",
    "post_attention_layernorm": "layer_norm2",
    "self_attn.q_proj": "self_attn.q_proj",
    "self_attn.k_proj": "self_attn.k_proj",
    "self_attn.v_proj": "self_attn.v_proj",
    "self_attn.o_proj": "self_attn.out_proj",
    "mlp.up_proj": "mlp.fc1",
    "mlp.down_proj": "mlp.fc2",
}


def siglip_config(vision: Fields, layers: int | None = None) -> tuple[EncoderSpec, int, int]:
    """The tower, the pixels of a patch's side, and the patches of a tile's side."""
    tower = encoder_config(
        vision,
        eps=vision.positive("layer_norm_eps", default=1e-6),
        activation=vision.text("hidden_act", default="gelu_pytorch_tanh"),
        layers=layers,
    )
    patch, side = square_tiles(vision)
    return tower, patch, side
