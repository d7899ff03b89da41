"""From the arguments of llama-cpp-python's ``Llama`` to the options of ``LLM``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError, SdkError
from sdk.compat.llama_cpp._vision import MTMDChatHandler
from sdk.compat.llama_cpp.llama_speculative import LlamaPromptLookupDecoding
from sdk.compat.llama_cpp.llama_tokenizer import LlamaHFTokenizer
from sdk.kernels.lazy_torch import torch
from sdk.memory.weights import adapter_options
from sdk.quant.safe_repr import safe_repr

LLAMA_DEFAULT_SEED = 0xFFFFFFFF
LLAMA_SPLIT_MODE_NONE, LLAMA_SPLIT_MODE_LAYER, LLAMA_SPLIT_MODE_ROW = range(3)
LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED = -1
LLAMA_ATTENTION_TYPE_UNSPECIFIED = -1
LLAMA_POOLING_TYPE_UNSPECIFIED = -1
LLAMA_POOLING_TYPE_NONE, LLAMA_POOLING_TYPE_MEAN, LLAMA_POOLING_TYPE_CLS = range(3)
LLAMA_POOLING_TYPE_LAST = 3
GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_BF16 = 0, 1, 2, 8, 30

#: ``pooling=`` of ``LLM.encode`` for a pooling type; without one, every token has a vector.
POOLINGS: Mapping[int, str] = {
    LLAMA_POOLING_TYPE_NONE: "token",
    LLAMA_POOLING_TYPE_MEAN: "mean",
    LLAMA_POOLING_TYPE_CLS: "cls",
    LLAMA_POOLING_TYPE_LAST: "last",
}
#: Keys of files for the scaling of rotations.
_FACTORS = (".rope.scaling.factor", ".rope.scale_linear")
#: Arguments of older releases; today's ignore them, as every other unknown one.
OLD = ("n_parts", "f16_kv", "low_vram", "mul_mat_q")
_KV_TYPES = {
    GGML_TYPE_F32: "float32",
    GGML_TYPE_F16: "float16",
    GGML_TYPE_BF16: "bfloat16",
    GGML_TYPE_Q8_0: "int8",
    GGML_TYPE_Q4_0: "int4",
}
#: Arguments that would change answers and cannot be honored: the value that means "off", and what
#: to do instead.
REFUSED: Mapping[str, tuple[Any, str]] = {
    "main_gpu": (0, "make the Llama inside `with torch.cuda.device(...)`"),
    "vocab_only": (False, "use LlamaTokenizer.from_ggml_file(path)"),
    "kv_overrides": (None, "metadata of the file is used as it is"),
    "rope_scaling_type": (LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED, "the file's scaling is used"),
    "attention_type": (LLAMA_ATTENTION_TYPE_UNSPECIFIED, "the model's own attention is used"),
    "rope_freq_scale": (0.0, "the file's scaling is used"),
    "yarn_ext_factor": (-1.0, "the file's scaling is used"),
    "yarn_attn_factor": (1.0, "the file's scaling is used"),
    "yarn_beta_fast": (32.0, "the file's scaling is used"),
    "yarn_beta_slow": (1.0, "the file's scaling is used"),
    "yarn_orig_ctx": (0, "the file's scaling is used"),
    "lora_base": (None, "leave it out: an adapter is added to the weights as they are"),
}
#: Arguments about speed, memory or logging: any value is accepted, answers do not depend on it.
WITHOUT_EFFECT = (
    *("split_mode", "tensor_split", "use_mmap", "use_mlock", "n_ubatch", "n_threads_batch"),
    *("logits_all", "embedding", "offload_kqv", "flash_attn", "op_offload", "swa_full", "no_perf"),
    *("numa", "verbose"),
)
#: llama-cpp-python runs one request at a time and has memory for one context; texts are embedded
#: together.
_EMBEDDED_AT_ONCE = 8
_MOST_DRAFTS = 64


def llm_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of ``LLM`` for the arguments of ``Llama``.

    :raises RequestError: an argument cannot be honored.
    """
    for name, (off, instead) in REFUSED.items():
        neutral = name == "rope_freq_scale" and given[name] == 1.0  # see check_unscaled
        if given[name] != off and not neutral:
            raise RequestError(f"{name}={safe_repr(given[name])} is not supported: {instead}")
    n_ctx, n_batch = _count("n_ctx", given, 0), _count("n_batch", given, 1)
    at_once = min(n_batch, n_ctx or n_batch)
    options: dict[str, Any] = {
        "max_model_len": n_ctx or None,
        "max_num_batched_tokens": at_once,
        "max_num_seqs": min(at_once, _EMBEDDED_AT_ONCE if given["embedding"] else 1),
        "num_threads": given["n_threads"] or given["n_threads_batch"],
        "device": "cuda" if given["n_gpu_layers"] and torch.cuda.is_available() else "cpu",
    }
    if given["type_k"] is not None or given["type_v"] is not None:
        options["kv_cache_dtype"] = f"{_kv_type('type_k', given)}/{_kv_type('type_v', given)}"
    if given["rope_freq_base"]:
        options["hf_overrides"] = {"rope_theta": given["rope_freq_base"]}
    if given["tokenizer"] is not None:
        options["tokenizer"] = _tokenizer_folder(given["tokenizer"])
    if given["draft_model"] is not None:
        options["speculative_config"] = _speculation(given["draft_model"])
    if isinstance(given["chat_handler"], MTMDChatHandler):
        options["mmproj"] = str(given["chat_handler"].clip_model_path)
    if given["lora_path"] is not None:
        options |= adapter_options([given["lora_path"]])
    if given["pooling_type"] not in (LLAMA_POOLING_TYPE_UNSPECIFIED, *POOLINGS):
        raise RequestError(
            f"pooling_type: expected -1 to {LLAMA_POOLING_TYPE_LAST}, found "
            f"{safe_repr(given['pooling_type'])}; for a reranker use LLM.score"
        )
    return options


