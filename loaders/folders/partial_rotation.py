"""Refuses configs whose rotation libraries read in different ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import architecture
from sdk.quant.errors import UnsupportedError


def check_partial_rotation(config: Mapping[str, Any], source: str) -> None:
    """A share of rotated dimensions must be one that transformers' class reads.

    :raises UnsupportedError: others read it (vLLM, transformers 4), so it is not clear which model
        the file holds.
    """
    own = architecture(config["model_type"])
    if own is None or "partial_rotary_factor" in own.config.keys:
        return
    ropes = [config.get("rope_parameters") or {}, config.get("rope_scaling") or {}]
    places = [config, *(rope for rope in ropes if isinstance(rope, dict))]
    found = next((v for p in places if (v := p.get("partial_rotary_factor")) is not None), 1)
    if found != 1:
        raise UnsupportedError(
            f"{source}: partial_rotary_factor: expected 1, found {str(found)[:40]}: transformers' "
            f"class of {own.model_type} rotates whole heads"
        )
