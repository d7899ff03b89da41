"""llama.cpp under the same load, in its own process: requests and results are JSON lines.

A script, run by path in any interpreter that has llama-cpp-python; imports nothing of this package.
First line in: ``{"model", "threads", "streams", "context"}`` (streams: the most at once; context:
tokens per stream), out: ``{"name"}``. Then per line in: ``{"prompts": [[id, ...], ...],
"output_len"}``, out: ``{"prefill_s", "decode_s", "decode_tokens"}``. ``{"error"}`` on failure.
Greedy, end-of-text ignored, KV cache in float16 (llama.cpp's default), all streams in one batch.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from typing import Any

BATCH = 512


class Peer:
    """A model and a context for ``streams`` sequences."""

    def __init__(self, model: str, threads: int, streams: int, context: int) -> None:
        import llama_cpp

        self.api: Any = llama_cpp
        # Kept on self: ctypes frees a callback nothing refers to.
        self._quiet = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._quiet, None)
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(
            model.encode(), llama_cpp.llama_model_default_params()
        )
        if not self.model:
            raise RuntimeError(f"llama.cpp cannot load {model}")
        params = llama_cpp.llama_context_default_params()
        # Every sequence gets n_ctx / n_seq_max cells, rounded to 256 by llama.cpp.
        params.n_ctx = streams * (-(-context // 256) * 256)
        params.n_seq_max = streams
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        if not self.context:
            raise RuntimeError("llama.cpp cannot make a context")
        vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self.name = f"llama.cpp (llama-cpp-python {llama_cpp.__version__})"

    def measure(self, prompts: list[list[int]], output_len: int) -> dict[str, float]:
        """Prefill all prompts, then decode them together; seconds of each."""
        memory = self.api.llama_get_memory(self.context)
        self.api.llama_memory_clear(memory, True)
        start = time.perf_counter()
        tokens = self._prefill(prompts)
        prefilled = time.perf_counter()
        for step in range(output_len - 1):
            rows = [(token, len(prompts[i]) + step, i, True) for i, token in enumerate(tokens)]
            self._decode(rows)
            tokens = [self._argmax(i) for i in range(len(rows))]
        end = time.perf_counter()
        return {
            "prefill_s": prefilled - start,
            "decode_s": end - prefilled,
            "decode_tokens": (output_len - 1) * len(prompts),
        }

    def _prefill(self, prompts: list[list[int]]) -> list[int]:
        """The first token of every stream."""
        rows = [
            (token, position, i, position == len(prompt) - 1)
            for i, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        first: dict[int, int] = {}
        for start in range(0, len(rows), BATCH):
            chunk = rows[start : start + BATCH]
            self._decode(chunk)
            for index, (_, _, stream, wanted) in enumerate(chunk):
                if wanted:
                    first[stream] = self._argmax(index)
        return [first[i] for i in range(len(prompts))]

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """One forward pass over (token, position, stream, wants logits)."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, stream, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, stream
            batch.logits[i] = wanted
        code = self.api.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode ended with {code}")

    def _argmax(self, row: int) -> int:
        import numpy

        logits = self.api.llama_get_logits_ith(self.context, row)
        return int(numpy.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())


def answers(lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """One reply per line, errors included; the first error is the last reply."""
    try:
        peer = Peer(**json.loads(next(lines)))
        yield {"name": peer.name}
        for line in lines:
            yield peer.measure(**json.loads(line))
    except Exception as error:
        yield {"error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    for answer in answers(iter(sys.stdin.readline, "")):
        print(json.dumps(answer), flush=True)
