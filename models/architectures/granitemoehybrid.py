"""Granite 4: Mamba-2 layers and a few that attend, most without rotation, with Granite 3's factors.

Every layer has a shared MLP, and most models experts beside it. transformers'
modeling_granitemoehybrid.py. GGUF files of models whose layers all attend call themselves
``granite``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    RECURRENT,
    Architecture,
    Blocks,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.architectures.granite import MULTIPLIERS, read_multipliers
from sdk.models.architectures.mamba2 import (
    GGUF_KEYS,
    GGUF_TENSORS,
    IGNORED,
    SIZES,
    read_sizes,
    spec_of,
)
from sdk.models.configs.experts import some_experts
from sdk.models.configs.fields import Fields
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sdk.models.mixers.mamba2 import Mamba2Spec

_MAMBA, _ATTENTION = "linear_attention", "full_attention"
_KINDS = {_MAMBA: RECURRENT, "mamba": RECURRENT, "attention": Blocks(), _ATTENTION: Blocks()}


def _derived(config: dict[str, Any]) -> None:
    """The kinds of layers, the width of the shared MLP of a model without experts, and that of a
    head of Mamba-2."""
    layers = config.get("num_hidden_layers")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    if kinds is None and isinstance(layers, int):
        kinds = [_MAMBA] * layers
    if isinstance(kinds, (list, tuple)):
        renamed = {"mamba": _MAMBA, "attention": _ATTENTION}
        config["layer_types"] = [renamed.get(kind, kind) for kind in kinds]
    config["mlp_width"] = config.get("shared_intermediate_size", 1024)
    derive_head(config)


def derive_head(config: dict[str, Any]) -> None:
    """The width of a head of Mamba-2, where a config leaves it to the model."""
    heads, hidden = config.get("mamba_n_heads", 128), config.get("hidden_size")
    if config.get("mamba_d_head") in (None, "auto") and isinstance(hidden, int) and heads:
        config["mamba_d_head"] = config.get("mamba_expand", 2) * hidden // heads


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    rotates = fields.values.get("position_embedding_type")
    if rotates not in (None, "rope", "nope"):
        raise UnsupportedError(
            f"config: position_embedding_type: expected rope or null, found {rotates!r}"
        )
    return [rotates != "rope"] * len(windows)


def recurrent(fields: Fields) -> Mamba2Spec | None:
    """The sizes of its Mamba-2, if any layer has one."""
    if _MAMBA not in fields.values.get("layer_types", ()):
        return None
    bias = fields.flag("mamba_proj_bias", default=False)
    return spec_of(fields, in_bias=bias, out_bias=bias)


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """Layers without key/value heads are Mamba-2."""
    read_multipliers(config, keys)
    read_sizes(config, keys)
    attends = keys.present("attention.head_count_kv", config["num_hidden_layers"])
    config["layer_types"] = [_ATTENTION if one else _MAMBA for one in attends]
    rotates = keys.flag("rope.scaling.finetuned", True)
    config["position_embedding_type"] = "rope" if rotates else None
    if not config["num_local_experts"]:
        config["shared_intermediate_size"] = config["intermediate_size"]


def _has_experts(keys: GgufKeys) -> bool:
    return keys.expert_count > 0


_GGUF = GgufRules(
    "granitehybrid",
    tensors=GGUF_TENSORS,
    read=_read_gguf,
    matches=_has_experts,
    keys=(*MULTIPLIERS.values(), *GGUF_KEYS, "rope.scaling.finetuned"),
    interleaved_qk=True,
)

ARCHITECTURE = Architecture(
    "granitemoehybrid",
    layer=LayerRules(dense="mlp.shared_experts"),
    config=ConfigRules(
        keys=(
            *("attention_bias", "position_embedding_type", "shared_intermediate_size"),
            *("layer_types", "num_local_experts", "num_experts_per_tok", "mamba_proj_bias"),
            *("time_step_limit", "mlp_width", *SIZES.values(), *MULTIPLIERS),
        ),
        ignored=(*IGNORED, "layers_block_type", "mamba_expand"),
        defaults={
            "attention_multiplier": 1.0,
            "shared_intermediate_size": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
        },
        fixed={"hidden_act": "silu"},
        unrotated=_unrotated,
        derived=_derived,
        expert_width="intermediate_size",
        has_experts=some_experts,
        dense_width="mlp_width",
        kinds=_KINDS,
        recurrent=recurrent,
    ),
    more_gguf=(
        _GGUF,
        _GGUF._replace(
            matches=None,
            tensors={
                **GGUF_TENSORS,
                **{
                    f"mlp.shared_experts.{part}_proj": f"ffn_{part}"
                    for part in ("gate", "up", "down")
                },
            },
            ignored=("expert_shared_feed_forward_length",),
        ),
    ),
)
