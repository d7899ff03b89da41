"""The keywords of ``LLM(...)``: typed for editors and type checkers, and turned into a config.

:class:`EngineOptions` declares them for static tools. A test compares it with the fields of
:class:`~sdk.config.EngineConfig`, which has the defaults and the checks.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypedDict, TypeVar

from sdk.config import EngineConfig, ProgressCallback
from sdk.engine.scheduling.policy import PolicyName, SchedulingPolicy
from sdk.memory.pool import MemoryPool
from sdk.other_names import ENGINE, without_effect
from sdk.remote import RemoteWorkers
from sdk.speculative_config import SpeculativeConfig

_Function = TypeVar("_Function", bound=Callable[..., Any])


class EngineOptions(TypedDict, total=False):
    """Options of ``LLM``, ``LLM.plan`` and ``AsyncLLM``: see ``docs/api.md``."""

    filename: str | None
    tokenizer: str | os.PathLike[str] | None
    tokenizer_mode: Literal["auto"]
    skip_tokenizer_init: bool
    trust_remote_code: bool
    tensor_parallel_size: int
    pipeline_parallel_size: int
    data_parallel_size: int
    replica_routing: Literal["state", "requests", "round_robin"]
    prefill_replicas: int
    enable_expert_parallel: bool
    num_redundant_experts: int
    remote_workers: RemoteWorkers | Mapping[str, Any] | None
    distributed_executor_backend: Literal["mp", "uni", "ray"] | None
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float", "half"]
    quantization: str | None
    revision: str | None
    chat_template: str | None
    seed: int
    memory: int | str | MemoryPool | None
    kv_cache_memory_bytes: int | str | None
    gpu_memory_utilization: float | None
    enforce_eager: bool
    hf_overrides: Mapping[str, Any] | None
    device: Literal["auto", "cpu", "cuda"]
    num_threads: int | None
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int | None
    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    enable_prompt_embeds: bool
    kv_cache_dtype: str
    kv_policy: str | None
    kv_keep: tuple[int, int]
    load_format: Literal["auto", "gguf", "safetensors"]
    scheduling_policy: PolicyName | SchedulingPolicy
    tenant_weights: Mapping[str, float] | None
    priority_aging: float | None
    max_waiting: int | None
    prefix_eviction: Literal["lru", "cost"]
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None
    enable_lora: bool
    max_loras: int
    max_lora_rank: int
    max_cpu_loras: int | None
    lora_memory: int | str | None
    lora_dtype: Literal["auto", "int8"]
    swap_space: int | str
    swap_path: str | os.PathLike[str] | None
    disk_offload: int | str
    disk_offload_path: str | os.PathLike[str] | None
    cpu_offload: int | str
    compute: Literal["auto", "exact"]
    deterministic: bool
    local_files_only: bool
    download_dir: str | os.PathLike[str] | None
    generation_config: str | os.PathLike[str]
    override_generation_config: Mapping[str, Any] | None
    on_progress: ProgressCallback | None


def engine_config(model: object, **options: Any) -> EngineConfig:
    """The config for the keywords of a call. ``None`` means the default.

    :raises TypeError: an unknown keyword; suggests our name for it or the closest one.
    :raises RequestError: an invalid value.
    """
    # Passed on as **options everywhere, so that Jedi, which does not know Unpack, finds the names.
    known = {field.name: field for field in fields(EngineConfig) if field.name != "model"}
    for name, value in list(options.items()):
        if name in known:
            if value is None and known[name].default is not None:
                del options[name]
        elif without_effect(name, value):
            del options[name]
        else:
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            hint = f": {ENGINE[name].here}" if name in ENGINE else hint
            raise TypeError(f"LLM() got an unknown option {name!r}{hint}")
    return EngineConfig(model=str(model), **options)


def takes_options(function: _Function) -> _Function:
    """Make ``inspect.signature``, and so notebooks, show the options instead of ``**options``."""
    signature = inspect.signature(function)
    shown = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    types = EngineOptions.__annotations__
    for field in fields(EngineConfig):
        if field.name != "model":
            assert field.default is not MISSING
            shown.append(
                inspect.Parameter(
                    field.name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=_text(types[field.name]),
                )
            )
    function.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
    return function


def _text(annotation: Any) -> Any:
    """The text of an annotation, which a TypedDict stores as a forward reference."""
    return getattr(annotation, "__forward_arg__", annotation)
