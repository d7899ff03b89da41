"""Granite 3: Llama with four fixed multipliers: embeddings, attention scores, blocks and logits.

transformers' modeling_granite.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sdk.models.architecture import Architecture, ConfigRules, GgufKeys, GgufRules
from sdk.quant.errors import UnsupportedError

#: The multipliers in a config and in the metadata of a GGUF file.
MULTIPLIERS = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    if not keys.flag("rope.scaling.finetuned", True):
        raise UnsupportedError(
            f"{keys.source}: granite.rope.scaling.finetuned: expected true, found false: a Granite "
            "model without rotary embeddings is not supported"
        )
    read_multipliers(config, keys)


def read_multipliers(config: dict[str, Any], keys: GgufKeys) -> None:
    """The four factors, also of models built on Granite."""
    for ours, theirs in MULTIPLIERS.items():
        default = config["head_dim"] ** -0.5 if ours == "attention_multiplier" else 1.0
        config[ours] = keys.number(theirs) or default


def _read_minicpm(config: dict[str, Any], keys: GgufKeys) -> None:
    """MiniCPM 1 and 2, whose code computes what Granite's does. The first files do not say by how
    much, and llama.cpp's default for logits contradicts the converter's."""
    for ours, theirs in MULTIPLIERS.items():
        if ours == "attention_multiplier":
            config[ours] = config["head_dim"] ** -0.5
            continue
        found = keys.number(theirs)
        if not found:
            raise UnsupportedError(
                f"{keys.source}: minicpm.{theirs}: expected a number, found {found}: the file was "
                "made by a version of llama.cpp's converter that did not write it; convert the "
                "model again"
            )
        config[ours] = found


def write_multipliers(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    """The metadata of the factors."""
    return {theirs: float(config[ours]) for ours, theirs in MULTIPLIERS.items()}


ARCHITECTURE = Architecture(
    "granite",
    config=ConfigRules(
        keys=("attention_bias", "mlp_bias", *MULTIPLIERS), defaults={"attention_multiplier": 1.0}
    ),
    gguf=GgufRules(
        "granite",
        read=_read_gguf,
        write=write_multipliers,
        keys=(*MULTIPLIERS.values(), "rope.scaling.finetuned"),
        # files of dense Granite 4 say what its hybrids have; tensors of those would be left over
        ignored=(
            *("expert_shared_feed_forward_length", "ssm.conv_kernel", "ssm.state_size"),
            *("ssm.group_count", "ssm.inner_size", "ssm.time_step_rank"),
        ),
        interleaved_qk=True,
    ),
    more_gguf=(
        GgufRules(
            "minicpm",
            read=_read_minicpm,
            keys=("embedding_scale", "residual_scale", "logit_scale"),
            interleaved_qk=True,
        ),
    ),
)
