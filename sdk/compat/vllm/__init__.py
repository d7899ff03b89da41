"""vLLM's offline interface on an :class:`sdk.LLM`, in this process.

A program that was written for vLLM changes only its import lines; submodules have vLLM's names.
``LLM.llm`` is the LLM with everything that vLLM has no name for. docs/compat/compat.md lists the
differences.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from sdk.compat.vllm.config import (
    PoolerConfig as PoolerConfig,
)
from sdk.compat.vllm.engine.arg_utils import (
    AsyncEngineArgs as AsyncEngineArgs,
    EngineArgs as EngineArgs,
)
from sdk.compat.vllm.entrypoints.llm import (
    LLM as LLM,
)
from sdk.compat.vllm.inputs import (
    PromptType as PromptType,
    TextPrompt as TextPrompt,
    TokensPrompt as TokensPrompt,
)
from sdk.compat.vllm.logprobs import (
    Logprob as Logprob,
)
from sdk.compat.vllm.lora.request import (
    LoRARequest as LoRARequest,
)
from sdk.compat.vllm.outputs import (
    BeamSearchOutput as BeamSearchOutput,
    BeamSearchSequence as BeamSearchSequence,
    ClassificationOutput as ClassificationOutput,
    ClassificationRequestOutput as ClassificationRequestOutput,
    CompletionOutput as CompletionOutput,
    EmbeddingOutput as EmbeddingOutput,
    EmbeddingRequestOutput as EmbeddingRequestOutput,
    PoolingOutput as PoolingOutput,
    PoolingRequestOutput as PoolingRequestOutput,
    RequestOutput as RequestOutput,
    RequestStateStats as RequestStateStats,
    ScoringOutput as ScoringOutput,
    ScoringRequestOutput as ScoringRequestOutput,
)
from sdk.compat.vllm.pooling_params import (
    PoolingParams as PoolingParams,
)
from sdk.compat.vllm.sampling_params import (
    BeamSearchParams as BeamSearchParams,
    GuidedDecodingParams as GuidedDecodingParams,
    RequestOutputKind as RequestOutputKind,
    SamplingParams as SamplingParams,
    StructuredOutputsParams as StructuredOutputsParams,
)
from sdk.compat.vllm.v1.engine.async_llm import (
    AsyncLLM as AsyncLLM,
)
from sdk.compat.vllm.v1.engine.llm_engine import (
    LLMEngine as LLMEngine,
)

#: The release whose names these are.
__version__ = "0.32.0"
__version_tuple__ = (0, 32, 0)
AsyncLLMEngine = AsyncLLM
#: Submodules that the names above do not need.
_LATER = ("distributed", "logger", "platforms", "utils")


def __getattr__(name: str) -> ModuleType:
    """``vllm.utils`` after ``import vllm``."""
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
