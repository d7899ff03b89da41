"""GPT-2: learned positions, and files that store matrices as ``[in, out]``.

Radford et al., "Language Models are Unsupervised Multitask Learners" (2019); transformers'
modeling_gpt2.py. Quantizers write the usual order of matrices.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.configs.derived import every_head_has_keys, four_times_wide

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sdk.models.configs.fields import Fields

#: Keys of a config, ours to GPT-2's; also of other models.
KEYS = {
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    "hidden_act": "activation_function",
}
NAMES = {
    "model.layers": "transformer.h",
    "model.embed_tokens": "transformer.wte",
    "model.embed_positions": "transformer.wpe",
    "model.norm": "transformer.ln_f",
    "self_attn.qkv_proj": "attn.c_attn",
    "self_attn.o_proj": "attn.c_proj",
    "mlp.up_proj": "mlp.c_fc",
    "mlp.down_proj": "mlp.c_proj",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
}


def all_biases(fields: Fields) -> Biases:
    return Biases(True, True, True)


def no_rotation(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    return [True] * len(windows)


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    four_times_wide(config)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu_new"


ARCHITECTURE = Architecture(
    "gpt2",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        ignored=(
            *("n_ctx", "attn_pdrop", "reorder_and_upcast_attn", "summary_type"),
            *("summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            *("summary_first_dropout", "summary_last_dropout"),
        ),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu_new",
            "tie_word_embeddings": True,
        },
        fixed={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False},
        unrotated=no_rotation,
        biases=all_biases,
        norm_eps="layer_norm_epsilon",
        names=KEYS,
        derived=_derived,
    ),
    tensors=TensorRules(names=NAMES, layers_transposed=True),
    gguf=GgufRules("gpt2", read=_read_gguf),
    embedding=EmbeddingRules(positions=0),
)
