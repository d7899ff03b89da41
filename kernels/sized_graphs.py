"""Steps as graphs of fixed shapes: whole decode steps, and steps with prompts as pieces between
attention operators. With several ranks all steps run in pieces, also between their exchanges.

A graph has fixed shapes, so there is one per bucket of sizes. A smaller step runs in the next
larger graph with padding rows (slot -1: attention and the write of keys skip them). The launches of
an attention also depend on the lengths of its requests, which are bounded in decode steps but not
in prompts.

Nothing is captured while a step is served: sizes are captured one at a time, at load and when the
engine is idle, the largest first, so that the smaller ones fit into its memory. A step whose size
has no graph runs operator by operator, and its size is the next to be captured.

All graphs share one memory pool, because only one runs at a time. Tensors that are read after the
next replay must be outside the pool, where no other graph has its scratch.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from sdk.kernels.card import Card
from sdk.kernels.dataclass import dataclass
from sdk.kernels.errors import KernelError
from sdk.kernels.graph import Attend, Cut, Exchange
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.batch import AttentionBatch

logger = logging.getLogger("sdk")
Result = TypeVar("Result")
Recorded = TypeVar("Recorded")
Size = Any  # hashable
#: An attention operator or an exchange of a recorded step, run on the batch of a step.
Between = Callable[[AttentionBatch], None]

#: Tokens of the largest step that runs in pieces. Launching the 13 operators of a layer one by one
#: takes 0.6 to 2.8 ms of Python (50 to 220 us each, measured without a card on 2 cores); with 2,048
#: tokens a layer of 8B computes for about 1.5 ms on an H100 (1 TFLOP; estimated, not measured).
MOST_TOKENS = 2048
#: Where memory is scarce. With more tokens the graphs' memory grows, and sizes are further apart.
FEW_TOKENS = 512


def buckets(largest: int) -> list[int]:
    """Batch sizes that have a graph: 1, 2, 4, 8, then ever larger distances.

    A decode step reads all weights whatever its rows, so up to a third more rows, which are
    padding, take little time. For 256 requests these are 15 sizes; multiples of 8 would be 35.
    """
    small = [1, 2, 4, 8, 16, 24, 32, 48, 64, *range(96, 257, 32)]
    sizes = [*small, *range(320, largest, 64)]
    return [*(size for size in sizes if size < largest), largest]


def token_buckets(largest: int) -> list[int]:
    """Numbers of tokens that have graphs: powers of two up to 64, then multiples of 64, and of 128
    above :data:`FEW_TOKENS`.

    There a step computes for longer than it takes to launch, so padding costs its share of the
    time: at most a quarter of 512 tokens, an eighth of 1,024. Each size costs capturing it (two
    passes through the model's code) and a graph for each piece; 2,048 tokens have 26 sizes.
    """
    sizes = [*(1 << bit for bit in range(6)), *range(64, FEW_TOKENS, 64)]
    sizes += range(FEW_TOKENS, largest, 128)
    return [*(size for size in sizes if size < largest), largest]


def bucket_of(sizes: Sequence[int], rows: int) -> int:
    """The first of ascending ``sizes`` that is large enough. :raises KernelError: none is."""
    at = bisect_left(sizes, rows)
    if at == len(sizes):
        raise KernelError(f"replay: expected at most {sizes[-1]} rows, found {rows}")
    return sizes[at]


class SizedGraphs(Generic[Recorded]):
    """Graphs by size, of which some wait to be captured.

    After a failure no more are captured, because memory stays short; existing graphs stay in use.
    ``failed`` is the reason, or empty.

    :param sizes: the largest first.
    :param what: names a step of a size, for messages.
    """

    def __init__(self, sizes: Sequence[Size], what: Callable[[Size], str]) -> None:
        self._waiting = list(sizes)
        self._what = what
        self._recorded: dict[Size, Recorded] = {}
        self.failed = ""

    @property
    def sizes(self) -> Sequence[Size]:
        """What was captured."""
        return list(self._recorded)

    @property
    def waits(self) -> bool:
        """Whether a size is left to capture."""
        return bool(self._waiting)

    def find(self, size: Size) -> Recorded | None:
        """The graph of a size. ``None``: it has none; if it can, it is the next to be captured."""
        found = self._recorded.get(size)
        if found is None and size in self._waiting:
            self._waiting.remove(size)
            self._waiting.insert(0, size)
        return found

    def capture_next(self, capture: Callable[[Size], Recorded]) -> None:
        """Capture the next size that waits. No step may be in flight."""
        size = self._waiting.pop(0)
        try:
            self._recorded[size] = capture(size)
        except (RuntimeError, KernelError) as error:
            self._waiting.clear()
            self.failed = f"{self._what(size)} cannot be captured: {error}"
            count = len(self._recorded)
            kept = f"{count} captured before stay in use" if count else "none is captured yet"
            logger.warning(
                "%s; this and other sizes run operator by operator, %s", self.failed, kept
            )


class StepGraphs(Generic[Result]):
    """The decode steps of one engine. ``forward(size, shared)`` runs a step on the first rows of
    fixed buffers, and returns fixed buffers that every replay fills. There is a graph for each
    size, and with ``shares`` a second one for requests that begin with the same pages
    (``AttentionBatch.shared_len``).
    """

    def __init__(
        self, forward: Callable[[int, bool], Result], largest: int, card: Card, *, shares: bool
    ) -> None:
        self._forward = forward
        self._buckets = buckets(largest)
        self._card = card
        descending = self._buckets[::-1]
        kinds = [(size, False) for size in descending]
        if shares:
            kinds += [(size, True) for size in descending if size > 1]
        self.graphs: SizedGraphs[tuple[Any, Result]] = SizedGraphs(
            kinds, lambda kind: f"a decode step of {kind[0]}"
        )

    def size(self, requests: int) -> int:
        """The bucket for a step of this many requests."""
        return bucket_of(self._buckets, requests)

    def has(self, size: int) -> bool:
        """Whether there is a graph of this bucket."""
        return self.graphs.find((size, False)) is not None

    def replay(self, size: int, shared: bool) -> Result:
        """Run the step of a bucket that has a graph on the current contents of its buffers.

        Requests that begin with the same pages may run in the graph for any requests.
        """
        found = self.graphs.find((size, shared)) or self.graphs.find((size, False))
        if found is None:
            raise KernelError(f"replay: no decode step of {size} is captured")
        graph, result = found
        graph.replay()
        return result

    def capture_next(self) -> None:
        """See :meth:`SizedGraphs.capture_next`."""
        self.graphs.capture_next(self._capture)

    def _capture(self, kind: tuple[int, bool]) -> tuple[Any, Result]:
        card = self._card
        with card.capturing(lambda: self._forward(*kind)):
            card.begin()
            result = self._forward(*kind)
            return card.end(), result


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
        self, forward: Callable[[int, Cut, Exchange], Tensor], most_tokens: int, card: Card
    ) -> None:
        self._forward = forward
        self._buckets = token_buckets(min(most_tokens, MOST_TOKENS))
        self._card = card
        self.graphs: SizedGraphs[_Pieces] = SizedGraphs(
            self._buckets[::-1], lambda size: f"{size} tokens"
        )
        self._buffers: dict[Any, Tensor] = {}

    @property
    def most_tokens(self) -> int:
        """The tokens of the largest step."""
        return self._buckets[-1]

    def replay(self, batch: AttentionBatch) -> Tensor | None:
        """Run the step in the buffers; returns its hidden states, valid until the next replay.
        ``None``: no graph.

        :raises KernelError: the step is larger than any graph.
        """
        pieces = self.graphs.find(bucket_of(self._buckets, batch.num_tokens))
        if pieces is None:
            return None
        pieces.graphs[0].replay()
        for between, graph in zip(pieces.between, pieces.graphs[1:], strict=True):
            between(batch)
            graph.replay()
        return pieces.hidden[: batch.num_tokens]

    def capture_next(self) -> None:
        """See :meth:`SizedGraphs.capture_next`."""
        self.graphs.capture_next(self._capture)

    def _capture(self, size: int) -> _Pieces:
        card = self._card
        graphs: list[Any] = []
        pieces: list[Between] = []

        def part(between: Between) -> None:
            graphs.append(card.end())
            pieces.append(between)
            card.begin()

        with card.capturing(lambda: self._run(size, lambda _: None, lambda _: None)):
            card.begin()
            hidden = self._run(size, part, part)
            graphs.append(card.end())
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
