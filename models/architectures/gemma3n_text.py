"""Gemma 3n, the text part: four residual streams, of which layers run on one (models/altup.py).

As in Gemma 4 values have a norm without a weight, scores no scale, layers embeddings of their own,
and the last layers read the keys of earlier ones. MLPs of the first layers keep few activations.
"Gemma 3n" (Google, 2025); transformers' modeling_gemma3n.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist
from typing import Any

from sdk.models.architecture import (
    NORMS_AROUND,
    Architecture,
    ConfigRules,
    GgufKeys,
    GgufRules,
    LayerCaches,
    LayerRules,
)
from sdk.models.architectures.gemma2 import GGUF_TENSORS
from sdk.models.architectures.gemma4_text import shared_with_earlier
from sdk.models.configs.fields import MAX_WIDTH, Fields
from sdk.models.configs.sliding import all_but_every
from sdk.models.configs.stream_spec import StreamSpec
from sdk.quant.caches import AttentionCache

#: Of the MLPs of the first layers, if a config does not say it, and their number.
_SPARSE, _SPARSE_LAYERS = 0.95, 10
#: Its rows are those between the matrices beside attention.
_LEFT = "blk.0.laurel_l.weight"


def _caches(fields: Fields, windows: Sequence[int | None]) -> LayerCaches:
    dim = fields.count("head_dim", 4096, default=256)
    heads = fields.count("num_key_value_heads", MAX_WIDTH)
    own = [AttentionCache(heads, dim, dim, window) for window in windows]
    return shared_with_earlier(fields, own)


def _widths(fields: Fields, layers: int) -> list[int]:
    stated = fields.values.get("intermediate_size_per_layer")  # of a file
    stated = fields.values.get("intermediate_size") if stated is None else stated
    each = stated if isinstance(stated, (list, tuple)) else [stated] * layers
    if len(each) != layers:
        fields.fail("intermediate_size", f"a width, or {layers} of them", each)
    counts = Fields({str(i): one for i, one in enumerate(each)}, "config: intermediate_size")
    return [counts.count(str(i), MAX_WIDTH) for i in range(layers)]


def _streams(fields: Fields, layers: int) -> StreamSpec:
    count = fields.count("altup_num_inputs", 32, default=4)
    if count < 2:
        fields.fail("altup_num_inputs", "at least 2", count)
    return StreamSpec(
        count,
        fields.count("laurel_rank", MAX_WIDTH, default=64),
        fields.flag("altup_correct_scale", default=True),
        tuple(_deviations(fields, layers)),
    )


def _deviations(fields: Fields, layers: int) -> list[float | None]:
    key = "activation_sparsity_pattern"
    stated = fields.values.get(key)
    if stated is None:
        sparse = _SPARSE_LAYERS if layers > _SPARSE_LAYERS else 0
        stated = [_SPARSE] * sparse + [0.0] * (layers - sparse)
    if not isinstance(stated, (list, tuple)) or len(stated) != layers:
        fields.fail(key, f"a list of {layers} shares", stated)
    for share in stated:
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share < 1:
            fields.fail(key, "shares of 0 to 1", share)
    return [NormalDist().inv_cdf(share) if share > 0 else None for share in stated]


def _read_gguf(config: dict[str, Any], keys: GgufKeys) -> None:
    """A file has the limits of activations in standard deviations, minus infinity for none."""
    layers, window = config["num_hidden_layers"], config["sliding_window"]
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config["final_logit_softcapping"] = keys.number("final_logit_softcapping", 30.0)
    config["layer_types"] = keys.layer_types(layers, window=window, period=5)
    config["num_kv_shared_layers"] = keys.integer("attention.shared_kv_layers", (0, layers), 0)
    inputs = keys.integer("embedding_length_per_layer_input", (1, 1 << 16))
    config["hidden_size_per_layer_input"] = inputs
    config["altup_num_inputs"] = keys.integer("altup.num_inputs", (2, 32))
    config["altup_active_idx"] = keys.integer("altup.active_idx", (0, 32), 0)
    rank = keys.rows(_LEFT)
    if rank is None:
        raise keys.fail(_LEFT, None, "a matrix beside the attention of each layer")
    config["laurel_rank"] = rank
    found = keys.get("activation_sparsity_scale")
    scales = [] if found is None else [float(scale) for scale in found]
    if len(scales) != layers or any(math.isnan(x) or x == math.inf for x in scales):
        raise keys.fail("activation_sparsity_scale", scales[:4], f"{layers} numbers")
    config["activation_sparsity_pattern"] = [NormalDist().cdf(x) for x in scales]
    config["rope_parameters"] = {
        "full_attention": {
            **(config.pop("rope_scaling") or {"rope_type": "default"}),
            "rope_theta": config["rope_theta"],
        },
        "sliding_attention": {
            "rope_type": "default",
            "rope_theta": keys.number("rope.freq_base_swa", 10_000.0),
        },
    }


ARCHITECTURE = Architecture(
    "gemma3n_text",
    aliases=("gemma3n",),
    layer=LayerRules(norms=NORMS_AROUND, qk_norm="head", v_norm=True),
    config=ConfigRules(
        keys=(
            *("attention_bias", "hidden_activation", "layer_types", "sliding_window"),
            *("final_logit_softcapping", "num_kv_shared_layers", "hidden_size_per_layer_input"),
            *("vocab_size_per_layer_input", "altup_num_inputs", "altup_correct_scale"),
            *("laurel_rank", "activation_sparsity_pattern", "rope_local_base_freq"),
            "intermediate_size_per_layer",
        ),
        # of training, of the towers and of what their outputs replace
        ignored=(
            *("altup_coef_clip", "image_token_id", "audio_token_id", "boi_token_id"),
            *("eoi_token_id", "boa_token_id", "eoa_token_id", "vision_soft_tokens_per_image"),
            "audio_soft_tokens_per_image",
        ),
        fixed={"altup_active_idx": 0},
        defaults={
            "head_dim": 256,
            "tie_word_embeddings": True,
            "hidden_activation": "gelu_pytorch_tanh",
            "final_logit_softcapping": 30.0,
            "hidden_size_per_layer_input": 256,
            "num_kv_shared_layers": 15,
            "vocab_size_per_layer_input": 262_144,
        },
        sliding=all_but_every(5),
        embedding_scale=math.sqrt,
        attention_scale=1.0,
        caches=_caches,
        widths=_widths,
        layer_inputs="hidden_size_per_layer_input",
        layer_rows="vocab_size_per_layer_input",
        streams=_streams,
    ),
    more_gguf=(
        GgufRules(
            "gemma3n",
            tensors={
                **GGUF_TENSORS,
                "altup.router_norm": "altup_router_norm",
                "altup.modality_router": "altup_router",
                "altup.prediction_coefs": "altup_predict_coef",
                "altup.correction_coefs": "altup_correct_coef",
                "altup.correct_output_scale": "altup_correct_scale",
                "laurel.linear_left": "laurel_l",
                "laurel.linear_right": "laurel_r",
                "laurel.post_laurel_norm": "laurel_post_norm",
                "per_layer_input_gate": "inp_gate",
                "per_layer_projection": "proj",
                "post_per_layer_input_norm": "post_norm",
            },
            read=_read_gguf,
            keys=(
                *("final_logit_softcapping", "attention.sliding_window_pattern"),
                *("rope.freq_base_swa", "attention.shared_kv_layers"),
                *("embedding_length_per_layer_input", "altup.num_inputs", "altup.active_idx"),
                "activation_sparsity_scale",
            ),
        ),
    ),
    wide_range=True,  # trained in bfloat16
)
