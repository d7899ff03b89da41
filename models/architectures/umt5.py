"""The encoder of UMT5: that of a gated T5 with a table of biases in every layer.

Chung et al., "UniMax" (2023), arXiv 2304.09151; transformers' modeling_umt5.py.
"""

from __future__ import annotations

from typing import Any

from sdk.models.architecture import Architecture, GgufKeys, TensorRules
from sdk.models.architectures import t5
from sdk.models.architectures.t5_gated import NAMES
from sdk.models.configs.fields import Fields


def _derived(config: dict[str, Any]) -> None:
    t5.derived(config)
    key = "feed_forward_proj"
    config.setdefault(key, "gated-gelu")
    if not t5.is_gated(config):
        Fields(config).fail(key, "gated-gelu or another gated activation", config[key])


def _has_tables(keys: GgufKeys) -> bool:
    return keys.has_tensor("enc.blk.1.attn_rel_b.weight")


ARCHITECTURE = Architecture(
    "umt5",
    config=t5.CONFIG._replace(
        derived=_derived,
        buckets=lambda fields: t5.buckets(fields, None),
    ),
    tensors=TensorRules(names=NAMES),
    gguf=t5.GGUF._replace(matches=_has_tables),
    more_gguf=(t5.WHOLE._replace(matches=_has_tables),),
    wide_range=True,
)
