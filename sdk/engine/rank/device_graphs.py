"""Steps as CUDA graphs: whole decode steps, one ahead; other steps in pieces.

With several ranks all steps run in pieces, and none is launched ahead: only rank 0 knows how tokens
are drawn, so only it could tell which steps may be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.run_ahead import InFlightStep, ReadbackBuffers, RunAhead
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import LaunchedBatch, Repeater
from sdk.kernels.card import Card
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch
from sdk.kernels.operators.sampling import Tokens
from sdk.kernels.sized_graphs import PieceGraphs, StepGraphs

_SEVERAL_RANKS = "several ranks launch no step ahead"


class DeviceGraphs:
    """See :class:`sdk.engine.rank.strategy.Strategy`.

    :meth:`capture_next` captures one size after another. Sizes without a graph run operator by
    operator. ``most_tokens``: of the largest step in pieces. ``reads_hidden``: a head that drafts
    reads hidden states of every step, so none is launched ahead. With recurrent states none is
    either: a token that is dropped could not be taken out of them again.
    """

    def __init__(
        self,
        passes: ForwardPasses,
        inputs: StepInputs,
        card: Card,
        most_tokens: int,
        *,
        reads_hidden: bool = False,
    ) -> None:
        #: See :class:`~sdk.engine.rank.strategy.Strategy`.
        self.steps_ahead = 0
        self._passes = passes
        self._inputs = inputs
        pinned = inputs.token_ids.is_cuda
        self._readbacks = ReadbackBuffers(len(inputs.output_rows), pinned=pinned)
        self.decodes: RunAhead | None = None
        self.pieces: PieceGraphs | None = None
        self.eager_reason: str | None = _SEVERAL_RANKS
        #: One batch of decoding requests and one of prompts.
        self.batches_in_flight = 1
        if passes.alone:
            self.eager_reason = passes.no_graphs_reason()
        if self.eager_reason is None:
            self.decodes = RunAhead(passes, inputs, self._readbacks, card)
            if not reads_hidden and inputs.attention_batch.states is None:
                self.steps_ahead, self.batches_in_flight = 1, 2
        self.eager_prompts_reason = passes.no_pieces_reason()
        if self.eager_prompts_reason is None:
            self.pieces = PieceGraphs(passes.pieces, min(most_tokens, len(inputs.token_ids)), card)

    @property
    def most_tokens_in_pieces(self) -> int:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return 0 if self.pieces is None else self.pieces.most_tokens

    @property
    def failed_captures(self) -> list[str]:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return [one.graphs.failed for one in self._sized if one.graphs.failed]

    @property
    def _sized(self) -> Sequence[StepGraphs[Any] | PieceGraphs]:
        steps = None if self.decodes is None else self.decodes.steps
        return [one for one in (steps, self.pieces) if one is not None]

    def capture_next(self) -> bool:
        """Capture the next size that waits; whether one was left. There are no requests."""
        waiting = next((one for one in self._sized if one.graphs.waits), None)
        if waiting is None:
            return False
        if self.decodes is not None:
            self.decodes.in_flight = None
        self._inputs.clear()
        waiting.capture_next()
        if waiting.graphs.failed and not waiting.graphs.sizes:
            if waiting is self.pieces:
                self.eager_prompts_reason, self.pieces = waiting.graphs.failed, None
            else:
                self.eager_reason, self.decodes = waiting.graphs.failed, None
                self.steps_ahead = 0
        return True

    def launch(self, batch: StepBatch) -> Sequence[LaunchedBatch]:
        """See :class:`~sdk.engine.rank.strategy.Strategy`.

        Rows that the step in flight has already run are not run again. The results of its other
        rows are dropped.
        """
        step = None
        if self.decodes is not None:
            step, self.decodes.in_flight = self.decodes.in_flight, None
        done = step.matching_rows(batch) if step is not None else {}
        if step is None or not done:
            return [self._launch(batch, whole=True)]
        rows, readback = list(done.values()), step.readback
        launched = [
            LaunchedBatch(batch.subset(list(done)), *_not_read(), lambda: readback.tokens(rows))
        ]
        if rest := [index for index in range(len(batch.rows)) if index not in done]:
            launched.append(self._launch(batch.subset(rest), whole=False))
        return launched

    def _launch(self, batch: StepBatch, *, whole: bool) -> LaunchedBatch:
        """``whole``: these are all rows of the plan, so the next step may have the same rows."""
        inputs = self._inputs
        tokens, outputs = inputs.fill(batch), len(batch.output_rows)
        # the masks of structured answers are computed while the model runs, so it samples after it
        masked = len(inputs.sampling.mask_tasks) > 0
        rows = 0 if masked else len(batch.draws)
        shaped, left_out = self._passes.pack_shapes(rows)
        decodes = batch.is_decode and not batch.embedded
        decoded = None
        if decodes and self.decodes is not None:
            decoded = self.decodes.run(batch.requests, shaped)
        if decoded is not None:
            step, hidden, logits = decoded
            if masked:
                return self._sample_masked(batch, hidden, logits)
            if left_out:
                return self._sample_again(batch, hidden, logits)
            if whole and self.decodes and self.steps_ahead and batch.plain and batch.foreseeable:
                self.decodes.launch_next(step, batch.random_draws, 1)
            return LaunchedBatch(batch, hidden, logits, step.readback.tokens)
        with torch.inference_mode():
            hidden = self._hidden(inputs.view(tokens, len(batch.rows)), batch.embedded)
        if not outputs or not self._passes.samples:
            with torch.inference_mode():
                logits = self._passes.logits(hidden, outputs)
            return self._launched(batch, hidden, logits, lambda: Tokens([], [], []))
        if masked:
            shaped, left_out = self._passes.pack_shapes(len(batch.draws))
        logits, sampled = self._passes.sample(hidden, outputs, shaped)
        if left_out:
            return self._sample_again(batch, hidden, logits)
        return self._launched(batch, hidden, logits, self._readbacks.start(sampled).tokens)

    def _sample_masked(self, batch: StepBatch, hidden: Tensor, logits: Tensor) -> LaunchedBatch:
        """Sample with masks that are computed now, while the device computes ``logits``."""
        shaped, left_out = self._passes.pack_shapes(len(batch.draws))
        if left_out:
            return self._sample_again(batch, hidden, logits)
        sampled = self._passes.draw(logits[: len(batch.draws)], shaped)
        return self._launched(batch, hidden, logits, self._readbacks.start(sampled).tokens)

    def _sample_again(self, batch: StepBatch, hidden: Tensor, logits: Tensor) -> LaunchedBatch:
        """Sample with all shapes, because some did not fit into the packed shapes."""
        buffers, count = self._inputs.sampling, len(batch.draws)
        self._passes.ops.sampling.sample_into(logits[:count], buffers)
        tokens = buffers.read(count)  # read now: the other batch in flight may use these buffers
        return self._launched(batch, hidden, logits, lambda: tokens)

    def _launched(
        self, batch: StepBatch, hidden: Tensor, logits: Tensor, read: Callable[[], Tokens]
    ) -> LaunchedBatch:
        return LaunchedBatch(batch, hidden, logits, read, self._passes.streams)

    def _hidden(self, batch: AttentionBatch, embedded: Sequence[tuple[int, Tensor]]) -> Tensor:
        if embedded:
            return self._passes.hidden(batch, embedded)
        replayed = None
        if self.pieces is not None and batch.num_tokens <= self.pieces.most_tokens:
            replayed = self.pieces.replay(batch)
        return self._passes.hidden(batch) if replayed is None else replayed

    def repeater(self, batch: StepBatch) -> Repeater | None:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        if self.decodes is None or self.decodes.in_flight is None:
            return None
        return _RunAheadRepeater(self.decodes, self._inputs, batch)


class _RunAheadRepeater:
    """See :class:`~sdk.engine.rank.strategy.Repeater`.

    The step it is asked for is already in flight, so it launches the step after that one.
    """

    def __init__(self, decodes: RunAhead, inputs: StepInputs, batch: StepBatch) -> None:
        self._decodes = decodes
        self._inputs = inputs
        self._batch = batch
        self._random_draws = batch.random_draws
        self._step: InFlightStep | None = None

    @property
    def ready(self) -> bool:
        return self._decodes.in_flight is not None

    def launch(self, tokens: list[int], ahead: int) -> None:
        step = self._step = self._decodes.in_flight
        assert step is not None
        self._inputs.wait()
        self._decodes.launch_next(step, self._random_draws, ahead + 1)

    def tokens(self) -> list[int] | None:
        assert self._step is not None
        found = self._step.readback.read()
        return [int(x) for x in found[:, 0]] if np.isfinite(found[:, 1]).all() else None

    def launched(self) -> LaunchedBatch:
        assert self._step is not None
        return LaunchedBatch(self._batch, *_not_read(), self._step.readback.tokens)


def _not_read() -> tuple[Tensor, Tensor]:
    """In place of hidden states and logits of plain batches, which nothing reads."""
    return torch.empty(0), torch.empty(0)
