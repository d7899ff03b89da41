"""The fixed tensors a step reads, written once per step: what a recorded step is replayed on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sdk.engine.plan import RequestStart
from sdk.kernels.batch import AttentionBatch
from sdk.kernels.sampling import SampleBuffers

_CPU = torch.device("cpu")
_LINE = 64  # bytes of a cache line
_TYPES = {np.int32: torch.int32, np.int64: torch.int64, np.float64: torch.float64}
#: A prefix is worth a pass of its own from so many requests and tokens on: fewer splits of keys
#: (kernels/gpu/attention_decode.py) are not read once for enough rows.
_SHARED_REQUESTS, _SHARED_TOKENS = 4, 512
#: Places among the parts of the buffers.
_TABLE, _DRAWS = 5, 6


class Running:
    """What a rank remembers of a request between steps."""

    __slots__ = ("num_computed", "num_prompt", "pages", "start", "token_ids")

    def __init__(self, start: RequestStart) -> None:
        self.start = start
        self.token_ids = list(start.token_ids)
        self.num_prompt = start.num_prompt_tokens
        self.num_computed = start.num_computed
        self.pages = list(start.pages)


class _Buffers:
    """Arrays in one piece of memory, and the tensors of a device that are copies of them.

    On a CPU they are the same memory; to a GPU all go in one copy from pinned memory, in the order
    of the stream, so that a step reads what was written before it.
    """

    def __init__(self, device: torch.device, *parts: tuple[type[Any], tuple[int, ...]]) -> None:
        offsets = [0]
        for dtype, shape in parts:
            size = math.prod(shape) * np.dtype(dtype).itemsize
            offsets.append(offsets[-1] + -(-size // _LINE) * _LINE)
        if device.type == "cuda":
            self._host = torch.zeros(offsets[-1], dtype=torch.uint8, pin_memory=True)
        else:  # memory that is there only where it was written
            self._host = torch.from_numpy(np.zeros(offsets[-1], np.uint8))
        self._device = self._host.to(device)
        self._offsets = offsets
        self._sent: Any = None
        if device.type == "cuda":
            self._sent = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.arrays: list[NDArray[Any]] = []
        self.tensors: list[Tensor] = []
        for (dtype, shape), begin in zip(parts, offsets, strict=False):
            size = math.prod(shape) * np.dtype(dtype).itemsize
            self.arrays.append(self._host.numpy()[begin : begin + size].view(dtype).reshape(shape))
            self.tensors.append(self._device[begin : begin + size].view(_TYPES[dtype]).view(shape))

    def send(self, part: int | None = None) -> None:
        """Copy what the arrays hold now, all of them or one; see :meth:`wait`."""
        if self._sent is not None:
            bytes_ = slice(None)
            if part is not None:
                bytes_ = slice(self._offsets[part], self._offsets[part + 1])
            self._device[bytes_].copy_(self._host[bytes_], non_blocking=True)
            self._sent.record()

    def wait(self) -> None:
        """Until what was sent last has been read: the arrays must not be written before that."""
        if self._sent is not None:
            self._sent.synchronize()


class StepInputs:
    """Tokens, their requests and the rows wanted of one step, in buffers that stay.

    A request that stands in the same row as in the step before has only its new pages written.
    ``find_shared``: look for pages that all requests begin with (``AttentionBatch.shared_len``).
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        max_model_len: int,
        page_size: int,
        device: torch.device = _CPU,
        *,
        find_shared: bool = False,
    ) -> None:
        self._find_shared = find_shared
        width = -(-max_model_len // page_size)
        self._buffers = _Buffers(
            device,
            (np.int64, (max_tokens,)),
            (np.int64, (max_requests,)),
            (np.int32, (max_requests + 1,)),
            (np.int32, (max_requests,)),
            (np.int32, (1,)),
            (np.int32, (max_requests, width)),  # _TABLE
            (np.float64, (max_requests, 8)),  # _DRAWS
        )
        self._table_written = False
        self._tokens, self._rows, self._starts, self._lengths, self._shared, self._table, draws = (
            self._buffers.arrays
        )
        #: ``output_rows``: the rows of hidden states whose logits are wanted; ``draws``: the bytes
        #: of how each is drawn.
        self.token_ids, self.output_rows, starts, lengths, self._shared_len, table, self.draws = (
            self._buffers.tensors
        )
        self._places: list[tuple[Running | None, int]] = [(None, 0)] * max_requests
        self.sampling = SampleBuffers(max_requests, draws.data)
        # Tokens, lengths, what is sampled and its logits for ctypes: a step leaves the caches full
        # of weights, and then the code that made the native call is the cheapest to run again.
        # Reading the tokens takes 8 us like this, 28 through memoryviews.
        self._arrays: tuple[Any, Any, Any, Any] = (
            (c_int64 * max_tokens).from_buffer(self._tokens.data),
            (c_int32 * max_requests).from_buffer(self._lengths.data),
            (c_int64 * max_requests).from_buffer(self.sampling.tokens.data),
            (c_float * max_requests).from_buffer(self.sampling.best.data),
        )
        self.batch = AttentionBatch(
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            query_start=starts,
            context_len=lengths,
            page_table=table,
            slots=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            page_size=page_size,
            max_query_len=max_tokens,
            max_context_len=max_model_len,
        )

    def fill(self, rows: Sequence[tuple[Running, int]], outputs: Sequence[int]) -> int:
        """Write the step: so many tokens of each request, and the rows wanted; counts the tokens.

        It goes to the device with :meth:`view`. Positions and slots are the business of
        ``Ops.find_places``.
        """
        self._buffers.wait()
        end = 0
        for row, (request, count) in enumerate(rows):
            first = request.num_computed
            begin, end = end, end + count
            if count == 1:
                self._tokens[begin] = request.token_ids[first]
            else:
                self._tokens[begin:end] = request.token_ids[first : first + count]
            self._starts[row + 1] = end
            self._lengths[row] = first + count
            self.write_pages(row, request)
        self._rows[: len(outputs)] = outputs
        return end

    def write_pages(self, row: int, request: Running) -> None:
        """Write the pages that the request of this row has and the row has not."""
        owner, written = self._places[row]
        if owner is not request:
            written = 0
        if written != len(request.pages):
            self._table[row, written : len(request.pages)] = request.pages[written:]
            self._table_written = True
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

    def wait(self) -> None:
        """Until what was sent to the device last has been read."""
        self._buffers.wait()

    def forget(self) -> None:
        """Requests were dropped: hold on to none of them."""
        self._places = [(None, 0)] * len(self._places)

    def view(self, tokens: int, requests: int) -> AttentionBatch:
        """The batch of the step just written, for a pass that is not a replay."""
        whole = self.batch
        pages = max(len(place[0].pages) for place in self._places[:requests] if place[0])
        shared = self._shared_tokens(requests) if self._find_shared else 0
        self._shared[0] = shared
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
        self._buffers.send()
        self._table_written = False
        return shared > 0

    def advance_on_device(self, requests: int, sampled: Tensor, *, drawn: bool) -> None:
        """Make the decode step on the device the one after it, with the tokens it ``sampled``.

        ``sampled`` float64 ``[requests or more, 3]``, tokens first. Of what lies here, only new
        pages and, with ``drawn``, how tokens are drawn go there.
        """
        if self._table_written:
            self._buffers.send(_TABLE)
            self._table_written = False
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

    def _shared_tokens(self, requests: int) -> int:
        """Tokens that all requests begin with in the same pages, where a pass over them pays."""
        if requests < _SHARED_REQUESTS:
            return 0
        size = self.batch.page_size
        most = (int(self._lengths[:requests].min()) - 1) // size
        table = self._table[:requests, :most]
        apart = np.flatnonzero((table != table[0]).any(axis=0))
        tokens = (int(apart[0]) if len(apart) else most) * size
        return tokens if tokens >= _SHARED_TOKENS else 0
