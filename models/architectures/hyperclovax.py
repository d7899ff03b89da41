"""HyperCLOVA X SEED Think: Granite with norms after the blocks too, and a factor of logits.

NAVER (2025); transformers' modeling_hyperclovax.py. ``logits_scaling`` multiplies here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, LayerRules, Norms
from sdk.models.architectures.granite import MULTIPLIERS

if TYPE_CHECKING:
    pass


def _derived(config: dict[str, Any]) -> None:
    """The factor under the name that multiplies."""
    if "logits_scaling" in config:
        config["logit_scale"] = config.pop("logits_scaling")
    if config.get("attention_multiplier") is None:
        config.pop("attention_multiplier", None)


ARCHITECTURE = Architecture(
    "hyperclovax",
    layer=LayerRules(
        norms=Norms("input_layernorm", "post_norm1", "post_attention_layernorm", "post_norm2")
    ),
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias", "logit_scale", *MULTIPLIERS),
        fixed={"use_post_norm": True},
        derived=_derived,
    ),
)
