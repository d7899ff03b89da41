"""Steps as graphs of fixed shapes: whole decode steps, and steps with prompts as pieces between
attention operators. With several ranks all steps run in pieces, also between their exchanges.

A graph has fixed shapes, so there is one per bucket of sizes, captured when it is first needed. A
smaller step runs in the next larger graph with padding rows (slot -1: attention and the write of
keys skip them). The launches of an attention also depend on the lengths of its requests, which are
bounded in decode steps but not in prompts.

All graphs share one memory pool, because only one runs at a time. Tensors that are read after the
next replay must be outside the pool, where no other graph has its scratch.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from sdk.kernels.backend import GraphRecorder
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.errors import CaptureError, KernelError
from sdk.kernels.graph import Attend, Cut, Exchange

logger = logging.getLogger("sdk")
Result = TypeVar("Result")
Recorded = TypeVar("Recorded")
#: An attention operator or an exchange of a recorded step, run on the batch of a step.
Between = Callable[[AttentionBatch], None]

#: Tokens of the largest step that runs in pieces. With more, a layer of 4,096 features computes for
#: longer than launching its operators one by one takes (0.1 to 0.3 ms); estimated, not measured.
MOST_TOKENS = 512


def buckets(largest: int) -> list[int]:
    """Batch sizes that have a graph: powers of two up to 8, then multiples of 8."""
    small = [size for size in (1, 2, 4) if size < largest]
    return [*small, *range(8, largest, 8), largest]


def token_buckets(largest: int) -> list[int]:
    """Numbers of tokens that have graphs: powers of two up to 64, then multiples of 64."""
    small = [1 << bit for bit in range(6) if 1 << bit < largest]
    return [*small, *range(64, largest, 64), largest]


def bucket_of(sizes: Sequence[int], rows: int) -> int:
    """The first of ascending ``sizes`` that is large enough. :raises KernelError: none is."""
    at = bisect_left(sizes, rows)
    if at == len(sizes):
        raise KernelError(f"replay: expected at most {sizes[-1]} rows, found {rows}")
    return sizes[at]


class CapturedGraphs(Generic[Recorded]):
    """Captured graphs by size. After a failure no more are captured, because memory stays short;
    existing graphs stay in use. ``failed`` is the reason, or empty.
    """

    def __init__(self) -> None:
        self._recorded: dict[Any, Recorded] = {}
        self.failed = ""

    @property
    def sizes(self) -> Sequence[Any]:
        return list(self._recorded)

    def find(self, size: Any, capture: Callable[[], Recorded], what: str) -> Recorded:
        """The graph of a size. :raises CaptureError: it cannot be captured."""
        if size not in self._recorded:
            if self.failed:
                raise CaptureError(self.failed)
            try:
                self._recorded[size] = capture()
            except RuntimeError as error:
                self.failed = f"{what} cannot be captured: {error}"
                count = len(self._recorded)
                kept = f"{count} captured before stay in use" if count else "none is captured yet"
                logger.warning(
                    "%s; this and other sizes run operator by operator, %s", self.failed, kept
                )
                raise CaptureError(self.failed) from error
        return self._recorded[size]


class StepGraphs(Generic[Result]):
    """The decode steps of one engine. ``forward(size, *variant)`` runs a step on the first rows of
    fixed buffers, and returns fixed buffers that every replay fills. There is a graph for each size
    and ``variant``.
    """

    def __init__(
        self, forward: Callable[..., Result], largest: int, recorder: GraphRecorder
    ) -> None:
        self._forward = forward
        self._buckets = buckets(largest)
        self._recorder = recorder
        self.captured: CapturedGraphs[tuple[Any, Result]] = CapturedGraphs()

    def size(self, requests: int) -> int:
        """The bucket for a step of so many requests."""
        return bucket_of(self._buckets, requests)

    def replay(self, size: int, *variant: bool) -> Result:
        """Run the step of a bucket on the current contents of its buffers.

        :raises CaptureError: it cannot be captured.
        """
        what = f"a decode step of {size}"
        graph, result = self.captured.find(
            (size, *variant), lambda: self._capture(size, *variant), what
        )
        graph.replay()
        return result

    def _capture(self, size: int, *variant: bool) -> tuple[Any, Result]:
        recorder = self._recorder
        recorder.warm_up(lambda: self._forward(size, *variant))
        recorder.begin()
        try:
            result = self._forward(size, *variant)
        finally:
            graph = recorder.end()
        return graph, result


@dataclass(frozen=True, slots=True)
class _Pieces:
    """One bucket: graphs and what runs between them in turn, and their result."""

    graphs: list[Any]
    between: list[Between]
    hidden: Tensor


class PieceGraphs:
    """Steps of up to ``most_tokens`` tokens, with prompts or decoding requests, in pieces.

    ``forward(size, cut, exchange)`` computes hidden states from the first ``size`` rows of fixed
    buffers, and calls ``cut`` for each attention and ``exchange`` for each sum or transfer between
    ranks. These run on the step's own batch, between the pieces, and share data with them through
    buffers of all layers and buckets, because a layer's memory in the pool is reused by other
    layers.

    A capture exchanges nothing, and an exchange has the rows of the step without padding. So a rank
    makes the same exchanges whether it captures a step, replays it, or runs it operator by
    operator, and ranks need not agree on that.
    """

    def __init__(
        self,
        forward: Callable[[int, Cut, Exchange], Tensor],
        most_tokens: int,
        recorder: GraphRecorder,
    ) -> None:
        self._forward = forward
        self._buckets = token_buckets(min(most_tokens, MOST_TOKENS))
        self._recorder = recorder
        self.captured: CapturedGraphs[_Pieces] = CapturedGraphs()
        self._buffers: dict[Any, Tensor] = {}

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest step."""
        return self._buckets[-1]

    def replay(self, batch: AttentionBatch) -> Tensor:
        """Run the step in the buffers; returns its hidden states, valid until the next replay.

        :raises CaptureError: it cannot be captured.
        """
        size = bucket_of(self._buckets, batch.num_tokens)
        pieces = self.captured.find(size, lambda: self._capture(size, batch), f"{size} tokens")
        pieces.graphs[0].replay()
        for between, graph in zip(pieces.between, pieces.graphs[1:], strict=True):
            between(batch)
            graph.replay()
        return pieces.hidden[: batch.num_tokens]

    def _capture(self, size: int, batch: AttentionBatch) -> _Pieces:
        recorder = self._recorder
        graphs: list[Any] = []
        pieces: list[Between] = []

        def part(between: Between) -> None:
            graphs.append(recorder.end())
            pieces.append(between)
            recorder.begin()

        recorder.warm_up(lambda: self._run(size, lambda attend: attend(batch), lambda _: None))
        recorder.begin()
        try:
            hidden = self._run(size, part, part)
        finally:
            graphs.append(recorder.end())
        return _Pieces(graphs, pieces, hidden)

    def _run(
        self,
        size: int,
        at_attention: Callable[[Between], None],
        at_exchange: Callable[[Between], None],
    ) -> Tensor:
        def cut(q: Tensor, out: Tensor, attend: Attend) -> Tensor:
            queries = self._buffer("queries", q).copy_(q)
            result = self._buffer("results", out)

            def attention(batch: AttentionBatch) -> None:
                tokens = batch.num_tokens
                attend(queries[:tokens], batch, result[:tokens])

            at_attention(attention)
            return result

        def exchange(x: Tensor, run: Callable[[Tensor], None]) -> None:
            rows = self._buffer("exchanged", x).copy_(x)
            at_exchange(lambda batch: run(rows[: batch.num_tokens]))
            x.copy_(rows)

        hidden = self._forward(size, cut, exchange)
        return self._buffer("hidden", hidden).copy_(hidden)

    def _buffer(self, purpose: str, like: Tensor) -> Tensor:
        """The first rows of a fixed buffer."""
        key = purpose, like.shape[1:], like.dtype
        if key not in self._buffers:
            self._buffers[key] = like.new_empty(self._buckets[-1], *like.shape[1:])
        return self._buffers[key][: like.shape[0]]
