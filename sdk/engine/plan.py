"""The contract between the scheduler and the ranks: what to run, and what came out.

Both directions are immutable and picklable and hold ids and numbers only, no tensors: the same
objects drive one rank in this process or several in others.

Those made in every step are named tuples: a frozen dataclass of nine fields takes 0.9 us to make, a
named tuple 0.2 us, and 32 requests make 34 of them in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from sdk.logprobs import Logprobs
from sdk.params import SamplingParams
from sdk.sampling.resolved import ResolvedParams

RequestKind = Literal["generate", "embed"]


@dataclass(frozen=True, slots=True)
class RequestStart:
    """All a rank must know of a request it has not seen, or was told to forget (preemption).

    ``token_ids`` are the prompt and everything generated so far; the first ``num_computed`` of them
    already have their keys and values in ``pages`` (a prefix hit).
    """

    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    num_computed: int
    pages: tuple[int, ...]
    params: SamplingParams
    kind: RequestKind = "generate"
    #: Token ids behind the words of ``params``: bad words, EOS, sequence breakers.
    resolved: ResolvedParams = field(default_factory=ResolvedParams)
    #: The request whose logits this one's guide: it is never sampled, its tokens are the other's.
    guides: str | None = None
    #: Mirostat's target surprise for the next token, where one was generated before.
    mirostat_mu: float | None = None


class Swap(NamedTuple):
    """One page to copy: ``out`` of the cache into a slot of the swap space, or back in.

    Page ids as the kernels have them (``kernels/ladder.py``), of slots too; both of one level.
    """

    page: int
    slot: int
    out: bool


class Move(NamedTuple):
    """A page of a ladder that goes from one place to another, between levels or within one.

    Page ids as the kernels have them (``kernels/ladder.py``).
    """

    source: int
    target: int


Copy = Swap | Move


class StepPlan(NamedTuple):
    """One step; ``num_tokens`` is the step itself: (request id, tokens to run), in batch order."""

    step_id: int
    num_tokens: tuple[tuple[str, int], ...] = ()
    started: tuple[RequestStart, ...] = ()
    #: Tokens committed since the last plan, so that every rank knows what to feed next.
    appended: tuple[tuple[str, tuple[int, ...]], ...] = ()
    new_pages: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Finished, aborted or preempted since the last plan: ranks forget them.
    dropped: tuple[str, ...] = ()
    #: To be made before anything else, one after the other: each names places as they are when its
    #: turn comes. The tables of the requests that ranks know change with the moves.
    copies: tuple[Copy, ...] = ()

    def going_on(self, tokens: list[int]) -> StepPlan:
        """This plan, of one token in each row, with these tokens appended to its rows."""
        rows = zip(self.num_tokens, tokens, strict=True)
        return self._replace(appended=tuple((name, (token,)) for (name, _), token in rows))


class Sampled(NamedTuple):
    """One token and, where asked for, its log-probability (natural log) and the alternatives."""

    token_id: int
    logprob: float | None = None
    rank: int | None = None
    #: The best tokens, those asked for by id, and this one.
    top: Logprobs | None = None
    #: Under mirostat the target surprise after this token: unlike all else that a sampler knows of
    #: a request it cannot be had from the tokens.
    mirostat_mu: float | None = None


class StepResult(NamedTuple):
    """What one step produced.

    ``sampled`` has an entry for exactly those requests whose last known token ran in this step
    (guides aside: their last token runs in the step of their request's).
    ``prompt_logprobs`` scores the prompt tokens that follow the positions run in this step.
    ``errors`` fails single requests (NaN logits) while the others go on.
    """

    step_id: int
    sampled: Mapping[str, Sampled] = {}
    prompt_logprobs: Mapping[str, tuple[Sampled, ...]] = {}
    hidden: Mapping[str, list[float]] = {}
    errors: Mapping[str, str] = {}
    #: Slots of the swap space whose file took no page, and why: they hold nothing.
    unwritten: Mapping[int, str] = {}
