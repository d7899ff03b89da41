"""Prompt embeddings: vectors in place of token ids, checked and copied."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.quant.safe_repr import safe_repr

Embeds = NDArray[np.float32]


def read_embeds(value: Any, hidden_size: int) -> Embeds:
    """A float32 copy of a tensor or an array ``[T, hidden_size]`` of floats.

    :raises RequestError: it has another type or shape, or a number that is not finite.
    """
    if hasattr(value, "detach"):  # a torch tensor; numpy has no bfloat16
        value = value.detach().cpu()
        value = value.float().numpy() if value.is_floating_point() else value.numpy()
    if not isinstance(value, np.ndarray) or value.dtype.kind != "f":
        kind = f"an array of {value.dtype}" if hasattr(value, "dtype") else safe_repr(value)
        raise RequestError(
            f"prompt_embeds: expected a torch tensor or a numpy array of floats, found {kind}"
        )
    if value.ndim != 2 or value.shape[1] != hidden_size or not value.shape[0]:
        raise RequestError(
            f"prompt_embeds: expected shape [tokens, {hidden_size}] (the model's hidden size) with "
            f"at least one token, found {list(value.shape)}"
        )
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes infinite: see below
        embeds: Embeds = np.array(value, np.float32, order="C")
    if not np.isfinite(embeds).all():
        row = int(np.flatnonzero(~np.isfinite(embeds).all(axis=1))[0])
        raise RequestError(f"prompt_embeds[{row}]: expected finite float32 numbers, found others")
    return embeds


def embeds_salt(embeds: Embeds, salt: str | None) -> str:
    """A cache salt for these embeddings only: their placeholder token ids are all the same."""
    return f"{blake2b(embeds.tobytes()).hexdigest()}{'' if salt is None else ' ' + salt}"


def check_params(params: SamplingParams, has_negative: bool) -> None:
    """:raises RequestError: a parameter reads the prompt's tokens, and there are none."""
    if params.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs: prompt_embeds have no tokens to score; leave it out")
    if params.token_healing:
        raise RequestError("token_healing: prompt_embeds have no tokens to take; leave it out")
    if params.guidance_scale != 1.0 and not has_negative:
        raise RequestError(
            "guidance_scale: prompt_embeds have no last token to use as the negative prompt; pass "
            "a negative_prompt"
        )
