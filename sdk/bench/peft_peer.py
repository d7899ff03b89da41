"""Decodes with peft on transformers, for the lora suite of the bench: JSON in, JSON out.

A script, run by path in any interpreter that has peft; it imports nothing from this package. It
reads ``{"model", "adapters", "prompt_len", "output_len", "rounds", "requests", "cases"}`` and
writes ``{"version", "rows": [{"requests", "case", "rates": [[plain, with adapters], ...]}]}`` in
tokens per second. All requests are one batch, in float32.
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext
from typing import Any


def rate(model: Any, prompts: Any, output_len: int, names: list[str] | None) -> float:
    """Tokens per second after the prompts. ``names``: the adapter of each request, or none."""
    import torch

    mixed: dict[str, Any] = {}
    if names is not None and len(set(names)) > 1:
        mixed["adapter_names"] = names
    elif names is not None:
        model.set_adapter(names[0])
    with torch.no_grad(), model.disable_adapter() if names is None else nullcontext():
        out = model(prompts, use_cache=True, **mixed)
        begin = time.perf_counter()
        for _ in range(output_len - 1):
            tokens = out.logits[:, -1].argmax(-1, keepdim=True)
            out = model(tokens, past_key_values=out.past_key_values, use_cache=True, **mixed)
        return float((output_len - 1) * len(prompts) / (time.perf_counter() - begin))


def main() -> None:
    asked = json.load(sys.stdin)
    import peft
    import torch
    import transformers

    how = {"dtype": torch.float32}
    base = transformers.AutoModelForCausalLM.from_pretrained(asked["model"], **how)
    paths = asked["adapters"]
    model: Any = peft.PeftModel.from_pretrained(base, paths[0], adapter_name="0")
    for number, path in enumerate(paths[1:], 1):
        model.load_adapter(path, adapter_name=str(number))
    model.eval()
    rows = []
    for count in asked["requests"]:
        generator = torch.Generator().manual_seed(count)
        shape = count, asked["prompt_len"]
        prompts = torch.randint(
            min(1000, model.config.vocab_size // 2),
            model.config.vocab_size,
            shape,
            generator=generator,
        )
        for case in asked["cases"]:
            names = {"beside": None, "one": ["0"] * count}.get(case, [str(n) for n in range(count)])
            rates = []
            for number in range(-1, asked["rounds"]):
                pair = [rate(model, prompts, asked["output_len"], who) for who in (None, names)]
                if number >= 0:
                    rates.append(pair)
            rows.append({"requests": count, "case": case, "rates": rates})
    json.dump({"version": peft.__version__, "rows": rows}, sys.stdout)


if __name__ == "__main__":
    main()
