"""What a step reads: buffers that stay, a prefix in the same pages, rows that are nobody's."""

from __future__ import annotations

import torch

from sdk.engine.inputs import Running, StepInputs
from sdk.engine.plan import RequestStart
from sdk.params import SamplingParams

PAGE = 16


def request(name: str, length: int, pages: list[int]) -> Running:
    start = RequestStart(
        name, tuple(range(length)), length, length - 1, tuple(pages), SamplingParams()
    )
    return Running(start)


def filled(lengths: list[int], shared_pages: int) -> StepInputs:
    """Decoding requests whose first pages are the same."""
    inputs = StepInputs(16, 8, 2048, PAGE, find_shared=True)
    common = list(range(1, shared_pages + 1))
    rows = []
    for i, length in enumerate(lengths):
        count = -(-length // PAGE) - shared_pages
        rows.append((request(f"r{i}", length, common + [100 * (i + 2)] * count), 1))
    inputs.fill(rows, list(range(len(rows))))
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


def test_rows_that_fill_up_a_step_have_no_query_and_no_page() -> None:
    inputs = filled([20, 30, 40], 0)
    inputs.output_rows[3:] = 7
    inputs.fill_up(3, 8)
    batch = inputs.decoding(8, shared=False)
    assert batch.query_start.tolist() == [0, 1, 2, 3, 3, 3, 3, 3, 3]
    assert inputs.output_rows.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert (batch.num_tokens, batch.num_requests, batch.max_query_len) == (8, 8, 1)
    batch.check()


def test_the_draws_lie_where_a_device_reads_them() -> None:
    inputs = filled([20, 30], 0)
    inputs.sampling.set(1, inputs.sampling.draws[0].tobytes(), 0.625)
    assert inputs.draws[1, 7] == 0.625
    assert inputs.draws.dtype == torch.float64
