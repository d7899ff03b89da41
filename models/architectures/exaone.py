"""EXAONE 3 and 3.5: Llama with other names of tensors. LG AI Research (2024), arXiv 2408.03541."""

from __future__ import annotations

from sdk.models.architecture import Architecture, ConfigRules, TensorRules

ARCHITECTURE = Architecture(
    "exaone",
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias"),
        ignored=("embed_dropout",),
        defaults={"rope_theta": 500_000.0},
        norm_eps="rms_norm_eps",
        names={
            "num_hidden_layers": "num_layers",
            "rms_norm_eps": "layer_norm_epsilon",
            "hidden_act": "activation_function",
        },
    ),
    tensors=TensorRules(
        names={
            "model.layers": "transformer.h",
            "model.embed_tokens": "transformer.wte",
            "model.norm": "transformer.ln_f",
            "self_attn.o_proj": "attn.attention.out_proj",
            "self_attn": "attn.attention",
            "mlp.gate_proj": "mlp.c_fc_0",
            "mlp.up_proj": "mlp.c_fc_1",
            "mlp.down_proj": "mlp.c_proj",
            "input_layernorm": "ln_1",
            "post_attention_layernorm": "ln_2",
        }
    ),
)
