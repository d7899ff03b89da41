"""ARWKV-7: Qwen 2's layers with RWKV-7's time mixing in the place of attention.

Lin et al., "ARWKV" (2025), arXiv 2501.15570; llama.cpp's arwkv7.cpp. Folders need the code beside
their weights, which is not run.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import (
    RECURRENT,
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.architectures.rwkv7 import (
    GGUF_KEYS,
    GGUF_TENSORS,
    RANKS,
    derived,
    read_sizes,
    spec_of,
)
from sdk.models.configs.fields import Fields
from sdk.models.mixers.rwkv import RwkvSpec


def _recurrent(fields: Fields) -> RwkvSpec:
    return spec_of(fields, fields.optional_positive("head_norm_eps"), shifts_mlp=False)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_sizes(config, keys)
    shifts = keys.integer("token_shift_count", (0, 2), 1)
    if shifts != 1:
        raise keys.fail("token_shift_count", shifts, "1")
    config["wkv_has_gate"] = keys.has_tensor("blk.0.time_mix_g1.weight")
    if keys.has_tensor("blk.0.time_mix_ln.weight"):
        config["head_norm_eps"] = 64e-5


ARCHITECTURE = Architecture(
    "arwkv7",
    layer=LayerRules(value_residual=True),
    config=ConfigRules(
        keys=(
            *("head_dim", "layer_types", "head_norm_eps", "wkv_has_gate"),
            *(key for key, *_ in RANKS.values()),
        ),
        derived=derived,
        biases=lambda fields: Biases(),
        unrotated=lambda fields, windows: [True] * len(windows),
        kinds={"linear_attention": RECURRENT},
        recurrent=_recurrent,
    ),
    more_gguf=(GgufRules("arwkv7", tensors=GGUF_TENSORS, read=_read_gguf, keys=GGUF_KEYS),),
    folders=False,
)
