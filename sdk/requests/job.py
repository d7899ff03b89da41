"""One request on its way to the engine, and where its outputs go."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from sdk.engine.engine import Output
from sdk.engine.plan import Pooling, RequestKind
from sdk.params import SamplingParams
from sdk.requests.adapters import KnownAdapter
from sdk.sampling.resolved import ResolvedParams
from sdk.text.automaton import StringAutomaton
from sdk.text.stops import StopStrings


class OutputSink(Protocol):
    """Receives the outputs of requests. The thread that steps calls it: it must return at once."""

    def deliver(self, output: Output) -> bool:
        """Take one output; ``False`` means nobody reads any more, and aborts the request."""

    def fail(self, request_id: str, error: Exception) -> None:
        """The request has ended without a final output."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request, ready for the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    prompt: str | None = None
    priority: int | None = None
    cache_salt: str | None = None
    prompt_embeds: Any = None  # float32 [tokens, hidden_size]
    kind: RequestKind = "generate"
    pooling: Pooling | None = None
    arrival_time: float | None = None
    resolved: ResolvedParams = field(default_factory=ResolvedParams)
    negative_prompt_token_ids: tuple[int, ...] | None = None
    stops: StopStrings | None = None
    banned: StringAutomaton | None = None
    result_bytes: int = 0
    adapter: KnownAdapter | None = None
