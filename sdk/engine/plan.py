"""The contract between the scheduler and the ranks: what to run, and what came out.

Both directions are immutable and picklable and hold ids and numbers only, no tensors: the same
objects drive one rank in this process or several in others.

Those made in every step are named tuples: a frozen dataclass of nine fields takes 0.9 us to make, a
named tuple 0.2 us, and 32 requests make 34 of them in a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    negative_of: str | None = None
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


class StepRow(NamedTuple):
    """What one request runs in a step: its next tokens, the last of them drafts."""

    request_id: str
    num_tokens: int
    #: How many of these tokens, the last ones, have a row of logits: none, one, or one more than
    #: there are drafts.
    num_outputs: int = 0
    #: Tokens that a drafter expects behind the known ones. Each is compared with the token drawn
    #: before it; from the first that differs on, all are dropped.
    drafts: tuple[int, ...] = ()
    #: The adapter of its tokens, by its slot on the ranks; -1: none.
    adapter: int = -1


class StepPlan(NamedTuple):
    """One step: its rows in batch order, and what the ranks must know before they run them."""

    step_id: int
    #: While the same requests decode, and nothing else happens, it is the same tuple in every plan.
    rows: tuple[StepRow, ...] = ()
    started: tuple[RequestStart, ...] = ()
    new_pages: tuple[tuple[str, tuple[int, ...]], ...] = ()
    #: Finished, aborted or preempted since the last plan: ranks forget them.
    dropped: tuple[str, ...] = ()
    #: To be made before anything else, one after the other: each names places as they are when its
    #: turn comes. The tables of the requests that ranks know change with the moves.
    copies: tuple[Copy, ...] = ()
    #: What rank 0 sampled since the last plan, by request, for the ranks that sample nothing;
    #: whoever sends them the plan adds it.
    sampled: tuple[tuple[str, tuple[int, ...]], ...] = ()


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

    ``tokens``, one sequence for each row of the plan: a row with outputs has the token drawn at the
    first of them, and one more for each draft that equals the token drawn before it. Empty for rows
    without outputs, of guides, and of requests in ``errors``.
    ``details`` has more about these tokens, for requests that want more.
    ``prompt_logprobs`` scores the prompt tokens that follow the positions run in this step.
    ``errors`` fails single requests (NaN logits) while the others go on.
    """

    step_id: int
    tokens: Sequence[Sequence[int]] = ()
    details: Mapping[str, Sequence[Sampled]] = {}
    prompt_logprobs: Mapping[str, tuple[Sampled, ...]] = {}
    hidden: Mapping[str, list[float]] = {}
    errors: Mapping[str, str] = {}
    #: Slots of the swap space whose file took no page, and why: they hold nothing.
    unwritten: Mapping[int, str] = {}
