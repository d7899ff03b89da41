"""Recorded steps of ranks whose sums are sockets; ranks are threads of this process."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.cluster.executors.groups import connect
from sdk.cluster.executors.remote.tcp_group import TcpGroup
from sdk.kernels.errors import CollectiveError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops

AN_HOUR_S = 3600.0  # a test ends sooner: then the wait has ended for another reason
TOKENS, OUTPUTS, WIDTH = 9, 4, 64
WEIGHT = torch.linspace(0.5, 2.0, WIDTH)


def on_all(size: int, call: Callable[[int], Any]) -> list[Any]:
    """What ``call(rank)`` returned or raised on each rank."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = call(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return found


Make = Callable[..., list[Any]]


@pytest.fixture
def groups(remote: ModuleType, tmp_path: Path) -> Iterator[Make]:
    """``groups(kind, size)``: connected ranks."""
    with contextlib.ExitStack() as stack:

        def over_tcp(size: int, limit_s: float) -> list[TcpGroup]:
            peers: list[dict] = [{} for _ in range(size)]
            for low in range(size):
                for high in range(low + 1, size):
                    ends = stack.enter_context(remote.connected())
                    peers[high][low], peers[low][high] = ends
            return [TcpGroup(rank, found, limit_s) for rank, found in enumerate(peers)]

        def make(kind: str, size: int, limit_s: float = AN_HOUR_S) -> list[Any]:
            if kind == "tcp":
                made: list[Any] = over_tcp(size, limit_s)
            else:
                place = tmp_path / f"{kind}-{size}"
                place.mkdir()
                made = on_all(
                    size,
                    lambda rank: connect(
                        kind, str(place), rank, size, connect_s=60, limit_s=limit_s
                    ),
                )
            for group in made:
                stack.callback(group.close)
            return made

        yield make


class Rank:
    """A step of three exchanges: as a graph, and as the function that it records."""

    def __init__(self, number: int, size: int, group: Any) -> None:
        self.number, self.size, self.group = number, size, group
        self.ops = Ops(num_threads=1 + number % 2, backends=["cpu"])
        self.x = torch.zeros(TOKENS, WIDTH)
        self.rows = torch.zeros(OUTPUTS, dtype=torch.int64)
        with torch.inference_mode():
            self.graph = self.ops.recording.capture(
                lambda: self.forward(self.x, self.rows), tokens=TOKENS, outputs=OUTPUTS, requests=1
            )

    def forward(self, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        ops, group = self.ops, self.group
        y = ops.all_reduce(ops.add(ops.zeros(len(x), WIDTH), x), group)
        y = ops.all_reduce(ops.norm(y, Norm(WEIGHT, 1e-5)), group)
        own = ops.select_rows(y, rows)
        return y, ops.all_gather(own, group, WIDTH, WIDTH * self.size)

    def steps(self, replayed: bool) -> list[Tensor]:
        found = []
        for step in range(12):
            used, asked = 1 + 5 * step % TOKENS, step % (OUTPUTS + 1)
            made = torch.Generator().manual_seed(100 * step + self.number)
            x = torch.randn(used, WIDTH, generator=made) * 10.0 ** (3 * self.number)
            self.x[:used], self.rows[:asked] = x, torch.arange(asked) % used
            if replayed:
                self.graph.replay(tokens=used, outputs=asked, requests=1)
                y, gathered = self.graph.result
            else:
                y, gathered = self.forward(self.x[:used], self.rows[:asked])
            found += [y[:used].clone(), gathered[:asked].clone()]
        return found


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_a_recorded_step_has_the_bits_of_an_eager_one_and_of_shared_memory(
    groups: Make, kind: str, size: int
) -> None:
    def both(ranks: list[Any]) -> list[Any]:
        return on_all(size, lambda rank: [ranks[rank].steps(True), ranks[rank].steps(False)])

    found = []
    for each in (kind, "memory"):
        ranks = [Rank(number, size, group) for number, group in enumerate(groups(each, size))]
        found.append(both(ranks))
        for rank in ranks:
            rank.ops.close()
    for over_sockets, in_memory in zip(*found, strict=True):
        expected = in_memory[0]
        for results in (*over_sockets, in_memory[1]):
            assert all(map(torch.equal, results, expected))


@pytest.mark.parametrize("kind", ["tcp", "gloo"])
def test_a_rank_that_goes_in_the_middle_of_a_step_is_an_error(groups: Make, kind: str) -> None:
    made = groups(kind, 2)
    rank = Rank(0, 2, made[0])

    def leave(_: int) -> None:
        made[1].all_reduce(torch.ones(TOKENS, WIDTH))
        made[1].close()

    found = on_all(
        2,
        lambda number: (
            leave(1) if number else rank.graph.replay(tokens=TOKENS, outputs=OUTPUTS, requests=1)
        ),
    )
    assert isinstance(found[0], CollectiveError) and found[1] is None
    rank.ops.close()


def test_a_rank_that_stays_away_is_given_up_after_the_limit(groups: Make) -> None:
    rank = Rank(0, 2, groups("tcp", 2, 0.2)[0])
    with pytest.raises(CollectiveError, match=r"rank 1: nothing within 0\.2 s"):
        rank.graph.replay(tokens=1, outputs=0, requests=1)
    rank.ops.close()


def test_ctrl_c_ends_a_step_that_waits_for_another_rank(groups: Make) -> None:
    rank = Rank(0, 2, groups("tcp", 2)[0])
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    try:
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            rank.graph.replay(tokens=TOKENS, outputs=OUTPUTS, requests=1)
    finally:
        interrupt.join()
        signal.signal(signal.SIGINT, before)
    assert (rank.ops.add(torch.ones(1, 8), torch.ones(1, 8)) == 2).all()  # no lock is held
    with pytest.raises(CollectiveError, match="was closed"):  # it would read what comes too late
        rank.graph.replay_again()
    rank.ops.close()
