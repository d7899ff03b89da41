"""Text cut into sequences of tokens, for calibration and evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.api.errors import RequestError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.models.configs.config import ModelConfig
from sdk.quant.tokenizer import Tokenizer

#: One or more texts, or token ids: one list per sequence.
Text = str | Sequence[str] | Sequence[Sequence[int]]

#: Characters of the built-in text reserved for evaluation; all others are for calibration.
_HELD_OUT = 65536


def token_sequences(
    what: str,
    text: Text,
    tokenizer: Tokenizer | None,
    config: ModelConfig,
    sequences: int,
    tokens: int,
) -> Tensor:
    """Token ids int64 ``[S, tokens]``: as many sequences as the text has, up to ``sequences``.

    Texts are joined and cut from the beginning. If the model begins texts with BOS, so does every
    sequence; lists of ids are used as given.

    Args:
        what: the parameter that error messages name.
        tokenizer: the model's; not needed for token ids.

    Raises:
        RequestError: too little text, ids outside the vocabulary, or no tokenizer.
    """
    if min(sequences, tokens) < 1:
        raise RequestError(
            f"{what}: expected 1 or more sequences and tokens, found {sequences} and {tokens}"
        )
    if tokens > config.max_position:
        raise RequestError(
            f"{what}: expected sequences of at most {config.max_position} tokens, the model's "
            f"context, found {tokens}"
        )
    ids, begin = _encoded(what, text, tokenizer)
    own = tokens - len(begin)
    count = min(sequences, len(ids) // own) if own > 0 else 0
    if not count:
        length = len(begin) + len(ids) if ids else 0
        raise RequestError(
            f"{what}: expected at least {tokens} tokens, found {length}; pass more text or fewer "
            "tokens per sequence"
        )
    found = torch.tensor(ids[: count * own], dtype=torch.int64).view(count, own)
    if int(found.min()) < 0 or int(found.max()) >= config.vocab_size:
        raise RequestError(
            f"{what}: expected token ids from 0 to {config.vocab_size - 1}, found "
            f"{int(found.min())} to {int(found.max())}"
        )
    return torch.cat((torch.tensor(begin, dtype=torch.int64).expand(count, -1), found), 1)


def _encoded(what: str, text: Text, tokenizer: Tokenizer | None) -> tuple[list[int], list[int]]:
    """The ids of the whole text, and those that every sequence begins with."""
    if not isinstance(text, str) and text and not isinstance(text[0], str):
        return [int(token) for row in text for token in row], []
    if tokenizer is None:
        raise RequestError(f"{what}: the model has no tokenizer; pass lists of token ids")
    texts = [text] if isinstance(text, str) else text
    ids = tokenizer.encode("\n\n".join(map(str, texts)), add_special_tokens=False)
    begin = tokenizer.encode("a")[:1]
    return ids, begin if begin == [tokenizer.bos_token_id] else []


def calibration_text() -> str:
    """Python's help topics (English prose, tables and programs, 500 KB) without
    :func:`evaluation_text`."""
    return _topics()[_HELD_OUT:]


def evaluation_text() -> str:
    """The first 64 KiB of Python's help topics, which calibration does not use by default."""
    return _topics()[:_HELD_OUT]


def _topics() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
