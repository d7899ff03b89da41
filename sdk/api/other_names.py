"""Option names of other libraries, and what to use here. ``docs/api.md`` has the same table."""

from __future__ import annotations

from typing import Any

from sdk.api.errors import RequestError
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

#: Parameters of transformers' generate, of llama-cpp-python's calls and of OpenAI's, Ollama's and
#: other APIs; and those of structures, which are inside of structured_outputs here.
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
    "json": "use structured_outputs={'json': schema}, or generate(..., returns=schema)",
    "schema": "use structured_outputs={'json': schema}, or generate(..., returns=schema)",
    "format": "use structured_outputs={'json': schema} or {'json_object': True}",
    "regex": "use structured_outputs={'regex': ...}",
    "choice": "use structured_outputs={'choice': [...]}",
    "choices": "use structured_outputs={'choice': [...]}",
    "json_object": "use structured_outputs={'json_object': True}",
    "structural_tag": "use structured_outputs={'structural_tag': ...}",
    "guided_json": "use structured_outputs={'json': schema}",
    "guided_regex": "use structured_outputs={'regex': ...}",
    "guided_choice": "use structured_outputs={'choice': [...]}",
    "guided_grammar": "use structured_outputs={'grammar': ...}",
    "best_of_n": "use best_of",
    "num_predict": "use max_tokens",
    "n_predict": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "max_gen_toks": "use max_tokens",
    "max_gen_len": "use max_tokens",
    "max_tokens_to_sample": "use max_tokens",
    "stop_sequences": "use stop",
    "stop_words": "use stop",
    "stop_tokens": "use stop, strings, or stop_token_ids",
    "repetition_context_size": "repetition_penalty counts the prompt and the whole answer",
    "repeat_last_n": "repetition_penalty counts the prompt and the whole answer",
    "repeat_penalty_last_n": "repetition_penalty counts the prompt and the whole answer",
    "mirostat": "use mirostat_mode=2",
    "typical": "use typical_p",
    "random_seed": "use seed",
    "random_state": "use seed",
    "n_probs": "use logprobs, a number",
    "output_scores": "use logprobs, a number",
    "return_full_text": "the output has the prompt: output.prompt + output.outputs[0].text",
    "reasoning_effort": "use chat(..., chat_template_kwargs={'reasoning_effort': ...})",
    "enable_thinking": "use chat(..., chat_template_kwargs={'enable_thinking': False})",
    "suffix": "use a prompt {'prompt': ..., 'suffix': ...}",
}

#: Keywords that other libraries' calls have, or that belong to another call of ours.
CALLS: dict[str, str] = {
    "messages": "a conversation is the first argument of chat(messages)",
    "message": "a conversation is the first argument of chat(messages)",
    "system": "chat takes it as a message: [{'role': 'system', 'content': ...}, ...]",
    "system_prompt": "chat takes it as a message: [{'role': 'system', 'content': ...}, ...]",
    "params": "use sampling_params",
    "generation_config": "use sampling_params",
    "stream": "call stream(prompt) or astream(prompt)",
    "batch_size": "the engine makes its own batches, of up to LLM(..., max_num_seqs=...) requests",
    "show_progress_bar": "use use_tqdm",
    "verbose": "use use_tqdm, and logging.getLogger('sdk')",
    "normalize_embeddings": "embed normalizes; encode(..., normalize=False) does not",
    "truncate_dim": "embed(..., dimensions=N) keeps the first N numbers",
    "precision": 'embed(..., output_dtype="int8") and others',
    "convert_to_numpy": "use numpy.array([output.embedding for output in outputs])",
    "convert_to_tensor": "use encode, whose outputs.data is a tensor",
    "top_k_documents": "use top_n",
    "return_documents": "each output has its document",
    "timeout": "use SamplingParams(deadline=seconds), or asyncio.wait_for with an async call",
    "callback": "use stream, which yields pieces",
    "functions": "use chat(messages, tools=[...])",
    "response_model": "use returns=",
    "output_type": "use returns=",
    "adapter": "use lora_request=",
    "lora": "use lora_request=",
    "add_special_tokens": "pass {'prompt_token_ids': [...]} to choose the tokens yourself",
}

#: Attributes that other libraries' objects have, by the name of our class.
ATTRIBUTES: dict[str, dict[str, str]] = {
    "LLM": {
        "create_chat_completion": "use chat(messages)",
        "create_completion": "use generate(prompts)",
        "create_embedding": "use embed(prompts)",
        "complete": "use generate(prompts)",
        "completion": "use generate(prompts)",
        "invoke": "use generate(prompts) or chat(messages)",
        "ainvoke": "use agenerate(prompts) or achat(messages)",
        "predict": "use generate(prompts) or chat(messages)",
        "ask": "use generate(prompts) or chat(messages)",
        "run": "use generate(prompts) or chat(messages)",
        "batch": "use generate(prompts), which takes a list",
        "generate_stream": "use stream(prompt)",
        "stream_chat": "use stream(messages)",
        "chat_stream": "use stream(messages)",
        "tokenizer": "use get_tokenizer()",
        "tokenize": "use get_tokenizer().encode(text)",
        "detokenize": "use get_tokenizer().decode(ids)",
        "encode_text": "use get_tokenizer().encode(text)",
        "from_pretrained": "use LLM(model)",
        "load": "LLM(model) has loaded it",
        "unload": "use close(), or sleep() and wake_up()",
        "reset": "requests share no state; reset_prefix_cache() forgets cached prompts",
        "eval": "use sdk.evaluate(model)",
        "llm_engine": "use enqueue() and step()",
        "device": "use config.device, and explain() for what runs where",
        "n_ctx": "use max_model_len",
        "metrics": "use get_metrics()",
    },
    "RequestOutput": {
        "content": "use output.outputs[0].text",
        "message": "it comes with chat(..., tools=[...]); use output.outputs[0].text",
        "choices": "use output.outputs",
        "generated_text": "use output.outputs[0].text",
        "token_ids": "use output.outputs[0].token_ids",
        "logprobs": "use output.outputs[0].logprobs",
        "finish_reason": "use output.outputs[0].finish_reason",
        "parsed": "it comes with returns=: generate(prompts, returns=...)",
        "usage": "use len(output.prompt_token_ids) and len(output.outputs[0].token_ids)",
    },
    "CompletionOutput": {
        "content": "use text",
        "message": "it comes with chat(..., tools=[...]); use text",
        "generated_text": "use text",
        "parsed": "it comes with returns=: generate(prompts, returns=...)",
        "delta": "of a stream, text is what is new",
    },
    "EmbeddingOutput": {
        "outputs": "use embedding, a list of floats",
        "data": "use embedding, a list of floats",
        "tolist": "use embedding, a list of floats",
        "shape": "use len(output.embedding)",
    },
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
