"""Sums over encrypted TCP connections; ranks are threads of this process."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from types import ModuleType

import pytest
import torch

from sdk.cluster.executors.groups import connect
from sdk.cluster.executors.remote.tcp_group import TcpGroup
from sdk.kernels.errors import CollectiveError


@pytest.fixture
def groups(remote: ModuleType):
    """``groups(size)``: connected ranks."""
    with contextlib.ExitStack() as stack:

        def make(size: int, limit_s: float = 60.0) -> list[TcpGroup]:
            peers: list[dict] = [{} for _ in range(size)]
            for low in range(size):
                for high in range(low + 1, size):
                    ends = stack.enter_context(remote.connected())
                    peers[high][low], peers[low][high] = ends
            made = [TcpGroup(rank, found, limit_s) for rank, found in enumerate(peers)]
            for group in made:
                stack.callback(group.close)
            return made

        yield make


def on_all(groups, call) -> list:
    """What ``call(rank, group)`` returned or raised on each rank."""
    found: list = [None] * len(groups)

    def run(rank: int) -> None:
        try:
            found[rank] = call(rank, groups[rank])
        except CollectiveError as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(groups))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_are_in_rank_order_and_the_same_bits_everywhere(groups, size: int) -> None:
    addends = torch.randn(size, 33, 7, generator=torch.Generator().manual_seed(1)) * 1e3
    addends[0, 0, 0], addends[1, 0, 0] = 1e8, 1.0  # the order shows
    expected = addends[0].clone()
    for other in addends[1:]:
        expected += other

    def add(rank: int, group: TcpGroup):
        x = addends[rank].clone()
        group.all_reduce(x)
        return x

    for found in on_all(groups(size), add):
        assert torch.equal(found, expected)


def test_the_bits_are_those_of_ranks_that_share_memory(groups, tmp_path: Path) -> None:
    addends = torch.randn(3, 257, generator=torch.Generator().manual_seed(2))

    def add(rank: int, group):
        x = addends[rank].clone()
        group.all_reduce(x)
        return x

    shared: list = [None] * 3

    def join(rank: int) -> None:
        shared[rank] = connect("memory", str(tmp_path), rank, 3, connect_s=60, limit_s=60)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for over_tcp, in_memory in zip(on_all(groups(3), add), on_all(shared, add), strict=True):
        assert torch.equal(over_tcp, in_memory)
    for group in shared:
        group.close()


def test_gathers_are_in_rank_order_and_take_any_shape_and_type(groups) -> None:
    made = groups(3)
    strided = torch.ones(1).as_strided((1,), (0,))
    for x in (torch.arange(6).reshape(2, 3), torch.tensor(2.5), torch.zeros(0, 4), strided):
        for parts in on_all(
            made, lambda rank, group, x=x: group.all_gather(x.add(rank) if rank else x)
        ):
            assert [torch.equal(part, x + rank) for rank, part in enumerate(parts)] == [True] * 3


def test_a_tensor_with_gaps_is_summed_in_place(groups) -> None:
    def add(rank: int, group: TcpGroup):
        x = torch.full((4, 6), float(rank + 1))
        group.all_reduce(x[:, 2:5])
        return x

    for rank, x in enumerate(on_all(groups(3), add)):
        assert torch.equal(x[:, 2:5], torch.full((4, 3), 6.0))
        assert torch.equal(x[:, :2], torch.full((4, 2), rank + 1.0))


def test_large_tensors_in_both_directions_do_not_wait_for_each_other(groups) -> None:
    for found in on_all(
        groups(2), lambda rank, group: group.all_gather(torch.full((4_000_000,), float(rank)))
    ):
        assert [part[-1].item() for part in found] == [0.0, 1.0]


def test_a_rank_that_does_not_come_is_named(groups) -> None:
    made = groups(2, 0.2)
    with pytest.raises(CollectiveError, match=r"rank 1: nothing within 0\.2 s"):
        made[0].all_reduce(torch.ones(3))


def test_a_rank_that_has_gone_is_named(groups) -> None:
    made = groups(3)
    made[1].close()
    found = on_all(made[::2], lambda rank, group: group.all_reduce(torch.ones(3)))
    assert all(isinstance(error, CollectiveError) for error in found)
    assert str(found[0]).startswith("rank 1: ")


def test_an_exchange_in_progress_fails_when_another_thread_gives_up(groups) -> None:
    made = groups(2)
    errors = []

    def add() -> None:
        try:
            made[0].all_reduce(torch.ones(3))
        except CollectiveError as error:
            errors.append(str(error))

    adding = threading.Thread(target=add)
    adding.start()
    time.sleep(0.1)
    made[0].close()
    adding.join()
    assert len(errors) == 1
    with pytest.raises(CollectiveError, match="was closed"):
        made[0].all_reduce(torch.ones(3))


class Tampering:
    """A socket on which somebody else changes what is sent."""

    def __init__(self, sock, change) -> None:
        self._sock, self._change = sock, change

    def __getattr__(self, name: str):
        return getattr(self._sock, name)

    def send(self, data, *flags: int) -> int:
        self._sock.sendall(self._change(bytes(data)))
        return len(data)


@pytest.mark.parametrize("what", ["payload", "tag", "repeated", "missing"])
def test_a_tensor_that_was_tampered_with_ends_the_group(groups, what: str) -> None:
    made = groups(2)
    (peer,) = made[1]._peers
    sent: list[bytes] = []

    def change(data: bytes) -> bytes:
        sent.append(data)
        at = {"payload": 20, "tag": len(data) - 1}.get(what)
        if at is not None:
            return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return sent[0] if what == "repeated" else b"" if len(sent) == 2 else data

    peer.stream.socket = Tampering(peer.stream.socket, change)
    if what in ("repeated", "missing"):  # the first one arrives
        on_all(made, lambda rank, group: group.all_reduce(torch.ones(3)))
    if what == "missing":
        made[1]._exchange = lambda parts: [
            (peer.begin(parts[1], parts[0]), peer.advance()) for _ in range(2)
        ]
    found = on_all(made, lambda rank, group: group.all_reduce(torch.ones(3)))
    assert str(found[0]).startswith("rank 1: ") and "BAD_RECORD_MAC" in str(found[0])


def test_ranks_that_exchange_different_tensors_are_named(groups) -> None:
    """Another step, say: the sums would be wrong without a word."""
    found = on_all(groups(2), lambda rank, group: group.all_reduce(torch.ones(3 + rank)))
    assert "rank 1: expected a tensor of 12 bytes, found 16" in str(found[0])
    assert isinstance(found[1], CollectiveError)


def test_a_forked_child_leaves_the_group_alone(groups) -> None:
    made = groups(2)
    pid = os.fork()
    if pid == 0:
        made[0].abandon()
        os._exit(0)
    os.waitpid(pid, 0)
    for x in on_all(made, lambda rank, group: group.all_gather(torch.tensor(float(rank)))):
        assert [part.item() for part in x] == [0.0, 1.0]
