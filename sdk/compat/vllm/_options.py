"""vLLM's options: their names and defaults, and which of ours they become."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from sdk.api.errors import RequestError
from sdk.api.image_hosts import ImageHosts
from sdk.quant.safe_repr import safe_repr


class Option(NamedTuple):
    """An option of vLLM. ``use``: what becomes of a value other than ``default``.

    ``same``: our option of this name. ``read``: another option (``llm_options``). ``free``: any
    value is accepted, because answers do not depend on it. ``only``: it is rejected, and
    ``instead`` says what to do.
    """

    default: Any
    use: Literal["same", "read", "free", "only"]
    instead: str = ""


def _same(default: Any) -> Option:
    return Option(default, "same")


def _read(default: Any) -> Option:
    return Option(default, "read")


def _free(default: Any) -> Option:
    return Option(default, "free")


def _only(default: Any, instead: str) -> Option:
    return Option(default, "only", instead)


#: In vLLM's order. Objects of vLLM's that are defaults there are None here.
OPTIONS: Mapping[str, Option] = {
    "enable_return_routed_experts": _only(False, "routed experts are not returned"),
    "return_sampling_mask": _only(False, "sampling masks are not returned"),
    "model_weights": _only("", "pass the folder or file with the weights as model"),
    "served_model_name": _free(None),
    "tokenizer": _same(None),
    "hf_config_path": _only(None, "put config.json into the model's folder, or use hf_overrides"),
    "runner": _free("auto"),
    "convert": _free("auto"),
    "skip_tokenizer_init": _same(False),
    "enable_prompt_embeds": _same(False),
    "tokenizer_mode": _same("auto"),
    "trust_remote_code": _free(False),
    "allowed_local_media_path": _same(""),
    "allowed_media_domains": _read(None),
    "download_dir": _same(None),
    "safetensors_load_strategy": _free(None),
    "safetensors_prefetch_num_threads": _free(8),
    "safetensors_prefetch_block_size": _free(16777216),
    "load_format": _same("auto"),
    "config_format": _free("auto"),
    "dtype": _same("auto"),
    "kv_cache_dtype": _same("auto"),
    "chat_template": _read(None),
    "seed": _same(0),
    "max_model_len": _same(None),
    "cudagraph_capture_sizes": _free(None),
    "max_cudagraph_capture_size": _free(None),
    "ir_op_priority": _free(None),
    "distributed_executor_backend": _same(None),
    "pipeline_parallel_size": _same(1),
    "master_addr": _free("127.0.0.1"),
    "master_port": _free(29501),
    "nnodes": _only(1, "use distributed_executor_backend='ray'"),
    "node_rank": _free(0),
    "distributed_timeout_seconds": _free(None),
    "cpu_distributed_timeout_seconds": _free(None),
    "numa_bind": _free(False),
    "numa_bind_nodes": _free(None),
    "numa_bind_cpus": _free(None),
    "device_ids": _only(None, "set CUDA_VISIBLE_DEVICES"),
    "tensor_parallel_size": _same(1),
    "prefill_context_parallel_size": _free(1),
    "decode_context_parallel_size": _free(1),
    "dcp_comm_backend": _free(None),
    "dcp_q_replicate": _free(None),
    "dcp_kv_cache_interleave_size": _free(1),
    "cp_kv_cache_interleave_size": _free(None),
    "data_parallel_size": _same(1),
    "data_parallel_rank": _free(None),
    "data_parallel_start_rank": _free(None),
    "data_parallel_size_local": _free(None),
    "data_parallel_address": _free(None),
    "data_parallel_rpc_port": _free(None),
    "data_parallel_hybrid_lb": _free(False),
    "data_parallel_external_lb": _free(False),
    "data_parallel_multi_port_external_lb": _free(False),
    "data_parallel_backend": _free("mp"),
    "enable_hc_sp": _free(False),
    "enable_expert_parallel": _same(False),
    "enable_batch_sharded_sampling": _free(None),
    "enable_ep_weight_filter": _free(False),
    "moe_backend": _free("auto"),
    "linear_backend": _free("auto"),
    "sparse_indexer_topk_backend": _free("auto"),
    "all2all_backend": _free("allgather_reducescatter"),
    "enable_elastic_ep": _free(False),
    "elastic_ep_max_dp_size": _free(None),
    "enable_dbo": _free(False),
    "ubatch_size": _free(0),
    "dbo_decode_token_threshold": _free(32),
    "dp_sync_interval": _free(16),
    "dbo_prefill_token_threshold": _free(512),
    "disable_nccl_for_dp_synchronization": _free(None),
    "eplb_config": _free(None),
    "enable_eplb": _free(False),
    "expert_placement_strategy": _free("linear"),
    "max_parallel_loading_workers": _free(None),
    "block_size": _same(None),
    "enable_prefix_caching": _same(None),
    "prefix_caching_hash_algo": _free("sha256"),
    "prefix_cache_retention_interval": _free(0),
    "disable_sliding_window": _only(False, "models keep their sliding windows"),
    "disable_cascade_attn": _free(None),
    "offload_backend": _free("auto"),
    "cpu_offload_gb": _read(0),
    "cpu_offload_params": _free(None),
    "offload_group_size": _free(0),
    "offload_num_in_group": _free(1),
    "offload_prefetch_step": _free(1),
    "offload_params": _free(None),
    "gpu_memory_utilization": _same(0.92),
    "kv_cache_memory_bytes": _same(None),
    "max_num_batched_tokens": _same(None),
    "max_num_scheduled_tokens": _free(None),
    "long_prefill_token_threshold": _free(0),
    "long_prefill_token_threshold_adaptive": _free(False),
    "max_num_seqs": _same(None),
    "max_num_active_seqs": _free(None),
    "max_num_queued_reqs": _only(None, "all requests are queued"),
    "max_num_queued_tokens": _only(None, "all requests are queued"),
    "max_logprobs": _free(20),
    "logprobs_mode": _only("raw_logprobs", "log-probabilities are the model's own"),
    "use_fp64_gumbel": _free(False),
    "enable_trace_replay": _only(False, "traces are not replayed"),
    "disable_log_stats": _free(False),
    "aggregate_engine_logging": _free(False),
    "revision": _same(None),
    "code_revision": _free(None),
    "hf_token": _read(None),
    "hf_overrides": _read(None),
    "model_class_overrides": _only(None, "this library's own model code is used"),
    "tokenizer_revision": _only(None, "download the tokenizer and pass tokenizer=FOLDER"),
    "quantization": _read(None),
    "quantization_config": _only(None, "use quantization='int4' or 'int8'"),
    "allow_deprecated_quantization": _free(False),
    "enforce_eager": _same(False),
    "disable_custom_all_reduce": _free(False),
    "enable_shm_tensor_arena": _free(False),
    "language_model_only": _read(False),
    "limit_mm_per_prompt": _read(None),
    "enable_mm_embeds": _free(False),
    "interleave_mm_strings": _free(False),
    "media_io_kwargs": _free(None),
    "mm_processor_kwargs": _only(None, "images are read as the model's files say"),
    "mm_processor_cache_gb": _free(4),
    "mm_processor_cache_type": _free("lru"),
    "mm_hasher_algorithm": _free("blake3"),
    "mm_shm_cache_max_object_size_mb": _free(128),
    "mm_encoder_only": _free(False),
    "mm_encoder_tp_mode": _free("weights"),
    "mm_encoder_attn_backend": _free(None),
    "mm_encoder_attn_dtype": _free(None),
    "mm_encoder_fp8_scale_path": _free(None),
    "mm_encoder_fp8_scale_save_path": _free(None),
    "mm_encoder_fp8_scale_save_margin": _free(1.5),
    "io_processor_plugin": _only(None, "plugins are not loaded"),
    "renderer_num_workers": _free(1),
    "skip_mm_profiling": _free(False),
    "video_pruning_rate": _free(None),
    "video_pruning_method": _free("evs"),
    "mm_tensor_ipc": _free("direct_rpc"),
    "mm_processor_device": _free("auto"),
    "mm_ipc_gpu_memory_gb": _free(0),
    "mm_device_do_normalize": _free(True),
    "enable_lora": _same(False),
    "max_loras": _same(1),
    "max_lora_rank": _same(16),
    "default_mm_loras": _free(None),
    "fully_sharded_loras": _free(False),
    "max_cpu_loras": _same(None),
    "lora_dtype": _free("auto"),
    "lora_target_modules": _only(None, "all matrices of an adapter are used"),
    "enable_tower_connector_lora": _free(False),
    "specialize_active_lora": _free(False),
    "enable_mixed_moe_lora_format": _free(False),
    "enable_moe_shared_loras": _free(False),
    "max_lora_cls_labels": _free(None),
    "ray_workers_use_nsight": _free(False),
    "num_gpu_blocks_override": _free(None),
    "model_loader_extra_config": _free(None),
    "ignore_patterns": _free(None),
    "enable_chunked_prefill": _same(None),
    "disable_chunked_mm_input": _free(False),
    "scheduler_reserve_full_isl": _free(True),
    "prefill_schedule_interval": _free(1),
    "watermark": _free(0.0),
    "disable_hybrid_kv_cache_manager": _free(None),
    "structured_outputs_config": _read(None),
    "aux_output_config": _only(None, "only the usual outputs are returned"),
    "reasoning_parser": _free(""),
    "reasoning_parser_plugin": _only(None, "plugins are not loaded"),
    "speculative_config": _read(None),
    "spec_method": _read(None),
    "spec_model": _read(None),
    "spec_tokens": _read(None),
    "watermark_config": _only(None, "answers are not watermarked"),
    "diffusion_config": _only(None, "models decode token by token"),
    "show_hidden_metrics_for_version": _free(None),
    "otlp_traces_endpoint": _free(None),
    "collect_detailed_traces": _free(None),
    "per_request_spec_decode_metrics": _free("none"),
    "kv_cache_metrics": _free(False),
    "kv_cache_metrics_sample": _free(0.01),
    "custom_histogram_buckets": _free(None),
    "cudagraph_metrics": _free(False),
    "enable_layerwise_nvtx_tracing": _free(False),
    "enable_mfu_metrics": _free(False),
    "enable_logging_iteration_details": _free(False),
    "jit_monitor_mode": _free("warn"),
    "jit_monitor_verbose": _free(False),
    "enable_mm_processor_stats": _free(False),
    "scheduling_policy": _same("fcfs"),
    "scheduler_cls": _only(None, "use scheduling_policy"),
    "pooler_config": _read(None),
    "compilation_config": _free(None),
    "attention_config": _free(None),
    "engram_config": _only(None, "this engine does not have engrams"),
    "mamba_config": _free(None),
    "kernel_config": _free(None),
    "enable_flashinfer_autotune": _free(None),
    "worker_cls": _only("auto", "workers cannot be replaced"),
    "worker_extension_cls": _only("", "workers cannot be extended"),
    "profiler_config": _read(None),
    "logging_config": _free(None),
    "log_level": _free(None),
    "log_config_file": _free(None),
    "kv_transfer_config": _only(None, "use llm.llm.snapshot and restore"),
    "kv_events_config": _only(None, "this engine does not publish events"),
    "ec_transfer_config": _free(None),
    "ec_manager_config": _free(None),
    "reasoning_config": _only(None, "use SamplingParams(thinking_token_budget=...)"),
    "generation_config": _same("auto"),
    "enable_sleep_mode": _free(False),
    "sleep_mode_offload_cudagraph": _free(False),
    "sleep_preserve_parameter_names": _free(None),
    "enable_cumem_allocator": _free(False),
    "enable_nccl_comm_suspend": _free(False),
    "override_generation_config": _same(None),
    "model_impl": _free("auto"),
    "attention_backend": _free(None),
    "kv_cache_dtype_skip_layers": _only(None, "use kv_cache_dtype='fp8:skip=0+1'"),
    "mamba_cache_dtype": _free("auto"),
    "mamba_ssm_cache_dtype": _free("auto"),
    "mamba_block_size": _free(None),
    "prefix_match_unit": _free(None),
    "mamba_cache_mode": _free("none"),
    "enable_mamba_shared_prefix_checkpoint": _free(False),
    "replayssm_buffer_len": _free(16),
    "use_replayssm": _free(False),
    "mamba_backend": _free(None),
    "mamba_ssu_algorithm": _free(None),
    "enable_mamba_cache_stochastic_rounding": _free(False),
    "mamba_cache_philox_rounds": _free(0),
    "additional_config": _free(None),
    "use_tqdm_on_load": _free(True),
    "pt_load_map_location": _free("cpu"),
    "logits_processors": _read(None),
    "async_scheduling": _free(None),
    "stream_interval": _free(1),
    "kv_sharing_fast_prefill": _free(False),
    "swa_bounded_replay": _free(True),
    "optimization_level": _free(None),
    "performance_mode": _free("balanced"),
    "fault_tolerance_config": _free(None),
    "enable_fault_tolerance": _free(False),
    "kv_offloading_size": _free(None),
    "kv_offloading_backend": _free("native"),
    "tokens_only": _only(False, "use skip_tokenizer_init"),
    "shutdown_timeout": _free(0),
    "weight_transfer_config": _only(None, "weights are not replaced while an engine runs"),
    "fail_on_environ_validation": _free(False),
    "gdn_prefill_backend": _free(None),
    "kda_prefill_backend": _free(None),
    "kda_decode_backend": _free(None),
}
#: The keywords that vLLM's ``LLM`` names; it takes the others as ``**kwargs``.
_NAMED = (
    *("runner", "convert", "tokenizer", "tokenizer_mode", "skip_tokenizer_init"),
    *("trust_remote_code", "allowed_local_media_path", "allowed_media_domains"),
    *("tensor_parallel_size", "dtype", "quantization", "revision", "tokenizer_revision"),
    *("chat_template", "seed", "gpu_memory_utilization", "cpu_offload_gb", "offload_group_size"),
    *("offload_num_in_group", "offload_prefetch_step", "offload_params", "enforce_eager"),
    *("enable_return_routed_experts", "return_sampling_mask", "disable_custom_all_reduce"),
    *("hf_token", "hf_overrides", "mm_processor_kwargs", "pooler_config"),
    *("structured_outputs_config", "profiler_config", "attention_config"),
    *("kv_cache_memory_bytes", "compilation_config", "quantization_config"),
    *("logits_processors", "spec_method", "spec_model", "spec_tokens"),
)
#: Methods of files, which are detected. vLLM rejects them for a checkpoint of another kind.
_FILE_METHODS = (
    *("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors", "fbgemm_fp8"),
    *("modelopt", "modelopt_fp4", "mxfp4", "hqq", "quark", "gpt_oss_mxfp4", "auto-round"),
)
#: Keys of ``structured_outputs_config`` that choose between engines; here there is one.
_ENGINE_KEYS = {"backend", "disable_fallback", "reasoning_parser", "reasoning_parser_plugin"}
_STRUCTURE_KEYS = {"disable_any_whitespace", "disable_additional_properties"}
_MODEL = "Qwen/Qwen3-0.6B"
_SEQS, _TOKENS = 64, 256


def llm_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of our ``LLM`` for vLLM's; names that vLLM does not have are ours already.

    :raises RequestError: an option cannot be honored.
    """
    changed = {name: value for name, value in given.items() if _is_changed(name, value)}
    options = {name: value for name, value in changed.items() if name not in OPTIONS}
    for name, value in changed.items():
        option = OPTIONS.get(name)
        if option is None or option.use == "free":
            continue
        if option.use == "only":
            raise RequestError(f"{name}={safe_repr(value)} is not supported: {option.instead}")
        if option.use == "same":
            options[name] = value
    options |= _memory(changed, options.get("device")) | _files(changed) | _sizes(changed)
    options |= _images(changed)
    drafts = dict(changed.get("speculative_config") or {})
    for name, key in (("method", "spec_method"), ("model", "spec_model")):
        drafts |= {name: changed[key]} if key in changed else {}
    if "spec_tokens" in changed:
        drafts["num_speculative_tokens"] = changed["spec_tokens"]
    return options | ({"speculative_config": drafts} if drafts else {})


