"""All logits of a prompt, computed by an engine's model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from os import PathLike
from typing import Any

import torch
from torch import Tensor

from sdk.api.config import EngineConfig
from sdk.api.options import engine_config
from sdk.kernels.system import SYSTEM
from sdk.loading.load import Loaded, load


@contextmanager
def opened(config: EngineConfig) -> Iterator[Loaded]:
    """A loaded engine, closed at the end of the block."""
    loaded = load(config)
    try:
        yield loaded
    finally:
        loaded.engine.close()
        SYSTEM.trim_heap()


def logits_of(
    model: str | PathLike[str], token_ids: Sequence[int], *, step: int = 256, **options: Any
) -> Tensor:
    """Logits float32 ``[len(token_ids), vocab]``; runs the prompt ``step`` tokens at a time.

    ``options`` and errors are those of :class:`sdk.LLM`.
    """
    config = engine_config(
        model,
        **{
            "max_model_len": len(token_ids),
            "max_num_seqs": 1,
            "max_num_batched_tokens": step,
            "skip_tokenizer_init": True,
            **options,
        },
    )
    with opened(config) as loaded:
        return torch.cat([part.clone() for part in loaded.runner.prompt_logits(token_ids)])
