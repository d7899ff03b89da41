"""SmallThinker: a mixture of experts whose router reads what enters the layer, before attention.

So experts may be read from a disk while attention runs: Song et al., "SmallThinker" (2025), arXiv
2507.20984. Gates are ReLU. Layers without a window do not rotate, if there are windows.
transformers has no class: the facts are those of the code beside the weights, which is not run, and
of llama.cpp.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    Architecture,
    Biases,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerRules,
)
from sdk.models.architectures.nomic_bert import check_only
from sdk.models.configs.fields import Fields

if TYPE_CHECKING:
    from collections.abc import Sequence

#: What the code beside the weights could also do.
_ONLY: dict[str, tuple[Any, ...]] = {
    "moe_enable_early_router": (True, None),
    "moe_enable_secondary_experts": (False, None),
    "moe_shared_primary_experts": (0, None),
    "use_qk_norm": (False, None),
}
_FULL, _LOCAL = "full_attention", "sliding_attention"
#: llama.cpp's layers: every fourth one sees all tokens, the first one, too.
_PERIOD = 4


def _layout(config: dict[str, Any], key: str, usual: int) -> list[int]:
    """0 or 1 for each layer."""
    fields, found = Fields(config), config.get(key)
    layers = config.get("num_hidden_layers")
    if found is None or not isinstance(layers, int):
        return [usual] * (layers if isinstance(layers, int) and 0 < layers <= 512 else 0)
    if not isinstance(found, list) or len(found) != layers or any(x not in (0, 1) for x in found):
        fields.fail(key, f"a list of 0 or 1 for each of {layers} layers", str(found)[:80])
    return [int(one) for one in found]


def _derived(config: dict[str, Any]) -> None:
    check_only(config, _ONLY, "smallthinker")
    if 0 in _layout(config, "moe_layer_layout", 1):
        Fields(config).fail("moe_layer_layout", "1 for each layer", 0)
    slides = _layout(config, "sliding_window_layout", 0)
    if config.get("layer_types") is None:
        config["layer_types"] = [_LOCAL if one else _FULL for one in slides]
    softmax = config.get("moe_primary_router_apply_softmax")
    config.setdefault("expert_selection_fn", "softmax" if softmax else "sigmoid")
    config["norm_topk_prob"] = True
    config["hidden_act"] = "relu"
    if config.get("intermediate_size") is None:  # no layer has an MLP
        config["intermediate_size"] = config.get("moe_intermediate_size")


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    return [not one for one in _layout(dict(fields.values), "rope_layout", 1)]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    sigmoid = keys.integer("expert_gating_func", (0, 1 << 16), 0) == 2
    config["expert_selection_fn"] = "sigmoid" if sigmoid else "softmax"
    layers = range(config["num_hidden_layers"])
    if config["sliding_window"]:
        config["sliding_window_layout"] = [int(i % _PERIOD != 0) for i in layers]
        config["rope_layout"] = config["sliding_window_layout"]


ARCHITECTURE = Architecture(
    "smallthinker",
    layer=LayerRules(route_early=True),
    config=ConfigRules(
        keys=(
            *("layer_types", "sliding_window", "sliding_window_layout", "rope_layout"),
            *("num_local_experts", "num_experts_per_tok", "moe_intermediate_size"),
            *("norm_topk_prob", "expert_selection_fn", "moe_primary_router_apply_softmax"),
            *("moe_layer_layout", *_ONLY),
        ),
        ignored=(
            *("model_name", "dense_ffn_hidden_size", "moe_num_secondary_experts", "head_router"),
            *("moe_secondary_expert_size", "profile_sparsity", "max_length"),
        ),
        defaults={"rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True},
        stated=(),
        biases=lambda fields: Biases(),
        names={
            "num_local_experts": "moe_num_primary_experts",
            "num_experts_per_tok": "moe_num_active_primary_experts",
            "moe_intermediate_size": "moe_ffn_hidden_size",
            "sliding_window": "sliding_window_size",
        },
        derived=_derived,
        unrotated=_unrotated,
        expert_width="moe_intermediate_size",
    ),
    more_gguf=(GgufRules("smallthinker", read=_read_gguf, expert_gating=(1, 2)),),
)