def _is_changed(name: str, value: Any) -> bool:
    option = OPTIONS.get(name)
    if option is None:
        return True
    empty = option.default is None and isinstance(value, dict | list | set | tuple) and not value
    return not (value is None or value == option.default or empty)


def _memory(changed: Mapping[str, Any], device: object) -> dict[str, Any]:
    """On a CPU all weights are in the machine's memory anyway."""
    if "cpu_offload_gb" not in changed or device != "cuda":
        return {}
    return {"cpu_offload": int(changed["cpu_offload_gb"] * 2**30)}


def _files(changed: Mapping[str, Any]) -> dict[str, Any]:
    options = {}
    if (token := changed.get("hf_token", True)) is not True:
        raise RequestError(
            f"hf_token: expected None or True, found {type(token).__name__}; log in once with "
            "`hf auth login`, or set HF_TOKEN"
        )
    if (overrides := changed.get("hf_overrides")) is not None:
        if not isinstance(overrides, Mapping):
            raise RequestError(f"hf_overrides: expected a dict, found {safe_repr(overrides)}")
        options["hf_overrides"] = overrides
    if (template := changed.get("chat_template")) is not None:
        options["chat_template"] = _template(template)
    if changed.get("quantization") == "bitsandbytes":
        raise RequestError(
            "quantization='bitsandbytes' is not supported: files that it quantized are recognized "
            "without it; to quantize others while they are loaded, use quantization='int4'"
        )
    if changed.get("quantization") not in (None, *_FILE_METHODS):
        options["quantization"] = changed["quantization"]
    return options


