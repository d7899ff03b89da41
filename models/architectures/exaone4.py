"""EXAONE 4: norms after the blocks alone, and over the head of each query and key.

In the 32B model three of four layers slide, and only those rotate. LG AI Research, "EXAONE 4.0"
(2025); transformers' modeling_exaone4.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    NORMS_AFTER,
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.architectures.olmo2 import GGUF_TENSORS
from sdk.models.configs.sliding import all_but_every
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

#: llama.cpp gives a window to models of this many layers alone, whatever the file says.
_SLIDING_LAYERS = 64


def unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    """The layers that see all tokens, in a model with a window."""
    slides = fields.has("sliding_window")
    return [slides and window is None for window in windows]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    layers = config["num_hidden_layers"]
    window = (config["sliding_window"] or 4096) if layers == _SLIDING_LAYERS else None
    config["sliding_window"] = window
    config["layer_types"] = keys.layer_types(layers, window=window, period=4)


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    slides = bool(config.get("sliding_window"))
    if slides != (config["num_hidden_layers"] == _SLIDING_LAYERS):
        raise UnsupportedError(
            f"{source}: exaone4 is written as a GGUF file only with {_SLIDING_LAYERS} layers and a "
            "sliding window, or with another number of layers and none: llama.cpp takes the window "
            "from the number of layers"
        )
    return {}


ARCHITECTURE = Architecture(
    "exaone4",
    layer=LayerRules(norms=NORMS_AFTER, qk_norm="head"),
    config=ConfigRules(
        keys=("layer_types", "sliding_window", "sliding_window_pattern"),
        sliding=all_but_every(4),
        unrotated=unrotated,
    ),
    gguf=GgufRules(
        "exaone4",
        tensors=GGUF_TENSORS,
        read=_read_gguf,
        write=_write_gguf,
        keys=("attention.sliding_window_pattern", "rope.freq_base_swa"),
        slides="scaled",
    ),
)
