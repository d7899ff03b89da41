"""The options of an engine as attributes and as arguments of a command line."""

from __future__ import annotations

import argparse
import inspect
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from sdk.compat.vllm._options import OPTIONS, Option, option_signature

P = TypeVar("P", argparse.ArgumentParser, argparse._ArgumentGroup)
E = TypeVar("E", bound="EngineArgs")

#: Options whose default is None: what a command line has for them. The others are texts.
_INTEGERS = (
    *("max_cudagraph_capture_size", "distributed_timeout_seconds", "elastic_ep_max_dp_size"),
    *("cpu_distributed_timeout_seconds", "cp_kv_cache_interleave_size", "data_parallel_rank"),
    *("data_parallel_start_rank", "data_parallel_size_local", "data_parallel_rpc_port"),
    *("max_parallel_loading_workers", "block_size", "kv_cache_memory_bytes"),
    *("max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs"),
    *("max_num_active_seqs", "max_num_queued_reqs", "max_num_queued_tokens", "max_cpu_loras"),
    *("max_lora_cls_labels", "num_gpu_blocks_override", "spec_tokens", "mamba_block_size"),
    "prefix_match_unit",
)
_FLAGS = (
    *("dcp_q_replicate", "enable_batch_sharded_sampling", "enable_prefix_caching"),
    *("disable_nccl_for_dp_synchronization", "disable_cascade_attn", "enable_chunked_prefill"),
    *("disable_hybrid_kv_cache_manager", "enable_flashinfer_autotune", "async_scheduling"),
)
_JSON = (
    *("ir_op_priority", "hf_overrides", "model_class_overrides", "limit_mm_per_prompt"),
    *("media_io_kwargs", "mm_processor_kwargs", "default_mm_loras", "model_loader_extra_config"),
    *("custom_histogram_buckets", "override_generation_config"),
    *(name for name in OPTIONS if name.endswith("_config") and OPTIONS[name].default is None),
)
_LISTS = (
    *("served_model_name", "allowed_media_domains", "cudagraph_capture_sizes", "numa_bind_nodes"),
    *("numa_bind_cpus", "device_ids", "cpu_offload_params", "offload_params", "ignore_patterns"),
    *("lora_target_modules", "collect_detailed_traces", "sleep_preserve_parameter_names"),
    *("kv_cache_dtype_skip_layers", "logits_processors"),
)
_FLOATS = ("video_pruning_rate", "kv_offloading_size", "cpu_offload_gb", "watermark")
_SHORT = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "quantization": "-q",
    "optimization_level": "-O",
}
_SUFFIXES = {letter: 10 ** (3 * power) for power, letter in enumerate("kmgt", 1)} | {
    letter: 2 ** (10 * power) for power, letter in enumerate("KMGT", 1)
}


class EngineArgs:
    """The options of an engine as attributes, for ``from_engine_args``."""

    def __init__(self, *args: Any, **options: Any) -> None:
        known = inspect.signature(type(self))
        own = {name: value for name, value in options.items() if name not in known.parameters}
        bound = known.bind(*args, **{k: v for k, v in options.items() if k not in own})
        bound.apply_defaults()
        self.__dict__.update(bound.arguments | own)

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Add vLLM's options to a parser or to a group of one: ``--max-model-len 4k``."""
        return _add(parser, EngineArgs)

    @classmethod
    def from_cli_args(cls: type[E], args: argparse.Namespace) -> E:
        """The options in parsed arguments; arguments that are none are left alone."""
        known = inspect.signature(cls).parameters
        return cls(**{name: value for name, value in vars(args).items() if name in known})


class AsyncEngineArgs(EngineArgs):
    """:class:`EngineArgs` for :class:`~sdk.compat.vllm.AsyncLLMEngine`."""

    @staticmethod
    def add_cli_args(parser: P, async_args_only: bool = False) -> P:
        """See :meth:`EngineArgs.add_cli_args`. ``async_args_only``: those of this class alone."""
        if async_args_only:
            _add_one(parser, "enable_log_requests", Option(False, "free"))
            return parser
        return _add(parser, AsyncEngineArgs)


_ARGUMENT = inspect.Parameter.POSITIONAL_OR_KEYWORD
_ALL = {name: option for name, option in OPTIONS.items() if name != "chat_template"}
EngineArgs.__signature__ = option_signature(_ALL, _ARGUMENT)  # type: ignore[attr-defined]
AsyncEngineArgs.__signature__ = option_signature(  # type: ignore[attr-defined]
    _ALL, _ARGUMENT, inspect.Parameter("enable_log_requests", _ARGUMENT, default=False)
)


def _add(parser: P, options: type[EngineArgs]) -> P:
    for name, parameter in inspect.signature(options).parameters.items():
        _add_one(parser, name, OPTIONS.get(name, Option(parameter.default, "free")))
    return parser


def _add_one(parser: P, name: str, option: Option) -> None:
    flags = [f"--{name.replace('_', '-')}", *([_SHORT[name]] if name in _SHORT else [])]
    effects = {"only": f"not supported: {option.instead}", "free": "no effect here"}
    effect = effects.get(option.use)
    told = None if effect is None else effect.replace("%", "%%")
    parser.add_argument(*flags, dest=name, default=option.default, help=told, **_read(name, option))


def _read(name: str, option: Option) -> Mapping[str, Any]:
    """How ``argparse`` reads the values of an option."""
    default = option.default
    if isinstance(default, bool) or name in _FLAGS:
        return {"action": argparse.BooleanOptionalAction}
    if name == "max_model_len":
        return {"type": length}
    if isinstance(default, float) or name in _FLOATS:
        return {"type": float}
    if isinstance(default, int) or name in _INTEGERS:
        return {"type": integer}
    if name in _JSON:
        return {"type": json_object}
    if name in _LISTS:
        return {"nargs": "+"}
    if name == "hf_token":
        return {"nargs": "?", "const": True}
    return {"type": str}


def integer(text: str) -> int:
    """``"4096"``, ``"4k"`` (4,000), ``"4K"`` (4,096), ``"1.5m"``.

    :raises argparse.ArgumentTypeError: it is something else.
    """
    found = re.fullmatch(r"(-?\d+)|(\d+)([KMGT])|(\d+(?:\.\d+)?)([kmgt])", text.strip())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"expected an integer like 4096, 4k (4,000) or 4K (4,096), found {text!r:.80}"
        )
    plain, binary, power, decimal, thousands = found.groups()
    if plain:
        return int(plain)
    return int(binary) * _SUFFIXES[power] if binary else int(float(decimal) * _SUFFIXES[thousands])


def length(text: str) -> int | None:
    """:func:`integer`; ``"auto"`` and ``-1`` mean the longest that fits."""
    if text.strip().lower() in ("auto", "-1"):
        return None
    return integer(text)


def json_object(text: str) -> Any:
    """:raises argparse.ArgumentTypeError: the text is not a JSON object."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"expected JSON, found {text!r:.80}") from error
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, found {text!r:.80}")
    return found
