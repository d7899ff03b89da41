"""Batches that were planned and not committed yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from sdk.engine.plan import StepPlan
from sdk.engine.scheduling.request import Request


class Batch(NamedTuple):
    """A plan and the sequence that each of its rows belongs to."""

    plan: StepPlan
    sequences: Sequence[Request]
    #: How many of the rows decode: one token, with or without drafts after it.
    num_decodes: int = 0
    #: When it was planned; of a batch that is repeated: the first time.
    planned_ts: float = 0.0


class InFlightBatches:
    """The batches in flight, oldest first, and the last batch if the next one may repeat it.

    A batch is ``repeatable`` if it contains everything that runs, each request with one token, and
    no request came or went since. ``need_page``: its requests that need a page for the next step,
    ``need_save``: those that fill a page in it, after which their recurrent states are saved.
    ``same``: the repeatable batch, planned without new pages or copies. It can be used again
    unchanged, so that nothing is built or read row by row.
    """

    def __init__(self) -> None:
        self.batches: deque[Batch] = deque()
        self.repeatable: Batch | None = None
        self.need_page: list[Request] = []
        self.need_save: list[Request] = []
        self.same: Batch | None = None

    def __len__(self) -> int:
        return len(self.batches)

    def stop_repeating(self) -> None:
        """The next batch is planned request by request."""
        self.repeatable, self.need_page, self.need_save = None, [], []

    def sequences(self) -> frozenset[Request]:
        """All sequences in flight, negative ones included."""
        return frozenset(sequence for batch in self.batches for sequence in batch.sequences)

    @property
    def decoding(self) -> bool:
        """Whether a request decodes in a batch in flight."""
        return any(batch.num_decodes for batch in self.batches)
