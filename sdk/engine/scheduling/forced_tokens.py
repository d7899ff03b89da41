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
    """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""

    def match(self, request: Request) -> int:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        return _CERTAIN if request.forced else 0

    def propose(self, request: Request, most: int) -> Sequence[int]:
        """See :class:`~sdk.engine.scheduling.drafts.Drafter`."""
        return request.forced[:most]
