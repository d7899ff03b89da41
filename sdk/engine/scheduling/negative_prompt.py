"""Classifier-free guidance (CFG): a request with a negative prompt runs as two sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.api.errors import RequestError
from sdk.engine.scheduling.request import Request

if TYPE_CHECKING:
    from sdk.engine.scheduling.scheduler_config import SchedulerConfig


def longest_answer(
    request: Request, negative: Request, config: SchedulerConfig, available: int
) -> int:
    """The longest answer for which both sequences of ``request`` fit ``available`` KV pages.

    :raises RequestError: no answer fits, or guidance is not possible with this ``config``.
    """
    own, other = request.num_tokens, negative.num_tokens
    if config.max_num_seqs < 2:
        raise RequestError(
            "guidance_scale: a request with a negative prompt takes two slots, and max_num_seqs is "
            f"{config.max_num_seqs}; use max_num_seqs=2 or more"
        )
    if not config.enable_chunked_prefill:
        raise RequestError("guidance_scale needs enable_chunked_prefill=True")
    if not other:
        raise RequestError("the negative prompt is empty: at least one token is needed")
    if other >= config.max_model_len:
        raise RequestError(
            f"the negative prompt has {other} tokens; max_model_len is "
            f"{config.max_model_len}, and at least 1 must be left for the answer"
        )
    size = config.page_size
    # The last token of an answer is never read back. Both tables' last pages may be part full.
    longest = (available * size - own - other) // 2 + 1
    while -(-(own + longest - 1) // size) - (-(other + longest - 1) // size) > available:
        longest -= 1
    if longest < 1:
        raise RequestError(
            f"the prompt ({own} tokens) and its negative prompt ({other}) need more "
            f"than the {available} KV pages of {size} tokens that are available in all"
        )
    return min(longest, config.max_model_len - max(own, other))


def in_prefill(request: Request) -> bool:
    """Whether more than the last known token of one of its sequences has yet to run."""
    if len(request.token_ids) - request.num_computed > 1:
        return True
    negative = request.negative
    return negative is not None and len(negative.token_ids) - negative.num_computed > 1


def share(request: Request, budget: int) -> list[tuple[Request, int]]:
    """The tokens that each sequence of a request in prefill runs within ``budget``; at least one.

    The last known tokens of two sequences run in the same step, so that it has the logits of both.
    Until both fit, the last token of each sequence does not run.
    """
    need = request.num_tokens - request.num_computed
    if request.negative is None:
        return [(request, min(need, budget))]
    others = request.negative.num_tokens - request.negative.num_computed
    if need + others > budget:
        need, others = need - 1, others - 1
    num = min(need, budget)
    shares = ((request, num), (request.negative, min(others, budget - num)))
    return [(sequence, num) for sequence, num in shares if num]
