"""Qwen 2 and 2.5: Llama with biases on q, k and v; the upper layers may slide."""

from __future__ import annotations

from sdk.models.architecture import Architecture, Biases, ConfigRules, GgufRules
from sdk.models.configs.fields import Fields


def upper_layers(fields: Fields, layers: int) -> list[bool]:
    """Those from ``max_window_layers`` on, if ``use_sliding_window`` is set."""
    on = fields.flag("use_sliding_window", default=False) and fields.has("sliding_window")
    first = fields.values.get("max_window_layers", 28) if on else layers
    if not isinstance(first, int) or first < 0:
        fields.fail("max_window_layers", "a number of layers", first)
    return [layer >= first for layer in range(layers)]


ARCHITECTURE = Architecture(
    "qwen2",
    config=ConfigRules(
        keys=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
        stated=("hidden_act", "use_sliding_window", "sliding_window", "max_window_layers"),
        sliding=upper_layers,
        biases=lambda fields: Biases(qkv=True),
    ),
    gguf=GgufRules("qwen2"),
)
