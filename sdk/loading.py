"""From options to a running engine: read the headers, plan the memory, then load."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from sdk.config import EngineConfig
from sdk.engine.engine import Engine
from sdk.engine.kept_prefixes import KeptPrefixes
from sdk.engine.kv_cache import kv_spec
from sdk.engine.runner import ModelRunner
from sdk.engine.runner_config import RunnerConfig
from sdk.engine.scheduler import Scheduler
from sdk.engine.scheduler_config import SchedulerConfig
from sdk.errors import CheckpointError, OutOfMemoryError, RequestError
from sdk.executors.local import LocalExecutor
from sdk.kernels.ops import Compute
from sdk.loaders.open import open_checkpoint
from sdk.memory import Demand, MemoryPlan, available_memory, format_bytes, plan_memory
from sdk.model_key import ModelKey, model_key
from sdk.models.auto import read_config
from sdk.models.config import ModelConfig
from sdk.models.parallel import Mesh
from sdk.params import SamplingParams
from sdk.progress import reporting
from sdk.quant.at_load import packed_at_load
from sdk.quant.checkpoint import Checkpoint
from sdk.quant.spec import kv_bits
from sdk.quant.tokenizer import Tokenizer

if TYPE_CHECKING:
    from sdk.executors.process import ProcessExecutor


#: Of a GPU's free memory, what an engine may take unless told otherwise; the rest is for torch's
#: own buffers and the kernels' scratch.
_GPU_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Loaded:
    """Everything an :class:`sdk.LLM` is made of."""

    engine: Engine
    kept: KeptPrefixes
    model_key: ModelKey
    runner: ModelRunner
    tokenizer: Tokenizer | None
    model_config: ModelConfig
    plan: MemoryPlan
    default_params: SamplingParams
    eos_token_ids: frozenset[int]
    warnings: tuple[str, ...]


def plan(config: EngineConfig) -> MemoryPlan:
    """The memory plan of ``config``; reads headers, loads nothing."""
    checkpoint = _open(config)
    try:
        return _plan(config, checkpoint, _model_config(config, checkpoint))
    finally:
        checkpoint.close()


def load(config: EngineConfig) -> Loaded:
    """Build the engine; on any error everything built so far is given back."""
    with contextlib.ExitStack() as undo:
        checkpoint = _open(config)
        undo.callback(checkpoint.close)
        model_config = _model_config(config, checkpoint)
        memory = _plan(config, checkpoint, model_config)
        tokenizer = None if config.skip_tokenizer_init else _tokenizer(config, checkpoint)
        default_params = _default_params(checkpoint.generation_config)
        runner_config = _runner_config(config, checkpoint, memory)
        eos = frozenset(tokenizer.eos_token_ids if tokenizer is not None else _eos(checkpoint))
        scheduler_config = SchedulerConfig(
            num_pages=runner_config.num_pages,
            page_size=memory.page_size,
            max_model_len=memory.max_model_len,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            enable_prefix_caching=config.enable_prefix_caching,
            enable_chunked_prefill=config.enable_chunked_prefill,
            policy=config.scheduling_policy,
            kv_type=memory.kv_dtype,
            kv_bits=kv_bits(memory.kv_dtype),
            num_swap_pages=runner_config.num_swap_pages,
            eos_token_ids=eos,
        )
        executor = _executor(config, runner_config, checkpoint)
        undo.callback(executor.close)
        with reporting("load", "B", config.on_progress) as report:
            checkpoint.on_bytes = report
            executor.start()
        scheduler = Scheduler(scheduler_config)
        engine = Engine(
            scheduler,
            executor,
            tokenizer,
            vocab_size=model_config.vocab_size,
            seed=config.seed,
        )
        undo.pop_all()
    return Loaded(
        engine=engine,
        kept=KeptPrefixes(
            scheduler,
            executor,
            kv_spec(model_config, model_config.num_kv_heads, memory.page_size, memory.kv_dtype),
        ),
        model_key=model_key(
            checkpoint.path,
            model_config,
            memory.max_model_len,
            quantization=config.quantization,
            overrides=config.hf_overrides or {},
        ),
        runner=executor.runner,
        tokenizer=tokenizer,
        model_config=model_config,
        plan=memory,
        default_params=default_params,
        eos_token_ids=eos,
        warnings=tuple(f"unused tensor {name}" for name in executor.runner.unused_tensors),
    )


def _runner_config(
    config: EngineConfig, checkpoint: Checkpoint, memory: MemoryPlan
) -> RunnerConfig:
    return RunnerConfig(
        model=str(checkpoint.path),
        num_pages=memory.num_pages + 1,  # page 0 belongs to nobody
        page_size=memory.page_size,
        kv_dtype=memory.kv_dtype,
        max_model_len=memory.max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        num_threads=max(_threads(config) // config.tensor_parallel_size, 1),
        device=_device(config),
        compute=_compute(config),
        enforce_eager=config.enforce_eager,
        deterministic=config.deterministic,
        hf_overrides=dict(config.hf_overrides or {}),
        quantization=config.quantization,
        num_swap_pages=_swap_pages(config, memory),
        swap_path=config.swap_path,
    )


def _swap_pages(config: EngineConfig, memory: MemoryPlan) -> int:
    """:raises OutOfMemoryError: swap space for less than a page, or more than the machine has."""
    swap = _bytes(config.swap_space)
    assert swap is not None
    if 0 < swap < memory.page_bytes:
        raise OutOfMemoryError(
            f"swap_space: a page of {memory.page_size} tokens takes "
            f"{format_bytes(memory.page_bytes)}, found {format_bytes(swap)}"
        )
    free = available_memory()
    if config.swap_path is None and swap and memory.total + swap > free:
        raise OutOfMemoryError(
            f"swap_space: {format_bytes(swap)} beside {format_bytes(memory.total)} for model and "
            f"KV cache is more than the {format_bytes(free)} this machine has left; "
            "swap_path=FOLDER puts it into a file"
        )
    return swap // memory.page_bytes


def _open(config: EngineConfig) -> Checkpoint:
    checkpoint = open_checkpoint(
        config.model, revision=config.revision, local_files_only=config.local_files_only
    )
    if config.load_format not in ("auto", checkpoint.format):
        checkpoint.close()
        raise CheckpointError(
            f"{checkpoint.path}: expected {config.load_format} (load_format), "
            f"found {checkpoint.format}"
        )
    return packed_at_load(checkpoint, config.quantization)


class _NoRanks:
    """A group that carries nothing: a mesh with it only tells how it would cut."""

    def all_reduce(self, x: Any) -> None:
        raise NotImplementedError

    def all_gather(self, x: Any) -> list[Any]:
        raise NotImplementedError


def _check_cut(size: int, model: ModelConfig) -> None:
    """Refuse a number of ranks that the model cannot be dealt to, before any of them starts."""
    mesh = Mesh(0, size, _NoRanks())
    mesh.heads(model.num_heads, model.num_kv_heads)
    mesh.columns(model.intermediate_size)
    if model.experts is not None:
        mesh.columns(model.experts.width)
    mesh.vocabulary(model.vocab_size)


def _model_config(config: EngineConfig, checkpoint: Checkpoint) -> ModelConfig:
    return read_config({**checkpoint.config, **(config.hf_overrides or {})})


def _compute(config: EngineConfig) -> Compute:
    # dtype="float32" asks for the arithmetic that compute="exact" names
    return "exact" if config.dtype == "float32" else config.compute


def _device(config: EngineConfig) -> str:
    """``"auto"`` is the CPU. :raises RequestError: where the device asked for cannot be used."""
    if config.device != "cuda":
        return "cpu"
    if not torch.cuda.is_available():
        raise RequestError("device='cuda': torch finds no GPU here; leave device unset for the CPU")
    if config.tensor_parallel_size > 1:
        raise RequestError("device='cuda': tensor_parallel_size must be 1 in this release")
    return "cuda"


def _available(config: EngineConfig) -> int:
    """Bytes that weights, pages and workspace may take where no budget is given."""
    if _device(config) == "cpu":
        return available_memory()
    free: int = torch.cuda.mem_get_info()[0]
    return int(free * (config.gpu_memory_utilization or _GPU_SHARE))


def _threads(config: EngineConfig) -> int:
    return config.num_threads or len(os.sched_getaffinity(0))


def _plan(config: EngineConfig, checkpoint: Checkpoint, model: ModelConfig) -> MemoryPlan:
    dtype = config.kv_cache_dtype
    if config.kv_policy is not None:
        dtype = config.kv_policy
    elif dtype == "auto":
        dtype = "float32" if _compute(config) == "exact" else "float16"
    _check_cut(config.tensor_parallel_size, model)
    # Every rank is a process of this machine: the budget holds the pages of all of them, and with
    # more ranks than heads some heads are kept twice.
    heads = max(model.num_kv_heads, config.tensor_parallel_size)
    page_bytes = kv_spec(model, heads, config.block_size, dtype).page_bytes
    experts = model.experts
    return plan_memory(
        Demand(
            weights=sum(
                entry.nbytes if entry.held is None else entry.held for entry in checkpoint.entries()
            ),
            page_bytes=page_bytes,
            page_size=config.block_size,
            kv_dtype=dtype,
            model_context=model.max_position,
            hidden_size=model.hidden_size,
            intermediate_size=model.intermediate_size,
            vocab_size=model.vocab_size,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            experts_per_token=0 if experts is None else experts.per_token,
            expert_width=0 if experts is None else experts.width,
        ),
        budget=_bytes(config.memory),
        kv_budget=_bytes(config.kv_cache_memory_bytes),
        max_model_len=config.max_model_len,
        available=_available(config),
    )


def _bytes(value: int | str | None) -> int | None:
    assert not isinstance(value, str)  # EngineConfig has parsed it
    return value


def _tokenizer(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    if config.tokenizer is None:
        found: Tokenizer | None = checkpoint.tokenizer
        return found
    from sdk.loaders.tokenizer.from_folder import tokenizer_from_folder

    named = tokenizer_from_folder(config.tokenizer)
    if named is None:
        raise CheckpointError(f"{config.tokenizer}: no tokenizer files in it")
    return named


def _default_params(generation: Mapping[str, Any]) -> SamplingParams:
    """What the checkpoint recommends; greedy where it says ``do_sample: false``."""
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    given = {name: generation[name] for name in names if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        given["temperature"] = 0.0
    try:
        return SamplingParams.from_optional(**given)
    except RequestError as error:
        raise CheckpointError(f"generation_config: {error}") from error


def _eos(checkpoint: Checkpoint) -> list[int]:
    """The ids that end an answer where no tokenizer says so."""
    for facts in (checkpoint.generation_config, checkpoint.config):
        ids = facts.get("eos_token_id")
        if isinstance(ids, int):
            return [ids]
        if isinstance(ids, list):
            return [token for token in ids if isinstance(token, int)]
    return []


def _executor(
    config: EngineConfig, runner_config: RunnerConfig, checkpoint: Checkpoint
) -> LocalExecutor[ModelRunner] | ProcessExecutor[ModelRunner]:
    """Rank 0 reuses the opened checkpoint; the other ranks open the file themselves."""

    def own(given: RunnerConfig, mesh: Mesh) -> ModelRunner:
        return ModelRunner(given, mesh, checkpoint)

    if config.tensor_parallel_size == 1:
        return LocalExecutor(own, runner_config)
    from sdk.executors.process import ProcessExecutor

    return ProcessExecutor(
        ModelRunner,
        runner_config,
        config.tensor_parallel_size,
        num_threads=runner_config.num_threads,
        own_factory=own,
    )
