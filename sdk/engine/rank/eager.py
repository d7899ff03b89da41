"""Steps that run operator by operator."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import LaunchedBatch, Repeater
from sdk.kernels.lazy_torch import torch


class Eager:
    """See :class:`sdk.engine.rank.strategy.Strategy`."""

    most_tokens_in_pieces = 0
    steps_ahead = 0
    batches_in_flight = 1

    def __init__(self, passes: ForwardPasses, inputs: StepInputs, reason: str) -> None:
        self._passes = passes
        self._inputs = inputs
        self.eager_reason: str | None = reason
        self.eager_prompts_reason: str | None = reason
        self.failed_captures: list[str] = []

    def capture_next(self) -> bool:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return False

    def launch(self, batch: StepBatch) -> Sequence[LaunchedBatch]:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        inputs, passes = self._inputs, self._passes
        tokens = inputs.fill(batch)
        if passes.lockstep is not None:
            passes.lockstep.begin(tokens)
        begin = perf_counter()
        with torch.inference_mode():
            hidden = passes.hidden(inputs.view(tokens, len(batch.rows)), batch.embedded)
            logits = passes.logits(hidden, len(batch.output_rows))
        passes.native_seconds += perf_counter() - begin
        num_draws = len(batch.draws)
        read = partial(inputs.sampling.read, num_draws)
        return [LaunchedBatch(batch, hidden, logits, read, passes.streams)]

    def repeater(self, batch: StepBatch) -> Repeater | None:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return None