def check_unscaled(rope_freq_scale: float, metadata: Callable[[], Mapping[str, Any]]) -> None:
    """``rope_freq_scale=1``, which LangChain always passes, turns the file's scaling off.

    :raises RequestError: the file has one.
    """
    if rope_freq_scale != 1.0:
        return
    for key, value in metadata().items():
        if key.endswith(_FACTORS) and float(value) not in (0.0, 1.0):
            raise RequestError(
                f"rope_freq_scale={rope_freq_scale} is not supported: the file's scaling is used "
                f"({key} is {value}); leave it out"
            )


#: Options of ``LLM`` that our messages name, and what a caller of ``Llama`` calls them.
_WORDS = {
    "max_model_len": "n_ctx",
    "max_num_batched_tokens": "n_batch",
    "num_threads": "n_threads",
    "kv_cache_dtype": "type_k and type_v",
}
_WORD = re.compile("|".join(map(re.escape, _WORDS)))


@contextmanager
def in_llama_words() -> Iterator[None]:
    """Errors raised inside name the arguments of ``Llama``."""
    try:
        yield
    except SdkError as error:
        error.args = tuple(
            _WORD.sub(lambda found: _WORDS[found.group()], one) if isinstance(one, str) else one
            for one in error.args
        )
        raise


def _count(name: str, given: Mapping[str, Any], low: int) -> int:
    value = given[name]
    if not isinstance(value, int) or isinstance(value, bool) or value < low:
        raise RequestError(f"{name}: expected an integer of at least {low}, found {value!r:.80}")
    return value


def _kv_type(name: str, given: Mapping[str, Any]) -> str:
    number = GGML_TYPE_F16 if given[name] is None else given[name]
    if number not in _KV_TYPES:
        known = ", ".join(map(str, _KV_TYPES))
        raise RequestError(
            f"{name}: expected one of the types {known} (F32, F16, BF16, Q8_0, Q4_0), found "
            f"{safe_repr(number)}"
        )
    return _KV_TYPES[number]


def _tokenizer_folder(given: object) -> Path:
    """Where the files of a ``LlamaHFTokenizer`` are."""
    if not isinstance(given, LlamaHFTokenizer):
        raise RequestError(
            f"tokenizer: expected a LlamaHFTokenizer, found {safe_repr(given)}; without one the "
            "file's own tokenizer is used"
        )
    name = str(given.hf_tokenizer.name_or_path)
    folder = Path(name)
    if not folder.is_dir():
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(name, "tokenizer.json")
        if not isinstance(found, str):
            raise RequestError(
                f"tokenizer: expected one with a tokenizer.json in a folder or in the hub's cache, "
                f"found {safe_repr(name)}; save it with save_pretrained and load it from there"
            )
        folder = Path(found).parent
    return folder


def _speculation(draft: object) -> dict[str, Any]:
    if not isinstance(draft, LlamaPromptLookupDecoding):
        raise RequestError(
            f"draft_model: expected LlamaPromptLookupDecoding(...), found {safe_repr(draft)}; "
            "other drafters are not supported. Answers are the same without one"
        )
    return {
        "method": "ngram",
        "num_speculative_tokens": min(draft.num_pred_tokens, _MOST_DRAFTS),
        "prompt_lookup_min": 1,
        "prompt_lookup_max": draft.max_ngram_size,
    }
