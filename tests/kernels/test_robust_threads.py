"""Engines among other threads, processes and engines: nothing hangs, nothing is torn."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.kernels import cpu
from sdk.kernels.cpu import library
from sdk.kernels.errors import KernelError
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops

#: Seconds, far beyond what anything here takes: a test that gets there has hung.
PATIENCE = 120.0


def together(*bodies: Callable[[], None]) -> None:
    """All bodies at once, each in a thread; what one of them raises is raised here."""
    errors: list[BaseException] = []

    def run(body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive(), "hung"
    if errors:
        raise errors[0]


def tasks() -> set[str]:
    return {path.name for path in Path("/proc/self/task").iterdir()}


def in_child(body: Callable[[], bool]) -> bool | None:
    """What ``body`` returns in a forked child; None when the child does not answer."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        answer = b"raised"
        try:
            answer = b"true" if body() else b"false"
        finally:
            os.write(writer, answer)
            os._exit(0)
    os.close(writer)
    ready, _, _ = select.select([reader], [], [], PATIENCE)
    answer = os.read(reader, 16) if ready else b""
    if not ready:
        os.kill(child, 9)
    os.waitpid(child, 0)
    os.close(reader)
    return {b"true": True, b"false": False}.get(answer)


def test_every_operator_of_a_closed_engine_says_so(cases: Any) -> None:
    ops = Ops("cpu", num_threads=2)
    linear, x, weight = ops.linear(cases.affine(20, 96)), torch.zeros(4, 96), torch.ones(96)
    ids = torch.tensor([0, 1])
    calls: list[Callable[[], Any]] = [
        lambda: linear.matmul(x),
        lambda: linear.rows(ids),
        linear.layout,
        lambda: ops.linear(cases.affine(20, 96)),
        lambda: ops.norm(x, Norm(weight, 1e-5)),
        lambda: ops.add_norm(x, x.clone(), Norm(weight, 1e-5)),
        lambda: ops.gated_activation(x, "silu"),
        lambda: ops.zeros(1, 4),
        lambda: ops.add(x, x),
        lambda: ops.add_bias(x, weight),
        lambda: ops.scale(x, 2.0),
        lambda: ops.softcap(x, 2.0),
        lambda: ops.select_rows(x, ids),
        lambda: ops.rope_angles(ids, weight, 1.0),
        lambda: ops.sampling.argmax(x),
    ]
    for call in calls:
        call()
    ops.close()
    ops.close()
    for call in calls:
        with pytest.raises(KernelError, match="the engine is closed"):
            call()


def test_an_engine_may_be_closed_while_other_threads_use_it(cases: Any) -> None:
    weight, x = cases.affine(600, 256), cases.activations(8, 256)
    first = Ops("cpu", num_threads=1)
    expected = first.linear(weight).matmul(x)
    first.close()
    for _ in range(10):
        ops = Ops("cpu", num_threads=3)
        linear = ops.linear(weight)
        started = threading.Barrier(3)

        def use(linear: Any = linear, started: Any = started) -> None:
            started.wait(PATIENCE)
            with pytest.raises(KernelError, match="the engine is closed"):
                while True:
                    assert torch.equal(linear.matmul(x), expected)

        def close(ops: Ops = ops, started: Any = started) -> None:
            started.wait(PATIENCE)
            ops.close()

        together(use, use, close)


def test_two_engines_and_four_threads_compute_what_one_does(cases: Any) -> None:
    weight, x = cases.affine(600, 256), cases.activations(8, 256)
    norm = torch.rand(256)
    engines = [Ops("cpu", num_threads=threads) for threads in (2, 3)]
    linears = [ops.linear(weight) for ops in engines]
    expected = linears[0].matmul(x), engines[0].norm(x, Norm(norm, 1e-5))

    def use(which: int) -> None:
        for _ in range(60):
            assert torch.equal(linears[which].matmul(x), expected[0])
            assert torch.equal(engines[which].norm(x, Norm(norm, 1e-5)), expected[1])

    together(*(lambda which=which: use(which) for which in (0, 0, 1, 1)))
    for ops in engines:
        ops.close()


def test_engines_come_and_go_in_several_threads(cases: Any) -> None:
    weight, x = cases.affine(300, 128), cases.activations(6, 128)
    before = tasks()

    def live() -> None:
        for threads in (1, 2, 4):
            ops = Ops("cpu", num_threads=threads)
            ops.linear(weight).matmul(x)
            ops.close()

    together(live, live, live)
    deadline = time.monotonic() + PATIENCE
    while len(tasks()) > len(before):  # the system lists a thread a moment longer than it lives
        assert time.monotonic() < deadline, "threads are left over"


