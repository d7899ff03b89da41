"""The outputs of requests: immutable snapshots with the names that vLLM users know.

An output never changes once it was returned; each step with new tokens builds new objects. They
share no lists, except that all outputs of a request have the same ``prompt_token_ids`` list.
``finish_reason`` is ``stop`` (EOS, a stop token or a stop string), ``length`` (``max_tokens`` or
the end of the context), ``abort``, ``error`` or ``deadline``.

Objects built in every step are named tuples: creating a frozen dataclass of nine fields takes
0.9 us, a named tuple 0.2 us, and 32 concurrent requests need 96 of them per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from sdk.logprobs import Logprob as Logprob, Logprobs as Logprobs

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


class CompletionOutput(NamedTuple):
    """One of the ``n`` answers of a request.

    ``stop_reason`` is the stop string or stop token id that ended the answer, ``None`` for EOS, or
    the message if ``finish_reason`` is ``error``. With ``RequestOutputKind.DELTA``, ``text``,
    ``token_ids`` and ``logprobs`` hold only what is new since the last output, otherwise
    everything so far. ``cumulative_logprob`` (the sum over all tokens so far) requires
    ``logprobs``. An entry of ``logprobs`` reads like a ``dict[int, Logprob]``, best token first.
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
        """Whether this answer is complete."""
        return self.finish_reason is not None


class RequestEvent(NamedTuple):
    """What a shortage of memory did to a request, at time ``ts`` (see :class:`RequestMetrics`).

    ``preempted``: it lost its pages when it had ``num_tokens`` tokens, prompt and answer.
    ``resumed``: it has pages again; ``num_tokens`` tokens were cached and not computed again.
    ``swapped_in``: ``num_pages`` pages of ``kv_bits`` bits were copied back from the swap space,
    of its prefix or of what it had before it was preempted. ``recoded``: ``num_pages`` of its
    pages moved to a lower tier of ``kv_policy`` and have ``kv_bits`` bits from then on.
    """

    ts: float
    kind: Literal["preempted", "resumed", "swapped_in", "recoded"]
    num_tokens: int = 0
    num_pages: int = 0
    kv_bits: int = 0


class RequestMetrics(NamedTuple):
    """Times and counts of one request, and what happened to it (``events``, oldest first).

    All times are seconds of the engine's monotonic clock, so any two can be subtracted (in vLLM
    ``arrival_time`` is wall-clock time); ``None`` means not yet. For a request with several
    answers the times cover all of them, and the counts are totals. ``num_draft_tokens`` were
    verified (speculative decoding), and ``num_accepted_tokens`` of them became part of the answer.
    """

    arrival_time: float
    queued_ts: float
    scheduled_ts: float | None = None
    first_token_ts: float | None = None
    last_token_ts: float | None = None
    num_generation_tokens: int = 0
    num_preemptions: int = 0
    events: tuple[RequestEvent, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestOutput(NamedTuple):
    """The state of one request: its prompt and its answers so far.

    ``prompt_logprobs`` starts with ``None`` because nothing precedes the first token.
    ``num_cached_tokens`` is how many prompt tokens came from the prefix cache when the request was
    first scheduled (``None`` before that).
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
class Estimate:
    """How long a request would take if it came now (``LLM.estimate``): seconds until its first
    token and until its end, expected and as a range ``(low, high)``.

    ``None`` until the engine has run prompts and answers, because the times of its steps are
    measured. ``num_waiting``: requests that would start before it. ``num_cached_tokens`` of its
    ``num_prompt_tokens`` would not be computed.
    """

    first_token: float | None
    finish: float | None
    first_token_range: tuple[float, float] | None
    finish_range: tuple[float, float] | None
    num_prompt_tokens: int
    num_cached_tokens: int
    num_waiting: int


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The last hidden state of one prompt: ``hidden_size`` numbers, a vector of length 1.

    An embed request that fails or is aborted ends with a :class:`RequestOutput` that says why.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
    finished: bool = True
    metrics: RequestMetrics | None = None


class PoolingOutput(NamedTuple):
    """``data``: a float32 tensor ``[hidden_size]``; with the pooling "token" it is
    ``[tokens, hidden_size]``."""

    data: Any  # this module does not import torch


class PoolingRequestOutput(NamedTuple):
    """The hidden states of one prompt, pooled (``LLM.encode``)."""

    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int | None = None
    finished: bool = True
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of one prompt: a probability for each of ``labels``."""

    request_id: str
    prompt_token_ids: list[int]
    probs: list[float]
    labels: list[str]
    finished: bool = True
    metrics: RequestMetrics | None = None

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)

    @property
    def label(self) -> str:
        """The most probable class."""
        return self.labels[max(range(len(self.probs)), key=self.probs.__getitem__)]


@dataclass(frozen=True, slots=True)
class RerankOutput:
    """One document of ``LLM.rerank``: its index in the call, its text and how relevant it is."""

    index: int
    document: str
    relevance_score: float


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts match: the cosine of their embeddings, -1 to 1, or the probability that
    the model's classification head gives, 0 to 1."""

    request_id: str
    score: float
