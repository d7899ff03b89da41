"""The keywords of ``LLM(...)``: typed for editors and type checkers, and turned into a config.

:class:`EngineOptions` declares them for static tools. A test compares it with the fields of
:class:`~sdk.api.config.EngineConfig`, which has the defaults and the checks.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from typing import Any, Literal, TypedDict, TypeVar

from sdk.api.config import EngineConfig, ProgressCallback
from sdk.api.image_options import ImageFetcher
from sdk.api.memory_pool import MemoryPool
from sdk.api.near_misses import option_of_a_call
from sdk.api.other_names import ENGINE, without_effect
from sdk.api.remote_workers import RemoteWorkers
from sdk.api.scheduling_policy import PolicyName, SchedulingPolicy
from sdk.api.speculative_config import SpeculativeConfig

_Function = TypeVar("_Function", bound=Callable[..., Any])


class EngineOptions(TypedDict, total=False):
    """Options of ``LLM``, ``LLM.plan`` and ``AsyncLLM``: see ``docs/api.md``."""

    filename: str | None
    """The GGUF file of a hub repository or a folder: its name, or a pattern such as
    `"*Q4_K_M.gguf"`. Default: none."""
    tokenizer: str | os.PathLike[str] | None
    """A folder with another tokenizer. Default: the model's."""
    tokenizer_mode: Literal["auto"]
    """Accepted for programs that name it; there is no other mode. Default: `"auto"`."""
    pre_tokenizer: str | None
    """How a GGUF file's tokenizer splits texts into words, by llama.cpp's name: `"default"`,
    `"llama-bpe"`, ... A file that names a split which embedlm does not know is refused without it,
    because the model would get wrong tokens. Default: the file's."""
    skip_tokenizer_init: bool
    """Load no tokenizer: token ids in, token ids out. Default: `False`."""
    trust_remote_code: bool
    """Known by name only: code that comes with a model is never run, and `True` raises an error.
    Default: `False`."""
    tensor_parallel_size: int
    """Number of ranks that compute each layer together; each one beyond the first is a child
    process, a worker on another host, or an actor of Ray. Default: 1."""
    pipeline_parallel_size: int
    """Number of stages, which run the layers one after the other, each with `tensor_parallel_size`
    ranks. Default: 1."""
    data_parallel_size: int
    """Number of replicas: processes with an engine each, behind one `LLM`. Default: 1."""
    replica_routing: Literal["state", "requests", "round_robin"]
    """Which replica runs a request: the one that should begin first (`"state"`), the one with the
    fewest requests (`"requests"`), or each in turn (`"round_robin"`). Default: `"state"`."""
    prefill_replicas: int
    """How many of the replicas compute only prompts, and hand keys and values over to the others.
    Default: 0."""
    enable_expert_parallel: bool
    """With several ranks: every rank has whole experts of a mixture, instead of a part of each one;
    with replicas of one rank: they share the experts. Default: `False`."""
    num_redundant_experts: int
    """Copies of experts in each layer, in addition to the model's own; `rebalance_experts` gives
    them to the busiest ones. Default: 0."""
    remote_workers: RemoteWorkers | Mapping[str, Any] | None
    """`RemoteWorkers(listen="10.0.0.1:29500", token_file="token")`: the other ranks are on other
    hosts and connect here. Default: none."""
    distributed_executor_backend: Literal["mp", "uni", "ray"] | None
    """What runs the other ranks: `"mp"` (child processes; the default), `"ray"` (actors, on other
    nodes too: ray.md); `"uni"` allows one rank only. Default: `None`."""
    dtype: Literal["auto", "float32", "float16", "bfloat16", "float", "half"]
    """The type of activations. Default: `"auto"`."""
    quantization: str | None
    """Online quantization: pack float matrices while they are loaded. Default: none."""
    revision: str | None
    """For hub ids: a branch, a tag or a commit. Default: the default branch."""
    chat_template: str | None
    """Another template: its source, or the name of one of the model's. Default: the model's."""
    seed: int
    """Requests without a seed derive theirs from this one, in the order of submission. Default:
    0."""
    memory: int | str | MemoryPool | None
    """Hard budget for weights, KV cache, workspace and tokenizer: bytes, a string such as `"2GiB"`,
    or a `MemoryPool` that several models share. Default: none."""
    kv_cache_memory_bytes: int | str | None
    """Bytes for the KV cache alone. Default: none."""
    gpu_memory_utilization: float | None
    """The share of a GPU's free memory that may be used if there is no `memory` (0.9); no effect on
    a CPU. Default: none."""
    enforce_eager: bool
    """`True`: do not record steps, launch every operator on its own. Default: `False`."""
    hf_overrides: Mapping[str, Any] | None
    """Fields to replace in the model's config. Default: none."""
    device: Literal["auto", "cpu", "cuda"]
    """One GPU if there is one, the model fits, and every kernel gives its known answers on it;
    otherwise the CPU, and `load_warnings` and `explain()` say why. `"cpu"`; `"cuda"`: NVIDIA or AMD
    GPUs through Triton, one for each rank, not run on a card yet. Default: `"auto"`."""
    num_threads: int | None
    """Threads in this engine's own pool. Default: CPUs of this process, at most its container's
    quota."""
    max_model_len: int | None
    """Tokens of one request, prompt and answer together. Default: the model's context, or what the
    KV cache can hold if that is less."""
    max_num_seqs: int
    """Requests that run at once (request slots). Default: 64."""
    max_num_batched_tokens: int | None
    """Tokens of one step, at least `max_num_seqs` (the default grows with it). Default: 256, on a
    GPU 2,048."""
    block_size: int
    """Tokens of a KV page, a power of two; 128 with a `kv_policy`. Default: 16."""
    enable_prefix_caching: bool
    """Reuse the KV pages of equal prefixes. Default: `True`."""
    enable_chunked_prefill: bool
    """Split long prompts over several steps. Default: `True`."""
    enable_prompt_embeds: bool
    """Accept `prompt_embeds`; on a CPU the workspace doubles. Default: `False`."""
    mmproj: str | os.PathLike[str] | None
    """The file with the encoder of images of a GGUF model. Default: the one beside the model that
    fits."""
    limit_mm_per_prompt: Mapping[str, int] | None
    """`{"image": 4}`: the most images of a prompt; `{"image": 0}` loads a vision model for text
    only. Default: none (999)."""
    image_fetcher: ImageFetcher | None
    """A function that gets a URL and returns the bytes of the image there, such as
    `sdk.ImageHosts(["img.example.org"])`. Default: none."""
    allowed_local_media_path: str | os.PathLike[str]
    """A folder: `image_url` may name files in it. Default: `""`."""
    disable_additional_properties: bool
    """In every structured answer and tool call, objects that list properties have no others.
    Default: `False`."""
    kv_cache_dtype: str
    """`float32`, `float16`, `bfloat16`, `int16` (only on a CPU: 2 % larger than float16, and
    attention of long prompts is up to 1.5 times as fast), `int8` (1.94 times the tokens of
    float16), `fp8`, `fp8_e5m2`, `int4` (3.66 times). Default: `"auto"`."""
    kv_policy: str | None
    """`"fp16>int8>int4"`, `"fp16>int8"` or `"int8>int4"`: when the KV cache is full, pages move to
    a lower tier before any is evicted. Default: none."""
    kv_keep: tuple[int, int]
    """With a `kv_policy`: how many pages at the beginning of each request, and how many full pages
    at its end, keep the first type. Default: `(1, 0)`."""
    load_format: Literal["auto", "gguf", "safetensors"]
    """`"gguf"` or `"safetensors"`: raise an error if the model is of the other kind. Default:
    `"auto"`."""
    scheduling_policy: PolicyName | SchedulingPolicy
    """Or `"priority"`: smaller numbers first; `"fair"`: shares for tenants; or an object of your
    own. Default: `"fcfs"`."""
    tenant_weights: Mapping[str, float] | None
    """For `"fair"`: a dict such as `{"interactive": 4}`. Default: all 1."""
    priority_aging: float | None
    """For `"priority"` and `"fair"`: seconds of waiting that count as one level of `priority`;
    `math.inf` turns it off. Default: 60."""
    max_waiting: int | None
    """How many requests may wait beyond `max_num_seqs`; more raise a `QueueFullError`. Default:
    none."""
    prefix_eviction: Literal["lru", "cost"]
    """Or `"cost"`: which cached page is evicted first. Default: `"lru"`."""
    state_snapshot_dtype: Literal["auto", "float16"]
    """`"float16"`: snapshots of recurrent states in half the bytes; answers after a hit then differ
    in rounding. Default: `"auto"`."""
    speculative_config: SpeculativeConfig | Mapping[str, Any] | str | None
    """Speculative decoding: `"ngram"`, `"self"`, `"mtp"` (the model's own block of multi-token
    prediction), or a dict such as `{"model": "small.gguf", "num_speculative_tokens": 4}`, where the
    model may be a head of EAGLE or Medusa. Default: none."""
    enable_lora: bool
    """Requests may have LoRA adapters. Default: `False`."""
    max_loras: int
    """Adapters in memory at a time, all of which may run in one step. Default: 1."""
    max_lora_rank: int
    """The largest rank of an adapter. Default: 16."""
    max_cpu_loras: int | None
    """If it is larger than `max_loras`, it counts instead. Default: none."""
    lora_memory: int | str | None
    """Bytes for all adapters together, such as `"200MiB"`, with one that is being loaded; part of
    `memory`. Default: enough for `max_loras` adapters of `max_lora_rank` on all linear layers."""
    lora_dtype: Literal["auto", "int8"]
    """`"int8"`: adapters in 8 bits, on a CPU: less to read for each step. Default: `"auto"` (16
    bits)."""
    swap_space: int | str
    """A second place for KV pages, and for frames and states, such as `"4GiB"`, in addition to
    `memory`: what is evicted from the KV cache goes there and is copied back instead of being
    computed again. Default: 0."""
    swap_path: str | os.PathLike[str] | None
    """A folder: the swap space is a file there, reserved at load, instead of memory. Default:
    none."""
    disk_offload: int | str
    """On a CPU: bytes of weights to leave in a file, such as `"2GiB"`, or `"auto"` for what
    `memory` cannot hold. Default: 0."""
    disk_offload_path: str | os.PathLike[str] | None
    """The folder of that file, on a disk. Default: the system's folder for temporary files."""
    cpu_offload: int | str
    """The same for `device="cuda"`: the weights of the last layers stay in host memory and are
    copied to the card while the layer before computes; not run on a card yet. Default: 0."""
    weight_cache: bool | int | str
    """On a CPU: keep the packed weights in the user's cache folder, and map them from there at the
    next opening, shared by all processes; with it, experts that `memory` cannot hold are read when
    they are needed. `True`: at most 32 GiB of files; or a size such as `"60GiB"`. Default:
    `False`."""
    compute: Literal["auto", "exact"]
    """`"exact"`: fp32 arithmetic on the dequantized values, without quantized activations.
    `"auto"`: kernels may quantize or round activations: on a CPU to 8 bits in blocks inside a
    product, on a GPU to bfloat16 or float16 between kernels; `llm.explain()` names the type.
    Default: `"auto"`."""
    deterministic: bool
    """On a GPU: answers do not depend on the rest of the batch, on chunks or on preemptions;
    slower. Default: `False`."""
    local_files_only: bool
    """For hub ids: use what is in the cache and download nothing. Default: `False`."""
    download_dir: str | os.PathLike[str] | None
    """A folder for downloads from the hub. Default: the hub's cache."""
    generation_config: str | os.PathLike[str]
    """Where the default sampling parameters come from: the model's files; `"vllm"` for vLLM's
    neutral defaults; or a folder with a `generation_config.json`. Default: `"auto"`."""
    override_generation_config: Mapping[str, Any] | None
    """A dict of single values that override those, such as `{"temperature": 0.5}`. Default:
    none."""
    on_progress: ProgressCallback | None
    """`f(stage, done, total)`; if it returns `False`, the load is cancelled. Default: none."""


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
            if name not in ENGINE and (of_call := option_of_a_call(name, value)) is not None:
                hint = f": {of_call}"
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
