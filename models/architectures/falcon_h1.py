"""Falcon-H1: attention and Mamba-2 side by side in every layer, and a factor for every part.

llama.cpp's converter puts the factors into the weights. TII, "Falcon-H1" (2025), arXiv 2507.22448;
transformers' modeling_falcon_h1.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    Architecture,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    TensorRules,
)
from sdk.models.architectures.mamba2 import (
    GGUF_KEYS,
    GGUF_TENSORS,
    IGNORED,
    SIZES,
    read_sizes,
    spec_of,
)
from sdk.models.configs.fields import Fields
from sdk.models.mixers.mamba2 import Factors, Mamba2Spec
from sdk.quant.errors import UnsupportedError

#: What the input of attention is multiplied with also multiplies its scores, twice.
_ATTENTION = ("attention_in_multiplier", "attention_out_multiplier", "key_multiplier")
_SSM = ("ssm_in_multiplier", "ssm_out_multiplier", "ssm_multipliers")


def _derived(config: dict[str, Any]) -> None:
    """Factors of attention as a scale of scores and one of its result, and the kinds of layers."""
    layers, heads = config.get("num_hidden_layers"), config.get("mamba_n_heads", 128)
    if isinstance(layers, int):
        config["layer_types"] = ["hybrid"] * layers
    inner = config.get("mamba_d_ssm", 1024)
    if inner is None and isinstance(config.get("hidden_size"), int):
        inner = config.get("mamba_expand", 2) * config["hidden_size"]
    if config.get("mamba_d_head") in (None, "auto") and isinstance(inner, int):
        config["mamba_d_head"] = inner // heads
    into, out, key = (_factor(config, name) for name in _ATTENTION)
    config["qk_scale_factor"] = into * into * key
    config["attention_output_factor"] = into * out
    biased = [name for name in ("attention_bias", "mamba_proj_bias") if config.get(name)]
    factors = into, _factor(config, "ssm_in_multiplier")
    if biased and factors != (1.0, 1.0):
        raise UnsupportedError(
            f"config: {biased[0]}: expected false, found true: biases beside factors of inputs, "
            f"here attention_in_multiplier and ssm_in_multiplier {factors}, are not supported"
        )


def _factor(config: dict[str, Any], name: str) -> float:
    found = config.get(name)
    return 1.0 if found is None else Fields(config).positive(name)


def _recurrent(fields: Fields) -> Mamba2Spec:
    into = fields.positive("ssm_in_multiplier", default=1.0)
    each = fields.factors("ssm_multipliers", 5) if fields.has("ssm_multipliers") else (1.0,) * 5
    z, x, b, c, dt = each
    out = fields.positive("ssm_out_multiplier", default=1.0)
    return spec_of(
        fields,
        in_bias=fields.flag("mamba_proj_bias", default=False),
        out_bias=fields.flag("projectors_bias", default=False),
        norm=fields.flag("mamba_rms_norm", default=False),
        norm_first=fields.flag("mamba_norm_before_gate", default=True),
        factors=Factors(into * z, into * x, into * b, into * c, into * dt, out),
    )


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_sizes(config, keys)
    config["mamba_rms_norm"] = keys.has_tensor("blk.0.ssm_norm.weight")
    config["mamba_norm_before_gate"] = False


ARCHITECTURE = Architecture(
    "falcon_h1",
    config=ConfigRules(
        keys=(
            *("attention_bias", "mlp_bias", "layer_types", "time_step_limit", "mamba_rms_norm"),
            *("mamba_norm_before_gate", "mamba_proj_bias", "projectors_bias", "mlp_multipliers"),
            *("embedding_multiplier", "output_multiplier", "qk_scale_factor"),
            *("attention_output_factor", *_SSM, *SIZES.values()),
        ),
        ignored=(
            *(*IGNORED, *_ATTENTION, "mamba_d_ssm", "mamba_expand", "num_logits_to_keep"),
            "layers_block_type",
        ),
        defaults={
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
        },
        fixed={"hidden_act": "silu"},
        names={"output_multiplier": "lm_head_multiplier"},
        derived=_derived,
        kinds={"hybrid": Blocks(recurrent=True)},
        recurrent=_recurrent,
    ),
    tensors=TensorRules(
        names={
            "model.norm": "model.final_layernorm",
            "post_attention_layernorm": "pre_ff_layernorm",
            "mlp": "feed_forward",
        }
    ),
    more_gguf=(
        GgufRules(
            "falcon-h1",
            tensors={**GGUF_TENSORS, "post_attention_layernorm.weight": "ffn_norm"},
            read=_read_gguf,
            keys=GGUF_KEYS,
        ),
    ),
)
