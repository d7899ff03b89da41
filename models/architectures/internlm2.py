"""InternLM 2 and 2.5: Llama whose files have query heads, their key and their value in turn.

Cai et al., "InternLM2 Technical Report" (2024), arXiv 2403.17297. transformers has no class for the
folders; GGUF files of the model are laid out as Llama's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.models.architecture import Architecture, Biases, ConfigRules, TensorRules

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def biases(fields: Fields) -> Biases:
    every = fields.flag("bias", default=False)
    return Biases(every, every)


ARCHITECTURE = Architecture(
    "internlm2",
    config=ConfigRules(keys=("bias",), defaults={"rms_norm_eps": 1e-6}, biases=biases),
    tensors=TensorRules(
        names={
            "model.embed_tokens": "model.tok_embeddings",
            "lm_head": "output",
            "self_attn.qkv_proj": "attention.wqkv",
            "self_attn.o_proj": "attention.wo",
            "mlp.gate_proj": "feed_forward.w1",
            "mlp.up_proj": "feed_forward.w3",
            "mlp.down_proj": "feed_forward.w2",
            "input_layernorm": "attention_norm",
            "post_attention_layernorm": "ffn_norm",
        },
        qkv_by_group=True,
    ),
)
