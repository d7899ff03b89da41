"""One request as the engine takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sdk.api.lora import KnownAdapter
from sdk.api.params import SamplingParams
from sdk.engine.plan import SequenceSpec
from sdk.kernels.dataclass import dataclass
from sdk.text.automaton import StringAutomaton
from sdk.text.stops import StopStrings


@dataclass(frozen=True, slots=True)
class Job:
    """The one description of a request, made once and never changed.

    ``spec`` is the part that ranks need. If the parameters ask for several answers, each of them
    has a spec of its own, with its id and seed.
    """

    spec: SequenceSpec
    prompt_token_ids: tuple[int, ...]
    #: The text of the prompt, for outputs.
    prompt: str | None = None
    #: Overrides that of the sampling parameters.
    priority: int | None = None
    #: Separates entries of the prefix cache, as the adapter does.
    cache_salt: str | None = None
    #: Orders requests: a time of the scheduler's clock. ``None``: when the engine gets it.
    arrival_time: float | None = None
    #: For guidance; ``None``: the last token of the prompt.
    negative_prompt_token_ids: tuple[int, ...] | None = None
    #: The compiled strings of the parameters; ``None``: the engine compiles them.
    stops: StopStrings | None = None
    banned: StringAutomaton | None = None
    #: The most that its log-probabilities may take. It starts when these are free.
    result_bytes: int = 0
    adapter: KnownAdapter | None = None

    @property
    def request_id(self) -> str:
        """The caller's id, or one that the ``LLM`` chose."""
        return self.spec.request_id

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters."""
        return self.spec.params

    def with_spec(self, **changes: Any) -> Job:
        """The same with other values of fields of ``spec``."""
        return replace(self, spec=replace(self.spec, **changes))
