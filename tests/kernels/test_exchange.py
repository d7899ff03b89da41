"""Sums and gathers over ranks as operators; the ranks are threads, each with its own ``Ops``."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sdk.kernels.cpu.rank_group import SharedGroup
from sdk.kernels.errors import CollectiveError, KernelError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops

Call = Callable[[int, Any, Ops], Any]
AN_HOUR_S = 3600.0  # a test ends sooner: then the wait has ended for another reason


class Ranks:
    """``size`` ranks; :meth:`do` runs a function on all of them at the same time."""

    def __init__(
        self, folder: Path, size: int, num_threads: int, limit_s: float = AN_HOUR_S
    ) -> None:
        self.size = size
        self.ops = [Ops(num_threads=num_threads, backends=["cpu"]) for _ in range(size)]
        self.groups: dict[int, SharedGroup] = {}
        self._each(
            lambda rank: self.groups.__setitem__(
                rank, SharedGroup(str(folder), rank, size, connect_s=60, limit_s=limit_s)
            )
        )

    def _each(self, call: Callable[[int], object]) -> None:
        errors: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                call(rank)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), "a rank hangs"
        if errors:
            raise errors[0]

    def do(self, call: Call) -> list[Any]:
        found: dict[int, Any] = {}
        self._each(lambda r: found.__setitem__(r, call(r, self.groups[r], self.ops[r])))
        return [found[rank] for rank in range(self.size)]

    def close(self) -> None:
        for ops in self.ops:
            ops.close()


@pytest.fixture(params=[(2, 1), (2, 2), (3, 1), (5, 1)], ids=lambda p: f"{p[0]} ranks, {p[1]}")
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path, *request.param)
    yield made
    made.close()


def addend(rank: int, rows: int, width: int, seed: int = 0) -> Tensor:
    made = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(rows, width, generator=made) * 10.0 ** (3 * (rank % 3))


def total(size: int, rows: int, width: int, seed: int = 0) -> Tensor:
    """In the order of the ranks."""
    result = addend(0, rows, width, seed).clone()
    for rank in range(1, size):
        result += addend(rank, rows, width, seed)
    return result


@pytest.mark.parametrize(("rows", "width"), [(1, 7), (1, 576), (7, 576), (300, 960)])
def test_a_sum_has_the_same_bits_on_every_rank(ranks: Ranks, rows: int, width: int) -> None:
    def call(rank: int, group: SharedGroup, ops: Ops) -> Tensor:
        return ops.all_reduce(addend(rank, rows, width), group)

    expected = total(ranks.size, rows, width)
    for found in ranks.do(call):
        assert torch.equal(found, expected)


def test_rows_with_gaps_between_them_are_summed_in_place(ranks: Ranks) -> None:
    def call(rank: int, group: SharedGroup, ops: Ops) -> Tensor:
        wide = torch.full((4, 6), -1.0)
        wide[:, 1:4] = rank + 1.0
        ops.all_reduce(wide[:, 1:4], group)
        return wide

    for found in ranks.do(call):
        assert (found[:, 1:4] == sum(range(1, ranks.size + 1))).all()
        assert (found[:, :1] == -1).all() and (found[:, 4:] == -1).all()


@pytest.mark.parametrize("missing", [0, 1, 3])
def test_columns_are_gathered_side_by_side(ranks: Ranks, missing: int) -> None:
    width = 5

    def call(rank: int, group: SharedGroup, ops: Ops) -> Tensor:
        own = addend(rank, 6, width)
        last = rank == ranks.size - 1
        x = own[:, : width - missing].contiguous() if last else own
        return ops.all_gather(x, group, width, ranks.size * width - missing)

    parts = torch.cat([addend(rank, 6, width) for rank in range(ranks.size)], dim=1)
    for found in ranks.do(call):
        assert torch.equal(found, parts[:, : ranks.size * width - missing])


def test_nothing_is_exchanged_for_no_rows(ranks: Ranks) -> None:
    def call(rank: int, group: SharedGroup, ops: Ops) -> Tensor:
        assert ops.all_reduce(torch.empty(0, 8), group).shape == (0, 8)
        return ops.all_reduce(torch.ones(1, 8), group)

    assert all((found == ranks.size).all() for found in ranks.do(call))


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_sizes_and_kinds(ranks: Ranks, seed: int) -> None:
    """Areas grow, alternate and are reused; ranks are delayed at random."""
    plan = random.Random(seed)
    steps = [
        (plan.choice(("sum", "gather", "plain")), plan.randint(1, 60), plan.randint(1, 900))
        for _ in range(120)
    ]

    def call(rank: int, group: SharedGroup, ops: Ops) -> list[Tensor]:
        delays = random.Random(seed + rank)
        found = []
        for number, (kind, rows, width) in enumerate(steps):
            if delays.random() < 0.1:
                time.sleep(delays.random() * 1e-3)
            x = addend(rank, rows, width, number)
            if kind == "sum":
                found.append(ops.all_reduce(x, group))
            elif kind == "gather":
                found.append(ops.all_gather(x, group, width, width * ranks.size))
            else:
                found.append(torch.cat(group.all_gather(x), dim=1))
        return found

    results = ranks.do(call)
    for number, (kind, rows, width) in enumerate(steps):
        parts = [addend(rank, rows, width, number) for rank in range(ranks.size)]
        sums = kind == "sum"
        expected = total(ranks.size, rows, width, number) if sums else torch.cat(parts, dim=1)
        for found in results:
            assert torch.equal(found[number], expected)


def test_a_recorded_sum_joins_the_operators_around_it(ranks: Ranks) -> None:
    tokens, outputs, width = 9, 4, 64
    weight = torch.linspace(0.5, 2.0, width)

    def forward(ops: Ops, group: SharedGroup, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.add(ops.zeros(len(x), width), x)
        ops.all_reduce(y, group)
        y = ops.norm(y, Norm(weight, 1e-5))
        ops.all_reduce(y, group)
        picked = ops.select_rows(y, rows)
        return y, ops.all_gather(picked, group, width, width * ranks.size)

    def call(rank: int, group: SharedGroup, ops: Ops) -> bool:
        x, rows = torch.zeros(tokens, width), torch.zeros(outputs, dtype=torch.int64)
        with torch.inference_mode():
            graph = ops.recording.capture(
                lambda: forward(ops, group, x, rows), tokens=tokens, outputs=outputs, requests=1
            )
        same = True
        for step in range(30):
            used, asked = 1 + step % tokens, step % (outputs + 1)
            x[:used] = addend(rank, used, width, step)
            rows[:asked] = torch.arange(asked) % used
            graph.replay(tokens=used, outputs=asked, requests=1)
            expected = forward(ops, group, x[:used], rows[:asked])
            for found, wanted in zip(graph.result, expected, strict=True):
                same &= torch.equal(found[: len(wanted)], wanted)
        return same

    assert ranks.do(call) == [True] * ranks.size


class Doubles:
    """A group in Python of two ranks that have the same; notes what it gets."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self.error: BaseException | None = None

    def all_reduce(self, x: Tensor) -> None:
        self.shapes.append(tuple(x.shape))
        if self.error is not None:
            raise self.error
        x *= 2

    def all_gather(self, x: Tensor) -> list[Tensor]:
        self.shapes.append(tuple(x.shape))
        return [x, x]


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def alone(request: pytest.FixtureRequest) -> Iterator[Ops]:
    ops = Ops(num_threads=request.param, backends=["cpu"])
    yield ops
    ops.close()


