"""Adapters that the ``peft`` package makes and saves, and its logits with them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sdk import LLM, SamplingParams


def with_peft(base: Path | Any, seed: int = 0, **config: Any) -> Any:
    """A model of transformers (or of a folder) with random factors: peft's own start as zeros."""
    import transformers
    from peft import LoraConfig, get_peft_model

    if isinstance(base, Path):
        how = {"dtype": torch.float32, "attn_implementation": "eager"}
        with quiet(transformers):
            base = transformers.AutoModelForCausalLM.from_pretrained(base, **how)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(base, LoraConfig(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            scale = 0.2 if "bias" in name else 0.3 / (min(parameter.shape) ** 0.5)
            with torch.no_grad():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without warnings and progress bars of transformers, whose settings are the process's."""
    log, before = transformers.utils.logging, transformers.utils.logging.get_verbosity()
    bars = log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(before)
        if bars:
            log.enable_progress_bar()


def save(model: Any, folder: Path) -> Path:
    """Save as PEFT does."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(folder)
    return folder


def adapter(folder: Path, base: Path | Any, seed: int = 0, **config: Any) -> Path:
    """Save an adapter with random factors."""
    return save(with_peft(base, seed, **config), folder)


def expected(model: Any, ids: Sequence[int]) -> Tensor:
    """Log-probabilities ``[T, vocab]`` by transformers and peft."""
    with torch.no_grad():
        return model(torch.tensor([list(ids)])).logits[0].float().log_softmax(-1)


SCORED = SamplingParams(temperature=0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)


def scores(llm: LLM, ids: Sequence[int], lora: Any) -> Tensor:
    """The same by an ``LLM``: after each token of the prompt."""
    [output] = llm.generate(list(ids), SCORED, lora_request=lora, use_tqdm=False)
    return table(output)


def table(output: Any) -> Tensor:
    """The log-probabilities of an output with ``SCORED``, ``[T, vocab]``."""
    rows = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    return torch.tensor([[row[token].logprob for token in range(len(row))] for row in rows])
