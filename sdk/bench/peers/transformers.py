"""transformers: one batch of equally long prompts, with its own growing cache."""

from __future__ import annotations

import time
from typing import Any

from .opening import Opening

#: Keys and values have the model's type.
KV = ("auto",)


class Transformers:
    def __init__(self, opening: Opening) -> None:
        import torch
        import transformers

        if opening.prefix_cache:
            raise ValueError("it has no prefix cache")
        dtype = "bfloat16" if opening.engine.endswith("-bf16") else "float32"
        start = time.perf_counter()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            opening.model, dtype=getattr(torch, dtype)
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
