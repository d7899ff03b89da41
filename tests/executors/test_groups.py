"""Both ways in which ranks exchange tensors; three ranks are three threads of this process."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import get_args

import pytest
import torch

from sdk.executors.groups import Transport, connect
from sdk.kernels.errors import CollectiveError


@pytest.fixture(params=get_args(Transport))
def kind(request: pytest.FixtureRequest) -> Transport:
    return request.param


def test_ranks_that_do_not_come_are_given_up(kind: Transport, tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match="rank 0 cannot connect to the others"):
        connect(kind, str(tmp_path), 0, 2, connect_s=0.2, limit_s=1)


@pytest.fixture
def three(kind: Transport, tmp_path: Path):
    """Three ranks on three threads of this process."""
    groups = {}

    def join(rank: int) -> None:
        groups[rank] = connect(kind, str(tmp_path), rank, 3, connect_s=60, limit_s=60)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield [groups[rank] for rank in range(3)]
    for group in groups.values():
        group.close()


def on_all(groups, call) -> None:
    threads = [threading.Thread(target=call, args=(r, g)) for r, g in enumerate(groups)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_sum_of_three_ranks_is_the_same_bits_everywhere_and_in_any_row(three) -> None:
    # big + small - big: the order of additions shows in the result
    addends = [torch.full((1, 7), value) for value in (1e8, 1.0, -1e8)]
    expected = ((addends[0] + addends[1]) + addends[2])[0]
    sums = {}

    def add(rank: int, group) -> None:
        rows = addends[rank].repeat(501, 1)
        group.all_reduce(rows)
        sums[rank] = rows

    on_all(three, add)
    for rows in sums.values():
        assert torch.equal(rows, expected.expand_as(rows))


def test_a_tensor_with_gaps_is_summed_in_place(three) -> None:
    views = {}

    def add(rank: int, group) -> None:
        views[rank] = torch.full((4, 6), float(rank + 1))
        group.all_reduce(views[rank][:, 2:5])

    on_all(three, add)
    for rank, view in views.items():
        assert torch.equal(view[:, 2:5], torch.full((4, 3), 6.0))
        assert torch.equal(view[:, :2], torch.full((4, 2), rank + 1.0))


def test_a_closed_group_refuses_to_sum(three) -> None:
    three[0].close()
    with pytest.raises(CollectiveError, match=r"was closed|gave up"):
        three[0].all_reduce(torch.ones(2))
