"""Jais: GPT-2's layers with linear biases of attention, a gate of SiLU, and scores over the width.

Sengupta et al., "Jais and Jais-chat" (2023), arXiv 2308.16149; the code beside its weights, which
is not run, and llama.cpp's jais.cpp. GGUF files have the factors of embeddings and logits in their
weights.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
)
from sdk.models.architectures.gpt2 import KEYS, NAMES, all_biases, no_rotation
from sdk.models.configs.derived import every_head_has_keys, four_times_wide
from sdk.models.configs.fields import Fields
from sdk.models.configs.score_biases import Alibi

#: Scores are divided by the width of a head, not by its root: two names in files.
_BY_WIDTH = ("scale_qk_dot_by_d", "mup_scale_qk_dot_by_d")


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    four_times_wide(config)
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    by_width = any(config.get(key) for key in _BY_WIDTH)
    if by_width and isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
        config["attention_multiplier"] = heads / hidden
    scale = _factor(config, "mup_embeddings_scale", "embeddings_scale")
    config["embedding_multiplier"] = scale
    if config.get("mup_output_alpha") is not None:
        width = _factor(config, "mup_output_alpha") * _factor(config, "mup_width_scale")
    else:
        width = _factor(config, "width_scale")
    config["logits_scaling"] = 1.0 / width


def _factor(config: dict[str, Any], *names: str) -> float:
    """The first that a config has, 1 without any."""
    name = next((one for one in names if config.get(one) is not None), names[0])
    return Fields(config).positive(name, default=1.0)


def _alibi(fields: Fields) -> Alibi:
    return Alibi(most=fields.positive("alibi_bias_max", default=8.0))


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["scale_qk_dot_by_d"] = True
    config["alibi_bias_max"] = keys.number("attention.max_alibi_bias", 0.0)


ARCHITECTURE = Architecture(
    "jais",
    layer=LayerRules(norm=LAYER_NORM),
    config=ConfigRules(
        keys=(
            *("attention_multiplier", "embedding_multiplier", "logits_scaling", *_BY_WIDTH),
            *("embeddings_scale", "mup_embeddings_scale", "width_scale", "mup_width_scale"),
            *("mup_output_alpha", "alibi_bias_max"),
        ),
        ignored=(
            *("n_ctx", "attn_pdrop", "reorder_and_upcast_attn", "alibi_scaling"),
            *("summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels"),
            *("summary_first_dropout", "summary_last_dropout"),
        ),
        defaults={"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True},
        fixed={
            "activation_function": "swiglu",
            "position_embedding_type": "alibi",
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
        },
        activation=lambda fields: "silu",
        unrotated=no_rotation,
        biases=all_biases,
        norm_eps="layer_norm_epsilon",
        names={ours: theirs for ours, theirs in KEYS.items() if ours != "hidden_act"},
        derived=_derived,
        alibi=_alibi,
    ),
    tensors=TensorRules(
        names={
            **{ours: theirs for ours, theirs in NAMES.items() if ours != "model.embed_positions"},
            "mlp.gate_proj": "mlp.c_fc2",
        },
        layers_transposed=True,
    ),
    more_gguf=(GgufRules("jais", read=_read_gguf, keys=("attention.max_alibi_bias",)),),
)
