"""Checks before a load: options, file headers, and what the machine has available now.

``LLM.plan`` and ``LLM`` both use them, so that they reject the same things.
"""

from __future__ import annotations

from sdk.api.config import EngineConfig
from sdk.api.errors import CheckpointError, OutOfMemoryError, RequestError, UnsupportedError
from sdk.api.machine import available_memory
from sdk.api.sizes import format_bytes
from sdk.engine.pages.disk_space import disk_folder, disk_space_problem
from sdk.loading.sampling_defaults import sampling_defaults
from sdk.memory.plan import MemoryPlan
from sdk.memory.resolve import available_to, config_values
from sdk.models.architecture import architecture
from sdk.models.auto import model_type
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.tokenizer import Tokenizer


def check_options(config: EngineConfig, checkpoint: Checkpoint, made: MemoryPlan) -> None:
    """Reject options that would fail with any amount of memory.

    :raises CheckpointError: the folder of ``tokenizer`` or ``generation_config`` has no such file.
    :raises RequestError: options contradict each other.
    :raises UnsupportedError: options that this kind of model does not support.
    """
    sampling_defaults(config, checkpoint)
    named_tokenizer(config)
    if made.fits and not whole_prompts(config, made):
        raise RequestError(
            "without chunked prefill max_num_batched_tokens "
            f"({config.step_tokens}) must be at least "
            f"max_model_len ({made.max_model_len}), because a prompt runs in one step"
        )
    if config.pipeline_parallel_size > 1 and config.device != "cuda":
        from sdk.kernels.cpu.rank_group import why_not_shared

        if (reason := why_not_shared()) is not None:
            raise UnsupportedError(
                f"pipeline_parallel_size={config.pipeline_parallel_size}: stages exchange tensors "
                f"through shared memory only, which is not possible here: {reason}"
            )
    name = model_type(config_values(config, checkpoint))
    if architecture(name) is None:
        for option in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (found := getattr(config, option)) > 1:
                raise UnsupportedError(
                    f"model_type {name!r} runs through transformers, on one rank only: "
                    f"expected {option}=1, found {found}"
                )
        if config.cpu_offload:
            raise UnsupportedError(
                f"{checkpoint.path}: cpu_offload supports only this library's own model code, and "
                f"model_type {name!r} runs through transformers; leave cpu_offload at 0"
            )


def named_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The tokenizer in the folder of the ``tokenizer`` option; None if the option is not used.

    :raises CheckpointError: the folder has no tokenizer.
    """
    if config.tokenizer is None or config.skip_tokenizer_init:
        return None
    from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder

    named = tokenizer_from_folder(config.tokenizer)
    if named is None:
        raise CheckpointError(f"{config.tokenizer}: expected tokenizer files in it, found none")
    return named


def whole_prompts(config: EngineConfig, made: MemoryPlan) -> bool:
    """Whether a step holds the longest prompt, or prompts may be split."""
    return config.enable_chunked_prefill or made.max_model_len <= config.step_tokens


def memory_shortage(config: EngineConfig, made: MemoryPlan) -> str:
    """A breakdown if the machine has less memory now than the plan needs; otherwise empty."""
    available = available_to(config)
    if made.total <= available:
        return ""
    return (
        "the machine cannot give what the budget allows:\n"
        f"  planned    {format_bytes(made.total):>10}\n"
        f"  budget     {format_bytes(made.budget or made.total):>10}\n"
        f"  available  {format_bytes(available):>10}"
    )


def room_shortage(config: EngineConfig, made: MemoryPlan) -> str:
    """Why there is no room for what is outside of the budget, offloaded weights and swapped pages;
    empty if there is."""
    return _offload_shortage(config, made) or _swap_shortage(config, made)


def _offload_shortage(config: EngineConfig, made: MemoryPlan) -> str:
    if not made.offloaded:
        return ""
    if made.layers_away:
        free = available_memory()
        if made.offloaded <= free:
            return ""
        return (
            f"cpu_offload: {format_bytes(made.offloaded)} of weights are more than the "
            f"{format_bytes(free)} this machine has left; lower cpu_offload"
        )
    try:
        folder = disk_folder(config.disk_offload_path)
    except OutOfMemoryError as error:
        return str(error)
    return disk_space_problem("disk_offload", folder, made.offloaded, "weights")


def _swap_shortage(config: EngineConfig, made: MemoryPlan) -> str:
    swap = config.swap_space
    assert not isinstance(swap, str)  # EngineConfig has parsed it
    if swap == 0:
        return ""
    if swap < made.page_bytes:
        return (
            f"swap_space: expected at least a page of {made.page_size} tokens, "
            f"{format_bytes(made.page_bytes)}, found {format_bytes(swap)}"
        )
    swap *= made.replicas  # each has this much
    if config.swap_path is not None:
        return disk_space_problem("swap_path", config.swap_path, swap, "swap space")
    free = available_memory()
    if made.total + swap <= free:
        return ""
    space = format_bytes(swap)
    if made.replicas > 1:
        space += f" for {made.replicas} replicas"
    return (
        f"swap_space: {space}, with {format_bytes(made.total)} for model and KV "
        f"cache, is more than the {format_bytes(free)} this machine has left; use "
        "swap_path=FOLDER to swap to a file"
    )
