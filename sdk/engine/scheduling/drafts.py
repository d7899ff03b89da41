"""Draft tokens: a drafter guesses a request's next tokens, and one step verifies all of them.

Leviathan et al. 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) accept a draft with
a probability that keeps the model's distribution. Here a draw is a pure function of (seed,
position), so the model's own token is drawn at every position, and a draft is accepted if it equals
that token: the answer is bitwise the one without drafts.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from sdk.engine.pages.page_pool import PagePool
from sdk.engine.plan import TO_DRAFT, StepRow
from sdk.engine.scheduling.draft_lengths import PROBE_DRAFTS, Acceptance, DraftHistory, DraftLengths
from sdk.engine.scheduling.request import Request


class Drafter(ABC):
    """Guesses the next tokens of answers."""

    def match(self, request: Request) -> int:
        """How many of the last tokens the next proposal is based on; 0: there is none."""
        return 1

    def is_on_ranks(self, request: Request) -> bool:
        """Whether the ranks make the next proposal."""
        return False

    @abstractmethod
    def propose(self, request: Request, most: int) -> Sequence[int]:
        """Up to ``most`` tokens that may follow ``request.token_ids``; fewer, or none, are fine."""

    def end(self, request: Request) -> None:
        """The request has ended, or has lost tokens: forget what was read of it."""
        return

    def reset(self) -> None:
        """Forget what was learned from other requests."""
        return


class RankDrafter(Drafter):
    """The ranks draft (engine/rank/drafting_model.py): a plan has only the number of drafts.

    Requests of up to ``longest`` tokens get some.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def match(self, request: Request) -> int:
        """See :class:`Drafter`."""
        return int(len(request.token_ids) <= self._longest)

    def is_on_ranks(self, request: Request) -> bool:
        """See :class:`Drafter`."""
        return True

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See :class:`Drafter`."""
        return (TO_DRAFT,) * min(most, self._longest - len(request.token_ids))


class FirstMatch(Drafter):
    """The first of several drafters that has a proposal."""

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = drafters
        self._chosen: dict[Request, Drafter] = {}

    def match(self, request: Request) -> int:
        """See :class:`Drafter`."""
        for drafter in self._drafters:
            if found := drafter.match(request):
                self._chosen[request] = drafter
                return found
        return 0

    def is_on_ranks(self, request: Request) -> bool:
        """See :class:`Drafter`."""
        return self._chosen[request].is_on_ranks(request)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See :class:`Drafter`."""
        return self._chosen[request].propose(request, most)

    def end(self, request: Request) -> None:
        """See :class:`Drafter`."""
        self._chosen.pop(request, None)
        for drafter in self._drafters:
            drafter.end(request)

    def reset(self) -> None:
        """See :class:`Drafter`."""
        for drafter in self._drafters:
            drafter.reset()


