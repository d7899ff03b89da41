"""Runs another engine under the bench's load in its own process: JSON lines in, JSON lines out.

A script, run by path in any interpreter that has the engine; it imports nothing from this package.
Each line gets one reply. On failure the reply is ``{"error"}``, and it is the last one.

- First ``{"engine", "model", "threads", "requests", "context", "kv", "prefix_cache"}`` ->
  ``{"name", "kv", "vocab_size", "open_s"}``. ``requests``: the most at once; ``context``: tokens
  per request; ``kv``: the type of keys and values, or ``"auto"``. ``open_s`` excludes Python's
  imports.
- ``{"prompts": [[id, ...], ...], "output_len"}`` -> ``{"prefill_s", "decode_s", "decode_tokens"}``:
  greedy, end-of-text ignored, all requests concurrently.
- ``{"logits_of": [id, ...], "path"}`` -> ``{}``; writes float32 ``[ids, vocab_size]`` to ``path``.
- ``{"one": [id, ...], "output_len", "temperature", "schema", "drafts"}`` -> ``{"seconds",
  "tokens"}``: one request through the engine's own class, as an application would run it.
  ``schema``: a JSON schema or null; ``drafts``: whether it drafts from the prompt. ``seconds``:
  after the first token.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

BATCH = 512
#: --kv-dtype -> the name of llama.cpp's type; its own default is float16.
LLAMA_KV = {
    "auto": "F16", "float16": "F16", "bfloat16": "BF16", "float32": "F32",
    "int8": "Q8_0", "int4": "Q4_0",
}  # fmt: skip


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C functions, all requests in one batch."""

    def __init__(
        self,
        engine: str,
        model: str,
        threads: int,
        requests: int,
        context: int,
        kv: str,
        prefix_cache: bool,
    ) -> None:
        import llama_cpp

        if kv not in LLAMA_KV:
            raise ValueError(f"llama.cpp: expected kv one of {', '.join(LLAMA_KV)}, found {kv!r}")
        start = time.perf_counter()
        self.api: Any = llama_cpp
        # Stored on self, because ctypes frees a callback without references.
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        self.context = llama_cpp.llama_init_from_model(
            self.model, self._params(threads, requests, context, LLAMA_KV[kv])
        )
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.prefix_cache = prefix_cache
        self.cached: list[int] = []
        self._classes: dict[bool, Any] = {}
        self._opening = {
            "model_path": model,
            "n_ctx": context,
            "n_batch": BATCH,
            "n_threads": threads,
            "n_threads_batch": threads,
            "seed": 1,
        }
        self.hello = {
            "name": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
            "kv": LLAMA_KV[kv].lower(),
            "vocab_size": self.vocab_size,
            "open_s": time.perf_counter() - start,
        }

    def _params(self, threads: int, requests: int, context: int, kv: str) -> Any:
        params = self.api.llama_context_default_params()
        # Every sequence gets n_ctx / n_seq_max cells; llama.cpp rounds that to 256.
        params.n_ctx = requests * (-(-context // 256) * 256)
        params.n_seq_max = requests
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        params.type_k = params.type_v = getattr(self.api, f"GGML_TYPE_{kv}")
        if kv in ("Q8_0", "Q4_0"):  # quantized values need it; otherwise llama.cpp decides
            params.flash_attn_type = self.api.LLAMA_FLASH_ATTN_TYPE_ENABLED
        return params

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        start = time.perf_counter()
        tokens = self._prefill(prompts, self._keep_prefix(prompts))
        prefilled = time.perf_counter()
        for step in range(output_len - 1):
            rows = [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)]
            self._decode(rows)
            tokens = [self._argmax(i) for i in range(len(rows))]
        return {
            "prefill_s": prefilled - start,
            "decode_s": time.perf_counter() - prefilled,
            "decode_tokens": (output_len - 1) * len(prompts),
        }

    def run_one(
        self,
        one: list[int],
        output_len: int,
        temperature: float,
        schema: dict[str, Any] | None,
        drafts: bool,
    ) -> dict[str, Any]:
        llm = self._class(drafts)
        grammar = None
        if schema is not None:
            text = json.dumps(schema)
            grammar = self.api.LlamaGrammar.from_json_schema(text, verbose=False)
        tokens: list[int] = []
        first = last = time.perf_counter()
        for token in llm.generate(one, temp=temperature, top_p=0.9, top_k=0, grammar=grammar):
            last = time.perf_counter()
            first = first if tokens else last
            tokens.append(token)
            if len(tokens) == output_len or (grammar and token == llm.token_eos()):
                break
        return {"seconds": last - first, "tokens": tokens}

    def _class(self, drafts: bool) -> Any:
        """llama-cpp-python's class, once with and once without its drafts from the prompt."""
        if drafts not in self._classes:
            from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

            self._classes[drafts] = self.api.Llama(
                **self._opening,
                draft_model=LlamaPromptLookupDecoding(num_pred_tokens=8) if drafts else None,
                logits_all=drafts,
                verbose=False,
            )
        return self._classes[drafts]

    def logits(self, prompt: list[int]) -> Iterator[Any]:
        self._keep_prefix([[]])
        for start in range(0, len(prompt), BATCH):
            chunk = prompt[start : start + BATCH]
            self._decode([(token, start + i, 0, True) for i, token in enumerate(chunk)])
            for row in range(len(chunk)):
                yield self._logits(row)

    def _keep_prefix(self, prompts: list[list[int]]) -> int:
        """Clear the cache, except a single prompt's prefix; the number of tokens kept."""
        memory = self.api.llama_get_memory(self.context)
        kept = 0
        if self.prefix_cache:
            last = len(prompts[0]) - 1  # the last token always runs, because its logits are needed
            for old, new in zip(self.cached, prompts[0][:last], strict=False):
                if old != new:
                    break
                kept += 1
            self.cached = prompts[0]
            self.api.llama_memory_seq_rm(memory, 0, kept, -1)
        else:
            self.api.llama_memory_clear(memory, True)
        return kept

    def _prefill(self, prompts: list[list[int]], kept: int) -> list[int]:
        """The first token of every request."""
        rows = [
            (token, position, i, position == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ][kept:]
        first: dict[int, int] = {}
        for start in range(0, len(rows), BATCH):
            chunk = rows[start : start + BATCH]
            self._decode(chunk)
            for index, (_, _, request, has_logits) in enumerate(chunk):
                if has_logits:
                    first[request] = self._argmax(index)
        return [first[i] for i in range(len(prompts))]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One forward pass over rows of (token, position, request, whether it needs logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, request, has_logits) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, request
            batch.logits[i] = has_logits
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")

    def _logits(self, row: int) -> Any:
        import numpy

        logits = self.api.llama_get_logits_ith(self.context, row)
        return numpy.ctypeslib.as_array(logits, (self.vocab_size,))

    def _argmax(self, row: int) -> int:
        return int(self._logits(row).argmax())


class Vllm:
    """vLLM, stepped through its own engine; environment variables set its threads."""

    def __init__(
        self,
        engine: str,
        model: str,
        threads: int,
        requests: int,
        context: int,
        kv: str,
        prefix_cache: bool,
    ) -> None:
        from vllm import LLM, __version__

        _only_auto(engine, kv)
        dtype = "bfloat16" if engine.endswith("-bf16") else "float32"
        start = time.perf_counter()
        self.llm = LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            max_num_seqs=requests,
            max_model_len=context,
            enable_prefix_caching=prefix_cache,
        )
        self.count = 0
        self.hello = {
            "name": f"vLLM {__version__} {dtype}",
            "kv": dtype,
            "vocab_size": self.llm.llm_engine.model_config.get_vocab_size(),
            "open_s": time.perf_counter() - start,
        }

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=0,
            max_tokens=output_len,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine = self.llm.llm_engine
        start = time.perf_counter()
        for prompt in prompts:
            self.count += 1
            engine.add_request(str(self.count), {"prompt_token_ids": prompt}, params)
        running: set[str] = set()
        prefilled = ended = start
        tokens, finished = 0, False
        while engine.has_unfinished_requests():
            outputs = engine.step()
            now = time.perf_counter()
            all_run = len(running) == len(prompts) and not finished
            for output in outputs:
                if all_run:
                    tokens += len(output.outputs[0].token_ids)
                    ended = now
                elif output.outputs[0].token_ids:
                    running.add(output.request_id)
                    if len(running) == len(prompts) and prefilled == start:
                        prefilled = ended = now
                finished = finished or output.finished
        return {
            "prefill_s": prefilled - start,
            "decode_s": ended - prefilled,
            "decode_tokens": tokens,
        }


class Transformers:
    """transformers: one batch of equally long prompts, with its own growing cache."""

    def __init__(
        self,
        engine: str,
        model: str,
        threads: int,
        requests: int,
        context: int,
        kv: str,
        prefix_cache: bool,
    ) -> None:
        import torch
        import transformers

        _only_auto(engine, kv)
        if prefix_cache:
            raise ValueError("transformers has no prefix cache")
        dtype = "bfloat16" if engine.endswith("-bf16") else "float32"
        start = time.perf_counter()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            model, dtype=getattr(torch, dtype)
        )
        self.model.eval()
        self.hello = {
            "name": f"transformers {transformers.__version__} {dtype}",
            "kv": dtype,
            "vocab_size": self.model.config.vocab_size,
            "open_s": time.perf_counter() - start,
        }

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        import torch

        with torch.inference_mode():
            start = time.perf_counter()
            tokens, cache = self._step(torch.tensor(prompts), None)
            prefilled = time.perf_counter()
            for _ in range(output_len - 1):
                tokens, cache = self._step(tokens, cache)
            end = time.perf_counter()
        return {
            "prefill_s": prefilled - start,
            "decode_s": end - prefilled,
            "decode_tokens": (output_len - 1) * len(prompts),
        }

    def _step(self, tokens: Any, cache: Any) -> tuple[Any, Any]:
        out = self.model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        return out.logits[:, -1].argmax(-1, keepdim=True), out.past_key_values


