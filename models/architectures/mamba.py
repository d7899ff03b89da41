"""Mamba-1: layers of nothing but its mixer. Also what other models' configs say of theirs.

Gu and Dao, "Mamba" (2023), arXiv 2312.00752; transformers' modeling_mamba.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    Norms,
    TensorRules,
)
from sdk.models.architectures.mamba2 import IGNORED as IGNORED_OF_BOTH, NAMES
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.mixers.mamba import MambaSpec

#: Names of tensors of a mixer in folders, where it is called ``mixer``.
MIXER_NAMES = {
    f"mamba.{name}": f"mixer.{name}"
    for name in ("in_proj", "conv1d", "x_proj", "dt_proj", "A_log", "D", "out_proj")
}
#: The names of a mixer in GGUF files.
GGUF_TENSORS = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.x_proj": "ssm_x",
    "mamba.dt_proj": "ssm_dt",
    "mamba.A": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.out_proj": "ssm_out",
}
GGUF_KEYS = ("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank")
#: Keys without an effect on results: of training, of how transformers runs it.
IGNORED = (
    *(key for key in IGNORED_OF_BOTH if key != "time_step_rank"),
    *("time_step_scale", "time_step_init_scheme", "use_mambapy", "use_associative_scan"),
)
#: What a spec needs, under our names and those of Mamba's own configs.
SIZES = {
    "mamba_d_inner": "intermediate_size",
    "mamba_d_state": "state_size",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_rank": "time_step_rank",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_proj_bias": "use_bias",
}


def spec_of(fields: Fields, **others: Any) -> MambaSpec:
    """The sizes of a mixer; ``others``: what a model reads itself."""
    taps = fields.count("mamba_d_conv", 16)
    if taps < 2:
        fields.fail("mamba_d_conv", "at least 2 tokens", taps)
    return MambaSpec(
        fields.count("mamba_d_inner", MAX_WIDTH),
        fields.count("mamba_d_state", 512),
        taps,
        fields.count("mamba_dt_rank", MAX_WIDTH),
        conv_bias=fields.flag("mamba_conv_bias", default=True),
        bias=fields.flag("mamba_proj_bias", default=False),
        **others,
    )


def derive_sizes(config: dict[str, Any], expand: str) -> None:
    """The channels, ``expand`` times the hidden size, and the rank of dt, where a config leaves
    it to the model."""
    hidden, factor = config.get("hidden_size"), config.get(expand, 2)
    if not isinstance(hidden, int) or not isinstance(factor, (int, float)):
        return
    config.setdefault("mamba_d_inner", int(factor * hidden))
    if config.get("mamba_dt_rank") in (None, "auto"):
        config["mamba_dt_rank"] = -(-hidden // 16)


def read_sizes(config: dict[str, Any], keys: GgufKeys, names: Mapping[str, str] = SIZES) -> None:
    """The sizes of a mixer in a GGUF file, as a config has them."""
    config[names["mamba_d_inner"]] = keys.integer("ssm.inner_size", (1, MAX_WIDTH))
    config[names["mamba_d_state"]] = keys.integer("ssm.state_size", (1, 512))
    config[names["mamba_d_conv"]] = keys.integer("ssm.conv_kernel", (2, 16))
    config[names["mamba_dt_rank"]] = keys.integer("ssm.time_step_rank", (1, MAX_WIDTH))


def read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """A file of layers of nothing but Mamba-1."""
    read_sizes(config, keys)


def derived(config: dict[str, Any]) -> None:
    """What follows from other keys; and what a model without attention and MLPs does not have, so
    that sizes of it exist."""
    derive_sizes(config, "expand")
    if isinstance(own := config.get("intermediate_size"), int):  # which may contradict the factor
        config["mamba_d_inner"] = own
    inner, layers = config.get("mamba_d_inner"), config.get("num_hidden_layers")
    if isinstance(inner, int):
        heads = inner // 16 if inner % 16 == 0 else 1
        config["num_attention_heads"] = config["num_key_value_heads"] = heads
        config["head_dim"] = inner // max(heads, 1)
        config["intermediate_size"] = inner
    if isinstance(layers, int):
        config["layer_types"] = ["linear_attention"] * layers


#: What configs of Mamba-1 alone say.
CONFIG = ConfigRules(
    keys=(*SIZES, "expand", "layer_types"),
    ignored=IGNORED,
    defaults={
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 1 << 20,
        "mamba_d_conv": 4,
        "mamba_d_state": 16,
        "tie_word_embeddings": True,
    },
    fixed={"hidden_act": "silu"},
    norm_eps="layer_norm_epsilon",
    names={ours: theirs for ours, theirs in SIZES.items() if ours != "mamba_d_inner"},
    derived=derived,
    biases=lambda fields: Biases(),
    unrotated=lambda fields, windows: [True] * len(windows),
    kinds={"linear_attention": Blocks(attention=False, recurrent=True, mlp=False)},
    recurrent=spec_of,
)
LAYER = LayerRules(norms=Norms(before_mlp=None))
TENSORS = TensorRules(names={**NAMES, **MIXER_NAMES})
GGUF = GgufRules("mamba", tensors=GGUF_TENSORS, read=read_gguf, keys=(*GGUF_KEYS, "ssm.dt_b_c_rms"))

ARCHITECTURE = Architecture(
    "mamba",
    layer=LAYER,
    config=CONFIG,
    tensors=TENSORS,
    more_gguf=(GGUF,),
)
