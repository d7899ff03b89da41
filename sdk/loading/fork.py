"""``LLM.fork``: options and memory plan of a second engine with the same weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sdk.api.config import EngineConfig
from sdk.api.errors import OutOfMemoryError, RequestError
from sdk.api.memory_pool import MemoryPool
from sdk.api.options import engine_config
from sdk.api.speculative_config import SpeculativeConfig
from sdk.loading.checks import check_options, memory_shortage, room_shortage
from sdk.memory.plan import MemoryPlan
from sdk.memory.planning import plan_for
from sdk.memory.resolve import device_of
from sdk.memory.weights import weight_bytes
from sdk.models.architecture import architecture
from sdk.models.auto import model_type
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.safe_repr import safe_repr

#: Options that say nothing about the weights, their kernels or the tokenizer.
FREE_OPTIONS = frozenset(
    {
        "block_size",
        "chat_template",
        "disable_additional_properties",
        "enable_chunked_prefill",
        "enable_lora",
        "enable_prefix_caching",
        "enable_prompt_embeds",
        "enforce_eager",
        "generation_config",
        "kv_cache_dtype",
        "kv_cache_memory_bytes",
        "kv_keep",
        "kv_policy",
        "lora_dtype",
        "lora_memory",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_waiting",
        "memory",
        "num_threads",
        "on_progress",
        "override_generation_config",
        "prefix_eviction",
        "priority_aging",
        "scheduling_policy",
        "seed",
        "speculative_config",
        "state_snapshot_dtype",
        "swap_path",
        "swap_space",
        "tenant_weights",
    }
)


def fork_config(plan: MemoryPlan, values: Mapping[str, Any], /, **options: Any) -> EngineConfig:
    """The options of a fork: those of the first engine, whose ``plan`` this is, and ``options``.

    Without a new limit the fork has as many bytes of KV cache. ``values``: the model's config.

    :raises TypeError: an unknown option.
    :raises RequestError: an invalid value, or an option or an engine that cannot share weights.
    """
    first = plan.config
    assert first is not None
    _check_engine(first, values, has_experts_away=plan.experts is not None)
    given = engine_config(**{"model": first.model, **options})
    for name in options:
        if name not in FREE_OPTIONS and getattr(given, name) != getattr(first, name):
            raise RequestError(
                f"fork: {name}={safe_repr(options[name])}: a fork has the weights of this LLM, and "
                f"{name} would change them or how they are read; leave it out, or load another LLM"
            )
    if isinstance(given.memory, MemoryPool):
        raise RequestError(
            "fork: memory: expected bytes, found a memory pool: a pool counts the weights of each "
            "of its models, and these are shared"
        )
    changes = {name: getattr(given, name) for name in options if name in FREE_OPTIONS}
    if not changes.keys() & {"memory", "kv_cache_memory_bytes"}:
        changes |= {"memory": None, "kv_cache_memory_bytes": plan.kv_cache}
    config = replace(first, **changes)
    speculative = config.speculative_config
    if isinstance(speculative, SpeculativeConfig) and speculative.has_weights:
        raise RequestError(
            "fork: speculative_config: weights that draft are not shared; pass "
            "speculative_config=None, or one with method='ngram'"
        )
    return config


def _check_engine(
    config: EngineConfig, values: Mapping[str, Any], *, has_experts_away: bool
) -> None:
    """Only an engine that has all weights in this process's memory can share them."""
    reasons = {
        "its weights are on a GPU": device_of(config) != "cpu",
        "its weights are in other processes too": config.num_ranks > 1,
        "its weights are offloaded (disk_offload)": bool(config.disk_offload),
        "its experts are not all in memory": has_experts_away,
        "its memory is that of a pool, which counts weights once for each model": isinstance(
            config.memory, MemoryPool
        ),
        "transformers' code runs it, which has its weights inside": architecture(model_type(values))
        is None,
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise RequestError(f"fork: this LLM cannot share its weights: {reason}")


def fork_plan(config: EngineConfig, checkpoint: Checkpoint) -> MemoryPlan:
    """The memory of a fork: without weights and tokenizer, which it shares.

    :raises OutOfMemoryError: it exceeds its budget, or the memory that is free now.
    """
    weights = replace(weight_bytes(config, checkpoint), total=0, loading=0, early=0)
    made = plan_for(replace(config, skip_tokenizer_init=True), checkpoint, weights)
    made = replace(made, config=config)
    check_options(config, checkpoint, made)
    problem = made.problem or memory_shortage(config, made) or room_shortage(config, made)
    if problem:
        raise OutOfMemoryError(f"fork: {problem}")
    return made
