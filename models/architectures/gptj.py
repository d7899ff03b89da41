"""GPT-J: attention and MLP read one norm; the first dimensions of a head turn in adjacent pairs.

Wang and Komatsuzaki, "GPT-J-6B" (2021); transformers' modeling_gptj.py. llama.cpp has the name and
those of tensors, but neither a converter nor layers: GGUF files are those that are written here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    LAYER_NORM,
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    TensorRules,
    always,
)
from sdk.models.architectures.gpt2 import KEYS
from sdk.models.configs.derived import every_head_has_keys, four_times_wide

if TYPE_CHECKING:
    from collections.abc import Mapping


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    four_times_wide(config)
    hidden, heads, turns = (
        config.get(key) for key in ("hidden_size", "num_attention_heads", "rotary_dim")
    )
    if isinstance(hidden, int) and isinstance(heads, int) and heads and isinstance(turns, int):
        config["partial_rotary_factor"] = turns / (hidden // heads)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    config["hidden_act"] = "gelu_new"
    config["rotary_dim"] = keys.integer("rope.dimension_count", (2, 4096))


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    return {"rope.dimension_count": int(config["rotary_dim"])}


ARCHITECTURE = Architecture(
    "gptj",
    layer=LayerRules(norm=LAYER_NORM, gated=False, adjacent_pairs=True),
    config=ConfigRules(
        keys=("rotary_dim", "partial_rotary_factor"),
        ignored=(
            *("attn_pdrop", "n_ctx", "rotary", "scale_attn_weights", "summary_activation"),
            *("summary_first_dropout", "summary_proj_to_labels", "summary_type"),
            "summary_use_proj",
        ),
        defaults={"layer_norm_epsilon": 1e-5, "hidden_act": "gelu_new", "rotary_dim": 64},
        biases=lambda fields: Biases(mlp=True, head=True),
        norm_eps="layer_norm_epsilon",
        names=KEYS,
        derived=_derived,
        parallel_blocks=always,
    ),
    gguf=GgufRules(
        "gptj",
        read=_read_gguf,
        write=_write_gguf,
        only={"hidden_act": "gelu_new", "tie_word_embeddings": False},
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.h",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "self_attn.o_proj": "attn.out_proj",
            "self_attn": "attn",
            "mlp.up_proj": "mlp.fc_in",
            "mlp.down_proj": "mlp.fc_out",
            "input_layernorm": "ln_1",
        }
    ),
)
