"""Mamba-2: layers of nothing but its mixer. Also what other models' configs say of theirs.

Dao and Gu, "Transformers are SSMs" (2024), arXiv 2405.21060; transformers' modeling_mamba2.py.
"""

from __future__ import annotations

import math
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
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.mixers.mamba2 import Mamba2Spec

#: Names of tensors of a mixer, and of what is around the layers, in folders.
MIXER_NAMES = {
    f"mamba.{name}": f"mixer.{name}"
    for name in ("in_proj", "conv1d", "A_log", "D", "dt_bias", "norm", "out_proj")
}
NAMES: dict[str, str | tuple[str, ...]] = {
    "model.embed_tokens": "backbone.embeddings",
    "model.norm": "backbone.norm_f",
    "model.layers": ("backbone.layers", "model.layers"),
    "input_layernorm": "norm",
}
#: The names of a mixer in GGUF files.
GGUF_TENSORS = {
    "mamba.in_proj": "ssm_in",
    "mamba.conv1d": "ssm_conv1d",
    "mamba.A": "ssm_a",
    "mamba.D": "ssm_d",
    "mamba.dt_bias": "ssm_dt.bias",
    "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}
GGUF_KEYS = (
    *("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size", "ssm.group_count"),
    "ssm.time_step_rank",
)
#: Keys without an effect on results: of training, of how transformers runs it.
IGNORED = (
    *("time_step_rank", "time_step_min", "time_step_max", "time_step_floor", "chunk_size"),
    *("residual_in_fp32", "rescale_prenorm_residual", "mamba_chunk_size"),
)
#: What a spec needs, under the names that most models have.
SIZES = {
    "heads": "mamba_n_heads",
    "head_dim": "mamba_d_head",
    "groups": "mamba_n_groups",
    "state": "mamba_d_state",
    "taps": "mamba_d_conv",
    "conv_bias": "mamba_conv_bias",
}

#: The same in Mamba-2's own configs.
_SIZES = {
    "heads": "num_heads",
    "head_dim": "head_dim",
    "groups": "n_groups",
    "state": "state_size",
    "taps": "conv_kernel",
    "conv_bias": "use_conv_bias",
}


def spec_of(fields: Fields, names: Mapping[str, str] = SIZES, **others: Any) -> Mamba2Spec:
    """The sizes of a mixer; ``names``: the keys of a model, ``others``: what it reads itself."""
    heads, head_dim, groups = (
        fields.count(names[one], MAX_WIDTH) for one in ("heads", "head_dim", "groups")
    )
    if heads % groups:
        fields.fail(names["groups"], f"a divisor of {heads} heads", groups)
    taps = fields.count(names["taps"], 16)
    if taps < 2:
        fields.fail(names["taps"], "at least 2 tokens", taps)
    least, most = _limits(fields)
    return Mamba2Spec(
        heads,
        head_dim,
        groups,
        fields.count(names["state"], 512),
        taps,
        conv_bias=fields.flag(names["conv_bias"], default=True),
        least=least,
        most=most,
        **others,
    )


def _limits(fields: Fields) -> tuple[float, float]:
    """Limits of time steps. JSON has no infinity: see transformers' ``__float__``."""
    found = fields.values.get("time_step_limit")
    if found is None:
        return 0.0, math.inf
    numbers = [
        float(one["__float__"]) if isinstance(one, Mapping) and "__float__" in one else one
        for one in (found if isinstance(found, (list, tuple)) else ())
    ]
    known = all(isinstance(one, (int, float)) and one >= 0 for one in numbers)
    if len(numbers) != 2 or not known or numbers[0] > numbers[1]:
        fields.fail("time_step_limit", "two numbers of at least 0, the smaller first", found)
    return float(numbers[0]), float(numbers[1])


def read_sizes(config: dict[str, Any], keys: GgufKeys, names: Mapping[str, str] = SIZES) -> None:
    """The sizes of a mixer in a GGUF file, as a config has them. ``conv_bias`` counts in folders
    alone."""
    heads = keys.integer("ssm.time_step_rank", (1, MAX_WIDTH))
    config[names["heads"]] = heads
    config[names["head_dim"]] = keys.integer("ssm.inner_size", (heads, MAX_WIDTH)) // heads
    config[names["groups"]] = keys.integer("ssm.group_count", (1, heads))
    config[names["state"]] = keys.integer("ssm.state_size", (1, 512))
    config[names["taps"]] = keys.integer("ssm.conv_kernel", (2, 16))


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_sizes(config, keys, _SIZES)


def _derived(config: dict[str, Any]) -> None:
    """What a model without attention and MLPs does not have, so that sizes of it exist."""
    heads = config.get("mamba_n_heads")
    layers = config.get("num_hidden_layers")
    config["num_attention_heads"] = config["num_key_value_heads"] = heads
    config["head_dim"] = config.get("mamba_d_head")
    if isinstance(heads, int) and isinstance(config["head_dim"], int):
        config["intermediate_size"] = heads * config["head_dim"]
    if isinstance(layers, int):
        config["layer_types"] = ["linear_attention"] * layers


def _recurrent(fields: Fields) -> Mamba2Spec:
    bias = fields.flag("use_bias", default=False)
    return spec_of(fields, in_bias=bias, out_bias=bias)


ARCHITECTURE = Architecture(
    "mamba2",
    layer=LayerRules(norms=Norms(before_mlp=None)),
    config=ConfigRules(
        keys=(*SIZES.values(), "use_bias", "time_step_limit", "layer_types"),
        ignored=(*IGNORED, "expand"),
        defaults={
            "layer_norm_epsilon": 1e-5,
            "max_position_embeddings": 1 << 20,
            "mamba_n_groups": 8,
            "mamba_d_conv": 4,
        },
        fixed={"hidden_act": "silu"},
        norm_eps="layer_norm_epsilon",
        names={SIZES[one]: theirs for one, theirs in _SIZES.items()},
        derived=_derived,
        biases=lambda fields: Biases(),
        unrotated=lambda fields, windows: [True] * len(windows),
        kinds={"linear_attention": Blocks(attention=False, recurrent=True, mlp=False)},
        recurrent=_recurrent,
    ),
    tensors=TensorRules(names={**NAMES, **MIXER_NAMES}),
    more_gguf=(GgufRules("mamba2", tensors=GGUF_TENSORS, read=_read_gguf, keys=GGUF_KEYS),),
)
