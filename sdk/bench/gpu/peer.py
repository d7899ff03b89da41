"""Runs transformers on a model of random weights: one JSON question on stdin, one answer.

A script, run by path; it imports nothing from this package. ``{"what": "generate" or
"generate_batch", "config", "device", "lengths": [[prompt, output], ...]}`` ->
``{"tokens_per_s"}``: greedy, end-of-text ignored, after a short warm-up.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Sequence
from typing import Any


def open_model(config: dict[str, Any], device: str) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    facts = dict(config)
    made = AutoConfig.for_model(facts.pop("model_type"), **facts)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16)
    model.eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompts(lengths: Sequence[Sequence[int]], vocabulary: int) -> list[list[int]]:
    draw = random.Random(1)
    return [[draw.randrange(vocabulary) for _ in range(prompt)] for prompt, _ in lengths]


def generate(model: Any, lengths: Sequence[Sequence[int]]) -> int:
    """All prompts in one batch of equal lengths; returns the number of tokens generated."""
    import torch

    ids = torch.tensor(prompts(lengths, model.config.vocab_size), device=model.device)
    output = lengths[0][1]
    with torch.inference_mode():
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=output,
            min_new_tokens=output,
        )
    return int(found[:, ids.shape[1] :].numel())


def generate_batch(model: Any, lengths: Sequence[Sequence[int]]) -> int:
    """What ``model.generate_batch`` does, but with a separate length for every request."""
    from transformers import GenerationConfig

    config = GenerationConfig(
        do_sample=False, eos_token_id=-1, pad_token_id=0, max_new_tokens=lengths[0][1]
    )
    manager = model.init_continuous_batching(generation_config=config)
    manager.start()
    tokens = done = 0
    try:
        for ids, (_, output) in zip(
            prompts(lengths, model.config.vocab_size), lengths, strict=True
        ):
            manager.add_request(ids, max_new_tokens=output, eos_token_id=-1)
        while done < len(lengths):
            result = manager.get_result(timeout=1)
            if result is None:
                if not manager.is_running():
                    raise RuntimeError("the thread of transformers' manager ended early")
            elif result.is_finished():
                if getattr(result, "error", None):
                    raise RuntimeError(str(result.error))
                done += 1
                tokens += len(result.generated_tokens)
    finally:
        manager.stop(block=True)
    return tokens


def answer(question: dict[str, Any]) -> dict[str, float]:
    run = {"generate": generate, "generate_batch": generate_batch}[question["what"]]
    model = open_model(question["config"], question["device"])
    lengths = question["lengths"]
    run(model, [(prompt, min(output, 4)) for prompt, output in lengths])
    begin = time.perf_counter()
    tokens = run(model, lengths)
    expected = sum(output for _, output in lengths)
    if tokens != expected:
        raise RuntimeError(f"expected {expected} tokens, found {tokens}")
    return {"tokens_per_s": tokens / (time.perf_counter() - begin)}


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: transformers must not import our modules by their short names
    found = answer(json.load(sys.stdin))
    print(json.dumps(found))
