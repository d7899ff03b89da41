"""Command R7B and Command A: Command R in which three of four layers slide, and only those rotate.

Cohere (2024); transformers' modeling_cohere2.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules, always
from sdk.models.architectures.cohere import DEFAULTS, LAYER, read_gguf, write_gguf
from sdk.models.configs.sliding import all_but_every
from sdk.quant.errors import CheckpointError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    return [window is None for window in windows]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    read_gguf(config, keys)
    layers, window = config["num_hidden_layers"], config["sliding_window"]
    if window is None:
        raise CheckpointError(
            f"{keys.source}: cohere2.attention.sliding_window: expected a number, found none"
        )
    config["layer_types"] = keys.layer_types(layers, window=window, period=4)


ARCHITECTURE = Architecture(
    "cohere2",
    layer=LAYER,
    config=ConfigRules(
        keys=(
            *("attention_bias", "logit_scale"),
            *("layer_types", "sliding_window", "sliding_window_pattern"),
        ),
        defaults={**DEFAULTS, "sliding_window": 4096},
        sliding=all_but_every(4),
        unrotated=_unrotated,
        norm_eps="layer_norm_eps",
        parallel_blocks=always,
    ),
    gguf=GgufRules(
        "cohere2",
        read=_read_gguf,
        write=write_gguf,
        keys=("logit_scale", "attention.sliding_window_pattern", "rope.freq_base_swa"),
        slides="scaled",
    ),
)
