"""Scales for an 8-bit KV cache, as compressed-tensors, ModelOpt and others store them in a model.

They are read, checked and reported, but not used. KV pages here have 16 bits, or 8 with a scale per
token and head that is computed from the values. That loses less than one number per layer.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from sdk.loaders.folders.safetensors_reader import SafetensorsFiles, StoredTensor
from sdk.loaders.formats.scales import FLOATS

logger = logging.getLogger("sdk")

#: Endings of their names.
KV_SCALES = (
    *(".self_attn.k_scale", ".self_attn.v_scale", ".attn.k_scale", ".attn.v_scale", ".kv_scale"),
    *(".k_proj.k_scale", ".v_proj.v_scale", ".k_proj.output_scale", ".v_proj.output_scale"),
)
#: One number, or one per key/value head.
_MOST = 1024


def read_kv_scales(
    files: SafetensorsFiles, tensors: Mapping[str, StoredTensor], source: str
) -> dict[str, float]:
    """The scales among ``tensors`` by name; of scales per head, the largest.

    Scales that are not positive numbers count as 1, as in other engines, with one warning that
    names ``source``.
    """
    found: dict[str, float] = {}
    unsound = []
    for name, stored in tensors.items():
        if not name.endswith(KV_SCALES):
            continue
        largest = math.nan
        if stored.dtype in FLOATS and 0 < math.prod(stored.shape) <= _MOST:
            values = files.tensor(stored.name)
            largest = float(values.max()) if bool((values > 0).all()) else math.nan
        if not math.isfinite(largest):
            unsound.append(stored.name)
            largest = 1.0
        found[name] = largest
    if unsound:
        logger.warning(
            "%s: %d scales of the KV cache are not positive numbers, such as %r; 1 is used instead",
            source,
            len(unsound),
            unsound[0],
        )
    if found:
        logger.info(
            "%s: %d scales for an 8-bit KV cache (%.3g to %.3g) are not used",
            source,
            len(found),
            min(found.values()),
            max(found.values()),
        )
    return found
