"""Steps as one native call each: a recorded program that accepts any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import perf_counter

from sdk.engine.rank.eager import Eager
from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import LaunchedBatch, Repeater
from sdk.sampling.draws import Draw
from sdk.sampling.uniform import TOKEN


class Recorded:
    """See :class:`sdk.engine.rank.strategy.Strategy`. kernels/graph.py records the program.

    :raises CaptureError: the model cannot be recorded.
    """

    eager_reason = eager_prompts_reason = None
    most_tokens_in_pieces = 0
    steps_ahead = 0
    batches_in_flight = 1

    def __init__(self, passes: ForwardPasses, inputs: StepInputs) -> None:
        self.graph = passes.record()
        self._streams = passes.streams  # buffers of the graph
        self._eager = Eager(passes, inputs, "prompt_embeds")
        self.passes = passes
        self._inputs = inputs
        self.failed_captures: list[str] = []

    def capture_next(self) -> bool:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return False

    def launch(self, batch: StepBatch) -> Sequence[LaunchedBatch]:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        if batch.embedded:
            return self._eager.launch(batch)
        inputs = self._inputs
        tokens = inputs.fill(batch)
        if (lockstep := self.passes.lockstep) is not None:
            lockstep.begin(tokens)
        begin = perf_counter()
        self.graph.replay(tokens=tokens, outputs=len(batch.output_rows), requests=len(batch.rows))
        self.passes.native_seconds += perf_counter() - begin
        return [self.launched(batch)]

    def run_empty(self) -> None:
        """Run a step without requests, for the engines that run in lockstep with this one."""
        self.graph.replay(tokens=0, outputs=0, requests=0)

    def launched(self, batch: StepBatch) -> LaunchedBatch:
        """The results of the last step, which ran ``batch``."""
        inputs, num_draws = self._inputs, len(batch.draws)
        read = partial(inputs.sampling.read, num_draws)
        return LaunchedBatch(batch, *self.graph.result, read, self._streams)

    def repeater(self, batch: StepBatch) -> Repeater | None:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return _RecordedRepeater(self, self._inputs, batch)


class _RecordedRepeater:
    """See :class:`~sdk.engine.rank.strategy.Repeater`. Writes tokens, lengths, random numbers."""

    ready = True

    def __init__(self, recorded: Recorded, inputs: StepInputs, batch: StepBatch) -> None:
        self._batch = batch
        self._recorded = recorded
        self._graph = recorded.graph
        self._passes = recorded.passes
        self._inputs = inputs
        self._count = len(batch.rows)
        states = [(row, draw.state) for row, draw in enumerate(batch.draws)]
        self._random = [(row, x) for row, x in states if x.foreseeable and not x.greedy]
        self._dependent = [(row, x) for row, x in states if not x.foreseeable]
        for row, state in states:
            if state.foreseeable:  # its changes may have ended with the last token: min_tokens
                inputs.sampling.set_shape(row, state.shape())

    def launch(self, tokens: list[int], ahead: int) -> None:
        inputs = self._inputs
        inputs.advance(tokens)
        for row, state in self._random:
            inputs.sampling.set(row, state.draw(ahead), state.uniform(TOKEN, ahead))
        for row, state in self._dependent:
            Draw(state).write(row, inputs.sampling)
        if (lockstep := self._passes.lockstep) is not None:
            lockstep.begin(self._count)
        begin = perf_counter()
        self._graph.replay_again()
        self._passes.native_seconds += perf_counter() - begin

    def tokens(self) -> list[int] | None:
        return self._inputs.sampled(self._count)

    def launched(self) -> LaunchedBatch:
        return self._recorded.launched(self._batch)