TOKENS, OUTPUTS, WIDTH = 9, 4, 64
WEIGHT = torch.linspace(0.5, 2.0, WIDTH)


def doubled(ops: Ops, group: Doubles, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Two sums in a row, operators around them, and a gather of fewer columns than both have."""
    y = ops.all_reduce(ops.add(ops.zeros(len(x), WIDTH), x), group)
    ops.all_reduce(y, group)
    y = ops.norm(y, Norm(WEIGHT, 1e-5))
    return y, ops.all_gather(ops.select_rows(y, rows), group, WIDTH, 2 * WIDTH - 5)


def recorded(ops: Ops, group: Doubles) -> tuple[Any, Tensor, Tensor]:
    """The graph of :func:`doubled`, and its inputs."""
    x, rows = torch.zeros(TOKENS, WIDTH), torch.zeros(OUTPUTS, dtype=torch.int64)
    with torch.inference_mode():
        graph = ops.recording.capture(
            lambda: doubled(ops, group, x, rows), tokens=TOKENS, outputs=OUTPUTS, requests=1
        )
    assert not group.shapes  # a recording says nothing to other ranks
    return graph, x, rows


def test_a_group_in_python_gets_the_rows_of_the_step(alone: Ops) -> None:
    group = Doubles()
    graph, x, rows = recorded(alone, group)
    for step in range(12):
        used, asked = 1 + step % TOKENS, step % (OUTPUTS + 1)
        x[:used] = addend(step, used, WIDTH)
        rows[:asked] = torch.arange(asked) % used
        del group.shapes[:]
        graph.replay(tokens=used, outputs=asked, requests=1)
        seen = [(used, WIDTH)] * 2 + [(asked, WIDTH)] * bool(asked)  # nothing for no rows
        assert group.shapes == seen
        graph.replay_again()
        assert group.shapes == 2 * seen
        expected = doubled(alone, group, x[:used], rows[:asked])
        for found, wanted in zip(graph.result, expected, strict=True):
            assert torch.equal(found[: len(wanted)], wanted)


@pytest.mark.parametrize("error", [CollectiveError("rank 1: gone"), KeyboardInterrupt()], ids=repr)
def test_what_a_group_raises_ends_the_step_and_nothing_else(
    alone: Ops, error: BaseException
) -> None:
    group = Doubles()
    graph, x, rows = recorded(alone, group)
    x[:] = addend(0, TOKENS, WIDTH)
    group.error = error
    with pytest.raises(type(error)) as raised:
        graph.replay(tokens=TOKENS, outputs=OUTPUTS, requests=1)
    assert raised.value is error and len(group.shapes) == 1
    group.error = None
    graph.replay(tokens=TOKENS, outputs=OUTPUTS, requests=1)
    expected = doubled(alone, group, x, rows)
    assert all(map(torch.equal, graph.result, expected))


def test_sums_in_python_do_not_keep_the_buffers_of_a_graph(alone: Ops) -> None:
    x, group = torch.ones(TOKENS, WIDTH), Doubles()

    def forward(sums: bool) -> Tensor:
        y = x
        for _ in range(20):
            y = alone.add(alone.zeros(TOKENS, WIDTH), y)
            if sums:
                alone.all_reduce(y, group)
        return y

    counts = []
    for sums in (False, True):
        with torch.inference_mode():
            graph = alone.recording.capture(
                partial(forward, sums), tokens=TOKENS, outputs=1, requests=1
            )
        counts.append(len(graph._buffers._free) + len(graph._buffers._lent))
    assert counts[0] == counts[1] < 5
    graph.replay(tokens=TOKENS, outputs=1, requests=1)
    assert (graph.result == 2.0**20).all()


def test_a_rank_that_gives_up_ends_the_wait_of_the_others(ranks: Ranks) -> None:
    def call(rank: int, group: SharedGroup, ops: Ops) -> None:
        if rank == 0:
            time.sleep(0.3)
            group.close()
        with pytest.raises(CollectiveError, match="another rank ended, gave up or did not answer"):
            ops.all_reduce(torch.ones(1, 8), group)
        with pytest.raises(CollectiveError):
            group.all_gather(torch.ones(1))

    ranks.do(call)


def test_a_rank_that_does_not_come_is_given_up_after_the_limit(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, 1, limit_s=0.3)
    with pytest.raises(CollectiveError, match=r"cpu\.all_reduce: another rank"):
        ranks.ops[0].all_reduce(torch.ones(1, 8), ranks.groups[0])
    ranks.close()


def test_a_process_that_is_killed_is_noticed_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            SharedGroup(str(tmp_path), 1, 2, connect_s=60, limit_s=AN_HOUR_S)
            time.sleep(60)
        finally:
            os._exit(1)
    group = SharedGroup(str(tmp_path), 0, 2, connect_s=60, limit_s=AN_HOUR_S)
    threading.Timer(0.2, os.kill, (child, signal.SIGKILL)).start()
    with pytest.raises(CollectiveError):
        group.all_gather(torch.ones(3))
    os.waitpid(child, 0)


def test_a_forked_child_does_not_end_the_group_of_its_parent(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, 1)
    child = os.fork()
    if child == 0:
        try:
            ranks.groups.pop(0).close()
            ranks.groups.clear()
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    found = ranks.do(lambda rank, group, ops: ops.all_reduce(torch.ones(1, 8), group))
    assert all((each == 2).all() for each in found)
    ranks.close()


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    with pytest.raises(CollectiveError, match="rank 0 cannot connect to the others"):
        SharedGroup(str(tmp_path / "none"), 0, 2, connect_s=0.1, limit_s=1)


@pytest.mark.parametrize("first", [0, 3, 10])
def test_rows_of_a_part_are_zero_where_another_rank_has_them(cases: Any, first: int) -> None:
    ops = Ops(num_threads=1, backends=["cpu"])
    reference = Ops(num_threads=1, backends=["reference"])
    layout = cases.affine(48, 64)
    ids = torch.tensor([first, first + 47, 0, 70, first + 5])
    whole = torch.zeros(80, 64)
    whole[first : first + 48] = reference.linear(layout).rows(torch.arange(48))
    for each in (ops, reference):
        assert torch.equal(each.linear(layout).rows(ids, (first, 80)), whole[ids])
        with pytest.raises(KernelError, match=r"expected ids in 0\.\.79, found 80"):
            each.linear(layout).rows(torch.tensor([80]), (first, 80))
    ops.close()
