"""Steps as graphs of a device: decode steps whole and one ahead, others in pieces."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sdk.engine.rank.forward import ForwardPasses
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.run_ahead import Arrivals, Flight, RunAhead
from sdk.engine.rank.strategy import Repeat, Run
from sdk.engine.rank.work import Work
from sdk.kernels.backend import GraphRecorder
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.graph import CaptureError
from sdk.kernels.sampling import Tokens
from sdk.kernels.sized_graphs import PieceGraphs

#: Logits nobody looks at: those of requests that want their tokens alone.
_NOTHING = torch.empty(0)


class DeviceGraphs:
    """See :class:`sdk.engine.rank.strategy.Strategy`. Sizes are captured when they are first
    needed; those that cannot be run operator by operator.
    """

    #: One of those who decode, and prompts beside it.
    batches_in_flight = 2

    def __init__(self, passes: ForwardPasses, inputs: StepInputs, recorder: GraphRecorder) -> None:
        self._passes = passes
        self._inputs = inputs
        pinned = inputs.token_ids.is_cuda
        self._arrivals = Arrivals(len(inputs.output_rows), pinned=pinned)
        self.decodes: RunAhead | None = RunAhead(passes.decode, inputs, self._arrivals, recorder)
        self.pieces: PieceGraphs | None = None
        self.eager_reason: str | None = None
        self.eager_prompts_reason = passes.uncut()
        if self.eager_prompts_reason is None:
            self.pieces = PieceGraphs(passes.pieces, len(inputs.token_ids), recorder)

    @property
    def most_tokens_in_pieces(self) -> int:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return 0 if self.pieces is None else self.pieces.most_tokens

    @property
    def failed_captures(self) -> list[str]:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        graphs = (self.decodes and self.decodes.graphs, self.pieces)
        return [one.captured.failed for one in graphs if one and one.captured.failed]

    @property
    def steps_ahead(self) -> int:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        return 0 if self.decodes is None else 1

    def launch(self, work: Work) -> Sequence[Run]:
        """See :class:`~sdk.engine.rank.strategy.Strategy`. What a step ahead has run is not run
        again; whatever else it ran is lost.
        """
        flight = None
        if self.decodes is not None:
            flight, self.decodes.flight = self.decodes.flight, None
        landed = flight.landed(work) if flight is not None else {}
        if flight is None or not landed:
            return [self._launch(work, whole=True)]
        rows, arrival = list(landed.values()), flight.arrival
        runs = [Run(work.part(list(landed)), _NOTHING, _NOTHING, lambda: arrival.tokens(rows))]
        if rest := [index for index in range(len(work.rows)) if index not in landed]:
            runs.append(self._launch(work.part(rest), whole=False))
        return runs

    def _launch(self, work: Work, *, whole: bool) -> Run:
        """``whole``: these are all rows, so that the next step may be these again."""
        inputs = self._inputs
        tokens, outputs = inputs.fill(work), len(work.outputs)
        shaped, left_out = self._passes.pack_shapes(len(work.draws))
        if work.decodes and (decoded := self._decode(work, shaped)) is not None:
            flight, hidden, logits = decoded
            if left_out:
                return self._drawn_again(work, hidden, logits)
            if whole and self.decodes is not None and work.plain and work.foreseeable:
                self.decodes.go_on(flight, work.drawing, 1)
            return Run(work, hidden, logits, flight.arrival.tokens)
        with torch.inference_mode():
            hidden = self._hidden(inputs.view(tokens, len(work.rows)))
        if not outputs:
            return Run(work, hidden, hidden[:0], lambda: Tokens([], [], []))
        logits, sampled = self._passes.sample(hidden, outputs, shaped)
        if left_out:
            return self._drawn_again(work, hidden, logits)
        return Run(work, hidden, logits, self._arrivals.send(sampled).tokens)

    def _drawn_again(self, work: Work, hidden: Tensor, logits: Tensor) -> Run:
        """With all shapes, of which there was no room for some."""
        buffers, count = self._inputs.sampling, len(work.draws)
        self._passes.ops.sampling.sample_into(logits[:count], buffers)
        chosen = buffers.read(count)  # a batch launched beside it may write there too
        return Run(work, hidden, logits, lambda: chosen)

    def _decode(self, work: Work, shaped: bool) -> tuple[Flight, Tensor, Tensor] | None:
        """The decode step just written, where they are captured."""
        if self.decodes is None:
            return None
        try:
            return self.decodes.run(work.running, shaped)
        except CaptureError as error:
            if not self.decodes.graphs.captured.sizes:
                self.decodes, self.eager_reason = None, str(error)
            return None

    def _hidden(self, batch: AttentionBatch) -> Tensor:
        if self.pieces is not None and batch.num_tokens <= self.pieces.most_tokens:
            try:
                return self.pieces.replay(batch)
            except CaptureError as error:
                if not self.pieces.captured.sizes:
                    self.pieces, self.eager_prompts_reason = None, str(error)
        return self._passes.hidden(batch)

    def repeat(self, work: Work) -> Repeat | None:
        """See :class:`~sdk.engine.rank.strategy.Strategy`."""
        if self.decodes is None or self.decodes.flight is None:
            return None
        return _NextFlight(self.decodes, self._inputs, work)


class _NextFlight:
    """See :class:`~sdk.engine.rank.strategy.Repeat`: the step was launched already, so launch the
    one after it.
    """

    def __init__(self, decodes: RunAhead, inputs: StepInputs, work: Work) -> None:
        self._decodes = decodes
        self._inputs = inputs
        self._work = work
        self._drawing = work.drawing
        self._flight: Flight | None = None

    @property
    def ready(self) -> bool:
        return self._decodes.flight is not None

    def launch(self, tokens: list[int], ahead: int) -> None:
        flight = self._flight = self._decodes.flight
        assert flight is not None
        self._inputs.wait()
        self._decodes.go_on(flight, self._drawing, ahead + 1)

    def tokens(self) -> list[int] | None:
        assert self._flight is not None
        found = self._flight.arrival.read()
        return [int(x) for x in found[:, 0]] if np.isfinite(found[:, 1]).all() else None

    def run(self) -> Run:
        assert self._flight is not None
        return Run(self._work, _NOTHING, _NOTHING, self._flight.arrival.tokens)
