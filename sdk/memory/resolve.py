"""Resolves options of an engine for this machine and for a model."""

from __future__ import annotations

import os
from typing import Any

import torch

from sdk.config import EngineConfig
from sdk.errors import RequestError
from sdk.kernels.context import Compute
from sdk.memory.machine import available_memory
from sdk.models.auto import read_config
from sdk.models.config import ModelConfig
from sdk.quant.checkpoint import Checkpoint

#: The share of a GPU's free memory that an engine may take by default.
_GPU_SHARE = 0.9


def compute_of(config: EngineConfig) -> Compute:
    """``"exact"`` or ``"auto"``."""
    # dtype="float32" asks for the same arithmetic as compute="exact"
    return "exact" if config.dtype == "float32" else config.compute


def device_of(config: EngineConfig) -> str:
    """``"auto"`` is the CPU. :raises RequestError: the device cannot be used here."""
    if config.device != "cuda":
        return "cpu"
    if not torch.cuda.is_available():
        raise RequestError("device='cuda': torch finds no GPU here; leave device unset for the CPU")
    if config.tensor_parallel_size > 1:
        raise RequestError("device='cuda': tensor_parallel_size must be 1 in this release")
    return "cuda"


def threads_of(config: EngineConfig) -> int:
    """The number of threads of the CPU kernels."""
    return config.num_threads or len(os.sched_getaffinity(0))


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
    free: int = torch.cuda.mem_get_info()[0]
    return int(free * (config.gpu_memory_utilization or _GPU_SHARE))


def config_values(config: EngineConfig, checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's config with the caller's ``hf_overrides``."""
    return {**checkpoint.config, **(config.hf_overrides or {})}


def model_config(config: EngineConfig, checkpoint: Checkpoint) -> ModelConfig:
    """The model that :func:`config_values` describes."""
    return read_config(config_values(config, checkpoint))
