"""Steps as one native call each: a recorded program that takes any number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.strategy import Repeat, Run
from sdk.engine.rank.work import Work
from sdk.sampling.draws import Draw
from sdk.sampling.uniform import TOKEN


class Recorded:
    """See :class:`sdk.engine.rank.strategy.Strategy`, and kernels/graph.py for the program.

    :raises CaptureError: the model cannot be recorded.
    """

    eager_reason = eager_prompts_reason = None
    most_tokens_in_pieces = 0
    steps_ahead = 0
    batches_in_flight = 1

    def __init__(self, passes: ForwardPasses, inputs: StepInputs) -> None:
        self.graph = passes.record()
        self.passes = passes
        self._inputs = inputs
        self.failed_captures: list[str] = []

    def launch(self, work: Work) -> Sequence[Run]:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        inputs = self._inputs
        tokens = inputs.fill(work)
        begin = perf_counter()
        self.graph.replay(tokens=tokens, outputs=len(work.outputs), requests=len(work.rows))
        self.passes.native_seconds += perf_counter() - begin
        return [Run(work, *self.graph.result, lambda: inputs.sampling.read(len(work.draws)))]

    def repeat(self, work: Work) -> Repeat | None:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return _RecordedAgain(self, self._inputs, work)


class _RecordedAgain:
    """See :class:`~sdk.engine.rank.strategy.Repeat`: writes tokens, lengths, random numbers."""

    ready = True

    def __init__(self, recorded: Recorded, inputs: StepInputs, work: Work) -> None:
        self._work = work
        self._graph = recorded.graph
        self._passes = recorded.passes
        self._inputs = inputs
        self._count = len(work.rows)
        states = [(row, draw.state) for row, draw in enumerate(work.draws)]
        self._drawing = [(row, x) for row, x in states if x.foreseeable and not x.greedy]
        self._following = [(row, x) for row, x in states if not x.foreseeable]

    def launch(self, tokens: list[int], ahead: int) -> None:
        inputs = self._inputs
        inputs.advance(tokens)
        for row, state in self._drawing:
            inputs.sampling.set(row, state.draw(ahead), state.uniform(TOKEN, ahead))
        for row, state in self._following:
            Draw(state).write(row, inputs.sampling)
        begin = perf_counter()
        self._graph.replay_again()
        self._passes.native_seconds += perf_counter() - begin

    def tokens(self) -> list[int] | None:
        return self._inputs.sampled(self._count)

    def run(self) -> Run:
        return Run(self._work, *self._graph.result, lambda: self._inputs.sampling.read(self._count))
