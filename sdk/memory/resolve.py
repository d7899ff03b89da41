"""What the options of an engine mean: files, device, threads, ranks, and what a model changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from sdk.api.config import EngineConfig
from sdk.api.errors import CheckpointError, RequestError
from sdk.api.load_progress import reporting
from sdk.api.machine import available_memory
from sdk.api.speculative_config import SpeculativeConfig
from sdk.kernels.context import Compute
from sdk.kernels.lazy_torch import torch
from sdk.kernels.packages import check_installed
from sdk.kernels.system import SYSTEM
from sdk.loaders.open import is_remote, open_checkpoint
from sdk.models.auto import quantized_online, read_config
from sdk.models.configs.config import ModelConfig
from sdk.quant.caches import StateCache, window_groups
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.safe_repr import safe_repr

#: The share of a GPU's free memory that an engine may take by default.
_GPU_SHARE = 0.9


def compute_of(config: EngineConfig) -> Compute:
    """``"exact"`` or ``"auto"``."""
    # dtype="float32" asks for the same arithmetic as compute="exact"
    return "exact" if config.dtype == "float32" else config.compute


def device_of(config: EngineConfig) -> str:
    """``"auto"`` is the CPU here: ``sdk/loading/device.py`` tries a card with options that name it.

    :raises MissingPackageError: torch is not installed.
    :raises RequestError: the device cannot be used here.
    """
    if config.device != "cuda":
        return "cpu"
    check_installed("torch", "device='cuda' needs", extra="gpu")
    if not torch.cuda.is_available():
        raise RequestError("device='cuda': torch finds no GPU here; leave device unset for the CPU")
    found = torch.cuda.device_count()
    if config.num_ranks > max(found, 1):
        raise RequestError(
            f"device='cuda': expected {config.num_ranks} GPUs, one for each rank "
            f"(tensor_parallel_size x pipeline_parallel_size), found {found}; use fewer ranks, or "
            "let this process see more GPUs (CUDA_VISIBLE_DEVICES)"
        )
    return "cuda"


def threads_of(config: EngineConfig) -> int:
    """The number of threads of the CPU kernels."""
    return config.num_threads or SYSTEM.num_cpus()


def ranks_here(config: EngineConfig) -> int:
    """How many ranks share this machine."""
    return 1 if config.remote_workers is not None else config.num_ranks


def hosts_of(config: EngineConfig) -> int:
    """How many machines the ranks run on; the plan takes them to be like this one."""
    return config.num_ranks // ranks_here(config)


def available_to(config: EngineConfig) -> int:
    """Bytes that weights, pages and workspace may take if no budget is given, on all hosts."""
    if device_of(config) == "cpu":
        return available_memory() * hosts_of(config)
    share = config.gpu_memory_utilization or _GPU_SHARE
    return int(_smallest_free(config.num_ranks) * share) * config.num_ranks


def _smallest_free(cards: int) -> int:
    """The free bytes of the current GPU, or the least of the first ``cards``.

    The others than the first count as free as a whole: CUDA measures what is free only in a
    context, of some hundred MB, that this process would keep on each of them.
    """
    if cards == 1:
        return int(torch.cuda.mem_get_info()[0])
    others = (torch.cuda.get_device_properties(at).total_memory for at in range(1, cards))
    return min(int(torch.cuda.mem_get_info(0)[0]), *others)


def check_cards_alike(cards: int) -> None:
    """Check that the first GPUs run the same code: all ranks have activations of one type.

    :raises RequestError: their compute capabilities differ.
    """
    found = [torch.cuda.get_device_capability(at) for at in range(cards)]
    if len(set(found)) > 1:
        each = ", ".join(f"cuda:{at} {major}.{minor}" for at, (major, minor) in enumerate(found))
        raise RequestError(
            f"device='cuda': expected {cards} GPUs of one compute capability, found {each}; choose "
            "others with CUDA_VISIBLE_DEVICES"
        )


def config_values(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's config with the caller's ``hf_overrides``."""
    return {**checkpoint.config, **(config.hf_overrides or {})}


def model_config(config: EngineConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The model that :func:`config_values` describes."""
    return read_config(config_values(config, checkpoint))


def open_model(config: EngineConfig) -> Checkpoint:
    """The files of a model, with checked headers; quantized while loading if ``config`` says so."""
    remote = is_remote(config.model)
    with reporting("download", "B", config.on_progress, bar=remote) as report:
        checkpoint = open_checkpoint(
            config.model,
            filename=config.filename,
            revision=config.revision,
            local_files_only=config.local_files_only,
            download_dir=config.download_dir,
            on_download=report,
            pre_tokenizer=config.pre_tokenizer,
            mmproj=config.mmproj if config.most_images else False,
        )
    if config.load_format not in ("auto", checkpoint.format):
        checkpoint.close()
        raise CheckpointError(
            f"{checkpoint.path}: expected {config.load_format} (load_format), "
            f"found {checkpoint.format}"
        )
    return quantized_online(checkpoint, config.quantization, config.hf_overrides)


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


def check_layer_inputs(config: EngineConfig, model: ModelConfig) -> None:
    """:raises RequestError: embeddings in place of tokens that layers look up themselves."""
    if model.layer_inputs and config.enable_prompt_embeds:
        raise RequestError(
            "enable_prompt_embeds: expected False, found True: every layer of this model ("
            f"{model.model_type}) has an embedding of its own for each token; leave the option out"
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


def why_one_group(config: EngineConfig, model: ModelConfig) -> str:
    """Why the layers of a model that have a window keep all tokens; empty: they give back what has
    left it, or none has one."""
    if not model.causal or not window_groups(model.caches):
        return ""
    asked = {
        "kv_policy": config.kv_policy is not None,
        "enable_chunked_prefill=False": not config.enable_chunked_prefill,
    }
    given = " and ".join(name for name, is_set in asked.items() if is_set)
    return f"with {given} pages have all layers" if given else ""


def check_states(config: EngineConfig, model: ModelConfig) -> None:
    """Reject options that work with pages alone, if a model has recurrent states.

    :raises RequestError: naming the option.
    """
    if not any(isinstance(cache, StateCache) for cache in model.caches):
        return
    speculative = config.speculative_config
    drafts = isinstance(speculative, SpeculativeConfig) and speculative.method == "self"
    found = f"the recurrent states of this model ({model.model_type})"
    if config.kv_policy is not None:
        raise RequestError(
            f"kv_policy: found {safe_repr(config.kv_policy)}: a state has no older tokens to keep "
            f"in fewer bits, and pages share their memory with {found}; give keys and values one "
            "type with kv_cache_dtype"
        )
    if drafts:
        raise RequestError(
            f"speculative_config: found {safe_repr(speculative)}: drafts that are written into the "
            f"model's own pages do not work with {found} yet; leave the option out"
        )


def step_pages(config: EngineConfig) -> int:
    """The pages of a step with as many tokens and requests as there may be."""
    tokens, requests = config.step_tokens, config.max_num_seqs
    return -(-tokens // config.block_size) + requests
