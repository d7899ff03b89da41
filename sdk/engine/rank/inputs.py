"""The fixed tensors a step reads, written once per step: what a recorded step is replayed on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int32, c_int64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sdk.engine.plan import Copy, Move
from sdk.engine.rank.running import Running
from sdk.engine.rank.step_buffers import Buffers, PageTable
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.sampling import SampleBuffers

if TYPE_CHECKING:
    from sdk.engine.rank.work import Work

_CPU = torch.device("cpu")
#: A prefix is worth a pass of its own from so many requests and tokens on: fewer splits of keys
#: (kernels/gpu/attention_decode.py) are not read once for enough rows.
_SHARED_REQUESTS, _SHARED_TOKENS = 4, 512
#: Place among the parts of the buffers.
_DRAWS = 5


class StepInputs:
    """Tokens, their requests and the rows wanted of one step, in buffers that stay.

    A request that stands in the same row as in the step before has only its new pages written.
    ``max_requests`` and ``max_outputs``: rows of a step, and those whose logits it may want.
    ``find_shared``: look for pages that all requests begin with (``AttentionBatch.shared_len``).
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        max_outputs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device = _CPU,
        *,
        find_shared: bool = False,
    ) -> None:
        self._find_shared = find_shared
        width = -(-max_model_len // page_size)
        self._table = PageTable(device, max_requests, width)
        self._buffers = Buffers(
            device,
            (np.int64, (max_tokens,)),
            (np.int64, (max_outputs,)),
            (np.int32, (max_requests + 1,)),
            (np.int32, (max_requests,)),
            (np.int32, (1,)),
            (np.float64, (max_outputs, 8)),  # _DRAWS
            (np.int32, (max_tokens,)),
            (np.int32, (max_outputs,)),
        )
        *arrays, self._adapters, self._output_adapters = self._buffers.arrays
        self._tokens, self._rows, self._starts, self._lengths, self._shared, draws = arrays
        self._adapters[:] = self._output_adapters[:] = -1
        #: ``output_rows``: the rows of hidden states whose logits are wanted; ``draws``: the bytes
        #: of how each is drawn; ``adapters``, ``output_adapters``: slots of tokens and outputs.
        *tensors, self.adapters, self.output_adapters = self._buffers.tensors
        self.token_ids, self.output_rows, starts, lengths, self._shared_len, self.draws = tensors
        self._adapted = False  # some adapter is written there
        self._places: list[tuple[Running | None, int]] = [(None, 0)] * max_requests
        self.sampling = SampleBuffers(max_outputs, draws.data)
        # Tokens, lengths, what is sampled and its logits for ctypes: a step leaves the caches full
        # of weights, and then the code that made the native call is the cheapest to run again.
        # Reading the tokens takes 8 us like this, 28 through memoryviews.
        self._arrays: tuple[Any, Any, Any, Any] = (
            (c_int64 * max_tokens).from_buffer(self._tokens.data),
            (c_int32 * max_requests).from_buffer(self._lengths.data),
            (c_int64 * max_outputs).from_buffer(self.sampling.tokens.data),
            (c_float * max_outputs).from_buffer(self.sampling.best.data),
        )
        self.batch = AttentionBatch(
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            query_start=starts,
            context_len=lengths,
            page_table=self._table.tensor,
            slots=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            page_size=page_size,
            max_query_len=max_tokens,
            max_context_len=max_model_len,
        )

    def fill(self, work: Work) -> int:
        """Write the step: tokens, the rows wanted and how they are drawn; counts the tokens.

        It goes to the device with :meth:`view`. Positions and slots are the business of
        ``Ops.find_places``.
        """
        self.wait()
        end = 0
        for index, (row, request) in enumerate(zip(work.rows, work.running, strict=True)):
            first, count = request.num_computed, row.num_tokens
            begin, end = end, end + count
            if count == 1:
                self._tokens[begin] = request.token_ids[first]
            else:
                known = end - len(row.drafts)
                self._tokens[begin:known] = request.token_ids[first : first + known - begin]
                self._tokens[known:end] = row.drafts
            self._starts[index + 1] = end
            self._lengths[index] = first + count
            self.write_pages(index, request)
        self._rows[: len(work.outputs)] = work.outputs
        if self._adapted or any(row.adapter >= 0 for row in work.rows):
            self._write_adapters(work)
        for index, draw in enumerate(work.draws):
            draw.write(index, self.sampling)
        return end

    def _write_adapters(self, work: Work) -> None:
        """The adapter of each token, and of each token whose logits are wanted."""
        end = 0
        for row in work.rows:
            begin, end = end, end + row.num_tokens
            self._adapters[begin:end] = row.adapter
        self._output_adapters[: len(work.outputs)] = self._adapters[work.outputs]
        self._adapted = any(row.adapter >= 0 for row in work.rows)
        if not self._adapted:
            self._adapters[:] = self._output_adapters[:] = -1

    def write_pages(self, row: int, request: Running) -> None:
        """Write the pages that the request of this row has and the row has not."""
        owner, written = self._places[row]
        if owner is not request:
            written = 0
        if written != len(request.pages):
            self._table.write(row, written, request.pages[written:])
            self._places[row] = request, len(request.pages)

    def advance(self, tokens: list[int]) -> None:
        """Write the step before once more: each request has one token, the one that follows."""
        rows = len(tokens)
        known, lengths, _, _ = self._arrays
        known[:rows] = tokens
        lengths[:rows] = [length + 1 for length in lengths[:rows]]

    def sampled(self, rows: int) -> list[int] | None:
        """The tokens sampled in the first ``rows`` rows; None unless their logits are finite."""
        _, _, tokens, maxima = self._arrays
        for best in maxima[:rows]:
            if best - best != 0.0:
                return None
        found: list[int] = tokens[:rows]
        return found

    def follow(self, requests: Iterable[Running], copies: Sequence[Copy]) -> None:
        """Pages have moved, one after the other: put those of all requests where they are now."""
        moves = [one for one in copies if isinstance(one, Move)]
        if not moves:
            return
        final: dict[int, int] = {}
        for source, target in reversed(moves):
            final[source] = final.get(target, target)
        for request in requests:
            request.pages = [final.get(page, page) for page in request.pages]
        self.forget()

    def wait(self) -> None:
        """Until what was sent to the device last has been read."""
        self._buffers.wait()
        self._table.wait()

    def forget(self) -> None:
        """Requests were dropped: hold on to none of them."""
        self._places = [(None, 0)] * len(self._places)
        for row in range(len(self.sampling.shapes)):
            self.sampling.set_shape(row, None)

    def view(self, tokens: int, requests: int) -> AttentionBatch:
        """The batch of the step just written, for a pass that is not a whole replay."""
        whole = self.batch
        self._starts[requests + 1 :] = tokens  # rows that fill up a step in pieces are nobody's
        pages = max(len(place[0].pages) for place in self._places[:requests] if place[0])
        shared = self._shared_tokens(requests) if self._find_shared else 0
        self._shared[0] = shared
        self._table.send()
        self._buffers.send()
        return replace(
            whole,
            positions=whole.positions[:tokens],
            query_start=whole.query_start[: requests + 1],
            context_len=whole.context_len[:requests],
            page_table=whole.page_table[:requests, :pages],
            slots=whole.slots[:tokens],
            max_query_len=int(np.diff(self._starts[: requests + 1]).max()),
            max_context_len=int(self._lengths[:requests].max()),
            shared_len=self._shared_len if shared else None,
        )

    def fill_up(self, requests: int, size: int) -> bool:
        """Make the decode step just written one of ``size`` rows, the last of them nobody's.

        Returns whether its requests begin with the same pages, see ``AttentionBatch.shared_len``.
        """
        self._starts[requests + 1 : size + 1] = requests
        self._rows[requests:size] = 0
        shared = self._shared_tokens(requests) if self._find_shared else 0
        self._shared[0] = shared
        self._table.send()
        self._buffers.send()
        return shared > 0

    def advance_on_device(self, requests: int, sampled: Tensor, *, drawn: bool) -> None:
        """Make the decode step on the device the one after it, with the tokens it ``sampled``.

        ``sampled`` float64 ``[requests or more, 3]``, tokens first. Of what lies here, only new
        pages and, with ``drawn``, how tokens are drawn go there.
        """
        self._table.send()
        if drawn:
            self._buffers.send(_DRAWS)
        self.token_ids[:requests].copy_(sampled[:requests, 0])
        self.batch.context_len[:requests] += 1

    def decoding(self, size: int, shared: bool) -> AttentionBatch:
        """The batch of every decode step of ``size`` rows, in buffers that stay."""
        whole = self.batch
        return replace(
            whole,
            positions=whole.positions[:size],
            query_start=whole.query_start[: size + 1],
            context_len=whole.context_len[:size],
            page_table=whole.page_table[:size],
            slots=whole.slots[:size],
            max_query_len=1,
            shared_len=self._shared_len if shared else None,
        )

    def in_pieces(self, size: int) -> AttentionBatch:
        """The batch of every step of up to ``size`` tokens, in buffers that stay.

        For what lies between attentions: of the requests it says nothing but whose the tokens are.
        """
        whole = self.batch
        return replace(whole, positions=whole.positions[:size], slots=whole.slots[:size])

    def _shared_tokens(self, requests: int) -> int:
        """Tokens that all requests begin with in the same pages, where a pass over them pays."""
        if requests < _SHARED_REQUESTS:
            return 0
        size = self.batch.page_size
        most = (int(self._lengths[:requests].min()) - 1) // size
        table = self._table.array[:requests, :most]
        apart = np.flatnonzero((table != table[0]).any(axis=0))
        tokens = (int(apart[0]) if len(apart) else most) * size
        return tokens if tokens >= _SHARED_TOKENS else 0
