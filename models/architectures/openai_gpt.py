"""The first GPT: GPT-2's tensors with norms of the sums after each block, as in a BERT.

Radford et al., "Improving Language Understanding by Generative Pre-Training" (2018); transformers'
modeling_openai.py. llama.cpp does not know the model.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, EmbeddingRules, TensorRules
from sdk.models.architectures import bert
from sdk.models.architectures.gpt2 import NAMES, all_biases, no_rotation
from sdk.models.configs.derived import every_head_has_keys

_NAMES = {
    **NAMES,
    "model.embed_tokens": "transformer.tokens_embed",
    "model.embed_positions": "transformer.positions_embed",
    "post_attention_layernorm": "ln_1",
    "post_feedforward_layernorm": "ln_2",
}
del _NAMES["model.norm"], _NAMES["input_layernorm"]


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    if isinstance(hidden := config.get("hidden_size"), int):
        config["intermediate_size"] = 4 * hidden
    if config.get("hidden_act") == "gelu":  # the code's table of activations says so
        config["hidden_act"] = "gelu_new"


ARCHITECTURE = Architecture(
    "openai_gpt",
    aliases=("openai-gpt",),
    layer=bert.LAYER,
    config=ConfigRules(
        ignored=(
            *("attn_pdrop", "summary_type", "summary_use_proj", "summary_activation"),
            *("summary_proj_to_labels", "summary_first_dropout"),
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
        unrotated=no_rotation,
        biases=all_biases,
        norm_eps="layer_norm_epsilon",
        names={
            "hidden_size": "n_embd",
            "num_attention_heads": "n_head",
            "num_hidden_layers": "n_layer",
            "max_position_embeddings": "n_positions",
            "hidden_act": "afn",
        },
        derived=_derived,
    ),
    tensors=TensorRules(names=_NAMES, layers_transposed=True),
    embedding=EmbeddingRules(positions=0),
)
