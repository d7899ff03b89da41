"""Which keys of GGUF metadata change what a model computes, and which do not.

llama.cpp reads about 120 keys with an architecture's name, many for a few architectures only. A key
is in one of four places here: :data:`READ` (or the ``keys`` of the architecture's ``GgufRules``),
:data:`NEUTRAL` (only the values that ask for nothing are supported), or :data:`HARMLESS`, with the
reason. Others have no effect, and a load reports them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np

from sdk.models.architecture import Architecture, GgufRules
from sdk.quant.errors import UnsupportedError

#: Read for every architecture, without its name.
READ = frozenset(
    {
        *("block_count", "context_length", "embedding_length", "feed_forward_length"),
        *("attention.head_count", "attention.head_count_kv", "attention.key_length"),
        *("attention.causal", "attention.value_length", "attention.layer_norm_rms_epsilon"),
        "attention.layer_norm_epsilon",  # the one of LayerNorm, the other of RMSNorm
        *("attention.sliding_window", "classifier.output_labels", "pooling_type"),
        "classifier.pooling_type",
        *("rope.dimension_count", "rope.freq_base", "rope.scale_linear"),
        *("rope.scaling.type", "rope.scaling.factor", "rope.scaling.attn_factor"),
        *("rope.scaling.original_context_length", "rope.scaling.yarn_ext_factor"),
        *("rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier"),
        *("rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow"),
    }
)
#: Read for mixtures of experts.
READ_FOR_EXPERTS = frozenset(
    {
        *("expert_count", "expert_used_count", "expert_feed_forward_length"),
        *("expert_gating_func", "expert_group_count", "expert_shared_count"),
        *("leading_dense_block_count", "expert_weights_scale", "expert_weights_norm"),
        *("expert_group_used_count", "expert_shared_feed_forward_length"),
    }
)
_OFF: tuple[Any, ...] = (0, False)
_ONE: tuple[Any, ...] = (0, 1, True)
#: The values with which a key asks for nothing.
NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "rope.scaling.finetuned": (True, False),
        # factors of a model's parts, soft caps, clamps
        **dict.fromkeys(("logit_scale", "residual_scale", "embedding_scale"), _ONE),
        **dict.fromkeys(("attention.scale", "attention.output_scale"), _OFF),
        **dict.fromkeys(("attention.temperature_length", "attention.temperature_scale"), _OFF),
        **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), _OFF),
        **dict.fromkeys(("router_logit_softcapping", "attention.clamp_kqv"), _OFF),
        **dict.fromkeys(("attention.max_alibi_bias", "swiglu_clamp_exp"), _OFF),
        **dict.fromkeys(("swiglu_clamp_shexp", "activation_sparsity_scale"), _OFF),
        "rope.scaling.alpha": _ONE,
        # other kinds of attention
        **dict.fromkeys(("attention.kv_lora_rank", "attention.q_lora_rank"), _OFF),
        **dict.fromkeys(("attention.key_length_mla", "attention.value_length_mla"), _OFF),
        **dict.fromkeys(("attention.indexer.head_count", "attention.indexer.key_length"), _OFF),
        **dict.fromkeys(("attention.indexer.top_k", "attention.shared_kv_layers"), _OFF),
        **dict.fromkeys(("attention.relative_buckets_count", "full_attention_interval"), _ONE),
        **dict.fromkeys(("attention.group_norm_epsilon", "attention.group_norm_groups"), _OFF),
        "attention.sliding_window_pattern": _OFF,
        # other kinds of layers
        **dict.fromkeys(("expert_count", "expert_used_count", "expert_shared_count"), _OFF),
        **dict.fromkeys(("expert_group_count", "expert_group_used_count"), _ONE),
        **dict.fromkeys(("experts_per_group", "expert_group_scale", "moe_latent_size"), _ONE),
        **dict.fromkeys(("expert_shared_feed_forward_length",), _OFF),
        **dict.fromkeys(("expert_chunk_feed_forward_length",), _OFF),
        "expert_weights_norm": (True,),
        **dict.fromkeys(("interleave_moe_layer_step", "moe_every_n_layers"), _ONE),
        **dict.fromkeys(("nextn_predict_layers", "n_deepstack_layers"), _OFF),
        **dict.fromkeys(("embedding_length_per_layer_input", "rescale_every_n_layers"), _OFF),
        **dict.fromkeys(("altup.num_inputs", "altup.active_idx", "shortconv.l_cache"), _OFF),
        **dict.fromkeys(("decoder_block_count", "decoder_start_token_id"), _OFF),
        **dict.fromkeys(("use_parallel_residual", "swin_norm"), _OFF),
        **dict.fromkeys(("ssm.conv_kernel", "ssm.inner_size", "ssm.state_size"), _OFF),
        **dict.fromkeys(("ssm.group_count", "ssm.time_step_rank", "ssm.dt_b_c_rms"), _OFF),
        **dict.fromkeys(("wkv.head_size", "token_shift_count", "kda.head_dim"), _OFF),
        **dict.fromkeys(("time_mix_extra_dim", "time_decay_extra_dim"), _OFF),
        **dict.fromkeys(("attention.decay_lora_rank", "attention.gate_lora_rank"), _OFF),
        **dict.fromkeys(("attention.iclr_lora_rank",), _OFF),
        **dict.fromkeys(("attention.value_residual_mix_lora_rank",), _OFF),
        # other kinds of models
        **dict.fromkeys(("convnext.block_count", "convnext.embedding_length"), _OFF),
        **dict.fromkeys(("posnet.block_count", "posnet.embedding_length"), _OFF),
        **dict.fromkeys(("features_length", "dense_2_feat_in", "dense_2_feat_out"), _OFF),
        **dict.fromkeys(("dense_3_feat_in", "dense_3_feat_out"), _OFF),
    }
)
#: Keys that must repeat another one, or be 0.
SAME: Mapping[str, str] = MappingProxyType(
    {
        "attention.key_length_swa": "attention.key_length",
        "attention.value_length_swa": "attention.value_length",
        "rope.dimension_count_swa": "rope.dimension_count",
        "rope.freq_base_swa": "rope.freq_base",
        "embedding_length_out": "embedding_length",
    }
)
#: Keys without an effect on results, by reason.
HARMLESS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "the rows of the embedding count": frozenset({"vocab_size"}),
        "of the positions of images": frozenset({"rope.dimension_sections"}),
        "a note on the conversion": frozenset({"tensor_data_layout"}),
    }
)
_HARMLESS = frozenset().union(*HARMLESS.values())


def eps_key(own: Architecture) -> str:
    """The key of the eps of a model's norms."""
    return f"attention.layer_norm_{'epsilon' if own.layer.norm.centred else 'rms_epsilon'}"


