"""Granite 4 whose layers all attend and have no experts: Granite 3 with other names of tensors.

transformers' modeling_granitemoehybrid.py. Its MLP is called shared, as it is where experts come
beside it. GGUF files of these models call themselves ``granite``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import Architecture, ConfigRules, TensorRules
from sdk.models.architectures.granite import MULTIPLIERS
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sdk.models.config_fields import Fields

_MAMBA = (
    *("mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_head", "mamba_d_conv"),
    *("mamba_expand", "mamba_chunk_size", "mamba_conv_bias", "mamba_proj_bias", "time_step_limit"),
)


def _derived(config: dict[str, Any]) -> None:
    """The width of the shared MLP, which is the only one.

    :raises UnsupportedError: there are experts, or layers with a state.
    """
    experts = config.get("num_local_experts")
    if experts:
        raise UnsupportedError(
            f"config: num_local_experts: expected 0, found {experts}: Granite 4 with experts is "
            "not supported"
        )
    layers = config.get("num_hidden_layers")
    kinds = config.get("layer_types") or config.get("layers_block_type")
    kinds = ["mamba"] * (layers if isinstance(layers, int) else 1) if kinds is None else kinds
    other = [kind for kind in kinds if kind not in ("attention", "full_attention")]
    if other:
        raise UnsupportedError(
            f"config: layer_types: expected full_attention alone, found {other[0]!r}: Granite 4 "
            "with Mamba layers is not supported"
        )
    config["layer_types"] = ["full_attention"] * len(kinds)
    if config.get("shared_intermediate_size") is not None:
        config["intermediate_size"] = config["shared_intermediate_size"]


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    rotates = fields.values.get("position_embedding_type")
    if rotates not in (None, "rope"):
        raise UnsupportedError(
            f"config: position_embedding_type: expected rope or null, found {rotates!r}"
        )
    return [rotates is None] * len(windows)


ARCHITECTURE = Architecture(
    "granitemoehybrid",
    config=ConfigRules(
        keys=(
            "attention_bias",
            "position_embedding_type",
            "shared_intermediate_size",
            "layer_types",
            *MULTIPLIERS,
        ),
        ignored=(*_MAMBA, "num_local_experts", "num_experts_per_tok", "layers_block_type"),
        defaults={"attention_multiplier": 1.0, "shared_intermediate_size": 1024},
        unrotated=_unrotated,
        derived=_derived,
    ),
    tensors=TensorRules(
        names={
            "mlp.gate_up_proj": "shared_mlp.input_linear",
            "mlp.down_proj": "shared_mlp.output_linear",
        }
    ),
)
