"""GPT-Neo: a GPT-2 without biases of q, k and v, whose scores have no scale and whose layers have a
window in turn.

Black et al., "GPT-Neo" (2021); transformers' modeling_gpt_neo.py. llama.cpp does not know it.
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
    TensorRules,
)
from sdk.models.architectures.gpt2 import no_rotation
from sdk.models.configs.derived import every_head_has_keys, four_times_wide

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

#: What a config without ``attention_types`` has.
_IN_TURN = [[["global", "local"], 12]]


def _slides(fields: Fields, layers: int) -> list[bool]:
    """Of ``attention_types``: pairs of the kinds of some layers, and how often they come."""
    stated: Any = fields.values.get("attention_types") or _IN_TURN
    kinds: list[Any] = []
    try:
        for each, times in stated:
            kinds += [*each][: layers + 1] * min(times, layers + 1)
            if len(kinds) > layers:  # a count in a file may be any number
                break
    except (TypeError, ValueError):
        kinds = []
    if len(kinds) != layers or any(kind not in ("global", "local") for kind in kinds):
        expected = f"pairs of a list of global or local and a count, {layers} layers in all"
        fields.fail("attention_types", expected, str(stated)[:120])
    return [kind == "local" for kind in kinds]


def _derived(config: dict[str, Any]) -> None:
    every_head_has_keys(config)
    four_times_wide(config)


ARCHITECTURE = Architecture(
    "gpt_neo",
    layer=LayerRules(norm=LAYER_NORM, gated=False),
    config=ConfigRules(
        keys=("attention_types", "sliding_window"),
        ignored=("attention_layers", "embed_dropout", "resid_dropout"),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "hidden_act": "gelu_new",
            "sliding_window": 256,
            "tie_word_embeddings": True,
        },
        sliding=_slides,
        unrotated=no_rotation,
        biases=lambda fields: Biases(output=True, mlp=True),
        norm_eps="layer_norm_epsilon",
        names={
            "num_attention_heads": "num_heads",
            "num_hidden_layers": "num_layers",
            "hidden_act": "activation_function",
            "sliding_window": "window_size",
        },
        derived=_derived,
        attention_scale=1.0,
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.h",
            "model.embed_tokens": "transformer.wte",
            "model.embed_positions": "transformer.wpe",
            "model.norm": "transformer.ln_f",
            "self_attn.q_proj": "attn.attention.q_proj",
            "self_attn.k_proj": "attn.attention.k_proj",
            "self_attn.v_proj": "attn.attention.v_proj",
            "self_attn.o_proj": "attn.attention.out_proj",
            "mlp.up_proj": "mlp.c_fc",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        }
    ),
    embedding=EmbeddingRules(positions=0),
)