def _images(changed: Mapping[str, Any]) -> dict[str, Any]:
    """How many images a prompt has, and which hosts they may come from."""
    options: dict[str, Any] = {}
    if (limits := changed.get("limit_mm_per_prompt")) is not None:
        if not isinstance(limits, Mapping):
            raise RequestError(f"limit_mm_per_prompt: expected a dict, found {safe_repr(limits)}")
        # a limit may have sizes beside its count, which plan vLLM's memory; neither videos nor
        # sounds are read, whatever their limits are
        counts = {
            k: v.get("count", 999) if isinstance(v, Mapping) else v for k, v in limits.items()
        }
        options["limit_mm_per_prompt"] = {k: v for k, v in counts.items() if k == "image"}
    if changed.get("language_model_only"):
        options["limit_mm_per_prompt"] = {"image": 0}
    if (hosts := changed.get("allowed_media_domains")) is not None:
        options["image_fetcher"] = ImageHosts(hosts)
    return options


def _template(given: Any) -> Any:
    """The source of a chat template; vLLM takes a file with it too."""
    if isinstance(given, Path) or (isinstance(given, str) and "{" not in given):
        path = Path(given)
        if path.is_file():
            return path.read_text(encoding="utf-8")
    return given


def _sizes(changed: Mapping[str, Any]) -> dict[str, Any]:
    """``max_num_seqs`` and ``max_num_batched_tokens``, if one of them needs another other one."""
    seqs, tokens = changed.get("max_num_seqs"), changed.get("max_num_batched_tokens")
    if isinstance(seqs, int) and tokens is None and seqs > _TOKENS:
        return {"max_num_batched_tokens": seqs}
    if isinstance(tokens, int) and seqs is None and 0 < tokens < _SEQS:
        return {"max_num_seqs": tokens}
    return {}


def structure_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of all requests' ``StructuredOutputsParams`` in ``structured_outputs_config``.

    :raises RequestError: it has a key that cannot be honored.
    """
    config = given.get("structured_outputs_config")
    if config is None:
        return {}
    values = config if isinstance(config, Mapping) else vars(config)
    chosen = {key: value for key, value in values.items() if value and key not in _ENGINE_KEYS}
    wrong = sorted(set(chosen) - _STRUCTURE_KEYS)
    if wrong:
        raise RequestError(f"structured_outputs_config: {wrong[0]} is not supported: leave it out")
    return chosen


def option_signature(
    names: Mapping[str, Any], kind: Any, *more: inspect.Parameter
) -> inspect.Signature:
    """A signature with ``model`` and these options of :data:`OPTIONS`."""
    model = inspect.Parameter("model", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
        model = model.replace(default=_MODEL)
    options = [inspect.Parameter(name, kind, default=OPTIONS[name].default) for name in names]
    return inspect.Signature([model, *options, *more])


LLM_SIGNATURE = option_signature(
    dict.fromkeys(_NAMED),
    inspect.Parameter.KEYWORD_ONLY,
    inspect.Parameter("kwargs", inspect.Parameter.VAR_KEYWORD),
)
