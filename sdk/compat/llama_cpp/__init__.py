"""llama-cpp-python's high-level interface on an :class:`sdk.LLM`, in this process.

A program that was written for llama-cpp-python changes only its import lines; submodules have its
names. ``Llama.llm`` is the LLM with everything that llama-cpp-python has no name for.
docs/compat/compat.md lists the differences.
"""

from __future__ import annotations

import importlib
from types import ModuleType

from sdk.compat.llama_cpp._completions import CompletionError as CompletionError
from sdk.compat.llama_cpp._options import (
    GGML_TYPE_BF16 as GGML_TYPE_BF16,
    GGML_TYPE_F16 as GGML_TYPE_F16,
    GGML_TYPE_F32 as GGML_TYPE_F32,
    GGML_TYPE_Q4_0 as GGML_TYPE_Q4_0,
    GGML_TYPE_Q8_0 as GGML_TYPE_Q8_0,
    LLAMA_ATTENTION_TYPE_UNSPECIFIED as LLAMA_ATTENTION_TYPE_UNSPECIFIED,
    LLAMA_DEFAULT_SEED as LLAMA_DEFAULT_SEED,
    LLAMA_POOLING_TYPE_CLS as LLAMA_POOLING_TYPE_CLS,
    LLAMA_POOLING_TYPE_LAST as LLAMA_POOLING_TYPE_LAST,
    LLAMA_POOLING_TYPE_MEAN as LLAMA_POOLING_TYPE_MEAN,
    LLAMA_POOLING_TYPE_NONE as LLAMA_POOLING_TYPE_NONE,
    LLAMA_POOLING_TYPE_UNSPECIFIED as LLAMA_POOLING_TYPE_UNSPECIFIED,
    LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED as LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED,
    LLAMA_SPLIT_MODE_LAYER as LLAMA_SPLIT_MODE_LAYER,
    LLAMA_SPLIT_MODE_NONE as LLAMA_SPLIT_MODE_NONE,
    LLAMA_SPLIT_MODE_ROW as LLAMA_SPLIT_MODE_ROW,
)
from sdk.compat.llama_cpp.llama import (
    Llama as Llama,
    LlamaState as LlamaState,
    LogitsProcessor as LogitsProcessor,
    LogitsProcessorList as LogitsProcessorList,
    MinTokensLogitsProcessor as MinTokensLogitsProcessor,
    StoppingCriteria as StoppingCriteria,
    StoppingCriteriaList as StoppingCriteriaList,
)
from sdk.compat.llama_cpp.llama_cache import (
    BaseLlamaCache as BaseLlamaCache,
    LlamaCache as LlamaCache,
    LlamaDiskCache as LlamaDiskCache,
    LlamaRAMCache as LlamaRAMCache,
)
from sdk.compat.llama_cpp.llama_grammar import LlamaGrammar as LlamaGrammar
from sdk.compat.llama_cpp.llama_speculative import (
    LlamaDraftModel as LlamaDraftModel,
    LlamaPromptLookupDecoding as LlamaPromptLookupDecoding,
)
from sdk.compat.llama_cpp.llama_tokenizer import (
    BaseLlamaTokenizer as BaseLlamaTokenizer,
    LlamaHFTokenizer as LlamaHFTokenizer,
    LlamaTokenizer as LlamaTokenizer,
)

#: The release whose names these are.
__version__ = "0.3.36"
#: Submodules that the names above do not need.
_LATER = ("llama_chat_format", "llama_types")


def __getattr__(name: str) -> ModuleType:
    """``llama_cpp.llama_types`` after ``import llama_cpp``."""
    if name in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    if name.startswith(("llama_", "ggml_")):
        raise AttributeError(
            f"{__name__} has no {name}: llama.cpp's C functions are not there; use Llama, or "
            "Llama.llm"
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
