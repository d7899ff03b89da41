"""Where our interfaces differ from the originals: docs/compat/compat.md shows this table.

Keys are patterns (``fnmatch``) of ``Object``, ``Object.method``, ``Object(parameter)`` and
``Object.method(parameter)``.
"""

from __future__ import annotations

from collections.abc import Mapping

from sdk.compat.vllm._missing import MISSING

#: ``llm_engine`` is an attribute; the comparison is one of methods.
_MISSING = {
    f"{owner}.{name}": why
    for owner, found in MISSING.items()
    for name, why in found.items()
    if name != "llm_engine"
}

DIFFERENCES: Mapping[str, Mapping[str, str]] = {
    "vllm": {
        **_MISSING,
        "EngineArgs.*": "options are attributes, not config objects",
        "AsyncEngineArgs.*": "the same",
        "LLMEngine(*)": "`LLMEngine(llm)` or `from_engine_args`",
        "LLMEngine.from_vllm_config": "options are attributes, not config objects",
        "LLMEngine.from_engine_args(usage_context)": "None here; it has no effect",
        "AsyncLLMEngine(*)": "`AsyncLLMEngine(llm)` or `from_engine_args`",
        "AsyncLLMEngine.from_vllm_config": "options are attributes, not config objects",
        "AsyncLLMEngine.from_engine_args(usage_context)": "None here; it has no effect",
        "SamplingParams.from_optional(*)": "takes the fields of `SamplingParams` as keywords",
        "SamplingParams.for_sampler_warmup": "internal",
        "SamplingParams.update_from_*": "internal",
        "SamplingParams.verify": "the constructor verifies",
        "StructuredOutputsParams(*)": "is `sdk.StructuredOutputsParams`, whose fields are keywords",
        "StructuredOutputsParams.all_*": "there is always exactly one structure",
        "PoolingParams.verify": "the constructor verifies",
        "PoolerConfig.*": "internal",
        "RequestOutput(kwargs)": "outputs are made by the engine",
        "RequestOutput.add": "use `output_kind` to get whole answers",
        "*.from_base": "outputs are made by the engine",
        "BeamSearchSequence.get_prompt": "use `orig_prompt`",
    },
    "llama_cpp": {
        "Llama.*(stop)": "the default is None, which means no strings, as `[]` does there",
        "Llama.logits_to_logprobs": "internal",
        "Llama.longest_token_prefix": "internal",
        "LlamaState(scores)": "logits are not kept",
        "LlamaState(llama_state*)": "`snapshot` has the keys and values",
        "LlamaDraftModel.__call__": "drafts are found by the engine",
        "LlamaPromptLookupDecoding.__call__": "drafts are found by the engine",
        "LlamaPromptLookupDecoding.find_candidate_pred_tokens": "drafts are found by the engine",
    },
    "openai": {
        "*OpenAI(*)": "the client takes an `LLM` instead of keys, addresses and retries",
        "*OpenAI.*": "there is no HTTP client",
        "*Completions(client)": "resources are made by the client",
        "*Embeddings(client)": "resources are made by the client",
        "*.create(model)": "may be left out",
        "*.create(stream)": "the default is False, which means the same",
        "*.create(audio)": "models read and write text only",
        "*.create(modalities)": "models read and write text only",
        "*.create(moderation)": "answers are not moderated",
        "*.create(prediction)": "use `speculative_config` of the LLM",
        "*.create(functions)": "use `tools`",
        "*.create(function_call)": "use `tool_choice`",
        "*.create(verbosity)": "has no equivalent",
        "*.create(web_search_options)": "nothing is searched",
        "*Embeddings.create(user)": "there is no HTTP request",
        "*Embeddings.create(extra_*)": "there is no HTTP request",
        "*Embeddings.create(timeout)": "embeddings have no deadline",
        "*ChatCompletions.delete": "completions are not stored",
        "*ChatCompletions.list": "completions are not stored",
        "*ChatCompletions.retrieve": "completions are not stored",
        "*ChatCompletions.update": "completions are not stored",
        "*ChatCompletions.parse": "use `llm.chat(..., returns=Type)`",
        "*ChatCompletions.stream": "use `create(stream=True)`",
    },
}
#: Defaults that mean "not given" there and are None here.
NOT_GIVEN = (
    {"object": "Omit"},
    {"object": "NotGiven"},
    {"object": "_HAS_DEFAULT_FACTORY_CLASS"},
    {"object": "Factory"},
    {"enum": "TRITON"},
    {"enum": "O2"},
)
#: Keys of results with another type: (key, type there, type here) -> why.
SHAPES: Mapping[tuple[str, str, str], str] = {
    ("metrics", "NoneType", "dict"): "always there, not only with `disable_log_stats=False`",
    ("num_cache_creation_tokens", "int", "NoneType"): "not counted",
    ("weight_versions", "list", "NoneType"): "weights have one version",
    ("decoded_token", "NoneType", "str"): "the texts of a beam's tokens are there too",
    ("prompt_token_ids", "list", "empty"): "`score` does not return the tokens of the pair",
    ("bytes", "NoneType", "list"): "the bytes of a token are there too",
}
