"""embedlm: run quantized language models inside your own program.

``import sdk`` takes a few milliseconds: every public name is loaded on first use. ``quantize`` and
``evaluate`` import torch then. ``LLM`` does not: torch, transformers and triton are imported only
when a model or a device needs them.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sdk.beam_search import BeamSearchOutput as BeamSearchOutput
    from sdk.beam_search import BeamSearchParams as BeamSearchParams
    from sdk.demo import demo_model as demo_model
    from sdk.errors import (
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
    from sdk.llm import LLM as LLM
    from sdk.lora import LoRAInfo as LoRAInfo, LoRARequest as LoRARequest
    from sdk.memory.plan import Alternative as Alternative, MemoryPlan as MemoryPlan
    from sdk.memory.pool import MemoryPool as MemoryPool
    from sdk.async_llm import AsyncLLM as AsyncLLM
    from sdk.outputs import (
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
    from sdk.engine.scheduling.policy import (
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
    from sdk.params import RequestOutputKind as RequestOutputKind
    from sdk.params import SamplingParams as SamplingParams
    from sdk.structured.params import StructuredOutputsParams as StructuredOutputsParams
    from sdk.persistence.snapshot import Snapshot as Snapshot
    from sdk.reports.quant_report import LayerReport as LayerReport
    from sdk.reports.quant_report import QuantReport as QuantReport
    from sdk.remote import RemoteWorkers as RemoteWorkers
    from sdk.distributed import launched_llm as launched_llm, run_worker as run_worker
    from sdk.tokenizer import LLMTokenizer as LLMTokenizer

__version__ = "0.1.0"
#: Tells the package ``embedlm`` that this ``sdk`` is ours, not another project's.
__distribution__ = "embedlm"

# The module of each public name; __getattr__ imports it when the name is first used.
_EXPORTS = {
    "LLM": "sdk.llm",
    "AsyncLLM": "sdk.async_llm",
    "LoRAInfo": "sdk.lora",
    "LoRARequest": "sdk.lora",
    "Alternative": "sdk.memory.plan",
    "MemoryPlan": "sdk.memory.plan",
    "MemoryPool": "sdk.memory.pool",
    "BeamSearchParams": "sdk.beam_search",
    "BeamSearchOutput": "sdk.beam_search",
    "SamplingParams": "sdk.params",
    "StructuredOutputsParams": "sdk.structured.params",
    "RequestOutputKind": "sdk.params",
    "RequestOutput": "sdk.outputs",
    "CompletionOutput": "sdk.outputs",
    "EmbeddingOutput": "sdk.outputs",
    "Estimate": "sdk.outputs",
    "PoolingRequestOutput": "sdk.outputs",
    "ClassificationOutput": "sdk.outputs",
    "RerankOutput": "sdk.outputs",
    "Logprob": "sdk.outputs",
    "RequestMetrics": "sdk.outputs",
    "RequestEvent": "sdk.outputs",
    "Timeline": "sdk.outputs",
    "RequestInfo": "sdk.engine.running_requests",
    "HistogramData": "sdk.metrics.histogram",
    "SLO": "sdk.metrics.slo",
    "EngineStats": "sdk.metrics.stats",
    "RequestStats": "sdk.metrics.stats",
    "Trace": "sdk.metrics.trace",
    "QuantReport": "sdk.reports.quant_report",
    "LayerReport": "sdk.reports.quant_report",
    "SchedulingPolicy": "sdk.engine.scheduling.policy",
    "PriorityPolicy": "sdk.engine.scheduling.policy",
    "FairPolicy": "sdk.engine.scheduling.policy",
    "Snapshot": "sdk.persistence.snapshot",
    "LLMTokenizer": "sdk.tokenizer",
    "RemoteWorkers": "sdk.remote",
    "run_worker": "sdk.distributed",
    "launched_llm": "sdk.distributed",
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
        "sdk.errors",
    ),
}
__all__ = ["__version__", *_EXPORTS]
#: torch is imported first, so that Ctrl-C may interrupt that (sdk/kernels/host/torch_import.py).
_NEED_TORCH = {"sdk.evaluating", "sdk.quantizing"}

logging.getLogger("sdk").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    module = _EXPORTS.get(name)
    if module is None:
        raise AttributeError(f"module 'sdk' has no attribute {name!r}")
    if module in _NEED_TORCH:
        from sdk.kernels.host.torch_import import import_torch

        import_torch()
    return getattr(import_module(module), name)


def __dir__() -> list[str]:
    return sorted(__all__)
