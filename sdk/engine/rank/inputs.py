"""The input buffers of a step. They stay in place, because recorded steps read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from ctypes import c_float, c_int32, c_int64
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from sdk.engine.plan import Copy, Move, StateSave, StepRow
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.step_buffers import Buffers, PageTable
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.operators.batch import AttentionBatch, WorkShape
from sdk.kernels.operators.sampling import SampleBuffers
from sdk.kernels.operators.states import StateBatch
from sdk.structured.library import mask_functions

if TYPE_CHECKING:
    from sdk.engine.rank.images import ImageInputs
    from sdk.engine.rank.step_batch import StepBatch

#: A separate pass over a shared prefix pays off from this number of requests and tokens on. With
#: fewer, too few rows share each split of keys (kernels/gpu/attention_decode.py).
_SHARED_REQUESTS, _SHARED_TOKENS = 4, 512
#: Index of the draws among the parts of the buffers.
_DRAWS = 5


class StepInputs:
    """Tokens, requests, page tables and output rows of one step, in fixed buffers.

    If a request has the same row as in the step before, only its new pages are written.
    ``max_requests`` and ``max_outputs``: the most rows and output rows of a step. ``find_shared``:
    look for pages that all requests begin with (``AttentionBatch.shared_len``). ``work``: the shape
    of ``AttentionBatch.work``. ``shift``: token i + ``shift`` is at position i. ``token_types``:
    the model reads ``AttentionBatch.token_types``. ``windows``: how many window groups of the cache
    have memory of their own. ``states``: the model has recurrent states.
    ``images``: the model sees images.
    """

    def __init__(
        self,
        max_tokens: int,
        max_requests: int,
        max_outputs: int,
        max_model_len: int,
        page_size: int,
        device: torch.device | None = None,
        *,
        find_shared: bool = False,
        work: WorkShape | None = None,
        shift: int = 0,
        token_types: bool = False,
        windows: int = 0,
        states: bool = False,
        images: ImageInputs | None = None,
    ) -> None:
        #: Whether steps may be launched with ``AttentionBatch.shared_len``.
        self.finds_shared = find_shared
        self._shift = shift
        self.images = images
        width, device = -(-max_model_len // page_size), device or torch.device("cpu")
        #: Of the layers that keep all tokens, then one for each window group.
        self._tables = [PageTable(device, max_requests, width) for _ in range(1 + windows)]
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
            (np.int64, (max_tokens if token_types else 1,)),
            *_state_parts(max_tokens, max_requests, states=states),
        )
        arrays, tensors = self._buffers.arrays[:9], self._buffers.tensors[:9]
        self._states, state_tensors = self._buffers.arrays[9:], self._buffers.tensors[9:]
        *arrays, self._adapters, self._output_adapters, self._types = arrays
        self._tokens, self._output_rows, self._starts, self._lengths, self._shared, draws = arrays
        self._adapters[:] = self._output_adapters[:] = -1
        #: ``output_rows``: rows of hidden states that get logits. ``draws``: the bytes of a DRAW
        #: for each. ``adapters``, ``output_adapters``: adapter slots of tokens and of output rows.
        *tensors, self.adapters, self.output_adapters, types = tensors
        self.token_ids, self.output_rows, starts, lengths, self._shared_len, self.draws = tensors
        self._adapted = False  # whether the buffers contain an adapter slot
        #: For each row of the page tables: its request, and how many entries of it are written.
        self._written: list[tuple[RankRequest | None, tuple[int, ...]]]
        self._written = [(None, ())] * max_requests
        self.sampling = SampleBuffers(max_outputs, draws.data)
        # Tokens, lengths, sampled tokens and their logits as ctypes arrays. A step leaves the CPU
        # caches full of weights, but ctypes' code is still in them, because the native call used
        # it. Reading the tokens takes 8 us this way and 28 us through memoryviews.
        self._arrays: tuple[Any, Any, Any, Any] = (
            (c_int64 * max_tokens).from_buffer(self._tokens.data),
            (c_int32 * max_requests).from_buffer(self._lengths.data),
            (c_int64 * max_outputs).from_buffer(self.sampling.tokens.data),
            (c_float * max_outputs).from_buffer(self.sampling.best.data),
        )
        #: A step of the largest size.
        self.attention_batch = AttentionBatch(
            positions=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            query_start=starts,
            context_len=lengths,
            page_table=self._tables[0].tensor,
            slots=torch.zeros(max_tokens, dtype=torch.int64, device=device),
            page_size=page_size,
            max_query_len=max_tokens,
            max_context_len=max_model_len,
            work=None
            if work is None
            else torch.zeros(work.rows, work.width, dtype=torch.int32, device=device),
            splits=0 if work is None else work.splits,
            token_types=types if token_types else None,
            states=StateBatch(*state_tensors) if states else None,
        )
        self.attention_batch = self._completed(self.attention_batch)

    def _completed(self, whole: AttentionBatch) -> AttentionBatch:
        """The step with what it reads of images, and with the page tables and slots of the window
        groups."""
        if (own := self.images) is not None:
            whole = replace(whole, ahead=own.ahead, image_rows=own.rows, shifts=own.shifts)
        windows = [
            replace(
                whole, page_table=table.tensor, slots=torch.zeros_like(whole.slots), group=group
            )
            for group, table in enumerate(self._tables[1:])
        ]
        return replace(whole, windows=tuple(windows))

    def fill(self, batch: StepBatch) -> int:
        """Write a step: tokens, pages, output rows and draws. Returns the number of tokens.

        :meth:`view` or :meth:`pad` sends it to the device. ``Ops.find_places`` computes positions
        and page slots.
        """
        self.wait()
        end, shift = 0, self._shift
        for index, (row, request) in enumerate(zip(batch.rows, batch.requests, strict=True)):
            first, count = request.num_computed, row.num_scheduled_tokens
            begin, end = end, end + count
            if count == 1:
                self._tokens[begin] = request.token_ids[first + shift]
            else:
                known, token = end - len(row.drafts), first + shift
                self._tokens[begin:known] = request.token_ids[token : token + known - begin]
                self._tokens[known:end] = row.drafts
            self._starts[index + 1] = end
            self._lengths[index] = first + count
            if self.attention_batch.token_types is not None:
                self._types[begin:end] = 0
                pooling = request.spec.pooling
                if pooling is not None and pooling.second_text is not None:
                    self._types[begin + max(pooling.second_text - first, 0) : end] = 1
            self.write_pages(index, request)
        if self.images is not None:
            self.images.write(batch.rows, batch.requests)
            self.images.stand_in(self._tokens)
        self.set_states(batch.rows, batch.requests, batch.state_saves)
        self._output_rows[: len(batch.output_rows)] = batch.output_rows
        if self._adapted or any(row.adapter >= 0 for row in batch.rows):
            self._write_adapters(batch)
        for index, draw in enumerate(batch.draws):
            draw.write(index, self.sampling)
        self.set_mask_tasks(batch)
        return end

    def set_states(
        self,
        rows: Sequence[StepRow],
        requests: Sequence[RankRequest],
        snapshots: Sequence[StateSave] = (),
    ) -> None:
        """Write which states a step reads and writes, if the model has any: of these rows in front
        of the others in the buffers."""
        if not self._states:
            return
        initial, starts, tokens, slots = self._states
        begin = count = 0
        for index, (row, request) in enumerate(zip(rows, requests, strict=True)):
            own = request.initial_slot
            initial[index] = request.state_slots[request.current_slot] if own is None else own
            end, first = begin + row.num_scheduled_tokens, begin - request.num_computed
            for one in snapshots:
                if one.request_id == row.request_id:
                    tokens[count], slots[count] = first + one.num_tokens - 1, one.slot
                    count += 1
            saves = request.saves(len(row.drafts))
            tokens[count : count + len(saves)] = range(end - len(saves), end)
            slots[count : count + len(saves)] = saves
            count += len(saves)
            starts[index + 1], begin = count, end

    def set_mask_tasks(self, batch: StepBatch) -> None:
        """Have the masks of structured answers computed while the step runs."""
        tasks = []
        for one in batch.sampled:
            structured = one.request.structured
            if structured is not None:
                task = structured.task(one.first_output, one.row.drafts)
                if task is not None:
                    self.sampling.use_masks(structured.vocab_size)
                    tasks.append(task)
        if tasks:
            self.sampling.set_mask_tasks(mask_functions(), tasks)
        else:
            self.sampling.clear_mask_tasks()

    def _write_adapters(self, batch: StepBatch) -> None:
        """Write the adapter slot of each token and of each output row."""
        end = 0
        for row in batch.rows:
            begin, end = end, end + row.num_scheduled_tokens
            self._adapters[begin:end] = row.adapter
        self._output_adapters[: len(batch.output_rows)] = self._adapters[batch.output_rows]
        self._adapted = any(row.adapter >= 0 for row in batch.rows)
        if not self._adapted:
            self._adapters[:] = self._output_adapters[:] = -1

    def write_pages(self, row: int, request: RankRequest) -> None:
        """Write the request's pages to this row of the page table, and its frames to those of the
        window groups, except those already there."""
        owner, written = self._written[row]
        tables = self._tables
        counts = request.num_places[: len(tables)]  # a model that drafts may have pages only
        if owner is not request:
            written = (0,) * len(tables)
        if written != counts:
            for table, places, begin in zip(tables, request.places, written, strict=False):
                table.write(row, begin, places[begin:])
            self._written[row] = request, counts

    def rewrite_pages(self, request: RankRequest) -> None:
        """Entries of a request that are written already have changed."""
        none = (0,) * len(self._tables)
        self._written = [
            (owner, none if owner is request else written) for owner, written in self._written
        ]

    def advance(self, tokens: list[int]) -> None:
        """Make the last decode step the next one: one token per request, lengths one larger."""
        rows = len(tokens)
        known, lengths, _, _ = self._arrays
        known[:rows] = tokens
        lengths[:rows] = [length + 1 for length in lengths[:rows]]

    def sampled(self, rows: int) -> list[int] | None:
        """The tokens sampled in the first ``rows`` rows. None: some logits are not finite."""
        _, _, tokens, maxima = self._arrays
        for best in maxima[:rows]:
            if best - best != 0.0:
                return None
        found: list[int] = tokens[:rows]
        return found

    def apply_moves(self, requests: Iterable[RankRequest], copies: Sequence[Copy]) -> None:
        """Update the page ids of all requests after the moves in ``copies``, in their order."""
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
        """Wait until the device has read what was sent last."""
        self._buffers.wait()
        for table in self._tables:
            table.wait()

    def forget(self) -> None:
        """Drop all references to requests."""
        self._written = [(None, ())] * len(self._written)
        for row in range(len(self.sampling.shapes)):
            self.sampling.set_shape(row, None)

    def view(self, tokens: int, requests: int) -> AttentionBatch:
        """Send the step just written to the device. Returns its attention batch."""
        self._starts[requests + 1 :] = tokens  # padding rows of a step in pieces have no request
        self._pad_states(requests)
        pages = max(len(one.pages) for one, _ in self._written[:requests] if one)
        shared = self._shared_tokens(requests) if self.finds_shared else 0
        self._shared[0] = shared
        self._send_pages()
        self._buffers.send()
        counts, lengths = np.diff(self._starts[: requests + 1]), self._lengths[:requests]
        longest = int(counts.max())
        return self._first(
            tokens,
            requests,
            pages,
            max_query_len=longest,
            max_context_len=int(lengths.max()),
            shared_len=self._shared_len if shared else None,
            # only prompts are for kernels of libraries
            lengths=None
            if longest == 1
            else tuple(zip(counts.tolist(), lengths.tolist(), strict=True)),
        )

    def _first(
        self, tokens: int, requests: int, pages: int | None = None, **facts: Any
    ) -> AttentionBatch:
        """The batch of the first ``tokens`` and ``requests`` in the buffers, of whose page tables
        the first ``pages`` columns are used. ``facts``: fields that have other values in it."""
        whole = self.attention_batch
        made = replace(
            whole,
            positions=whole.positions[:tokens],
            query_start=whole.query_start[: requests + 1],
            context_len=whole.context_len[:requests],
            page_table=whole.page_table[:requests, :pages],
            slots=whole.slots[:tokens],
            token_types=_first(whole.token_types, tokens),
            states=_first_states(whole.states, requests),
            ahead=_first(whole.ahead, tokens),
            image_rows=_first(whole.image_rows, tokens),
            shifts=None if whole.shifts is None else whole.shifts[:, :tokens],
            **facts,
        )
        if not whole.windows:
            return made
        windows = []
        for one in whole.windows:  # what all requests begin with has left the windows
            table, slots = one.page_table[:requests, :pages], one.slots[:tokens]
            own = replace(made, page_table=table, slots=slots, group=one.group)
            windows.append(replace(own, windows=(), shared_len=None))
        return replace(made, windows=tuple(windows))

    def _send_pages(self) -> None:
        """Send new entries of the page tables to the device."""
        for table in self._tables:
            table.send()

    def pad(self, requests: int, size: int) -> bool:
        """Pad the decode step just written to ``size`` rows and send it to the device.

        Returns whether its requests begin with the same pages (``AttentionBatch.shared_len``).
        """
        self._starts[requests + 1 : size + 1] = requests
        self._pad_states(requests)
        self._output_rows[requests:size] = 0
        shared = self._shared_tokens(requests) if self.finds_shared else 0
        self._shared[0] = shared
        self._send_pages()
        self._buffers.send()
        return shared > 0

    def _pad_states(self, requests: int) -> None:
        """Rows behind the last request save no state."""
        if self._states:
            _, starts, _, _ = self._states
            starts[requests + 1 :] = starts[requests]

    def advance_on_device(self, requests: int, sampled: Tensor, *, drawn: bool) -> None:
        """Turn the decode step on the device into the next one, using the tokens it ``sampled``.

        ``sampled`` is float64 ``[requests or more, 3]``, tokens first. The host sends only new
        pages and, with ``drawn``, the draws.
        """
        self._send_pages()
        if drawn:
            self._buffers.send(_DRAWS)
        self.token_ids[:requests].copy_(sampled[:requests, 0])
        self.attention_batch.context_len[:requests] += 1

    def clear(self) -> None:
        """Send a step without requests: all of its rows are padding. For a pass over the buffers
        whose results nobody reads."""
        self.forget()
        self.wait()
        self._starts[:] = self._lengths[:] = self._tokens[:] = self._output_rows[:] = 0
        self._adapters[:] = self._output_adapters[:] = -1
        self._shared[0] = 0
        for array in self._states:
            array[:] = 0
        if self.images is not None:
            self.images.clear()
        self.sampling.clear_mask_tasks()
        self._buffers.send()

    def empty_batch(self, tokens: int, context: int) -> AttentionBatch:
        """After :meth:`clear`: two requests without tokens among ``tokens`` rows of padding, for
        all kernels of a step with contexts of up to ``context`` tokens."""
        return self._first(tokens, 2, max_query_len=tokens, max_context_len=context)

    def decode_batch(self, size: int, shared: bool) -> AttentionBatch:
        """The attention batch of every decode step of ``size`` rows."""
        found = self._shared_len if shared else None
        return self._first(size, size, max_query_len=1, shared_len=found)

    def piece_batch(self, size: int) -> AttentionBatch:
        """The batch of every step of up to ``size`` tokens, for operators other than attention.

        It is not narrowed to the requests of a step.
        """
        return self._first(size, self.attention_batch.num_requests)

    def _shared_tokens(self, requests: int) -> int:
        """Tokens that all requests share in the same pages; 0 if a separate pass does not pay."""
        if requests < _SHARED_REQUESTS:
            return 0
        size = self.attention_batch.page_size
        most = (int(self._lengths[:requests].min()) - 1) // size
        table = self._tables[0].array[:requests, :most]
        apart = np.flatnonzero((table != table[0]).any(axis=0))
        tokens = (int(apart[0]) if len(apart) else most) * size
        return tokens if tokens >= _SHARED_TOKENS else 0


def _state_parts(
    tokens: int, requests: int, *, states: bool
) -> list[tuple[type[Any], tuple[int, ...]]]:
    """The buffers of a ``StateBatch``. A state is saved after the last token of each request, and
    as a snapshot or behind a draft after other tokens and that one."""
    if not states:
        return []
    saves = tokens + requests
    return [(np.int32, (count,)) for count in (requests, requests + 1, saves, saves)]


def _first_states(states: StateBatch | None, requests: int) -> StateBatch | None:
    if states is None:
        return None
    return replace(
        states, initial=states.initial[:requests], save_start=states.save_start[: requests + 1]
    )


def _first(x: Tensor | None, count: int) -> Tensor | None:
    return None if x is None else x[:count]
