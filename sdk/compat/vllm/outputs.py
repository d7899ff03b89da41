"""The outputs of vLLM's methods, made from ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from sdk.api import outputs as ours
from sdk.api.beam_search import BeamSearchOutput as OurBeams, BeamSearchSequence as OurSequence
from sdk.api.logprobs import Logprob, Logprobs
from sdk.api.lora import LoRARequest

T = TypeVar("T")
LogprobsOnePosition = dict[int, Logprob]
#: The text of one token, with the space before it and without bytes of other characters.
TextOf = Callable[[int], str]


@dataclass
class RequestStateStats:
    """Times and counts of one request. All times are seconds of one monotonic clock."""

    num_generation_tokens: int = 0
    num_preemptions: int = 0
    arrival_time: float = 0.0
    queued_ts: float = 0.0
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    is_corrupted: bool = False
    is_watermarked: bool = False
    is_watermark_skipped: bool = False


@dataclass
class CompletionOutput:
    """One of the ``n`` answers of a request. Fields that are always None exist for vLLM's sake."""

    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[LogprobsOnePosition] | None
    routed_experts: Any = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    sampling_mask: Any = None
    spec_decode_metrics: Any = None
    weight_versions: Any = None

    def finished(self) -> bool:
        """Whether this answer is complete."""
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    """The prompt of a request and its answers so far."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: list[LogprobsOnePosition | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestStateStats | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    num_cache_creation_tokens: int | None = None
    prompt_token_id_logprobs: Any = field(default=None, kw_only=True)
    kv_transfer_params: dict[str, Any] | None = field(default=None, kw_only=True)
    ec_transfer_params: dict[str, Any] | None = field(default=None, kw_only=True)


@dataclass
class PoolingOutput:
    """``data``: a tensor of hidden states or probabilities."""

    data: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolingOutput) and bool((self.data == other.data).all())

    __hash__ = None  # type: ignore[assignment]


@dataclass
class EmbeddingOutput:
    """A vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass
class ClassificationOutput:
    """The probabilities of the classes."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return len(self.probs)


@dataclass
class ScoringOutput:
    """How well two texts match."""

    score: float


@dataclass
class PoolingRequestOutput(Generic[T]):
    """What ``LLM.encode`` returns for one prompt."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int
    finished: bool
    error: Any = field(default=None, kw_only=True)


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """What ``LLM.embed`` returns for one prompt."""


class ClassificationRequestOutput(PoolingRequestOutput[ClassificationOutput]):
    """What ``LLM.classify`` returns for one prompt."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """What ``LLM.score`` returns for one pair."""


@dataclass
class BeamSearchSequence:
    """One beam. ``tokens`` and ``text`` begin with the prompt."""

    orig_prompt: Any
    tokens: list[int]
    logprobs: list[LogprobsOnePosition]
    lora_request: Any = None
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass
class BeamSearchOutput:
    """The beams of one prompt, best first."""

    sequences: list[BeamSearchSequence]


def request_output(
    found: ours.RequestOutput, text_of: TextOf, text: str | None = None
) -> RequestOutput:
    """``text``: of a prompt that was passed as token ids together with its text."""
    rows = found.prompt_logprobs
    if rows is not None:
        pairs = zip(found.prompt_token_ids, rows, strict=True)
        prompt_logprobs = [
            None if row is None else _position(token, row, text_of) for token, row in pairs
        ]
    return RequestOutput(
        found.request_id,
        text if found.prompt is None else found.prompt,
        found.prompt_token_ids,
        None if rows is None else prompt_logprobs,
        [_completion(answer, text_of) for answer in found.outputs],
        found.finished,
        None if found.metrics is None else _stats(found.metrics),
        lora_request=found.lora_request,
        num_cached_tokens=found.num_cached_tokens,
    )


def _completion(answer: ours.CompletionOutput, text_of: TextOf) -> CompletionOutput:
    logprobs = None
    if answer.logprobs is not None:
        pairs = zip(answer.token_ids, answer.logprobs, strict=True)
        logprobs = [_position(token, row, text_of) for token, row in pairs]
    return CompletionOutput(
        answer.index,
        answer.text,
        answer.token_ids,
        answer.cumulative_logprob,
        logprobs,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
    )


def _position(token: int, row: Mapping[int, Logprob], text_of: TextOf) -> LogprobsOnePosition:
    """In vLLM the token itself comes first, then the best ones."""
    entries = row.entries() if isinstance(row, Logprobs) else row.items()
    first = {token: row[token], **dict(entries)}
    return {
        one: entry if entry.decoded_token is None else replace(entry, decoded_token=text_of(one))
        for one, entry in first.items()
    }


def _stats(metrics: ours.RequestMetrics) -> RequestStateStats:
    first = metrics.first_token_ts or 0.0
    return RequestStateStats(
        metrics.num_generation_tokens,
        metrics.num_preemptions,
        metrics.arrival_time,
        metrics.queued_ts,
        metrics.scheduled_ts or 0.0,
        first,
        metrics.last_token_ts or 0.0,
        first - metrics.arrival_time if first else 0.0,
    )


def pooling_output(found: ours.PoolingRequestOutput) -> PoolingRequestOutput[PoolingOutput]:
    """Hidden states."""
    facts = found.prompt_token_ids, found.num_cached_tokens or 0, found.finished
    return PoolingRequestOutput(found.request_id, PoolingOutput(found.outputs.data), *facts)


def embedding_output(found: ours.PoolingRequestOutput) -> EmbeddingRequestOutput:
    """A vector of hidden states."""
    facts = found.prompt_token_ids, found.num_cached_tokens or 0, found.finished
    vector = EmbeddingOutput(found.outputs.data.tolist())
    return EmbeddingRequestOutput(found.request_id, vector, *facts)


def class_output(found: ours.ClassificationOutput) -> ClassificationRequestOutput:
    """Probabilities."""
    classes = ClassificationOutput(found.probs)
    return ClassificationRequestOutput(
        found.request_id, classes, found.prompt_token_ids, 0, found.finished
    )


def score_output(found: ours.ScoringOutput) -> ScoringRequestOutput:
    """A score; the tokens of the pair are not reported."""
    return ScoringRequestOutput(found.request_id, ScoringOutput(found.score), [], 0, True)


def beam_output(
    prompt: Any,
    found: OurBeams,
    decode: Callable[[list[int]], str],
    text_of: TextOf,
    lora: LoRARequest | None = None,
) -> BeamSearchOutput:
    """The beams of ``prompt``."""
    beams = [_beam(prompt, one, decode, text_of) for one in found.sequences]
    return BeamSearchOutput([replace(beam, lora_request=lora) for beam in beams])


def _beam(
    prompt: Any, found: OurSequence, decode: Callable[[list[int]], str], text_of: TextOf
) -> BeamSearchSequence:
    answer = found.tokens[len(found.tokens) - len(found.logprobs) :]
    pairs = zip(answer, found.logprobs, strict=True)
    return BeamSearchSequence(
        prompt,
        found.tokens,
        [_position(token, row, text_of) for token, row in pairs],
        cum_logprob=found.cum_logprob,
        text=None if found.text is None else decode(found.tokens),
        finish_reason=found.finish_reason,
        stop_reason=found.stop_reason,
    )
