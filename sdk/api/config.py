"""Every option of an engine, validated once and frozen.

Names and defaults follow vLLM's ``LLM`` where it has them. An option that this release does not
support raises an error that says what to do instead; no option is ignored silently.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, Literal

from sdk.api.errors import QuantizationError, RequestError, SdkError
from sdk.api.flags import check_flags
from sdk.api.image_options import MAX_IMAGES, ImageFetcher, image_options
from sdk.api.memory_pool import MemoryPool
from sdk.api.option_ranges import CHOICES, COUNTS, SHORT_FOR
from sdk.api.remote_workers import RemoteWorkers
from sdk.api.scheduling_policy import (
    PolicyName,
    SchedulingPolicy,
    check_aging,
    make_policy,
)
from sdk.api.sizes import cache_bytes, parse_bytes
from sdk.api.speculative_config import SpeculativeConfig, speculative_config
from sdk.kernels.dataclass import dataclass
from sdk.kernels.kv.tiers import KEPT_PAGES, TIER_PAGE_SIZE
from sdk.quant.safe_repr import is_value_error, safe_message, safe_repr
from sdk.quant.spec import KVTypes, parse_tiers

#: ``(stage, done, total)``; return ``False`` to cancel. Stages: ``"download"`` and ``"load"``
#: in bytes, ``"compile"`` in kernels of a GPU, ``"generate"`` in requests.
ProgressCallback = Callable[[str, int, int], "bool | None"]

#: Options of a later release: the value that means "off", and what to do instead.
_NOT_YET: dict[str, tuple[Any, str]] = {
    "trust_remote_code": (False, "code from checkpoints is never run"),
}

_DEFAULT_BLOCK = 16
#: Tokens of a step if no number is given. More did not make prompts faster on a CPU (docs/log.md).
STEP_TOKENS, _STEP_TOKENS_GPU = 256, 2048
#: A smaller size of swapped pages or offloaded weights is meant as a number of GiB: no page is
#: smaller than 1 KiB, and no weight that can be offloaded.
_LEAST_SIZE = 1024


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The options of one engine; ``LLM(**options)`` builds one. See ``docs/api.md`` for each.

    Sizes in bytes are numbers or strings such as ``"2GiB"`` and ``"500MB"``. ``None`` means
    "decide for me".
    """

    model: str
    filename: str | None = None
    tokenizer: str | None = None
    tokenizer_mode: Literal["auto"] = "auto"
    pre_tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    trust_remote_code: bool = False
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    replica_routing: Literal["state", "requests", "round_robin"] = "state"
    prefill_replicas: int = 0
    enable_expert_parallel: bool = False
    num_redundant_experts: int = 0
    remote_workers: RemoteWorkers | Mapping[str, Any] | None = None
    distributed_executor_backend: Literal["mp", "uni", "ray"] | None = None
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float", "half"] = "auto"
    quantization: str | None = None
    revision: str | None = None
    chat_template: str | None = None
    seed: int = 0
    memory: int | str | MemoryPool | None = None
    kv_cache_memory_bytes: int | str | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    hf_overrides: Mapping[str, Any] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    num_threads: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    block_size: int = _DEFAULT_BLOCK
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    enable_prompt_embeds: bool = False
    mmproj: str | None = None
    limit_mm_per_prompt: Mapping[str, int] | None = None
    image_fetcher: ImageFetcher | None = None
    allowed_local_media_path: str = ""
    disable_additional_properties: bool = False
    kv_cache_dtype: str = "auto"
    kv_policy: str | None = None
    kv_keep: tuple[int, int] = KEPT_PAGES
    load_format: Literal["auto", "gguf", "safetensors"] = "auto"
    scheduling_policy: PolicyName | SchedulingPolicy = "fcfs"
    tenant_weights: Mapping[str, float] | None = None
    priority_aging: float | None = None
    max_waiting: int | None = None
    prefix_eviction: Literal["lru", "cost"] = "lru"
    state_snapshot_dtype: Literal["auto", "float16"] = "auto"
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None = None
    enable_lora: bool = False
    max_loras: int = 1
    max_lora_rank: int = 16
    max_cpu_loras: int | None = None
    lora_memory: int | str | None = None
    lora_dtype: Literal["auto", "int8"] = "auto"
    swap_space: int | str = 0
    swap_path: str | None = None
    disk_offload: int | str = 0
    disk_offload_path: str | None = None
    cpu_offload: int | str = 0
    weight_cache: bool | int | str = False
    compute: Literal["auto", "exact"] = "auto"
    deterministic: bool = False
    local_files_only: bool = False
    download_dir: str | None = None
    generation_config: str = "auto"
    override_generation_config: Mapping[str, Any] | None = None
    on_progress: ProgressCallback | None = None

    def __post_init__(self) -> None:
        try:
            flags = [one.name for one in fields(self) if one.type == "bool"]
            check_flags(**{name: getattr(self, name) for name in flags})
            self._check()
            images = self.limit_mm_per_prompt, self.image_fetcher, self.allowed_local_media_path
            for name, value in image_options(*images).items():
                object.__setattr__(self, name, value)
            self._check_lora()
            self._check_experts()
            self._check_cards()
        except SdkError:
            raise
        except Exception as error:
            if not is_value_error(error):
                raise
            raise RequestError(f"an option cannot be read: {safe_message(error)}") from error

    def _check(self) -> None:
        self._check_texts()
        for name, (off, instead) in _NOT_YET.items():
            if getattr(self, name) != off:
                raise RequestError(
                    f"{name}={safe_repr(getattr(self, name))} is not available in this release: "
                    f"{instead}"
                )
        self._check_choices()
        for name, (low, high) in COUNTS.items():
            value = getattr(self, name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise RequestError(
                    f"{name}: expected an integer in {low}..{high}, found {safe_repr(value)}"
                )
        for name in ("memory", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, MemoryPool):
                object.__setattr__(self, name, parse_bytes(value, name))
        if self.dtype in SHORT_FOR:  # vLLM's other spellings
            object.__setattr__(self, "dtype", SHORT_FOR[self.dtype])
        self._check_steps()
        self._check_scheduling()
        self._check_swap()
        self._check_offload()
        self._check_stages()
        self._check_backend()
        self._check_remote()
        self._check_speculative()
        self._check_replicas()
        if self.state_snapshot_dtype != "auto":
            self._check_alone("state_snapshot_dtype", enable_prefix_caching=True)
        if self.kv_cache_dtype != "auto":
            object.__setattr__(self, "kv_cache_dtype", _kv_cache_dtype(self.kv_cache_dtype))
            if self.device == "cuda" and not KVTypes.parse(self.kv_cache_dtype).on_gpu:
                raise RequestError(
                    f"kv_cache_dtype: {self.kv_cache_dtype} is not supported on a GPU, whose "
                    "matrix units do not multiply integers of 16 bits; use float16 in place of "
                    "int16: it takes as much memory"
                )
        if self.kv_policy is not None:
            self._check_policy()
        elif self.kv_keep != KEPT_PAGES:
            raise RequestError(f"kv_keep={safe_repr(self.kv_keep)} needs a kv_policy: pass one too")
        if self.quantization is not None:
            _check_quantization(self.quantization)
        share = self.gpu_memory_utilization
        if share is not None and not (_is_number(share) and 0 < share <= 1):
            raise RequestError(
                f"gpu_memory_utilization: expected a share in (0, 1], found {safe_repr(share)}"
            )
        if self.block_size & (self.block_size - 1):
            raise RequestError(f"block_size: expected a power of two, found {self.block_size}")
        if self.filename is not None and not isinstance(self.filename, str):
            raise RequestError(f"filename: expected a file name, found {safe_repr(self.filename)}")
        if self.on_progress is not None and not callable(self.on_progress):
            raise RequestError(
                f"on_progress: expected a callable, found {safe_repr(self.on_progress)}"
            )

    def _check_texts(self) -> None:
        for name in ("chat_template", "pre_tokenizer", "revision"):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name))
        if not isinstance(given := self.hf_overrides or {}, Mapping) or not all(
            isinstance(key, str) for key in given
        ):
            found = safe_repr(given)
            raise RequestError(
                f"hf_overrides: expected a dict of config.json's keys, found {found}"
            )
        for name in ("download_dir", "generation_config", "tokenizer", "mmproj"):
            value = getattr(self, name)
            if value is not None:
                if not isinstance(value, str | os.PathLike):
                    raise RequestError(f"{name}: expected a path, found {safe_repr(value)}")
                object.__setattr__(self, name, os.fspath(value))

    def _check_choices(self) -> None:
        for name, allowed in CHOICES.items():
            value = getattr(self, name)
            if name == "scheduling_policy" and isinstance(value, SchedulingPolicy):
                continue
            if value not in allowed:
                raise RequestError(
                    f"{name}: expected one of {', '.join(map(repr, allowed))}, "
                    f"found {safe_repr(value)}"
                )

    def _check_offload(self) -> None:
        for name in ("disk_offload", "cpu_offload"):
            value = getattr(self, name)
            if value not in (0, "auto"):
                size = parse_bytes(value, name)
                if size < _LEAST_SIZE:
                    raise RequestError(
                        f"{name}: {value} would mean bytes; write {name}='{value}GiB'"
                    )
                object.__setattr__(self, name, size)
        if self.disk_offload and self.device == "cuda":
            raise RequestError(
                "disk_offload: with device='cuda' weights are offloaded to the machine's memory, "
                f"not to its disk; use cpu_offload={self.disk_offload!r}"
            )
        if self.cpu_offload and self.device != "cuda":
            raise RequestError(
                "cpu_offload: on a CPU all weights are in the machine's memory already; use "
                f"disk_offload={self.cpu_offload!r} to leave them on the disk"
            )
        object.__setattr__(self, "weight_cache", cache_bytes(self.weight_cache, self.device))
        self._check_folder("disk_offload_path", "disk_offload")

    def _check_backend(self) -> None:
        if self.distributed_executor_backend == "uni" and self.num_ranks > 1:
            raise RequestError(
                "distributed_executor_backend='uni' has one rank: expected tensor_parallel_size=1 "
                f"and pipeline_parallel_size=1, found {self.tensor_parallel_size} and "
                f"{self.pipeline_parallel_size}; use 'mp'"
            )
        if self.distributed_executor_backend == "ray":
            name = "distributed_executor_backend='ray'"
            self._check_alone(name, pipeline_parallel_size=1, data_parallel_size=1)

    def _check_remote(self) -> None:
        remote: object = self.remote_workers
        if remote is None:
            return
        if isinstance(remote, Mapping):
            object.__setattr__(self, "remote_workers", RemoteWorkers.of(remote))
        elif not isinstance(remote, RemoteWorkers):
            raise RequestError(
                f"remote_workers: expected RemoteWorkers(...), found {safe_repr(remote)}"
            )
        if self.tensor_parallel_size == 1:
            raise RequestError(
                "remote_workers needs a tensor_parallel_size of at least 2, this process included"
            )
        self._check_alone(
            "remote_workers",
            pipeline_parallel_size=1,
            data_parallel_size=1,
            enable_expert_parallel=False,
            distributed_executor_backend=None,
        )

    def _check_alone(self, option: str, **needed: object) -> None:
        """Other options that ``option`` cannot be combined with must have these values."""
        for name, value in needed.items():
            if (found := getattr(self, name)) != value:
                raise RequestError(
                    f"{option}: expected {name}={value!r} with it in this release, found "
                    f"{safe_repr(found)}"
                )

    def _check_stages(self) -> None:
        if self.disk_offload and self.pipeline_parallel_size > 1:
            raise RequestError(
                f"pipeline_parallel_size: disk_offload={safe_repr(self.disk_offload)} needs "
                "pipeline_parallel_size=1 in this release"
            )

    def _check_replicas(self) -> None:
        if self.prefill_replicas >= self.data_parallel_size:
            if self.prefill_replicas:
                raise RequestError(
                    f"prefill_replicas: expected fewer than data_parallel_size "
                    f"({self.data_parallel_size}), because the others make the answers; found "
                    f"{self.prefill_replicas}"
                )
        elif self.prefill_replicas:
            name = "prefill_replicas"
            self._check_alone(name, pipeline_parallel_size=1, enable_prefix_caching=True)
        if self.data_parallel_size == 1:
            return
        if isinstance(self.memory, MemoryPool):
            raise RequestError(
                "memory: replicas (data_parallel_size > 1) cannot share a MemoryPool with other "
                "models; pass a number of bytes for all of them together"
            )
        if self.device == "cuda":
            raise RequestError(
                "device='cuda': data_parallel_size must be 1 in this release; split the model over "
                "the GPUs with tensor_parallel_size, or start one LLM for each GPU"
            )
        if self.disk_offload:
            raise RequestError(
                "disk_offload: offloaded weights are read by one replica only; use "
                "data_parallel_size=1"
            )
        if isinstance(self.scheduling_policy, SchedulingPolicy):
            raise RequestError(
                "scheduling_policy: each replica has a policy of its own, expected its name with "
                f"data_parallel_size > 1, found {safe_repr(self.scheduling_policy)}"
            )

    def _check_speculative(self) -> None:
        speculative = speculative_config(self.speculative_config)
        object.__setattr__(self, "speculative_config", speculative)
        if speculative is None or not speculative.has_weights:
            return
        if speculative.scheme is not None:
            try:
                _check_quantization(speculative.scheme)
            except RequestError as error:
                raise RequestError(f"speculative_config: {error}") from error
        needed = {"disk_offload": 0, "cpu_offload": 0, "pipeline_parallel_size": 1}
        if speculative.method == "self":
            needed["tensor_parallel_size"] = 1
        method = f"speculative_config: method {speculative.method!r}"
        for name, value in needed.items():
            if (found := getattr(self, name)) != value:
                raise RequestError(
                    f"{method} needs {name}={value}, found {found!r}; method 'ngram' works with it"
                )
        if self.device == "cuda":
            raise RequestError(
                f"{method} is not supported on a GPU in this release; use method 'ngram'"
            )

    @property
    def most_images(self) -> int:
        """Images of one prompt."""
        return dict(self.limit_mm_per_prompt or {}).get("image", MAX_IMAGES)

    def _check_lora(self) -> None:
        if self.lora_memory is not None:
            if not self.enable_lora:
                raise RequestError("lora_memory needs enable_lora=True: pass it too")
            object.__setattr__(self, "lora_memory", parse_bytes(self.lora_memory, "lora_memory"))
        if self.lora_dtype != "auto":
            if not self.enable_lora:
                raise RequestError("lora_dtype needs enable_lora=True: pass it too")
            if self.device == "cuda":
                raise RequestError("lora_dtype: with device='cuda' expected 'auto', found 'int8'")
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise RequestError(
                f"max_cpu_loras ({self.max_cpu_loras}) must be at least max_loras "
                f"({self.max_loras})"
            )

    def _check_experts(self) -> None:
        if (
            self.num_redundant_experts
            and self.redundant_experts is None
            and self.lockstep_engines == 1
        ):
            raise RequestError(
                f"num_redundant_experts={self.num_redundant_experts}: copies of experts need "
                "enable_expert_parallel=True and a tensor_parallel_size or data_parallel_size of "
                "at least 2"
            )
        if self.lockstep_engines > 1:
            name = "enable_expert_parallel with data_parallel_size > 1"
            self._check_alone(name, pipeline_parallel_size=1, prefill_replicas=0)
            self._check_no_drafting_weights(name)
        if self.redundant_experts is not None and self.pipeline_parallel_size > 1:
            raise RequestError(
                "enable_expert_parallel: expected pipeline_parallel_size=1 with it in this "
                f"release, found {self.pipeline_parallel_size}; leave out one of them"
            )
        if self.redundant_experts is not None and self.disk_offload:
            raise RequestError(
                "disk_offload: not supported together with enable_expert_parallel in this release; "
                "leave out one of them"
            )

    def _check_no_drafting_weights(self, what: str) -> None:
        speculative = self.speculative_config
        if isinstance(speculative, SpeculativeConfig) and speculative.has_weights:
            raise RequestError(
                f"{what}: not supported together with speculative_config method "
                f"{speculative.method!r} in this release; use method 'ngram', or leave out one"
            )

    @property
    def lockstep_engines(self) -> int:
        """How many replicas run their steps together and share the experts
        (models/experts/lockstep.py); 1: each replica, or the only engine, runs alone."""
        spread = self.enable_expert_parallel and self.tensor_parallel_size == 1
        return self.data_parallel_size if spread else 1

    def _check_cards(self) -> None:
        """What ranks on several GPUs do not have in this release."""
        if self.device != "cuda" or self.num_ranks == 1:
            return
        self._check_alone(
            "device='cuda' with several ranks", enable_expert_parallel=False, remote_workers=None
        )
        if self.distributed_executor_backend == "ray":
            raise RequestError(
                "device='cuda' with several ranks: expected distributed_executor_backend='mp' or "
                "None with it in this release, found 'ray'"
            )
        if self.cpu_offload and self.pipeline_parallel_size > 1:
            raise RequestError(
                "cpu_offload: needs pipeline_parallel_size=1 in this release, found "
                f"{self.pipeline_parallel_size}"
            )

    @property
    def redundant_experts(self) -> int | None:
        """Copies of experts, if whole experts are spread over the ranks of an engine; else
        ``None``."""
        spread = self.enable_expert_parallel and self.tensor_parallel_size > 1
        return self.num_redundant_experts if spread else None

    @property
    def num_ranks(self) -> int:
        """The processes that compute the model, this one included."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def adapter_slots(self) -> int:
        """Adapters that may be in memory at a time; all of them may run in one step."""
        return max(self.max_loras, self.max_cpu_loras or 0) if self.enable_lora else 0

    @property
    def step_tokens(self) -> int:
        """The most tokens of a step: ``max_num_batched_tokens``, or the default of the device.

        A GPU needs more tokens at a time: each weight of a step with a prompt is dequantized once.
        """
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(_STEP_TOKENS_GPU if self.device == "cuda" else STEP_TOKENS, self.max_num_seqs)

    def _check_folder(self, name: str, option: str) -> None:
        """``name`` must be a folder, and has an effect only together with ``option``."""
        value = getattr(self, name)
        if value is None:
            return
        if not isinstance(value, str | os.PathLike):
            raise RequestError(f"{name}: expected a folder, found {safe_repr(value)}")
        if getattr(self, option) == 0:
            found = safe_repr(os.fspath(value))
            raise RequestError(f"{name}={found} needs a {option}: pass one too")
        object.__setattr__(self, name, os.fspath(value))

    def _check_steps(self) -> None:
        seqs, tokens = self.max_num_seqs, self.step_tokens
        if tokens < seqs:
            raise RequestError(
                f"max_num_batched_tokens ({tokens}) must be at least max_num_seqs ({seqs}): every "
                f"running request decodes in every step; pass max_num_seqs={tokens} too"
            )

    def _check_scheduling(self) -> None:
        policy, weights, aging = self.scheduling_policy, self.tenant_weights, self.priority_aging
        if weights is not None:
            if policy != "fair":
                raise RequestError(
                    f"tenant_weights needs scheduling_policy='fair', found {safe_repr(policy)}"
                )
            if not isinstance(weights, Mapping):
                raise RequestError(
                    "tenant_weights: expected a mapping of tenant to weight, found "
                    f"{safe_repr(weights)}"
                )
            object.__setattr__(self, "tenant_weights", dict(weights))
        if aging is not None:
            if policy not in ("priority", "fair"):
                raise RequestError(
                    "priority_aging needs scheduling_policy='priority' or 'fair', found "
                    f"{safe_repr(policy)}"
                )
            object.__setattr__(self, "priority_aging", check_aging(aging))
        if not isinstance(policy, SchedulingPolicy):
            make_policy(policy, self.tenant_weights)  # checks the weights

    def _check_swap(self) -> None:
        self._check_folder("swap_path", "swap_space")
        if self.swap_space == 0:
            return
        object.__setattr__(self, "swap_space", parse_bytes(self.swap_space, "swap_space"))
        if isinstance(self.swap_space, int) and self.swap_space < _LEAST_SIZE:
            raise RequestError(
                f"swap_space: {self.swap_space} would mean bytes, but vLLM's unit is GiB; write "
                f"swap_space='{self.swap_space}GiB'"
            )
        if not self.enable_prefix_caching:
            raise RequestError(
                "swap_space: swapped pages are found by their prefix, which needs "
                "enable_prefix_caching=True"
            )

    def _check_policy(self) -> None:
        policy = _text("kv_policy", self.kv_policy)
        try:
            object.__setattr__(self, "kv_policy", parse_tiers(policy))
        except ValueError as error:
            raise RequestError(f"kv_policy: {error}") from error
        keep = self.kv_keep
        if not isinstance(keep, list | tuple) or [type(n) for n in keep] != [int, int]:
            raise RequestError(f"kv_keep: expected two numbers of pages, found {safe_repr(keep)}")
        if min(keep) < 0:
            found = safe_repr(keep)
            raise RequestError(f"kv_keep: expected two numbers of at least 0, found {found}")
        object.__setattr__(self, "kv_keep", tuple(keep))
        if self.kv_cache_dtype != "auto":
            raise RequestError(
                f"kv_policy={self.kv_policy!r}: expected kv_cache_dtype='auto' with it, "
                f"found {self.kv_cache_dtype!r}"
            )
        if self.device == "cuda":
            raise RequestError(
                "kv_policy: not supported on a GPU in this release; use kv_cache_dtype instead"
            )
        if self.block_size not in (_DEFAULT_BLOCK, TIER_PAGE_SIZE):
            raise RequestError(
                f"kv_policy: expected block_size={TIER_PAGE_SIZE}, found {self.block_size}"
            )
        object.__setattr__(self, "block_size", TIER_PAGE_SIZE)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise RequestError(f"{name}: expected a string, found {safe_repr(value)}")
    return value


def _check_quantization(name: object) -> None:
    from sdk.quant.online import online_scheme  # imports torch

    scheme = _text("quantization", name)
    try:
        online_scheme(scheme)
    except QuantizationError as error:
        raise RequestError(str(error)) from error


def _kv_cache_dtype(text: object) -> str:
    """The canonical name: ``fp8_e4m3`` becomes ``fp8``."""
    name = _text("kv_cache_dtype", text)
    try:
        return str(KVTypes.parse(name))
    except ValueError as error:
        raise RequestError(f"kv_cache_dtype: {error}") from error