class Drafts:
    """Decides how many drafts a step verifies: at most ``most`` for each request, and
    ``most_in_step`` for all. Without ``lengths`` every request gets as many as it can.
    """

    def __init__(
        self,
        drafter: Drafter,
        most: int,
        lengths: DraftLengths | None = None,
        most_in_step: int | None = None,
    ) -> None:
        self.drafter = drafter
        self.lengths = lengths
        self._most = most
        self._most_in_step = most_in_step
        self._histories: dict[Request, DraftHistory] = {}
        self._of_weights = Acceptance.of_weights()
        self._chosen: dict[Request, int] = {}  # in step ``_step``
        self._step = -1
        self._next_look = 0

    def choose(
        self, requests: Sequence[Request], budget: int, step: int, *, repeats: bool = False
    ) -> bool:
        """Choose the number of drafts of ``requests``, which need one token each.

        Returns whether any gets drafts in this step. ``repeats``: these are the requests of the
        last step. Then nothing is done until the next step in which one of them should be looked
        at, because every object that is touched after a step costs time (docs/log.md).
        """
        if repeats and step < self._next_look:
            return False
        if step == self._step:
            return bool(self._chosen)
        self._step, self._chosen = step, {}
        if not repeats:
            self._end_finished()
        if self._most_in_step is not None:
            budget = min(budget, self._most_in_step)
        offers: list[Request] = []
        matches: list[int] = []
        next_look = None
        for request in requests:
            if not request.takes_drafts:
                continue
            history = self._histories.get(request)
            if history is None:
                history = self._histories[request] = DraftHistory(self._of_weights)
            if request.forced or step >= history.look_at:
                match = self.drafter.match(request)
                if match:
                    history.misses = 0
                    offers.append(request)
                    matches.append(match)
                else:
                    history.missed(step)
            if next_look is None or history.look_at < next_look:
                next_look = history.look_at
        self._next_look = step + 2**31 if next_look is None else next_look
        if offers and budget > 0:
            self._choose(offers, matches, len(requests), budget)
        return bool(self._chosen)

    def _choose(
        self, offers: list[Request], matches: list[int], num_rows: int, budget: int
    ) -> None:
        if self.lengths is None:
            self._chosen = dict.fromkeys(offers, self._most)
            return
        histories = [self._histories[request] for request in offers]
        on_ranks = [self.drafter.is_on_ranks(request) for request in offers]
        shares = []
        for request, history, match, drafted in zip(
            offers, histories, matches, on_ranks, strict=True
        ):
            history.learn(request.num_draft_tokens, request.num_accepted_tokens)
            shares.append(history.acceptance(match, on_ranks=drafted))
        most = [max(min(self._most, x.max_len - len(x.token_ids) - 1), 0) for x in offers]
        lengths = self.lengths.choose(shares, most, num_rows, budget, on_ranks=any(on_ranks))
        self._chosen = {x: count for x, count in zip(offers, lengths, strict=True) if count > 0}
        if self._chosen or not self.lengths.costs(num_rows, num_rows):
            return
        for request, history in zip(offers, histories, strict=True):
            if history.probes() and self.lengths.may_probe(num_rows):
                self._chosen[request] = PROBE_DRAFTS
                return

    def _end_finished(self) -> None:
        for request in [request for request in self._histories if request.finished]:
            del self._histories[request]
            self.drafter.end(request)

    def rewind(self, request: Request) -> None:
        """The request has lost its last tokens: the drafter reads it again."""
        self._chosen.pop(request, None)
        self.drafter.end(request)

    def look_again(self) -> None:
        """A request has a new proposal: :meth:`choose` looks at all of them in the next step."""
        self._next_look = 0

    def learn_step(self, rows: Sequence[StepRow], num_tokens: int, seconds: float) -> None:
        """Learn from the time of a step in which all ``rows`` decoded."""
        if self.lengths is not None:
            on_ranks = any(row.drafts_on_rank for row in rows)
            self.lengths.learn_step(len(rows), num_tokens, seconds, on_ranks=on_ranks)

    def take(self, request: Request, budget: int, pool: PagePool) -> tuple[int, ...]:
        """The drafts after a request that needs one token, within ``budget`` tokens.

        Also takes the pages they need, if any are left: for a draft no request is preempted and no
        page moves to a lower tier, and a draft without a page does not run.
        """
        known = len(request.token_ids)
        most = min(self._chosen.get(request, 0), budget, request.max_len - known - 1)
        if most < 1:
            return ()
        drafts = tuple(self.drafter.propose(request, most))[:most]
        missing = -(-(known + len(drafts)) // pool.page_size) - len(request.pages)
        if missing > 0:
            pages = pool.acquire((), missing) if pool.can_spare(missing) else None
            if pages is None:
                return drafts[: len(request.pages) * pool.page_size - known]
            request.pages += pages
        return drafts

    def reset(self) -> None:
        """Forget what was learned from other requests."""
        self.drafter.reset()
