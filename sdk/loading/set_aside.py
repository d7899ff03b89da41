"""How much address space the KV cache of an engine gets: on a CPU more than it has memory for."""

from __future__ import annotations

from sdk.api.config import EngineConfig
from sdk.api.memory_pool import MemoryPool
from sdk.memory.plan import MemoryPlan
from sdk.memory.resolve import device_of

#: ``resize`` can give an engine up to this many times the pages it starts with.
_ROOM_TO_GROW = 4


def pages_set_aside(config: EngineConfig, memory: MemoryPlan) -> int:
    """Pages of address space, with room to grow: only pages that were written take memory."""
    if device_of(config) != "cpu":
        return memory.num_pages
    whole = -(-memory.max_model_len // memory.page_size) * memory.max_num_seqs
    most = _most_cache(config, memory) // max(memory.page_bytes, 1)
    return max(memory.num_pages, min(whole, most))


def _most_cache(config: EngineConfig, memory: MemoryPlan) -> int:
    """Bytes that the KV cache may ever take."""
    if isinstance(config.memory, MemoryPool):
        return config.memory.budget
    return _ROOM_TO_GROW * memory.kv_cache


def places_set_aside(config: EngineConfig, memory: MemoryPlan, nbytes: int, planned: int) -> int:
    """Frames or slots of ``nbytes`` each, with the one for padding; ``planned``: in the plan. On a
    CPU as many as the whole cache could have, with room to grow."""
    if device_of(config) != "cpu":
        return planned
    whole = -(-memory.max_model_len // memory.page_size) * memory.max_num_seqs
    return max(planned, 1 + min(whole, _most_cache(config, memory) // nbytes))


def states_set_aside(config: EngineConfig, memory: MemoryPlan) -> int:
    """Slots of recurrent states."""
    states = memory.states
    return 0 if states is None else places_set_aside(config, memory, *states[:2])


def snapshots_set_aside(config: EngineConfig, memory: MemoryPlan) -> int:
    """Places of snapshots in 16 bits."""
    states = memory.states
    if states is None or not states.num_rounded:
        return 0
    return places_set_aside(config, memory, states.rounded_bytes, states.num_rounded)
