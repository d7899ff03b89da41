"""What the caller gets back: immutable snapshots with the names vLLM users know.

An output object never changes after it was handed out: each step that has news builds new ones.
Their lists are their own, except that all outputs of a request show one ``prompt_token_ids``.
``finish_reason`` is ``stop`` (EOS, a stop token or a stop string), ``length`` (the parameter
``max_tokens`` or the end of the context), ``abort``, ``error`` or ``deadline``.

Those made in every step are named tuples: a frozen dataclass of nine fields takes 0.9 us to make,
a named tuple 0.2 us, and 32 streams make 96 of them in a step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from sdk.logprobs import Logprob as Logprob, Logprobs as Logprobs

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


class CompletionOutput(NamedTuple):
    """One of the ``n`` answers of a request.

    ``stop_reason`` is the stop string or stop token id that ended the answer, ``None`` for EOS, and
    the message when ``finish_reason`` is ``error``. With ``RequestOutputKind.DELTA`` ``text``,
    ``token_ids`` and ``logprobs`` hold what is new since the last output, else everything so far.
    ``cumulative_logprob`` (the sum over all tokens so far) needs ``logprobs``. A row of
    ``logprobs`` is read like a ``dict[int, Logprob]``, best token first.
    """

    index: int  # type: ignore[assignment]  # the answer's number, not tuple.index
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: object | None = None

    @property
    def finished(self) -> bool:
        """True when nothing more will be generated for this answer."""
        return self.finish_reason is not None


class RequestEvent(NamedTuple):
    """Something that memory running short did to a request, at ``ts`` (see RequestMetrics).

    ``preempted``: its pages went to others when it had ``num_tokens``, prompt and answer.
    ``resumed``: it has pages again, ``num_tokens`` of them found and not computed anew.
    ``swapped_in``: ``num_pages`` of its prefix, or of what it had before it was preempted, were
    copied back from the swap space, of ``kv_bits`` bits. ``recoded``: ``num_pages`` of its pages
    went down the ladder of ``kv_policy`` and are of ``kv_bits`` bits from then on.
    """

    ts: float
    kind: Literal["preempted", "resumed", "swapped_in", "recoded"]
    num_tokens: int = 0
    num_pages: int = 0
    kv_bits: int = 0


class RequestMetrics(NamedTuple):
    """Times and counts of one request, and what happened to it (``events``, oldest first).

    All times are seconds of the engine's monotonic clock, so that any two may be subtracted
    (differs from vLLM, where ``arrival_time`` is wall clock); ``None`` until it happened. For a
    request with several answers they span all of them, and the counts are sums.
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    events: tuple[RequestEvent, ...] = ()


class RequestOutput(NamedTuple):
    """News of one request: its prompt and its answers so far.

    ``prompt_logprobs`` starts with ``None`` because nothing precedes the first
    token. ``num_cached_tokens`` is how many prompt tokens the prefix cache answered when the
    request was first scheduled (``None`` before that).
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[Logprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: object | None = None
    num_cached_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The pooled hidden state of one prompt, ``hidden_size`` numbers.

    An embed request that fails or is aborted ends with a :class:`RequestOutput` that says why.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
    finished: bool = True
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How alike two texts are: the cosine of their embeddings, -1 to 1."""

    request_id: str
    score: float
