"""The hidden states of the model that a drafting head reads, from the step that computes them until
the head has run.

A step only copies its rows. They are looked at before the next step that is planned anew, because
while the same requests decode, every Python object that is touched costs time (docs/log.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import NamedTuple

from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.strategy import LaunchedBatch
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.models.drafting_heads import DraftingHead


class _Step(NamedTuple):
    """The hidden states of a step, and how many rows of each request are those of its tokens."""

    batch: StepBatch
    counts: Sequence[int]
    values: Tensor


class _Kept:
    """The hidden states of the last tokens that the model has computed of a request."""

    __slots__ = ("num", "parts", "request")

    def __init__(self, request: RankRequest) -> None:
        self.request = request
        self.parts: list[Tensor] = []
        self.num = 0


class HeadFeatures:
    """Hidden states by request. The last one always stays, because the next draft needs it.

    ``only_last``: a head without attention reads no other.
    """

    def __init__(self, head: DraftingHead, *, only_last: bool) -> None:
        self._head = head
        self._only_last = only_last
        self._steps: list[_Step] = []
        self._kept: dict[str, _Kept] = {}
        self._divided: set[str] = set()  # since they were compacted
        #: How many rows wait, of all requests.
        self.num = 0

    def keep(self, launched: LaunchedBatch, counts: Sequence[int]) -> None:
        """Copy the rows of a step, of which the first ``counts`` of each request are right."""
        rows = launched.batch.num_tokens
        streams = launched.streams or (launched.hidden,)
        values = torch.cat([stream[:rows] for stream in streams], dim=1)
        self._steps.append(_Step(launched.batch, counts, values))
        self.num += sum(counts)

    def settle(self, left_out: Iterable[str]) -> None:
        """Divide the rows of the last steps among their requests, without those ``left_out``."""
        steps, self._steps = self._steps, []
        for batch, counts, values in steps:
            begin = 0
            for row, request, count in zip(batch.rows, batch.requests, counts, strict=True):
                if row.request_id not in left_out and drafts_for(request):
                    self._add(row.request_id, request, values[begin : begin + count])
                begin += row.num_scheduled_tokens
        self.num = sum(kept.num for kept in self._kept.values())

    def _add(self, request_id: str, request: RankRequest, values: Tensor) -> None:
        kept = self._kept.get(request_id)
        if kept is None or kept.request is not request or self._only_last:
            kept = self._kept[request_id] = _Kept(request)
        kept.parts.append(values[-1:] if self._only_last else values)
        kept.num += len(kept.parts[-1])
        self._divided.add(request_id)

    def waiting(self) -> list[tuple[str, RankRequest]]:
        """The requests whose rows are kept."""
        return [(request_id, kept.request) for request_id, kept in self._kept.items()]

    def first(self, request_id: str) -> float:
        """The position of the first row that is kept of a request; infinite if none is.

        The last one is that of the last token that the model has computed.
        """
        kept = self._kept.get(request_id)
        return inf if kept is None else kept.request.num_computed - kept.num

    def feed(self, positions: Sequence[tuple[str, int, int]]) -> None:
        """Make rows the head's next inputs: of each request those ``begin`` to ``end``."""
        values = []
        for request_id, begin, end in positions:
            kept = self._kept[request_id]
            first = kept.request.num_computed - kept.num
            values.append(torch.cat(kept.parts)[begin - first : end - first])
        with torch.inference_mode():
            self.feed_rows(self._head.project(torch.cat(values)))

    def feed_rows(self, rows: Tensor) -> None:
        """Make these rows the head's next inputs."""
        self._head.inputs[: len(rows)] = rows

    def only_last(self, requests: Iterable[tuple[str, RankRequest]]) -> None:
        """The head has run these requests: only their last rows are needed again."""
        for request_id, _ in requests:
            kept = self._kept[request_id]
            kept.parts = [kept.parts[-1][-1:].clone()]
            self.num -= kept.num - 1
            kept.num = 1

    def compact(self) -> None:
        """Copy what :meth:`settle` has divided, so that the rows of whole steps can be freed."""
        for request_id in self._divided:
            kept = self._kept[request_id]
            kept.parts = [torch.cat(kept.parts)]
        self._divided.clear()

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests have ended, or start again."""
        for request_id in request_ids:
            self._kept.pop(request_id, None)
            self._divided.discard(request_id)


def drafts_for(request: RankRequest) -> bool:
    """Whether a request may get drafts when its prompt has run."""
    spec = request.spec
    excluded = spec.params.mirostat_mode or spec.params.logits_processors
    guided = request.negative is not None or spec.negative_of is not None
    return spec.kind == "generate" and not (guided or excluded)
