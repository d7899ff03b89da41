"""Decode steps of a GPU, one of which is always under way.

While the host looks at the tokens of one step, the next already runs: the tokens go from its
sampler to the next step's inputs on the card. What the host decides meanwhile comes one step late.
A request that has ended ran once too often: that token is dropped, and its key and value lie in a
page that whoever has it next writes before reading, in the order of the stream. The others' tokens
of such a step are kept (:meth:`RunAhead.landed`), so that little is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.running import Running
from sdk.engine.rank.work import Work
from sdk.kernels.backend import GraphRecorder
from sdk.kernels.sampling import Tokens
from sdk.kernels.sized_graphs import StepGraphs
from sdk.sampling.state import RequestState
from sdk.sampling.uniform import TOKEN

#: Hidden states, logits and ``SamplingOps.sample_rows``.
Decoded = tuple[Tensor, Tensor, Tensor]
#: What was sampled is read while later steps write theirs: a batch beside it, and one ahead of
#: each.
_OUTCOMES = 4


class Arrival:
    """What a step samples, on its way to the host: ``[rows, 3]`` of ``SamplingOps.sample_rows``."""

    def __init__(self, outcome: Tensor) -> None:
        self._outcome = outcome
        self._arrived: Any = None
        if outcome.is_pinned():
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> NDArray[np.float64]:
        """Wait for it."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: NDArray[np.float64] = self._outcome.numpy()
        return found

    def tokens(self, rows: Sequence[int] | None = None) -> Tokens:
        """The same by column; of some rows."""
        found = self.read()
        tokens, best, shares = (found if rows is None else found[list(rows)]).T.tolist()
        return Tokens([*map(int, tokens)], best, shares)


class Arrivals:
    """Memory of the host for what ``most`` rows of a step sample, of the last few steps."""

    def __init__(self, most: int, *, pinned: bool) -> None:
        shape = most, 3
        self._outcomes = [
            torch.zeros(shape, dtype=torch.float64, pin_memory=pinned) for _ in range(_OUTCOMES)
        ]

    def send(self, sampled: Tensor) -> Arrival:
        """Have it copied when the device is that far."""
        outcome = self._outcomes.pop(0)
        self._outcomes.append(outcome)
        return Arrival(outcome[: len(sampled)].copy_(sampled, non_blocking=True))


class Flight:
    """A decode step that was launched: its rows, their lengths with it, and what it samples."""

    def __init__(self, rows: Sequence[Running], lengths: list[int], arrival: Arrival) -> None:
        self.rows = rows
        self.lengths = lengths
        self.arrival = arrival

    def landed(self, work: Work) -> dict[int, int]:
        """The rows of ``work`` that it has run, with their rows in it."""
        at = {id(request): row for row, request in enumerate(self.rows)}
        found = {}
        for index, (row, request) in enumerate(zip(work.rows, work.running, strict=True)):
            place = at.get(id(request))
            if (
                place is not None
                and row.num_tokens == row.num_outputs == 1
                and request.num_computed + 1 == self.lengths[place]
            ):
                found[index] = place
        return found


class _Kept:
    """Decode steps whose hidden states and logits go into buffers that all graphs share: with a
    pair of its own each, those of 256 requests and 150,000 tokens would keep 2.5 GB of logits."""

    def __init__(self, decode: Callable[[int, bool, bool], Decoded], largest: int) -> None:
        self._decode = decode
        self._largest = largest
        self._buffers: list[Tensor] = []

    def __call__(self, size: int, shared: bool, shaped: bool) -> Decoded:
        hidden, logits, sampled = self._decode(size, shared, shaped)
        if not self._buffers:
            self._buffers = [x.new_empty(self._largest, x.shape[1]) for x in (hidden, logits)]
        all_hidden, all_logits = self._buffers
        return all_hidden[:size].copy_(hidden), all_logits[:size].copy_(logits), sampled


class RunAhead:
    """Launches the decode steps of one engine. ``decode(size, shared, shaped)`` runs one over
    ``inputs``: ``shared`` if all requests begin with the same pages, ``shaped`` if logits change.

    ``flight`` is the step whose tokens nobody has asked for yet.
    """

    def __init__(
        self,
        decode: Callable[[int, bool, bool], Decoded],
        inputs: StepInputs,
        arrivals: Arrivals,
        recorder: GraphRecorder,
    ) -> None:
        largest = min(len(inputs.token_ids), inputs.batch.num_requests)
        self.graphs = StepGraphs(_Kept(decode, largest), largest, recorder)
        self._inputs = inputs
        self._arrivals = arrivals
        self._bucket = 0, False, False
        self._sampled: Tensor | None = None
        self.flight: Flight | None = None

    def run(self, rows: Sequence[Running], shaped: bool) -> tuple[Flight, Tensor, Tensor]:
        """The step just written into the inputs, with hidden states and logits.

        Those are valid until the next one.

        :raises CaptureError: where it cannot be captured.
        """
        size = self.graphs.size(len(rows))
        self._bucket = size, self._inputs.fill_up(len(rows), size), shaped
        lengths = [request.num_computed + 1 for request in rows]
        return self._launch(rows, lengths)

    def go_on(self, last: Flight, drawing: Sequence[tuple[int, RequestState]], ahead: int) -> None:
        """Launch the step after ``last``, where all of its requests have a page for it.

        ``drawing``: the rows drawn at random, ``ahead`` tokens after those their states know.
        """
        self.flight = None
        size = self._inputs.batch.page_size
        for request, length in zip(last.rows, last.lengths, strict=True):
            if len(request.pages) * size <= length:
                return
        if drawing:
            self._inputs.wait()
        for row, state in drawing:
            self._inputs.sampling.set(row, state.draw(ahead), state.uniform(TOKEN, ahead))
        assert self._sampled is not None
        self._inputs.advance_on_device(len(last.rows), self._sampled, drawn=bool(drawing))
        lengths = [length + 1 for length in last.lengths]
        self.flight, _, _ = self._launch(last.rows, lengths)

    def _launch(self, rows: Sequence[Running], lengths: list[int]) -> tuple[Flight, Tensor, Tensor]:
        hidden, logits, self._sampled = self.graphs.replay(*self._bucket)
        arrival = self._arrivals.send(self._sampled[: len(rows)])
        return Flight(rows, lengths, arrival), hidden, logits
