"""All ways in which ranks exchange tensors; three ranks are three threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import psutil
import pytest
import torch

from sdk.cluster.executors.gloo import TcpStore
from sdk.cluster.executors.groups import Transport, connect
from sdk.kernels.errors import CollectiveError


@pytest.fixture(params=get_args(Transport))
def kind(request: pytest.FixtureRequest) -> Transport:
    return request.param


@pytest.fixture
def place(kind: Transport, tmp_path: Path) -> Iterator[str]:
    """Where three ranks meet."""
    if kind != "tcp":
        yield str(tmp_path)
        return
    store = TcpStore("127.0.0.1", 3)
    yield store.place
    store.close()


def test_ranks_that_do_not_come_are_given_up(kind: Transport, place: str) -> None:
    with pytest.raises(CollectiveError, match="rank 0 cannot connect to the others"):
        connect(kind, place, 0, 3, connect_s=0.5, limit_s=1)


def test_ranks_of_several_machines_listen_only_where_they_reach_the_store() -> None:
    store = TcpStore("127.0.0.2", 2)
    try:
        group = []
        other = threading.Thread(
            target=lambda: group.append(connect("tcp", store.place, 1, 2, connect_s=60, limit_s=60))
        )
        other.start()
        group.append(connect("tcp", store.place, 0, 2, connect_s=60, limit_s=60))
        other.join()
        listening = {
            one.laddr.ip
            for one in psutil.Process().net_connections("inet")
            if one.status == psutil.CONN_LISTEN
        }
        assert listening <= {"127.0.0.1", "127.0.0.2"} and "127.0.0.2" in listening
        for one in group:
            one.close()
    finally:
        store.close()


def test_an_address_of_another_machine_and_a_store_that_is_gone_are_named() -> None:
    with pytest.raises(CollectiveError, match=r"cannot listen at 203\.0\.113\.1: "):
        TcpStore("203.0.113.1", 2)
    store = TcpStore("127.0.0.1", 2)
    store.close()
    with pytest.raises(CollectiveError, match=f"rank 1 cannot reach rank 0 at {store.place}: "):
        connect("tcp", store.place, 1, 2, connect_s=5, limit_s=5)


@pytest.fixture
def three(kind: Transport, place: str):
    """Three ranks on three threads of this process."""
    groups = {}

    def join(rank: int) -> None:
        groups[rank] = connect(kind, place, rank, 3, connect_s=60, limit_s=60)

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
