"""Prompts for fill-in-the-middle (FIM): a prefix and a suffix become one sequence of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.api.errors import RequestError
from sdk.quant.tokenizer import FimTokens, Tokenizer


def fim_tokens_of(tokenizer: Tokenizer, suffix_first: bool | None) -> FimTokens:
    """The model's tokens. :raises RequestError: it has none, or not for this order."""
    fim = tokenizer.fim_tokens
    if fim is None:
        raise RequestError(
            "suffix: the model's vocabulary has no fill-in-the-middle tokens (such as "
            "<|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>); use a code model that was trained "
            "with them, or leave the suffix out"
        )
    if fim.middle is None and suffix_first is False:
        raise RequestError(
            "suffix_first: expected True or nothing for this model, found False; it has no token "
            "between suffix and middle, so the suffix comes first"
        )
    return fim


def fim_prompt(
    tokenizer: Tokenizer,
    prefix: Sequence[int],
    suffix: Sequence[int],
    suffix_first: bool | None,
    keep: int | None,
) -> list[int]:
    """BOS and the tokens of a prompt, in the order of the model's training unless one is given.

    ``keep``: the most tokens. The prefix keeps its last tokens and the suffix its first ones, at
    least a quarter of the room if it is that long (as in llama.cpp).
    """
    fim = fim_tokens_of(tokenizer, suffix_first)
    bos = tokenizer.bos_token_id
    start = [bos] if bos is not None and tokenizer.encode("")[:1] == [bos] else []
    middle = [] if fim.middle is None else [fim.middle]
    if keep is not None:
        room = max(0, keep - len(start) - 2 - len(middle))
        taken = min(len(suffix), max(room // 4, room - len(prefix)))
        suffix = suffix[:taken]
        prefix = prefix[max(0, len(prefix) - (room - taken)) :]
    if not (fim.suffix_first if suffix_first is None else suffix_first):
        return [*start, fim.prefix, *prefix, fim.suffix, *suffix, *middle]
    if fim.prefix_token_first:
        return [*start, fim.prefix, fim.suffix, *suffix, *middle, *prefix]
    return [*start, fim.suffix, *suffix, fim.prefix, *prefix, *middle]
