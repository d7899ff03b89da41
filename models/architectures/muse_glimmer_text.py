"""Muse Glimmer, the text part: gated attention, norms around each block and of embeddings.

Queries and keys have norms without weights. Every fourth layer, counted from the last one, sees all
tokens and does not rotate; the others slide. Meta (2026); transformers' modeling_muse_glimmer.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sdk.models.architecture import (
    NORMS_AROUND,
    Architecture,
    ConfigRules,
    EmbeddingRules,
    GgufKeys,
    GgufRules,
    LayerRules,
    OutputGate,
    TensorRules,
)
from sdk.models.architectures.gemma2 import GGUF_TENSORS
from sdk.quant.errors import UnsupportedError

if TYPE_CHECKING:
    from sdk.models.configs.fields import Fields

_EVERY = 4


def _sliding(fields: Fields, layers: int) -> list[bool]:
    """All but every fourth layer, counted from the last one."""
    return [(layers - 1 - i) % _EVERY != 0 for i in range(layers)]


def _unrotated(fields: Fields, windows: Sequence[int | None]) -> list[bool]:
    """transformers looks only at whether a layer's base is 0, and rotates by the common one."""
    bases = fields.values.get("layer_rope_theta")
    if bases is None:
        return [not slides for slides in _sliding(fields, len(windows))]
    if not isinstance(bases, (list, tuple)) or len(bases) != len(windows):
        fields.fail("layer_rope_theta", f"a list of {len(windows)} numbers", bases)
    scaling = fields.values.get("rope_parameters") or fields.values
    common = scaling.get("rope_theta", 10_000.0)
    others = [base for base in bases if base not in (0, common)]
    if others:
        raise UnsupportedError(
            f"config: layer_rope_theta: expected 0 or rope_theta {common}, found {others[0]}: "
            "layers with a base of their own are not supported for muse_glimmer_text"
        )
    return [base == 0 for base in bases]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """The factor of queries is in the weights of their norm. llama.cpp fixes the eps of the norms
    after blocks; it rotates the sliding layers alone."""
    layers = config["num_hidden_layers"]
    kinds = keys.layer_types(layers, window=config["sliding_window"], period=_EVERY)
    config["layer_types"] = kinds
    config["layer_rope_theta"] = [
        0 if kind == "full_attention" else config["rope_theta"] for kind in kinds
    ]
    config["hidden_activation"] = "silu"
    config["qk_scale_factor"] = 1.0
    config["post_norm_eps"] = 1e-8
    config["output_multiplier"] = keys.number("logit_scale") or 1.0
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping")


def _write_gguf(config: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    raise UnsupportedError(
        f"{source}: muse_glimmer_text is not written as a GGUF file: the factor of queries would "
        "have to become a tensor; write a folder instead"
    )


ARCHITECTURE = Architecture(
    "muse_glimmer_text",
    aliases=("muse_glimmer",),
    layer=LayerRules(
        norms=NORMS_AROUND,
        qk_norm="unweighted",
        output_gate=OutputGate(),
    ),
    config=ConfigRules(
        keys=(
            *("attention_bias", "hidden_activation", "layer_types", "sliding_window"),
            *("final_logit_softcapping", "qk_scale_factor", "output_multiplier", "post_norm_eps"),
            "layer_rope_theta",
        ),
        # of the tower and of what its outputs replace
        ignored=("image_token_id", "video_token_id"),
        defaults={
            "head_dim": 128,
            "hidden_activation": "silu",
            "sliding_window": 2048,
            "final_logit_softcapping": 20.0,
            "qk_scale_factor": 3.87,
            "output_multiplier": 0.19611613513818404,
            "post_norm_eps": 1e-8,
        },
        sliding=_sliding,
        unrotated=_unrotated,
    ),
    embedding=EmbeddingRules(unweighted_norm=True),
    tensors=TensorRules(norms_minus_one=True, whole_norms=("model.norm",)),
    gguf=GgufRules(
        "muse-glimmer",
        tensors={**GGUF_TENSORS, "self_attn.gate_proj": "attn_gate"},
        read=_read_gguf,
        write=_write_gguf,
        keys=(
            *("logit_scale", "final_logit_softcapping"),
            *("attention.sliding_window_pattern", "rope.freq_base_swa"),
        ),
        interleaved_qk=True,
    ),
)
