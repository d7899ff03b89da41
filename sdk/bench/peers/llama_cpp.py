"""llama.cpp through llama-cpp-python's C functions, all requests in one batch."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

from .opening import Opening

#: Tokens of a batch.
BATCH = 512
#: Its own default is float16.
KV = {
    "auto": "F16", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "int16": "F16",
    "int8": "Q8_0", "int4": "Q4_0",
}  # fmt: skip


class LlamaCpp:
    def __init__(self, opening: Opening) -> None:
        import llama_cpp

        start = time.perf_counter()
        self.api: Any = llama_cpp
        # Stored on self, because ctypes frees a callback without references.
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            opening.model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"it cannot load {opening.model}")
        self.context = llama_cpp.llama_init_from_model(self.model, self._params(opening))
        if not self.context:
            raise RuntimeError("it cannot make a context")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.prefix_cache = opening.prefix_cache
        self.cached: list[int] = []
        self._classes: dict[bool, Any] = {}
        self._opening = {
            "model_path": opening.model,
            "n_ctx": opening.context,
            "n_batch": BATCH,
            "n_threads": opening.threads,
            "n_threads_batch": opening.threads,
            "seed": 1,
        }
        self.hello = {
            "name": f"llama.cpp (llama-cpp-python {llama_cpp.__version__})",
            "kv": KV[opening.kv].lower(),
            "vocab_size": self.vocab_size,
            "open_s": time.perf_counter() - start,
        }

    def _params(self, opening: Opening) -> Any:
        kv = KV[opening.kv]
        params = self.api.llama_context_default_params()
        # Every sequence gets n_ctx / n_seq_max cells; llama.cpp rounds that to 256.
        params.n_ctx = opening.requests * (-(-opening.context // 256) * 256)
        params.n_seq_max = opening.requests
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = opening.threads
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
