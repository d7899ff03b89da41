"""The encoder of T5 1.1, Flan-T5 and mT5: a T5's whose MLP has a gate.

Shazeer, "GLU Variants Improve Transformer" (2020), arXiv 2002.05202; transformers' modeling_t5.py.
The ``model_type`` of files is ``t5`` or ``mt5``; ``t5_gated`` is a name of ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, GgufKeys, TensorRules
from sdk.models.architectures import t5

if TYPE_CHECKING:
    from collections.abc import Mapping

NAMES: Mapping[str, str | tuple[str, ...]] = {
    **t5.NAMES,
    "mlp.gate_proj": "layer.1.DenseReluDense.wi_0",
    "mlp.up_proj": "layer.1.DenseReluDense.wi_1",
}


def _claims(config: Mapping[str, Any]) -> bool:
    # transformers' class of mT5 has a gate where the config does not say it
    usual = "gated-gelu" if config.get("model_type") == "mt5" else "relu"
    known = config.get("model_type") in ("t5", "mt5")
    return known and t5.is_gated({"feed_forward_proj": usual, **config})


def _has_gate(keys: GgufKeys) -> bool:
    """Whether it is this model, and not UMT5, which has a gate too."""
    tables = keys.has_tensor("enc.blk.1.attn_rel_b.weight")
    return keys.has_tensor("enc.blk.0.ffn_gate.weight") and not tables


ARCHITECTURE = Architecture(
    "t5_gated",
    config=t5.CONFIG._replace(
        defaults={**t5.CONFIG.defaults, "feed_forward_proj": "gated-gelu"},
    ),
    tensors=TensorRules(names=NAMES),
    gguf=t5.GGUF._replace(matches=_has_gate),
    more_gguf=(t5.WHOLE._replace(matches=_has_gate),),
    wide_range=True,
    claims=_claims,
)
