"""Methods of vLLM that are not here: what to do instead."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

_WEIGHTS = "weights are not replaced while an engine runs"
_RPC = "ranks run no code of callers"
_TEXT = "models read text only"
_TASKS = "one engine generates, embeds, classifies and scores"
#: By class; names are patterns (``fnmatch``).
MISSING: Mapping[str, Mapping[str, str]] = {
    "LLM": {
        "apply_model": "use `llm.llm.quant_report()`; the model's modules are not public",
        "collective_rpc": _RPC,
        "release_kv_cache_memory": "use `sleep(1)`",
        "reset_mm_cache": _TEXT,
        "*weight*": _WEIGHTS,
        "llm_engine": "use `LLMEngine(llm)`; `llm.llm` has the model's facts",
    },
    "LLMEngine": {
        "apply_model": "use `llm.quant_report()`; the model's modules are not public",
        "collective_rpc": _RPC,
        "do_log_stats_with_interval": "nothing is logged",
        "get_supported_tasks": _TASKS,
        "has_unfinished_requests_dp": "replicas are behind one engine",
        "release_kv_cache_memory": "use `sleep(1)`",
        "reset_*_cache": _TEXT,
        "*_profile": "use `start_profile` of `LLM`, or `llm.trace(path)`",
        "*weight*": _WEIGHTS,
    },
    "AsyncLLMEngine": {
        "*weight*": _WEIGHTS,
        "*_profile": "use `llm.trace(path)`",
        "checkpoint_*": "use `llm.snapshot` and `restore`",
        "*_generation": "use `sleep` and `wake_up`",
        "is_paused": "use `is_sleeping`",
        "add_request": "use `generate`",
        "check_admission": "all requests are queued",
        "collective_rpc": _RPC,
        "get_kv_event_sources": "this engine does not publish events",
        "get_num_*": "use `llm.get_metrics()`",
        "get_status": "use `check_health`",
        "get_supported_tasks": _TASKS,
        "handle_fault": "a dead engine is not restarted",
        "is_tracing_enabled": "requests are not traced",
        "notify_kv_transfer_request_rejected": "keys and values are not transferred",
        "release_kv_cache_memory": "use `sleep(1)`",
        "reset_encoder_cache": _TEXT,
        "reset_mm_cache": _TEXT,
        "scale_elastic_ep": "the number of ranks is fixed",
        "wait_for_requests_to_drain": "`shutdown` ends all requests",
    },
}


def missing(owner: str, name: str) -> AttributeError:
    """The error for an attribute that a class does not have."""
    for pattern, instead in MISSING[owner].items():
        if fnmatchcase(name, pattern):
            return AttributeError(f"{owner}.{name} of vLLM is not supported: {instead}", name=name)
    return AttributeError(f"{owner!r} object has no attribute {name!r}", name=name)
