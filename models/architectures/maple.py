"""Maple: Qwen 3's experts and norms of heads, windows in three of four layers, clamped experts.

Layers that see all tokens do not rotate. An expert clamps what enters its activation from above,
and what it is multiplied with from both sides, at 7. transformers has no class: the facts are those
of the code beside the weights of deepgrove/maple-preview, which is not run, and of llama.cpp.
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
    TensorRules,
)
from sdk.models.architectures.nomic_bert import check_only
from sdk.models.architectures.step3p5 import limits
from sdk.models.configs.sliding import all_but_every

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sdk.models.configs.fields import Fields

#: What a config could ask for otherwise.
_ONLY: dict[str, tuple[Any, ...]] = {
    "use_qk_norm": (True, None),
    "use_bias": (False, None),
    "num_shared_experts": (0, None),
    "moe_router_enable_expert_bias": (False, None),
    "first_k_dense_replace": (0, None),
}
#: The code has no other clamp, and configs do not state it.
_LIMIT = 7.0


def _derived(config: dict[str, Any]) -> None:
    check_only(config, _ONLY, "maple")
    layers = config.get("num_hidden_layers")
    if isinstance(layers, int) and 0 < layers <= 512:
        config.setdefault("swiglu_limits", [_LIMIT] * layers)
    if config.get("intermediate_size") is None:  # no layer has an MLP
        config["intermediate_size"] = config.get("moe_intermediate_size")


def _limits(key: str, fields: Fields, layers: int) -> list[float | None]:
    """A clamp of 1 or more: SiLU of it is then above the largest negative value of SiLU."""
    found = limits(key, fields, layers)
    for one in found:
        if one is None or one < 1.0:
            fields.fail(key, "clamps of 1 or more", one)
    return found


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    still = fields.flag("nope_on_global_attention", default=True)
    return [still and window is None for window in windows]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    layers = config["num_hidden_layers"]
    config["norm_topk_prob"] = True
    config["layer_types"] = keys.layer_types(layers, window=config["sliding_window"], period=4)
    found = keys.get("swiglu_clamp_exp")
    if found is None:
        raise keys.fail("swiglu_clamp_exp", "missing", "the clamp of each layer's experts")
    each = [found] * layers if isinstance(found, int | float) else list(found)[:layers]
    config["swiglu_limits"] = [float(one) for one in each]


ARCHITECTURE = Architecture(
    "maple",
    layer=LayerRules(qk_norm="head", limits_first=True),
    config=ConfigRules(
        keys=(
            *("layer_types", "sliding_window", "sliding_window_pattern", "norm_topk_prob"),
            *("num_experts", "num_experts_per_tok", "moe_intermediate_size", "swiglu_limits"),
            *("nope_on_global_attention", "partial_rotary_factor", *_ONLY),
        ),
        ignored=(
            *("quantize", "preaffine", "router_dtype", "embedding_dropout", "output_dropout"),
            *("score_function", "routed_scaling_factor", "n_group", "topk_group"),
            *("num_nextn_predict_layers", "mtp_loss_scaling_factor", "max_window_layers"),
        ),
        defaults={
            "head_dim": 128,
            "norm_topk_prob": True,
            "partial_rotary_factor": 0.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
        },
        stated=(),
        sliding=all_but_every(4),
        unrotated=_unrotated,
        biases=lambda fields: Biases(),
        fixed={"hidden_act": "silu"},
        derived=_derived,
        limits=_limits,
        expert_width="moe_intermediate_size",
    ),
    tensors=TensorRules(
        names={"model.embed_tokens": ("model.word_embeddings", "model.embed_tokens")}
    ),
    more_gguf=(
        GgufRules(
            "maple",
            read=_read_gguf,
            keys=("attention.sliding_window_pattern", "rope.freq_base_swa", "swiglu_clamp_exp"),
            slides="scaled",
        ),
    ),
)