def _only_auto(engine: str, kv: str) -> None:
    if kv != "auto":
        raise ValueError(
            f"{engine}: keys and values have the model's type; expected auto, found {kv}"
        )


def open_peer(engine: str, **opening: Any) -> Any:
    """The engine of that name."""
    kinds = {"llama.cpp": LlamaCpp, "vllm": Vllm, "transformers": Transformers}
    return kinds[engine.removesuffix("-bf16")](engine, **opening)


def answers(lines: Iterable[str], open_engine: Callable[..., Any]) -> Iterator[dict[str, Any]]:
    """One reply per line, errors included; the first error is the last reply."""
    questions = (json.loads(line) for line in lines)
    try:
        engine = open_engine(**next(questions))
        yield engine.hello
        for question in questions:
            if "logits_of" in question:
                with open(question["path"], "wb") as file:
                    for row in engine.logits(question["logits_of"]):
                        file.write(row.tobytes())
                yield {}
            elif "one" in question:
                yield engine.run_one(**question)
            else:
                yield engine.measure(**question)
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {error}"}


def serve(open_engine: Callable[..., Any]) -> None:
    """Answer standard input until it ends."""
    # Engines log to standard output, some from C code: redirect it to standard error.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        for answer in answers(iter(sys.stdin.readline, ""), open_engine):
            print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: engines must not import our modules by their short names
    serve(open_peer)
