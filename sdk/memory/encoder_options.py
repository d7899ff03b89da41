"""The options of an engine whose model is an encoder: its tokens see those after them too.

A text runs in one step, whose keys and values nobody reads later. So a step holds the longest text,
pages are those of one step, and nothing is cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sdk.api.config import EngineConfig
from sdk.api.errors import RequestError
from sdk.models.config import ModelConfig
from sdk.quant.safe_repr import safe_repr

#: Options that are about answers or about keys and values that stay: their values that ask for
#: nothing.
_OFF: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "speculative_config": (None,),
        "pipeline_parallel_size": (1,),
        "prefill_replicas": (0,),
        "kv_policy": (None,),
        "kv_cache_dtype": ("auto", "float32", "float16", "bfloat16"),
        "swap_space": (0,),
        "enable_prompt_embeds": (False,),
    }
)


def encoder_options(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """The options as an encoder runs with them.

    :raises RequestError: an option that an encoder has no use for.
    """
    for name, allowed in _OFF.items():
        found = getattr(config, name)
        if found not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise RequestError(
                f"{name}: expected {expected}, found {safe_repr(found)}: this model ("
                f"{model.model_type}) is an encoder, which runs a text in one step and generates "
                "nothing; leave the option out"
            )
    longest = min(config.max_model_len or model.max_position, model.max_position)
    return replace(
        config,
        max_num_batched_tokens=max(config.step_tokens, longest),
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
    )


def step_pages(config: EngineConfig) -> int:
    """The pages of a step with as many tokens and requests as there may be."""
    tokens, requests = config.step_tokens, config.max_num_seqs
    return -(-tokens // config.block_size) + requests
