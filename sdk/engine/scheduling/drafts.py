"""Draft tokens: a drafter guesses a request's next tokens, and one step verifies all of them.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) accept a draft with
a probability that keeps the model's distribution. Here a draw is a pure function of (seed,
position), so the model's own token is drawn at every position, and a draft is accepted if it equals
that token: the answer is bitwise the one without drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sdk.engine.pages.page_pool import PagePool
from sdk.engine.scheduling.request import Request


class Drafter(Protocol):
    """Guesses the next tokens of answers."""

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that may follow ``request.token_ids``; fewer, or none, are fine."""


class Drafts:
    """Decides how many drafts a step verifies, at most ``most`` for each request."""

    def __init__(self, drafter: Drafter, most: int) -> None:
        self._drafter = drafter
        self._most = most

    def take(self, request: Request, budget: int, pool: PagePool) -> tuple[int, ...]:
        """The drafts after a request that needs one token, within ``budget`` tokens.

        Also takes the pages they need, if any are left: no request is preempted for a draft, and a
        draft without a page does not run.
        """
        known = len(request.token_ids)
        most = min(self._most, budget, request.max_len - known - 1)
        if most < 1 or not request.takes_drafts:
            return ()
        drafts = tuple(self._drafter.propose(request, most))[:most]
        missing = -(-(known + len(drafts)) // pool.page_size) - len(request.pages)
        if missing > 0:
            if (pages := pool.acquire((), missing)) is None:
                return drafts[: len(request.pages) * pool.page_size - known]
            request.pages += pages
        return drafts
