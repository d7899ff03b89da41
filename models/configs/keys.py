"""Which keys of a config change what a model computes, and which do not.

Every key that transformers' class of a model reads is in one of three places: the model's
``ConfigRules.keys`` and :data:`COMMON` (it is read here, too), :data:`FIXED` (only some values are
supported), or :data:`HARMLESS`, with the reason. tests/models/test_config_keys.py walks the classes
and their code for keys that are in none of them, and compares the results of the others.

A key that no class of that name reads has no effect in transformers. It has none here either, even
if another model reads it, and a load reports it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

from sdk.models.architecture import WITHOUT_HEAD, Architecture, architecture
from sdk.quant.errors import UnsupportedError

#: Read for every model.
COMMON = frozenset(
    {
        *("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
        *("num_attention_heads", "num_key_value_heads", "head_dim", "max_position_embeddings"),
        *("hidden_act", "tie_word_embeddings", "partial_rotary_factor"),
        *("rope_parameters", "rope_scaling", "rope_theta"),
        "is_causal",
    }
)
#: The values with which a key changes nothing, and what another value asks for, where a model does
#: not read the key.
FIXED: Mapping[str, tuple[tuple[Any, ...], str]] = MappingProxyType(
    {
        "is_causal": ((True, None), "its tokens attend in both directions (an embedding model)"),
        "use_bidirectional_attention": (
            (False, None, "vision"),  # of the tokens of an image only
            "its tokens attend in both directions (an embedding model)",
        ),
        "is_encoder_decoder": (
            (False, None),
            "it is an encoder-decoder (sequence-to-sequence) model",
        ),
        "add_cross_attention": ((False, None), "its layers attend to an encoder"),
        "per_layer_config": ((None, {}), "its layers differ in size"),
        "pruned_heads": ((None, {}), "some of its heads were removed"),
    }
)
#: Keys without an effect on results, by reason.
HARMLESS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "training": frozenset(
            {
                *("attention_dropout", "resid_pdrop", "embd_pdrop", "initializer_range"),
                *("hidden_dropout", "classifier_dropout"),
                *("router_aux_loss_coef", "output_router_logits", "pretraining_tp"),
                "router_jitter_noise",  # but for Phi-3.5-MoE, which reads it
                *("gradient_checkpointing", "num_labels", "problem_type", "finetuning_task"),
            }
        ),
        "bookkeeping": frozenset(
            {
                *("_name_or_path", "name_or_path", "transformers_version", "architectures"),
                *(
                    "auto_map",
                    "torch_dtype",
                    "dtype",
                    "id2label",
                    "label2id",
                    "quantization_config",
                ),
                *("custom_pipelines", "tokenizer_class", "task_specific_params", "unsloth_fixed"),
                *("unsloth_version", "_commit_hash", "compression_config", "text_config"),
                *("vision_config", "audio_config", "language_config", "quantization"),
                "multimodal_config",  # ours: what a config has beside text and vision
            }
        ),
        "how transformers runs it": frozenset(
            {
                *("use_cache", "return_dict", "output_attentions", "output_hidden_states"),
                *("chunk_size_feed_forward", "attn_implementation", "experts_implementation"),
                *("_attn_implementation", "_attn_implementation_internal", "cache_implementation"),
                *("_experts_implementation_internal", "_output_attentions", "_post_init_done"),
                *("_attn_implementation_autoset", "torchscript", "use_return_dict", "use_bfloat16"),
            }
        ),
        "tokens": frozenset(
            {
                *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id"),
                *("decoder_start_token_id", "eot_token_id", "eom_token_id", "prefix"),
            }
        ),
        "generation (generation_config.json counts)": frozenset(
            {
                *("max_length", "min_length", "do_sample", "early_stopping", "num_beams"),
                *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty"),
                *("length_penalty", "no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
                *("num_return_sequences", "num_beam_groups", "diversity_penalty"),
                *("encoder_no_repeat_ngram_size", "return_dict_in_generate", "output_scores"),
                *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
                *("exponential_decay_length_penalty", "begin_suppress_tokens"),
            }
        ),
        "encoders and decoders that are not one": frozenset(
            {"is_decoder", "cross_attention_hidden_size", "tie_encoder_decoder"}
        ),
    }
)
_HARMLESS = frozenset().union(*HARMLESS.values())


def known_keys(own: Architecture) -> frozenset[str]:
    """The keys that are accounted for."""
    rules = own.config
    own_keys = {*rules.ignored, *rules.fixed, *rules.names.values()}
    return read_keys(own) | FIXED.keys() | _HARMLESS | own_keys


def read_keys(own: Architecture) -> frozenset[str]:
    """The keys that change what the model computes."""
    eps = own.config.norm_eps
    return COMMON | {*own.config.keys, *((eps,) if isinstance(eps, str) else ())}


def check_fixed(config: Mapping[str, Any], where: str) -> None:
    """:raises UnsupportedError: a key has a value that asks for something else than is run."""
    own = architecture(config.get("model_type"))
    read: frozenset[str] = frozenset() if own is None else read_keys(own)
    for key, (allowed, why) in FIXED.items():
        found = config.get(key)
        if key not in read and not any(found is value or found == value for value in allowed):
            raise UnsupportedError(
                f"{where}: {key}: expected {allowed[0]}, found {str(found)[:80]}: {why}, which is "
                "not supported"
            )
    for key, value in ({} if own is None else own.config.fixed).items():
        found = config.get(key)
        if found is not None and found != value:
            raise UnsupportedError(
                f"{where}: {key}: expected {value}, found {str(found)[:80]}: another value is not "
                f"supported for {config['model_type']}"
            )


def check_class(config: Mapping[str, Any], defaults: Mapping[str, Any], where: str) -> None:
    """Check a config against the class of the transformers that is installed, which may be newer.

    ``defaults``: the values of the class.

    :raises UnsupportedError: the class reads a key that is not known here, and its value is not the
        default.
    """
    own = architecture(config.get("model_type"))
    if own is None:
        return
    for key in sorted(defaults.keys() - known_keys(own)):
        found = config.get(key, defaults[key])
        if found != defaults[key]:
            raise UnsupportedError(
                f"{where}: {key}: expected {str(defaults[key])[:80]}, found {str(found)[:80]}: the "
                f"class of {own.model_type} in this version of transformers reads it, and it is "
                "not known here"
            )


def unknown_keys(config: Mapping[str, Any]) -> list[str]:
    """The keys with a value that nothing reads; none for a model that transformers runs."""
    own = architecture(config.get("model_type"))
    if own is None:
        return []
    known = known_keys(own) | {WITHOUT_HEAD}
    return sorted(key for key, value in config.items() if key not in known and value is not None)


def with_our_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with our keys in place of those that its model spells differently, and what
    follows from them; unchanged for most models."""
    found = dict(config)
    own = architecture(config.get("model_type"))
    if own is None:
        return found
    for ours, theirs in own.config.names.items():
        if theirs in found:
            found[ours] = found.pop(theirs)
    if own.config.derived is not None:
        own.config.derived(found)
    return found


def only_read(config: Mapping[str, Any], own: Architecture | None) -> dict[str, Any]:
    """The keys of a config that its model reads."""
    keys: Iterable[str] = config if own is None else read_keys(own)
    return {key: config[key] for key in keys if key in config}