def test_other_python_threads_go_on_during_a_call(cases: Any) -> None:
    """With an endless switch interval a thread gets its turn only when another one gives it."""
    ops = Ops("cpu", num_threads=1)
    linear, x = ops.linear(cases.affine(2048, 2048)), cases.activations(32, 2048)
    out = torch.empty(32, 2048)
    matmul = linear.choice.implementation.matmul  # no torch operator, which would let go too
    turns, stop = [0], threading.Event()

    def count() -> None:
        while not stop.wait(0.001):  # gives its own turn back
            turns[0] += 1

    thread = threading.Thread(target=count, daemon=True)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE)
    try:
        thread.start()
        before, calls = turns[0], 0
        while turns[0] == before and calls < 500:
            matmul(linear.packed, x, out)
            calls += 1
        after = turns[0]
    finally:
        sys.setswitchinterval(interval)
        stop.set()
    thread.join(PATIENCE)
    assert after > before
    ops.close()


def test_a_forked_child_computes_alone_what_its_parent_computes(cases: Any) -> None:
    ops = Ops("cpu", num_threads=3)
    linear, x = ops.linear(cases.affine(600, 256)), cases.activations(8, 256)
    expected = linear.matmul(x)

    def body() -> bool:
        before = tasks()  # one, or more where another library starts its own again
        same = torch.equal(linear.matmul(x), expected) and tasks() <= before
        ops.close()
        return same

    assert in_child(body) is True
    assert torch.equal(linear.matmul(x), expected)
    ops.close()


def test_a_forked_child_can_open_an_engine_of_its_own(cases: Any) -> None:
    ops = Ops("cpu", num_threads=2)
    weight, x = cases.affine(600, 256), cases.activations(8, 256)
    expected = ops.linear(weight).matmul(x)

    def body() -> bool:
        mine = Ops("cpu", num_threads=2)
        return torch.equal(mine.linear(weight).matmul(x), expected)

    assert in_child(body) is True
    ops.close()


@pytest.mark.slow
def test_a_process_may_end_while_daemon_threads_are_in_a_call() -> None:
    program = """
import threading
import torch
from sdk.kernels.weights.layouts import Dense
from sdk.kernels.operators.ops import Ops

ops = Ops("cpu", num_threads=2)
linear, x = ops.linear(Dense(torch.randn(512, 512))), torch.randn(16, 512)
started = threading.Barrier(4)

def use():  # torch's own operators do not survive this: they end in std::terminate
    out, matmul = torch.empty(16, 512), linear.choice.implementation.matmul
    started.wait()
    while True:
        matmul(linear.packed, x, out)

for _ in range(3):
    threading.Thread(target=use, daemon=True).start()
started.wait()
"""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=PATIENCE)
    assert (done.returncode, done.stderr) == (0, "")


def asleep(task: str) -> bool:
    stat = Path(f"/proc/self/task/{task}/stat").read_text()
    return stat.rpartition(")")[2].split()[0] == "S"


def test_threads_of_an_idle_engine_sleep(cases: Any) -> None:
    before = tasks()
    ops = Ops("cpu", num_threads=4)
    mine = tasks() - before
    assert len(mine) == 3
    ops.linear(cases.affine(2048, 512)).matmul(cases.activations(32, 512))
    deadline = time.monotonic() + PATIENCE
    while not all(asleep(task) for task in mine):
        assert time.monotonic() < deadline, "threads of an idle engine do not sleep"
    # and stay so: a thread that looks for work now and then is seen awake in some of these
    assert all(asleep(task) for _ in range(2000) for task in mine)
    ops.close()


def test_the_host_keeps_its_threads_environment_and_rounding(cases: Any) -> None:
    def settings() -> tuple[Any, ...]:
        tiny = torch.full((4,), 1e-39)
        return (
            dict(os.environ),
            torch.get_num_threads(),
            torch.get_num_interop_threads(),
            (tiny * 0.5).tolist(),  # would be zeros if denormals were flushed
            os.sched_getaffinity(0),
        )

    before = settings()
    ops = Ops("cpu", num_threads=3)
    ops.linear(cases.affine(600, 256)).matmul(cases.activations(8, 256))
    assert settings() == before
    ops.close()
    assert settings() == before


@pytest.mark.parametrize("threads", [0, -1, 2**31, 2**40])
def test_numbers_of_threads_that_make_no_sense_are_refused(threads: int) -> None:
    with pytest.raises(KernelError, match=f"num_threads: expected .*, found {threads}"):
        Ops("cpu", num_threads=threads)


def test_levels_the_processor_lacks_are_refused() -> None:
    missing = set(library.LEVELS) - set(cpu.levels())
    assert missing  # no processor has those of x86 and of ARM
    for level in missing:
        with pytest.raises(KernelError, match="SIMD level: expected one of"):
            cpu.open_backend("cpu", 1, level)
