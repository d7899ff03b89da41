"""embedlm: run quantized language models inside your own program.

``import sdk`` takes a few milliseconds: every public name is loaded on first use. ``quantize`` and
``evaluate`` import torch then. ``LLM`` does not: torch, transformers and triton are imported only
when a model or a device needs them.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdk.api.beam_search import BeamSearchOutput as BeamSearchOutput
    from sdk.api.beam_search import BeamSearchParams as BeamSearchParams
    from sdk.demo import demo_model as demo_model
    from sdk.api.errors import (
        AlignmentError as AlignmentError,
        CheckpointError as CheckpointError,
        EngineAsleepError as EngineAsleepError,
        EngineClosedError as EngineClosedError,
        EngineDeadError as EngineDeadError,
        LoadCancelled as LoadCancelled,
        MissingPackageError as MissingPackageError,
        OutOfMemoryError as OutOfMemoryError,
        QuantizationError as QuantizationError,
        QueueFullError as QueueFullError,
        RequestError as RequestError,
        SdkError as SdkError,
        SnapshotError as SnapshotError,
        UnsupportedError as UnsupportedError,
    )
    from sdk.api.image_hosts import ImageHosts as ImageHosts
    from sdk.llm import LLM as LLM
    from sdk.api.lora import LoRAInfo as LoRAInfo, LoRARequest as LoRARequest
    from sdk.memory.plan import Alternative as Alternative, MemoryPlan as MemoryPlan
    from sdk.api.memory_pool import MemoryPool as MemoryPool
    from sdk.async_llm import AsyncLLM as AsyncLLM
    from sdk.api.outputs import (
        ClassificationOutput as ClassificationOutput,
        CompletionOutput as CompletionOutput,
        EmbeddingOutput as EmbeddingOutput,
        Estimate as Estimate,
        Logprob as Logprob,
        PoolingRequestOutput as PoolingRequestOutput,
        RerankOutput as RerankOutput,
        RequestEvent as RequestEvent,
        RequestMetrics as RequestMetrics,
        RequestOutput as RequestOutput,
        Timeline as Timeline,
    )
    from sdk.api.scheduling_policy import (
        FairPolicy as FairPolicy,
        PriorityPolicy as PriorityPolicy,
        SchedulingPolicy as SchedulingPolicy,
    )
    from sdk.engine.running_requests import RequestInfo as RequestInfo
    from sdk.metrics.histogram import HistogramData as HistogramData
    from sdk.metrics.slo import SLO as SLO
    from sdk.metrics.stats import EngineStats as EngineStats, RequestStats as RequestStats
    from sdk.metrics.trace import Trace as Trace
    from sdk.evaluating import Evaluation as Evaluation, evaluate as evaluate
    from sdk.quantizing import quantize as quantize
    from sdk.api.params import RequestOutputKind as RequestOutputKind
    from sdk.api.params import SamplingParams as SamplingParams
    from sdk.api.structured_params import StructuredOutputsParams as StructuredOutputsParams
    from sdk.engine.snapshot import Snapshot as Snapshot
    from sdk.loading.quant_report import LayerReport as LayerReport
    from sdk.loading.quant_report import QuantReport as QuantReport
    from sdk.api.remote_workers import RemoteWorkers as RemoteWorkers
    from sdk.cluster.distributed import launched_llm as launched_llm, run_worker as run_worker
    from sdk.tokenizer import LLMTokenizer as LLMTokenizer

__version__ = "0.1.0"
#: Tells the package ``embedlm`` that this ``sdk`` is ours, not another project's.
__distribution__ = "embedlm"

# The module of each public name; __getattr__ imports it when the name is first used.
_EXPORTS = {
    "ImageHosts": "sdk.api.image_hosts",
    "LLM": "sdk.llm",
    "AsyncLLM": "sdk.async_llm",
    "LoRAInfo": "sdk.api.lora",
    "LoRARequest": "sdk.api.lora",
    "Alternative": "sdk.memory.plan",
    "MemoryPlan": "sdk.memory.plan",
    "MemoryPool": "sdk.api.memory_pool",
    "BeamSearchParams": "sdk.api.beam_search",
    "BeamSearchOutput": "sdk.api.beam_search",
    "SamplingParams": "sdk.api.params",
    "StructuredOutputsParams": "sdk.api.structured_params",
    "RequestOutputKind": "sdk.api.params",
    "RequestOutput": "sdk.api.outputs",
    "CompletionOutput": "sdk.api.outputs",
    "EmbeddingOutput": "sdk.api.outputs",
    "Estimate": "sdk.api.outputs",
    "PoolingRequestOutput": "sdk.api.outputs",
    "ClassificationOutput": "sdk.api.outputs",
    "RerankOutput": "sdk.api.outputs",
    "Logprob": "sdk.api.outputs",
    "RequestMetrics": "sdk.api.outputs",
    "RequestEvent": "sdk.api.outputs",
    "Timeline": "sdk.api.outputs",
    "RequestInfo": "sdk.engine.running_requests",
    "HistogramData": "sdk.metrics.histogram",
    "SLO": "sdk.metrics.slo",
    "EngineStats": "sdk.metrics.stats",
    "RequestStats": "sdk.metrics.stats",
    "Trace": "sdk.metrics.trace",
    "QuantReport": "sdk.loading.quant_report",
    "LayerReport": "sdk.loading.quant_report",
    "SchedulingPolicy": "sdk.api.scheduling_policy",
    "PriorityPolicy": "sdk.api.scheduling_policy",
    "FairPolicy": "sdk.api.scheduling_policy",
    "Snapshot": "sdk.engine.snapshot",
    "LLMTokenizer": "sdk.tokenizer",
    "RemoteWorkers": "sdk.api.remote_workers",
    "run_worker": "sdk.cluster.distributed",
    "launched_llm": "sdk.cluster.distributed",
    "demo_model": "sdk.demo",
    "quantize": "sdk.quantizing",
    "evaluate": "sdk.evaluating",
    "Evaluation": "sdk.evaluating",
    **dict.fromkeys(
        (
            "SdkError",
            "CheckpointError",
            "UnsupportedError",
            "AlignmentError",
            "RequestError",
            "MissingPackageError",
            "OutOfMemoryError",
            "EngineAsleepError",
            "EngineClosedError",
            "EngineDeadError",
            "LoadCancelled",
            "SnapshotError",
            "QuantizationError",
            "QueueFullError",
        ),
        "sdk.api.errors",
    ),
}
__all__ = ["__version__", *_EXPORTS]
#: torch is imported first, so that Ctrl-C may interrupt that (sdk/kernels/host/torch_import.py).
_NEED_TORCH = {"sdk.evaluating", "sdk.quantizing"}

logging.getLogger("sdk").addHandler(logging.NullHandler())

if sys.maxsize < 2**32:
    raise ImportError("embedlm needs a Python of 64 bits, and this one has 32: install another one")


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'sdk' has no attribute {name!r}")
    if module in _NEED_TORCH:
        from sdk.kernels.host.torch_import import torch_module

        torch_module(f"sdk.{name}")
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
