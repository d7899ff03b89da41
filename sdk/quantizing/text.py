"""What a model reads while it is calibrated: the caller's text, or one that Python brings along."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sdk.errors import RequestError
from sdk.models.config import ModelConfig
from sdk.quant.tokenizer import Tokenizer

#: Text or texts, or token ids: one list of a sequence each.
Calibration = str | Sequence[str] | Sequence[Sequence[int]]


def calibration_ids(
    given: Calibration | None,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    sequences: int,
    tokens: int,
) -> Tensor:
    """Token ids int64 ``[S, tokens]``: as many sequences as the text has, up to ``sequences``.

    Args:
        given: None for the built-in text, Python's own help topics (English prose, tables and
            programs, 550 KB). Texts are joined, and cut into sequences from the beginning.
        tokenizer: of the model; not needed where ids are given.

    Raises:
        RequestError: too little text, ids outside the vocabulary, or no tokenizer.
    """
    if min(sequences, tokens) < 1:
        raise RequestError(
            f"calibration: expected 1 or more sequences and tokens, found {sequences} and {tokens}"
        )
    if tokens > config.max_position:
        raise RequestError(
            f"calibration: expected sequences of {config.max_position} tokens at most, the context "
            f"of the model, found {tokens}"
        )
    if given is not None and not isinstance(given, str) and given and not isinstance(given[0], str):
        ids = [int(token) for row in given for token in row]
    else:
        if tokenizer is None:
            raise RequestError("calibration: the model has no tokenizer: give lists of token ids")
        texts = [_built_in()] if given is None else [given] if isinstance(given, str) else given
        ids = tokenizer.encode("\n\n".join(map(str, texts)), add_special_tokens=False)
    sequences = min(sequences, len(ids) // tokens)
    if not sequences:
        raise RequestError(f"calibration: expected at least {tokens} tokens, found {len(ids)}")
    found = torch.tensor(ids[: sequences * tokens], dtype=torch.int64).view(sequences, tokens)
    if int(found.min()) < 0 or int(found.max()) >= config.vocab_size:
        raise RequestError(
            f"calibration: expected token ids from 0 to {config.vocab_size - 1}, found "
            f"{int(found.min())} to {int(found.max())}"
        )
    return found


def _built_in() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