def check_keys(
    metadata: Mapping[str, Any], rules: GgufRules, experts: bool, source: str
) -> list[str]:
    """The keys of the architecture that have no effect, because nothing reads them.

    :raises UnsupportedError: a key asks for something that is not supported.
    """
    read = READ | {*rules.keys, *rules.ignored} | (READ_FOR_EXPERTS if experts else frozenset())
    prefix = f"{rules.name}."
    unknown: list[str] = []
    for key in metadata:
        name = key.removeprefix(prefix)
        if name == key or name in read or name in _HARMLESS:
            continue
        if name in NEUTRAL:
            _expect(key, metadata[key], NEUTRAL[name], source)
        elif name in SAME:
            same = metadata.get(prefix + SAME[name], 0)
            _expect(key, metadata[key], (same, 0), source)
        else:
            unknown.append(key)
    return unknown


def _expect(key: str, found: Any, allowed: tuple[Any, ...], source: str) -> None:
    """A value, or each of an array with one for each layer, must be one of ``allowed``."""
    values = found.tolist() if isinstance(found, np.ndarray) else [found]
    for value in values:
        if not any(value == one for one in allowed):
            raise UnsupportedError(
                f"{source}: {key}: expected {allowed[0]}, found {str(value)[:40]}: llama.cpp reads "
                "it for some models, and what it asks for is not supported"
            )
