"""Draft tokens that a structure leaves no choice about: names, quotes and brackets of JSON.

Rank 0 finds them (``StructuredAnswer.forced``) and reports them with a step's tokens. The model
still verifies them: it may spell the same text with other tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from sdk.engine.scheduling.drafts import Drafter
from sdk.engine.scheduling.request import Request

#: Counts as the longest match: nearly all of these drafts are accepted.
_CERTAIN = 2**20


class ForcedTokens(Drafter):
    """See :class:`~sdk.engine.scheduling.drafts.Drafter`. ``other`` proposes where nothing is
    forced."""

    def __init__(self, other: Drafter | None = None) -> None:
        self._other = other

    def match(self, request: Request) -> int:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        if request.forced:
            return _CERTAIN
        return 0 if self._other is None else self._other.match(request)

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        if request.forced:
            return request.forced[:most]
        return () if self._other is None else self._other.propose(request, most)

    def end(self, request: Request) -> None:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        if self._other is not None:
            self._other.end(request)

    def reset(self) -> None:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        if self._other is not None:
            self._other.reset()
