"""Option names of other libraries, and what to use here. ``docs/api.md`` has the same table."""

from __future__ import annotations

from typing import Any

from sdk.errors import RequestError
from sdk.kernels.dataclass import dataclass
from sdk.quant.safe_repr import safe_repr

#: Any value is accepted: the option is about another engine's internals, not about its answers.
_ANY = object()


@dataclass(frozen=True, slots=True)
class OtherName:
    """``here``: what to write instead. ``off``: values that match our behaviour anyway."""

    here: str
    off: tuple[object, ...] = ()


#: Options of vLLM's LLM, of llama-cpp-python's Llama and of transformers' from_pretrained.
ENGINE: dict[str, OtherName] = {
    # vLLM
    "disable_log_stats": OtherName("nothing is logged; use get_metrics()", (True,)),
    "disable_log_requests": OtherName("requests are not logged", (True,)),
    "enable_log_requests": OtherName("requests are not logged", (False,)),
    "task": OtherName(
        "one LLM generates, embeds, classifies and scores; nothing else is served",
        ("auto", "generate", "embed", "embedding", "classify", "score"),
    ),
    "runner": OtherName(
        "one LLM generates, embeds, classifies and scores; nothing else is served",
        ("auto", "generate", "pooling"),
    ),
    "convert": OtherName(
        "the checkpoint decides; leave it unset", ("auto", "none", "embed", "classify")
    ),
    "model_impl": OtherName("this library's own model code is used if it has any", ("auto",)),
    "config_format": OtherName("the format is detected", ("auto", "hf", "mistral")),
    "stream_interval": OtherName("every token is streamed", (1,)),
    "logprobs_mode": OtherName("log-probabilities are the model's own", ("raw_logprobs",)),
    "num_scheduler_steps": OtherName("every step is scheduled", (1,)),
    "cpu_offload_gb": OtherName("use disk_offload='4GiB', or cpu_offload='4GiB' on a GPU", (0,)),
    "async_scheduling": OtherName("", (_ANY,)),
    "disable_cascade_attn": OtherName("", (_ANY,)),
    "disable_custom_all_reduce": OtherName("", (_ANY,)),
    "enable_sleep_mode": OtherName("", (_ANY,)),
    "max_logprobs": OtherName("", (_ANY,)),
    "max_parallel_loading_workers": OtherName("", (_ANY,)),
    "max_seq_len_to_capture": OtherName("", (_ANY,)),
    "prefix_caching_hash_algo": OtherName("", (_ANY,)),
    "served_model_name": OtherName("", (_ANY,)),
    "use_v2_block_manager": OtherName("", (_ANY,)),
    "rope_scaling": OtherName("use hf_overrides={'rope_scaling': {...}}"),
    "rope_theta": OtherName("use hf_overrides={'rope_theta': ...}"),
    "tokenizer_revision": OtherName("download the tokenizer and pass tokenizer=FOLDER"),
    "hf_token": OtherName("log in once with `hf auth login`, or set HF_TOKEN"),
    "use_tqdm_on_load": OtherName("use on_progress=", (True,)),
    "preemption_mode": OtherName("use swap_space= to keep pages", ("recompute",)),
    "limit_mm_per_prompt": OtherName("models read text only"),
    # llama-cpp-python
    "model_path": OtherName("pass the file as the first argument, model"),
    "n_ctx": OtherName("use max_model_len (default: the model's own context)"),
    "n_batch": OtherName("use max_num_batched_tokens"),
    "n_ubatch": OtherName("use max_num_batched_tokens"),
    "n_threads": OtherName("use num_threads"),
    "n_threads_batch": OtherName("use num_threads"),
    "n_gpu_layers": OtherName("use device='cuda', and cpu_offload if the model is too large", (0,)),
    "main_gpu": OtherName("make the LLM inside `with torch.cuda.device(...)`", (0,)),
    "tensor_split": OtherName("every GPU has an equal part; use tensor_parallel_size"),
    "split_mode": OtherName("use tensor_parallel_size or pipeline_parallel_size"),
    "type_k": OtherName("use kv_cache_dtype, such as 'int8' or 'k8v4'"),
    "type_v": OtherName("use kv_cache_dtype, such as 'int8' or 'k8v4'"),
    "flash_attn": OtherName("", (_ANY,)),
    "use_mmap": OtherName("weights are packed while they are loaded", (True,)),
    "use_mlock": OtherName("memory is not locked", (False,)),
    "embedding": OtherName("", (_ANY,)),
    "logits_all": OtherName("use SamplingParams(prompt_logprobs=...)", (False,)),
    "chat_format": OtherName("use chat_template="),
    "lora_path": OtherName("use enable_lora=True and add_lora('name', path)"),
    "rope_freq_base": OtherName("use hf_overrides={'rope_theta': ...}", (0, 0.0)),
    "verbose": OtherName("use logging.getLogger('sdk'), and explain()", (False,)),
    "draft_model": OtherName("use speculative_config={'model': ...}, or 'ngram'"),
    # transformers
    "pretrained_model_name_or_path": OtherName("pass the model as the first argument, model"),
    "device_map": OtherName("use device='cuda'", ("auto", "cpu")),
    "torch_dtype": OtherName("use dtype"),
    "load_in_4bit": OtherName("use quantization='int4'", (False,)),
    "load_in_8bit": OtherName("use quantization='int8'", (False,)),
    "quantization_config": OtherName("use quantization='int4' or 'int8'"),
    "attn_implementation": OtherName("kernels are chosen automatically; explain() lists them"),
    "low_cpu_mem_usage": OtherName("", (_ANY,)),
    "max_memory": OtherName("use memory='2GiB'"),
    "offload_folder": OtherName("use disk_offload='auto' and disk_offload_path"),
    "cache_dir": OtherName("use download_dir"),
    "token": OtherName("log in once with `hf auth login`, or set HF_TOKEN"),
    "use_safetensors": OtherName("pickle files are never opened", (True,)),
}

