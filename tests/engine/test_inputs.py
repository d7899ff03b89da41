"""What a step reads: fixed buffers, a prefix in the same pages, padding rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sdk.api.params import SamplingParams
from sdk.engine.plan import RequestStart, SequenceSpec, StepRow
from sdk.engine.rank.inputs import StepInputs
from sdk.engine.rank.request import RankRequest
from sdk.engine.rank.step_batch import StepBatch
from sdk.engine.rank.step_buffers import Buffers, PageTable

PAGE = 16


def request(name: str, length: int, pages: list[int]) -> RankRequest:
    start = RequestStart(
        SequenceSpec(name, SamplingParams()),
        tuple(range(length)),
        length,
        length - 1,
        tuple(pages),
    )
    return RankRequest(start)


def decoding(requests: list[RankRequest]) -> StepBatch:
    rows = [StepRow(one.spec.request_id, 1, 1) for one in requests]
    return StepBatch(rows, requests, range(len(rows)))


def filled(lengths: list[int], shared_pages: int) -> StepInputs:
    """Decoding requests whose first pages are the same."""
    inputs = StepInputs(16, 8, 8, 2048, PAGE, find_shared=True)
    common = list(range(1, shared_pages + 1))
    rows = []
    for i, length in enumerate(lengths):
        count = -(-length // PAGE) - shared_pages
        rows.append(request(f"r{i}", length, common + [100 * (i + 2)] * count))
    inputs.fill(decoding(rows))
    return inputs


def shared(lengths: list[int], pages: int) -> int | None:
    found = filled(lengths, pages).view(len(lengths), len(lengths)).shared_len
    return None if found is None else int(found)


def test_a_shared_prefix_ends_at_the_first_page_that_differs() -> None:
    assert shared([700, 650, 640, 1000], 34) == 34 * PAGE


def test_a_prefix_pays_only_for_several_requests_and_many_tokens() -> None:
    assert shared([700, 650, 640], 34) is None
    assert shared([700, 650, 640, 1000], 31) is None


def test_a_prefix_leaves_every_request_a_token_of_its_own() -> None:
    # the shortest ends with its 34th page: its last token is not part of the prefix
    assert shared([34 * PAGE, 700, 700, 700], 34) == 33 * PAGE


def test_padding_rows_have_no_query_and_no_page() -> None:
    inputs = filled([20, 30, 40], 0)
    inputs.output_rows[3:] = 7
    assert not inputs.pad(3, 8)
    batch = inputs.decode_batch(8, shared=False)
    assert batch.shared_len is None
    assert batch.query_start.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert inputs.output_rows.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert (batch.num_tokens, batch.num_requests, batch.max_query_len) == (8, 8, 1)
    batch.check()


def test_padding_rows_of_a_step_in_pieces_have_no_request() -> None:
    inputs = filled([20, 30, 40], 0)
    inputs.attention_batch.query_start.fill_(1)
    inputs.attention_batch.query_start[:4] = torch.tensor([0, 1, 2, 3])
    inputs.view(3, 3)
    batch = inputs.piece_batch(8)
    assert batch.query_start.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert (batch.num_tokens, batch.num_requests) == (8, 8)
    batch.check()


def test_the_lengths_of_a_step_with_prompts_are_known_on_the_host() -> None:
    inputs = filled([20, 30, 40], 0)
    assert inputs.view(3, 3).lengths is None  # tokens alone: no kernel asks
    inputs.attention_batch.query_start[:4] = torch.tensor([0, 1, 9, 10])
    batch = inputs.view(10, 3)
    assert batch.lengths == ((1, 20), (8, 30), (1, 40))
    assert batch.context_len.tolist() == [context for _, context in batch.lengths]
    assert inputs.empty_batch(8, 64).lengths is None


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A device with memory of its own; the bytes of each copy to it."""
    copied: list[int] = []

    def memory(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)

    send = Buffers.send

    def sending(self: Buffers, part: int | None = None, rows: int | None = None) -> None:
        before, sent = self._device.clone(), torch.zeros(len(self._device), dtype=torch.bool)
        for mark in (0xA5, 0x5A):
            self._device.fill_(mark)
            send(self, part, rows)
            sent |= self._device != mark
        copied.append(int(sent.sum()))
        self._device.copy_(torch.where(sent, self._device, before))

    monkeypatch.setattr(Buffers, "_memory", staticmethod(memory))
    monkeypatch.setattr(Buffers, "send", sending)
    return copied


def test_of_a_page_table_only_new_entries_are_copied(apart: list[int]) -> None:
    table = PageTable(torch.device("cpu"), 64, 8192)
    for row in range(64):
        table.write(row, 0, [row + 1, row + 2])
    table.send()
    assert apart == [16 * 128]
    table.write(3, 2, [400_000])
    table.write(9, 2, [17, 18])
    table.write(9, 4, [19])
    table.send()
    table.send()
    assert apart == [16 * 128, 16 * 4]
    assert np.array_equal(table.tensor.numpy(), table.array)
    assert table.tensor[3, :4].tolist() == [4, 5, 400_000, 0]
    assert table.tensor[9, :6].tolist() == [10, 11, 17, 18, 19, 0]


def test_a_page_table_of_many_new_entries_is_copied_whole(apart: list[int]) -> None:
    table = PageTable(torch.device("cpu"), 4, 2048)
    table.write(2, 1, list(range(2000)))
    table.send()
    assert apart == [16 * 2000]
    for row in range(4):
        table.write(row, 0, list(range(row, 2040 + row)))
    table.send()
    assert len(apart) == 2 and apart[1] > 4 * 4 * 2000
    assert np.array_equal(table.tensor.numpy(), table.array)


def test_a_row_of_another_request_is_written_anew_on_the_device(apart: list[int]) -> None:
    inputs = StepInputs(16, 2, 2, 2048, PAGE)
    first, second = request("a", 40, [5, 6, 7]), request("b", 20, [8, 9])
    for rows in ([first, second], [second]):
        inputs.fill(decoding(rows))
        table = inputs.view(len(rows), len(rows)).page_table
        assert [table[i, : len(r.pages)].tolist() for i, r in enumerate(rows)] == [
            r.pages for r in rows
        ]


def test_the_draws_lie_where_a_device_reads_them() -> None:
    inputs = filled([20, 30], 0)
    inputs.sampling.set(1, inputs.sampling.draws[0].tobytes(), 0.625)
    assert inputs.draws[1, 7] == 0.625
    assert inputs.draws.dtype == torch.float64


def test_the_step_after_goes_on_with_the_tokens_that_were_sampled() -> None:
    inputs = filled([20, 30, 40], 0)
    inputs.pad(3, 4)
    before = inputs.attention_batch.context_len.clone()
    sampled = torch.tensor([[11.0, 0.5, 1.0], [262143.0, 0.5, 1.0], [13.0, 0.5, 1.0]]).double()
    inputs.advance_on_device(3, sampled, drawn=False)
    assert inputs.token_ids[:3].tolist() == [11, 262143, 13]
    grown = inputs.attention_batch.context_len - before
    assert grown[:3].tolist() == [1, 1, 1]
    assert not grown[3:].any()
