"""Requests with a guide: how long their answers can be, and how the two share a step's budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sdk.engine.scheduling.request import Request
from sdk.errors import RequestError

if TYPE_CHECKING:
    from sdk.engine.scheduling.scheduler_config import SchedulerConfig


def longest_answer(request: Request, guide: Request, config: SchedulerConfig, room: int) -> int:
    """The longest answer for which ``request`` and its guide fit ``room`` pages.

    Raises RequestError when there is none, or where guidance is not possible at all.
    """
    own, negative = request.num_tokens, guide.num_tokens
    if config.max_num_seqs < 2:
        raise RequestError(
            f"guidance_scale: a guided request takes two seats; max_num_seqs is "
            f"{config.max_num_seqs}"
        )
    if not config.enable_chunked_prefill:
        raise RequestError("guidance_scale needs enable_chunked_prefill=True")
    if not negative:
        raise RequestError("the negative prompt is empty: at least one token is needed")
    if negative >= config.max_model_len:
        raise RequestError(
            f"the negative prompt has {negative} tokens; max_model_len is "
            f"{config.max_model_len}, and at least 1 must be left for the answer"
        )
    size = config.page_size
    # The last token of an answer is never read back. Both tables' last pages may be part full.
    longest = (room * size - own - negative) // 2 + 1
    while -(-(own + longest - 1) // size) - (-(negative + longest - 1) // size) > room:
        longest -= 1
    if longest < 1:
        raise RequestError(
            f"the prompt ({own} tokens) and its negative prompt ({negative}) need more "
            f"than the {room} KV pages of {size} tokens that are available in all"
        )
    return min(longest, config.max_model_len - max(own, negative))


def in_prefill(request: Request) -> bool:
    """Whether more than its (and its guide's) last known token has yet to run."""
    if len(request.token_ids) - request.num_computed > 1:
        return True
    guide = request.guide
    return guide is not None and len(guide.token_ids) - guide.num_computed > 1


def share(request: Request, budget: int) -> list[tuple[Request, int]]:
    """What a request in prefill runs within ``budget`` tokens; something of it always does.

    While a guided one cannot complete, both of its sequences keep their last token back.
    """
    need = request.num_tokens - request.num_computed
    if request.guide is None:
        return [(request, min(need, budget))]
    others = request.guide.num_tokens - request.guide.num_computed
    if need + others > budget:
        need, others = need - 1, others - 1
    num = min(need, budget)
    shares = ((request, num), (request.guide, min(others, budget - num)))
    return [(sequence, num) for sequence, num in shares if num]
