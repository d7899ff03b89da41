"""What would stop a load, found before it: from options, headers and what the machine has now.

``LLM.plan`` and ``LLM`` ask here both, so that what one refuses the other does.
"""

from __future__ import annotations

from sdk.config import EngineConfig
from sdk.engine.pages.disk_space import disk_folder, disk_space_problem
from sdk.errors import CheckpointError, OutOfMemoryError, RequestError, UnsupportedError
from sdk.loading.sampling_defaults import sampling_defaults
from sdk.memory.machine import available_memory
from sdk.memory.plan import MemoryPlan
from sdk.memory.resolve import available_to
from sdk.memory.sizes import format_bytes
from sdk.models.auto import model_type, own_model
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.tokenizer import Tokenizer


def check_options(config: EngineConfig, checkpoint: Checkpoint, made: MemoryPlan) -> None:
    """Raise what no other amount of memory would help with.

    :raises CheckpointError: ``tokenizer`` or ``generation_config`` name a folder without any.
    :raises RequestError: options that do not go together.
    :raises UnsupportedError: options that this kind of model cannot have.
    """
    sampling_defaults(config, checkpoint)
    named_tokenizer(config)
    if made.fits and not whole_prompts(config, made):
        raise RequestError(
            "without chunked prefill max_num_batched_tokens "
            f"({config.max_num_batched_tokens}) must be at least "
            f"max_model_len ({made.max_model_len}): a prompt runs in one step"
        )
    name = model_type({**checkpoint.config, **(config.hf_overrides or {})})
    if own_model(name) is None:
        ranks = config.tensor_parallel_size
        if ranks > 1:
            raise UnsupportedError(
                f"model_type {name!r} runs through transformers, on one rank only: "
                f"expected tensor_parallel_size=1, found {ranks}"
            )
        if config.cpu_offload:
            raise UnsupportedError(
                f"{checkpoint.path}: cpu_offload moves layers of this library's own models; this "
                "one's run in transformers' code"
            )


def named_tokenizer(config: EngineConfig) -> Tokenizer | None:
    """The one in the folder that the ``tokenizer`` option names.

    :raises CheckpointError: there is none in it.
    """
    if config.tokenizer is None or config.skip_tokenizer_init:
        return None
    from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder

    named = tokenizer_from_folder(config.tokenizer)
    if named is None:
        raise CheckpointError(f"{config.tokenizer}: no tokenizer files in it")
    return named


def whole_prompts(config: EngineConfig, made: MemoryPlan) -> bool:
    """Whether a step holds the longest prompt, or prompts may be cut."""
    return config.enable_chunked_prefill or made.max_model_len <= config.max_num_batched_tokens


def memory_shortage(config: EngineConfig, made: MemoryPlan) -> str:
    """Empty, or the sums where the machine has less memory now than the plan takes."""
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
    """Empty, or why there is no room for what lies beside the budget: offloaded weights, swapped
    pages."""
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
            f"{format_bytes(free)} this machine has left"
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
            f"swap_space: a page of {made.page_size} tokens takes "
            f"{format_bytes(made.page_bytes)}, found {format_bytes(swap)}"
        )
    if config.swap_path is not None:
        return disk_space_problem("swap_path", config.swap_path, swap, "swap space")
    free = available_memory()
    if made.total + swap <= free:
        return ""
    return (
        f"swap_space: {format_bytes(swap)} beside {format_bytes(made.total)} for model and "
        f"KV cache is more than the {format_bytes(free)} this machine has left; "
        "swap_path=FOLDER puts it into a file"
    )
