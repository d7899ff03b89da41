"""Decode steps of a GPU with asynchronous scheduling: one step is always in flight.

While the host reads the tokens of one step, the next step already runs: its inputs take the tokens
from the sampler of the step before, on the card. So decisions of the host take effect one step
later. A request that has ended runs one more step. That token is dropped; its key and value are in
a page that the page's next owner overwrites before it reads them, because steps run in the order of
the stream. Tokens of the other requests are kept (:meth:`InFlightStep.matching_rows`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.step_batch import StepBatch
from sdk.kernels.card import Card
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.sampling import Tokens
from sdk.kernels.sized_graphs import StepGraphs
from sdk.sampling.state import SamplerState
from sdk.sampling.uniform import TOKEN

if TYPE_CHECKING:
    from sdk.engine.rank.forward import ForwardPasses

#: Buffers for readbacks. Later steps are launched before a readback is read: two batches in flight,
#: each with one step ahead.
_NUM_BUFFERS = 4


class Readback:
    """A copy of a step's samples to the host: ``[rows, 3]`` of ``SamplingOps.sample_rows``."""

    def __init__(self, samples: Tensor) -> None:
        self._samples = samples
        self._copied: Any = None
        if samples.is_pinned():
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()

    def read(self) -> NDArray[np.float64]:
        """Wait for the copy and return it."""
        if self._copied is not None:
            self._copied.synchronize()
        found: NDArray[np.float64] = self._samples.numpy()
        return found

    def tokens(self, rows: Sequence[int] | None = None) -> Tokens:
        """The same by column, for all rows or for ``rows``."""
        found = self.read()
        tokens, best, shares = (found if rows is None else found[list(rows)]).T.tolist()
        return Tokens([*map(int, tokens)], best, shares)


class ReadbackBuffers:
    """Host memory for the samples of the last few steps, each of up to ``max_rows`` rows."""

    def __init__(self, max_rows: int, *, pinned: bool) -> None:
        shape = max_rows, 3
        self._buffers = [
            torch.zeros(shape, dtype=torch.float64, pin_memory=pinned) for _ in range(_NUM_BUFFERS)
        ]

    def start(self, sampled: Tensor) -> Readback:
        """Start a copy to the host. It runs when the device has computed ``sampled``."""
        buffer = self._buffers.pop(0)
        self._buffers.append(buffer)
        return Readback(buffer[: len(sampled)].copy_(sampled, non_blocking=True))


class InFlightStep:
    """A launched decode step: its requests, their lengths after it, and its samples."""

    def __init__(
        self, requests: Sequence[RankRequest], lengths: list[int], readback: Readback
    ) -> None:
        self.requests = requests
        self.lengths = lengths
        self.readback = readback

    def matching_rows(self, batch: StepBatch) -> dict[int, int]:
        """The rows of ``batch`` that this step has already run: row in ``batch`` -> row in it."""
        row_of = {id(request): row for row, request in enumerate(self.requests)}
        found = {}
        for index, (row, request) in enumerate(zip(batch.rows, batch.requests, strict=True)):
            own = row_of.get(id(request))
            if (
                own is not None
                and row.num_scheduled_tokens == row.num_output_rows == 1
                and request.num_computed + 1 == self.lengths[own]
            ):
                found[index] = own
        return found


class _SharedResults:
    """Runs decode steps whose hidden states and logits are in buffers that all graphs share.

    With separate buffers per graph, the logits of 256 requests and a vocabulary of 150,000 tokens
    would take 2.5 GB. They are written there at once: a copy of logits takes an H100 0.1 ms.
    """

    def __init__(self, passes: ForwardPasses, largest: int) -> None:
        self._passes = passes
        self._largest = largest
        self._buffers: tuple[Tensor, Tensor] | None = None

    def __call__(self, size: int, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states, logits and samples."""
        if self._buffers is None:
            self._buffers = self._passes.new_results(self._largest)
        hidden, logits = (x[:size] for x in self._buffers)
        return hidden, logits, self._passes.decode(size, shared, hidden, logits)


class RunAhead:
    """Launches the decode steps of one engine.

    If some logits change before the draw, these are drawn from once more, with the changes: six
    launches, for which graphs of their own would cost as much time at load as all others together.

    ``in_flight`` is the step that was launched before the scheduler planned it, if any.
    """

    def __init__(
        self,
        passes: ForwardPasses,
        inputs: StepInputs,
        readbacks: ReadbackBuffers,
        card: Card,
    ) -> None:
        largest = min(len(inputs.token_ids), inputs.attention_batch.num_requests)
        decoded = _SharedResults(passes, largest)
        self.steps = StepGraphs(decoded, largest, card, shares=inputs.finds_shared)
        self._passes = passes
        self._inputs = inputs
        self._readbacks = readbacks
        self._bucket = 0, False
        self._shaped = False
        self._sampled: Tensor | None = None
        self.in_flight: InFlightStep | None = None

    def run(
        self, requests: Sequence[RankRequest], shaped: bool
    ) -> tuple[InFlightStep, Tensor, Tensor] | None:
        """Launch the step in the inputs. Returns it with its hidden states and logits, which are
        valid until the next launch. ``None``: its size has no graph.
        """
        size = self.steps.size(len(requests))
        if not self.steps.has(size):
            return None
        self._bucket, self._shaped = (size, self._inputs.pad(len(requests), size)), shaped
        lengths = [request.num_computed + 1 for request in requests]
        return self._launch(requests, lengths)

    def launch_next(
        self, last: InFlightStep, random_draws: Sequence[tuple[int, SamplerState]], ahead: int
    ) -> None:
        """Launch the step after ``last``, unless one of its requests has no page or frame for it.

        ``random_draws``: the rows that are drawn at random. Their sampling states do not have the
        last ``ahead`` tokens yet.
        """
        self.in_flight = None
        size = self._inputs.attention_batch.page_size
        for request, length in zip(last.requests, last.lengths, strict=True):
            if min(request.num_places) * size <= length:
                return
        if random_draws:
            self._inputs.wait()
        for row, state in random_draws:
            self._inputs.sampling.set(row, state.draw(ahead), state.uniform(TOKEN, ahead))
        assert self._sampled is not None
        self._inputs.advance_on_device(len(last.requests), self._sampled, drawn=bool(random_draws))
        lengths = [length + 1 for length in last.lengths]
        self.in_flight, _, _ = self._launch(last.requests, lengths)

    def _launch(
        self, requests: Sequence[RankRequest], lengths: list[int]
    ) -> tuple[InFlightStep, Tensor, Tensor]:
        hidden, logits, self._sampled = self.steps.replay(*self._bucket)
        if self._shaped:
            self._sampled = self._passes.draw(logits[: len(requests)], shaped=True)
        readback = self._readbacks.start(self._sampled[: len(requests)])
        return InFlightStep(requests, lengths, readback), hidden, logits
