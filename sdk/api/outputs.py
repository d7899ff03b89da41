"""The outputs of requests: immutable snapshots with the names that vLLM users know.

An output never changes once it was returned; each step with new tokens builds new objects. They
share no lists, except that all outputs of a request have the same ``prompt_token_ids`` list.
``finish_reason`` is ``stop`` (EOS, a stop token or a stop string), ``length`` (``max_tokens`` or
the end of the context), ``abort``, ``error`` or ``deadline``.

Objects built in every step are named tuples: creating a frozen dataclass of nine fields takes
0.9 us, a named tuple 0.2 us, and 32 concurrent requests need 96 of them per step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn

from sdk.api.errors import RequestError
from sdk.api.logprobs import Logprob as Logprob, Logprobs as Logprobs
from sdk.api.timeline import (
    RequestEvent as RequestEvent,
    RequestMetrics as RequestMetrics,
    Timeline as Timeline,
)
from sdk.kernels.dataclass import dataclass

FinishReason = Literal["stop", "length", "abort", "error", "deadline"]


class CompletionOutput(NamedTuple):
    """One of the ``n`` answers of a request.

    ``stop_reason`` is the stop string or stop token id that ended the answer, ``None`` for EOS, or
    the message if ``finish_reason`` is ``error``. With ``RequestOutputKind.DELTA``, ``text``,
    ``token_ids`` and ``logprobs`` hold only what is new since the last output, otherwise
    everything so far. ``cumulative_logprob`` (the sum over all tokens so far) requires
    ``logprobs``. ``closed``: the answer has a structure, and was completed because ``max_tokens``
    was near; it may be shorter than the model meant it to be. An entry of ``logprobs`` reads like
    a ``dict[int, Logprob]``, best token first.
    """

    index: int  # type: ignore[assignment]  # the answer's number, not tuple.index
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[Logprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: object | None = None
    closed: bool = False

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from sdk.api.display import answer_line

        printer.text(answer_line(self))

    @property
    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


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

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from sdk.api.display import request_line

        printer.text(request_line(self))

    def _repr_html_(self) -> str:
        from sdk.api.display import request_html

        return request_html(self)

    @property
    def text(self) -> str:
        """``outputs[0].text``, of a request with one answer.

        :raises RequestError: there are several.
        """
        if len(self.outputs) != 1:
            raise RequestError(
                f"text: this request has {len(self.outputs)} answers; use output.outputs[i].text"
            )
        return self.outputs[0].text

    @property
    def timeline(self) -> Timeline | None:
        """What happened to the request and when; ``print(output.timeline)`` shows it.

        ``None`` for outputs that were made without metrics.
        """
        if self.metrics is None:
            return None
        reasons = {answer.index: answer.finish_reason for answer in self.outputs}
        reasons_in_order = [reasons.get(index) for index in range(max(reasons, default=-1) + 1)]
        return Timeline.of(self.metrics, len(self.prompt_token_ids), reasons_in_order)


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
    """One prompt: what the model's files describe as its embedding (:meth:`sdk.LLM.embed`), else
    its last hidden state, ``hidden_size`` numbers, as a vector of length 1.

    An embed request that fails or is aborted ends with a :class:`RequestOutput` that says why.
    """

    request_id: str
    prompt_token_ids: list[int]
    embedding: list[float]
    finished: bool = True
    metrics: RequestMetrics | None = None

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        from sdk.api.display import numbers

        printer.text(f"EmbeddingOutput({self.request_id!r}, {numbers(self.embedding)})")

    @property
    def timeline(self) -> Timeline | None:
        """See :attr:`RequestOutput.timeline`."""
        return _timeline(self.metrics, self.prompt_token_ids)


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

    @property
    def timeline(self) -> Timeline | None:
        """See :attr:`RequestOutput.timeline`."""
        return _timeline(self.metrics, self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of one prompt: a probability for each of ``labels``.

    A model that classifies tokens has a list of them for each token of the prompt.
    """

    request_id: str
    prompt_token_ids: list[int]
    probs: list[Any]
    labels: list[str]
    finished: bool = True
    metrics: RequestMetrics | None = None

    @property
    def timeline(self) -> Timeline | None:
        """See :attr:`RequestOutput.timeline`."""
        return _timeline(self.metrics, self.prompt_token_ids)

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.labels)

    @property
    def label(self) -> str | list[str]:
        """The most probable class, or that of each token."""
        if self.probs and isinstance(self.probs[0], list):
            return [self._best(row) for row in self.probs]
        return self._best(self.probs)

    def _best(self, probs: list[float]) -> str:
        return self.labels[max(range(len(probs)), key=probs.__getitem__)]


@dataclass(frozen=True, slots=True)
class RerankOutput:
    """One document of ``LLM.rerank``: its index in the call, itself and how relevant it is."""

    index: int
    document: Any
    relevance_score: float


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well two texts match: the cosine of their embeddings, -1 to 1, or the probability that
    the model's classification head gives, 0 to 1."""

    request_id: str
    score: float


def _timeline(metrics: RequestMetrics | None, prompt_token_ids: list[int]) -> Timeline | None:
    """Of a request that does not generate."""
    return None if metrics is None else Timeline.of(metrics, len(prompt_token_ids))


def _other_name(self: object, name: str) -> NoReturn:
    """:raises AttributeError: always; with the name here of what other libraries call otherwise."""
    from sdk.api.near_misses import no_attribute

    no_attribute(self, name)


if not TYPE_CHECKING:  # type checkers report unknown attributes themselves
    for _kind in (CompletionOutput, RequestOutput, EmbeddingOutput):
        _kind.__getattr__ = _other_name
