"""Decode steps of a GPU, one of which is always under way.

While the host looks at the tokens of one step, the next already runs: the tokens go from its
sampler to the next step's inputs on the card. What the host decides meanwhile comes one step late.
A request that has ended ran once too often: that token is dropped, and its key and value lie in a
page that whoever has it next writes before reading, in the order of the stream. The others' tokens
of such a step are kept (:meth:`RunAhead.landed`), so that little is computed for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.engine.inputs import Running, StepInputs
from sdk.engine.plan import StepPlan
from sdk.kernels.gpu.graphs import CardRecorder, StepGraphs
from sdk.sampling.state import RequestState
from sdk.sampling.uniform import TOKEN

#: Hidden states, logits and ``Ops.sample_rows``.
Decoded = tuple[Tensor, Tensor, Tensor]


class Flight:
    """A decode step that was launched: its rows, their lengths with it, and what it samples."""

    def __init__(self, rows: Sequence[Running], lengths: list[int], outcome: Tensor) -> None:
        self.rows = rows
        self.lengths = lengths
        self._outcome = outcome
        self._arrived: Any = None
        if outcome.is_pinned():
            self._arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._arrived.record()

    def read(self) -> NDArray[np.float64]:
        """Wait for it: ``[rows, 3]``, token, best and probability (``Ops.sample_rows``)."""
        if self._arrived is not None:
            self._arrived.synchronize()
        found: NDArray[np.float64] = self._outcome[: len(self.rows)].numpy()
        return found


class _Kept:
    """Decode steps whose hidden states and logits go into buffers that all graphs share: with a
    pair of its own each, those of 256 requests and 150,000 tokens would keep 2.5 GB of logits."""

    def __init__(self, decode: Callable[[int, bool], Decoded], largest: int) -> None:
        self._decode = decode
        self._largest = largest
        self._buffers: list[Tensor] = []

    def __call__(self, size: int, shared: bool) -> Decoded:
        hidden, logits, sampled = self._decode(size, shared)
        if not self._buffers:
            self._buffers = [x.new_empty(self._largest, x.shape[1]) for x in (hidden, logits)]
        all_hidden, all_logits = self._buffers
        return all_hidden[:size].copy_(hidden), all_logits[:size].copy_(logits), sampled


class RunAhead:
    """Launches the decode steps of one engine. ``decode(size, shared)`` runs one over ``inputs``.

    ``flight`` is the step whose tokens nobody has asked for yet.
    """

    def __init__(
        self,
        decode: Callable[[int, bool], Decoded],
        inputs: StepInputs,
        largest: int,
        recorder: CardRecorder,
    ) -> None:
        self.graphs = StepGraphs(_Kept(decode, largest), largest, recorder)
        self._inputs = inputs
        pinned = inputs.token_ids.is_cuda
        # Two, because one is read while the next step writes the other.
        self._outcomes = [
            torch.zeros(largest, 3, dtype=torch.float64, pin_memory=pinned) for _ in range(2)
        ]
        self._bucket = 0, False
        self._sampled: Tensor | None = None
        self.flight: Flight | None = None

    def run(self, rows: Sequence[Running]) -> tuple[Flight, Tensor, Tensor]:
        """The step just written into the inputs, with hidden states and logits.

        Those are valid until the next one.

        :raises CaptureError: where it cannot be captured.
        """
        size = self.graphs.size(len(rows))
        self._bucket = size, self._inputs.fill_up(len(rows), size)
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
        self._outcomes.reverse()
        count = len(rows)
        self._outcomes[0][:count].copy_(self._sampled[:count], non_blocking=True)
        return Flight(rows, lengths, self._outcomes[0]), hidden, logits

    def landed(
        self, plan: StepPlan, requests: Mapping[str, Running]
    ) -> tuple[Flight | None, dict[str, int]]:
        """The flight and, of the requests whose part of ``plan`` it has run, their rows in it.

        Whatever else it ran is lost; None, where that is all.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            return None, {}
        at = {id(request): row for row, request in enumerate(flight.rows)}
        found = {}
        for request_id, count in plan.num_tokens:
            request = requests[request_id]
            row = at.get(id(request))
            if row is not None and count == 1 and request.num_computed + 1 == flight.lengths[row]:
                found[request_id] = row
        return (flight, found) if found else (None, {})
