"""The tokens of prompts that a step may still run."""

from __future__ import annotations

import sys

from sdk.engine.scheduling.request import Request
from sdk.kernels.dataclass import dataclass


@dataclass(slots=True)
class PromptBudget:
    """``tokens`` in all, ``scoring`` of them scored (``prompt_logprobs``), and ``patient`` of
    requests that are not urgent."""

    tokens: int
    scoring: int
    patient: int = sys.maxsize

    def most(self, request: Request) -> int:
        """How many of them ``request`` may run."""
        most = self.tokens
        if request.scores_prompt:
            most = min(most, self.scoring)
        if not request.urgent:
            most = min(most, self.patient)
        return most

    def take(self, request: Request, num_tokens: int) -> None:
        """``request`` runs so many. With an urgent one no others run, which would delay it."""
        self.tokens -= num_tokens
        if request.scores_prompt:
            self.scoring -= num_tokens
        if self.patient < sys.maxsize:
            self.patient = 0 if request.urgent else self.patient - num_tokens
