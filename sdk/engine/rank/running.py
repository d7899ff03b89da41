"""What a rank remembers of a request between steps."""

from __future__ import annotations

from collections.abc import Sequence

from sdk.engine.plan import RequestStart
from sdk.sampling.state import RequestState


class Running:
    """One request, or the guide of one: its tokens, pages and sampling state."""

    __slots__ = (
        "looked_at",
        "negative",
        "num_computed",
        "num_prompt",
        "pages",
        "start",
        "state",
        "token_ids",
    )

    def __init__(self, start: RequestStart) -> None:
        self.start = start
        self.token_ids = list(start.token_ids)
        self.num_prompt = start.num_prompt_tokens
        self.num_computed = start.num_computed
        self.pages = list(start.pages)
        #: Its guide, which goes on with the same tokens.
        self.negative: Running | None = None
        #: Whether more than the token is wanted of the rows it runs: scores, an embedding.
        self.looked_at = start.kind == "embed" or start.params.prompt_logprobs is not None
        #: Of a guide it is never asked for anything.
        self.state = RequestState(
            start.params,
            start.resolved,
            start.token_ids[: start.num_prompt_tokens],
            start.token_ids[start.num_prompt_tokens :],
            start.mirostat_mu,
        )

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take what was sampled: one token, and one more for each draft that was right.

        A step counts its drafts as not computed.
        """
        self.state.append(token_ids)
        self.token_ids += token_ids
        self.num_computed += len(token_ids) - 1
        if self.negative is not None:
            self.negative.token_ids += token_ids
