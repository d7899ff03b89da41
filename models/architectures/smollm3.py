"""SmolLM3: Llama whose every fourth layer does not rotate queries and keys (NoPE).

Yang et al., "RoPE to NoPE and Back Again" (2025); transformers' modeling_smollm3.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, GgufRules
from sdk.models.configs.fields import MAX_LAYERS
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

#: Every fourth layer, if the config does not say which; GGUF files never do.
_INTERVAL = 4


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    rotated = fields.values.get("no_rope_layers")  # 1 for each layer that rotates
    layers = len(windows)
    if rotated is None:
        every = fields.count("no_rope_layer_interval", MAX_LAYERS, default=_INTERVAL)
        return [(i + 1) % every == 0 for i in range(layers)]
    if not isinstance(rotated, (list, tuple)) or len(rotated) < layers:
        fields.fail("no_rope_layers", f"a list with 0 or 1 for each of {layers} layers", rotated)
    return [not rotates for rotates in rotated[:layers]]


def _sliding(fields: Fields, layers: int) -> list[bool]:
    """The layers that do not rotate, if ``use_sliding_window`` is set."""
    if not fields.flag("use_sliding_window", default=False) or not fields.has("sliding_window"):
        return [False] * layers
    return _unrotated(fields, [None] * layers)


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """llama.cpp assumes that every fourth layer does not rotate, and that none slides."""
    layers = config["num_hidden_layers"]
    usual = [int((i + 1) % _INTERVAL != 0) for i in range(layers)]
    rotated = config.get("no_rope_layers") or usual
    if list(rotated[:layers]) != usual or config.get("use_sliding_window"):
        raise UnsupportedError(
            f"{source}: smollm3 is written as a GGUF file only if every {_INTERVAL}th layer does "
            "not rotate and none slides: the file cannot express anything else"
        )
    return {}


ARCHITECTURE = Architecture(
    "smollm3",
    config=ConfigRules(
        keys=(
            *("attention_bias", "mlp_bias", "no_rope_layers", "no_rope_layer_interval"),
            *("layer_types", "use_sliding_window", "sliding_window"),
        ),
        ignored=("max_window_layers",),
        defaults={"rope_theta": 2_000_000.0, "tie_word_embeddings": True},
        sliding=_sliding,
        unrotated=_unrotated,
    ),
    gguf=GgufRules("smollm3", write=_write_gguf, interleaved_qk=True),
)
