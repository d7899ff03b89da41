"""Transfers from one rank to another as operators; the ranks are threads, each with its own Ops."""

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

from sdk.kernels.cpu.rank_group import SharedLink
from sdk.kernels.errors import CollectiveError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops

AN_HOUR_S = 3600.0  # a test ends sooner: then the wait has ended for another reason


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Each call in a thread of its own; their results. The first error is raised."""
    found: dict[int, Any] = {}
    errors: list[BaseException] = []

    def run(index: int) -> None:
        try:
            found[index] = calls[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    if errors:
        raise errors[0]
    return [found[index] for index in range(len(calls))]


def linked(folder: Path, slots: int = 2, limit_s: float = AN_HOUR_S) -> list[SharedLink]:
    """The two ends of a link."""

    def end(sends: bool) -> SharedLink:
        return SharedLink(str(folder), sends=sends, slots=slots, connect_s=60, limit_s=limit_s)

    return together(lambda: end(True), lambda: end(False))


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def ops(request: pytest.FixtureRequest) -> Iterator[list[Ops]]:
    made = [Ops(num_threads=request.param, backends=["cpu"]) for _ in range(2)]
    yield made
    for each in made:
        each.close()


def rows(number: int, count: int, width: int) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(number))


@pytest.mark.quick_cases(7)
@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("delayed", [0, 1, None])
def test_what_is_sent_arrives_in_order_whichever_end_is_slow(
    ops: list[Ops], slots: int, delayed: int | None, tmp_path: Path
) -> None:
    sender, receiver = linked(tmp_path, slots)
    plan = random.Random(slots)
    sizes = [(plan.randint(1, 60), plan.randint(1, 900)) for _ in range(80)]
    native = [plan.random() < 0.7 for _ in sizes]

    def pause(end: int) -> None:
        if delayed == end:
            time.sleep(1e-3)

    def send() -> None:
        for number, size in enumerate(sizes):
            pause(0)
            x = rows(number, *size)
            ops[0].send(x, sender) if native[number] else sender.send(x)

    def receive() -> None:
        for number, size in enumerate(sizes):
            pause(1)
            x = torch.empty(size)
            if native[number]:
                x = ops[1].receive(*size, receiver)
            else:
                receiver.receive(x)
            assert torch.equal(x, rows(number, *size))

    together(send, receive)
    if delayed is not None:
        waiting = receiver if delayed == 0 else sender
        assert waiting.waited_seconds > 0.01
        assert (sender if delayed == 0 else receiver).waited_seconds < waiting.waited_seconds


def test_the_sender_goes_on_until_all_slots_are_unread(tmp_path: Path) -> None:
    sender, receiver = linked(tmp_path, 2, limit_s=0.3)
    together(lambda: sender.reserve(64), lambda: receiver.reserve(64))
    for number in range(2):
        sender.send(torch.full((16,), float(number)))
    out = torch.empty(16)
    receiver.receive(out)
    sender.send(torch.full((16,), 2.0))
    with pytest.raises(CollectiveError, match="send: another rank"):
        sender.send(torch.full((16,), 3.0))
    with pytest.raises(CollectiveError, match="receive: another rank"):
        for _ in range(3):  # two that were sent, and one more
            receiver.receive(out)


def test_nothing_is_sent_for_no_rows(ops: list[Ops], tmp_path: Path) -> None:
    sender, receiver = linked(tmp_path)
    ops[0].send(torch.empty(0, 8), sender)
    assert ops[1].receive(0, 8, receiver).shape == (0, 8)
    _, found = together(
        lambda: ops[0].send(torch.ones(1, 8), sender), lambda: ops[1].receive(1, 8, receiver)
    )
    assert (found == 1).all()


def test_a_recorded_step_receives_and_sends(ops: list[Ops], tmp_path: Path) -> None:
    """Two stages and back: the first one records a send, then a receive of what the other made."""
    tokens, width = 9, 64
    weight = torch.linspace(0.5, 2.0, width)
    (tmp_path / "there").mkdir()
    (tmp_path / "back").mkdir()
    there, back = linked(tmp_path / "there"), linked(tmp_path / "back")

    def first(x: Tensor) -> Tensor:
        y = ops[0].norm(x, Norm(weight, 1e-5))
        ops[0].send(y, there[0])
        return ops[0].receive(len(x), width, back[1])

    def second(count: int) -> Tensor:
        y = ops[1].receive(count, width, there[1])
        y = ops[1].add(ops[1].norm(y, Norm(weight, 1e-5)), y)
        ops[1].send(y, back[0])
        return y

    x = torch.zeros(tokens, width)

    def capture(own: Ops, forward: Callable[[], Tensor]) -> Any:
        with torch.inference_mode():
            return own.recording.capture(forward, tokens=tokens, outputs=1, requests=1)

    graphs = [capture(ops[0], lambda: first(x)), capture(ops[1], lambda: second(tokens))]
    reference = Ops(num_threads=1, backends=["cpu"])
    for step in range(20):
        used = 1 + step % tokens
        x[:used] = rows(step, used, width)
        counts = {"tokens": used, "outputs": 0, "requests": 1}
        together(*(partial(graph.replay, **counts) for graph in graphs))
        y = reference.norm(x[:used], Norm(weight, 1e-5))
        y = reference.add(reference.norm(y, Norm(weight, 1e-5)), y)
        for graph in graphs:
            assert torch.equal(graph.result[:used], y)
    reference.close()


def test_a_link_in_python_gets_the_rows_of_the_step(ops: list[Ops]) -> None:
    class Echo:
        waited_seconds = 0.0

        def send(self, x: Tensor) -> None:
            self.x = x.clone()

        def receive(self, out: Tensor) -> None:
            out.copy_(self.x)

        def reserve(self, nbytes: int) -> None:
            raise AssertionError

    echo = Echo()
    for own in (ops[0], Ops(num_threads=1, backends=["reference"])):
        own.send(torch.ones(2, 3), echo)
        assert (own.receive(2, 3, echo) == 1).all()
    x = rows(1, 4, 3)

    def forward() -> Tensor:
        ops[0].send(ops[0].add(ops[0].zeros(4, 3), x), echo)
        return ops[0].receive(4, 3, echo)

    with torch.inference_mode():
        graph = ops[0].recording.capture(forward, tokens=4, outputs=1, requests=1)
    for used in (4, 1, 3):
        graph.replay(tokens=used, outputs=0, requests=1)
        assert torch.equal(graph.result[:used], x[:used]) and echo.x.shape == (used, 3)


def test_an_end_that_gives_up_ends_the_wait_of_the_other(ops: list[Ops], tmp_path: Path) -> None:
    sender, receiver = linked(tmp_path)
    threading.Timer(0.2, sender.close).start()
    with pytest.raises(CollectiveError, match=r"cpu\.receive: another rank ended, gave up"):
        ops[1].receive(1, 8, receiver)
    with pytest.raises(CollectiveError):
        receiver.receive(torch.empty(1))


def test_a_stage_that_lost_the_one_before_passes_nothing_on(ops: list[Ops], tmp_path: Path) -> None:
    """A recorded step runs to its end: what it computes without its input must not leave it."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    before, after = linked(tmp_path / "a"), linked(tmp_path / "b")

    def forward() -> Tensor:
        x = ops[0].receive(2, 8, before[1])
        ops[0].send(x, after[0])
        return x

    with torch.inference_mode():
        graph = ops[0].recording.capture(forward, tokens=2, outputs=1, requests=1)
    before[0].close()
    with pytest.raises(CollectiveError, match="step: another rank"):
        graph.replay(tokens=2, outputs=0, requests=1)
    with pytest.raises(CollectiveError):
        ops[1].receive(2, 8, after[1])


def test_a_process_that_is_killed_is_noticed_at_once(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            SharedLink(str(tmp_path), sends=True, slots=2, connect_s=60, limit_s=AN_HOUR_S)
            time.sleep(60)
        finally:
            os._exit(1)
    link = SharedLink(str(tmp_path), sends=False, slots=2, connect_s=60, limit_s=AN_HOUR_S)
    threading.Timer(0.2, os.kill, (child, signal.SIGKILL)).start()
    with pytest.raises(CollectiveError):
        link.receive(torch.empty(3))
    os.waitpid(child, 0)
