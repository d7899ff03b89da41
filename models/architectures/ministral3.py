"""Ministral 3 and Devstral 2: Mistral whose queries grow with the logarithm of their position.

transformers' modeling_ministral3.py. GGUF files call themselves ``mistral3``, as those of Mistral
Small 3 do, which has no such scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sdk.kernels.operators.head_norms import QueryScale
from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.models.configs.fields import MAX_POSITION
from sdk.models.configs.sliding import all_but_every
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

_SCALE, _LENGTH = "llama_4_scaling_beta", "original_max_position_embeddings"


def query_scale(fields: Fields) -> QueryScale | None:
    """The scale of queries among the parameters of the rotation, if it is there."""
    key = "rope_parameters" if fields.has("rope_parameters") else "rope_scaling"
    rope = type(fields)(fields.mapping(key), f"config: {key}")
    if not rope.values.get(_SCALE):
        return None
    return QueryScale(rope.positive(_SCALE), rope.count(_LENGTH, MAX_POSITION))


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    beta = keys.number("attention.temperature_scale", 0.0)
    if beta:
        length = config["max_position_embeddings"]
        config["rope_scaling"] = {
            _LENGTH: keys.integer("rope.scaling.original_context_length", (0, 1 << 31), 0)
            or length,
            **(config["rope_scaling"] or {"rope_type": "default"}),
            _SCALE: beta,
        }


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    scaled, each, every = rope.get(_SCALE), rope.get("mscale"), rope.get("mscale_all_dim")
    if config.get("sliding_window") or (each or 1.0) != 1.0:
        raise UnsupportedError(
            f"{source}: ministral3 is written as a GGUF file only without a window and with "
            f"mscale 1, found {config.get('sliding_window')} and {each}: it cannot express others"
        )
    found: dict[str, Any] = {"attention.temperature_scale": float(scaled)} if scaled else {}
    if scaled:
        found["rope.scaling.original_context_length"] = int(rope[_LENGTH])
    if each and every:
        found["rope.scaling.yarn_log_multiplier"] = float(every)
        found["rope.scaling.attn_factor"] = 1.0
    return found


ARCHITECTURE = Architecture(
    "ministral3",
    config=ConfigRules(
        keys=("sliding_window",),
        defaults={"head_dim": 128},
        sliding=all_but_every(1),
        query_scale=query_scale,
    ),
    gguf=GgufRules(
        "mistral3",
        read=_read_gguf,
        write=_write_gguf,
        keys=("attention.temperature_scale",),
        interleaved_qk=True,
        yarn_log_multiplier=True,
    ),
)