#: Parameters of transformers' generate, of llama-cpp-python's calls and of OpenAI's API.
SAMPLING: dict[str, str] = {
    "max_new_tokens": "use max_tokens",
    "max_completion_tokens": "use max_tokens",
    "max_length": "use max_tokens, which counts only the answer",
    "min_new_tokens": "use min_tokens",
    "do_sample": "use temperature: 0 always takes the most likely token, a higher one samples",
    "num_return_sequences": "use n",
    "num_beams": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "use_beam_search": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "length_penalty": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "early_stopping": "use llm.beam_search(prompts, BeamSearchParams(...))",
    "stop_strings": "use stop",
    "stopping_criteria": "use stop, stop_token_ids or stop_regex",
    "eos_token_id": "use stop_token_ids; the model's own EOS tokens always end an answer",
    "pad_token_id": "prompts are not padded",
    "bad_words_ids": "use bad_words, a list of strings",
    "repeat_penalty": "use repetition_penalty",
    "temp": "use temperature",
    "penalty_alpha": "contrastive search is not available in this release",
    "tfs_z": "use min_p or typical_p",
    "stream": "call LLM.stream or LLM.astream",
    "streamer": "call LLM.stream or LLM.astream",
    "echo": "the output has the prompt: output.prompt + output.outputs[0].text",
    "top_logprobs": "use logprobs, a number",
    "response_format": "use structured_outputs, such as {'json': schema} or {'json_object': True}",
    "grammar": "use structured_outputs={'grammar': ...}",
    "json_schema": "use structured_outputs={'json': schema}",
}


def without_effect(name: str, value: Any) -> bool:
    """Whether another library's option, with this value, matches our behaviour anyway.

    :raises RequestError: the option is known, but its value is not supported.
    """
    known = ENGINE.get(name)
    if known is None:
        return False
    if value is None or known.off == (_ANY,) or any(_same(value, off) for off in known.off):
        return True
    if not known.off:
        return False
    raise RequestError(f"{name}={safe_repr(value)} is not available: {known.here}")


def _same(value: object, off: object) -> bool:
    """``1`` is not ``True``."""
    return type(value) is type(off) and value == off
