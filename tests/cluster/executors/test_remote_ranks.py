"""Ranks that join over TCP: real processes on loopback, real sums; only the model is a fake."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import psutil
import pytest

from sdk.api.errors import EngineClosedError, EngineDeadError
from sdk.api.remote_workers import Address
from sdk.cluster.executors.process import ProcessExecutor
from sdk.cluster.wire.codec import CodecError
from sdk.cluster.wire.tls import HandshakeError
from sdk.engine.plan import StepPlan, StepResult
from sdk.executors.local import LocalExecutor

HERE = Path(__file__).parent


def run_step(executor: ProcessExecutor, plan: StepPlan) -> StepResult:
    executor.launch(plan)
    return executor.result()


class Hosts:
    """Workers that wait at one port, and executors that listen there."""

    def __init__(self, fakes: ModuleType) -> None:
        self._fakes = fakes
        self.port = fakes.free_port()
        self.workers: list = []

    def add(self, **options):
        worker = self._fakes.WorkerProcess(self.port, shared=True, **options)
        self.workers.append(worker)
        return worker

    def one_has_ended(self) -> bool:
        return any(one.process.poll() is not None for one in self.workers)

    def ensure(self, count: int) -> list:
        """``count`` living workers that wait."""
        for worker in [one for one in self.workers if one.process.poll() is not None]:
            worker.close()
            self.workers.remove(worker)
        while len(self.workers) < count:
            self.add()
        return self.workers

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()


@pytest.fixture(scope="module")
def module_hosts() -> Iterator[dict]:
    kept: dict = {}
    yield kept
    for hosts in kept.values():
        hosts.close()


@pytest.fixture
def hosts(remote: ModuleType, module_hosts: dict) -> Hosts:
    """Workers that all tests of this file share: they wait for the next engine after each."""
    return module_hosts.setdefault("hosts", Hosts(remote))


def sockets() -> set[tuple]:
    """The connections and listeners of this process, of whichever test."""
    found = psutil.Process().net_connections("inet")
    return {(one.laddr, one.raddr) for one in found if one.status != "TIME_WAIT"}


@pytest.fixture
def started(remote: ModuleType, hosts: Hosts) -> Iterator[Callable[..., ProcessExecutor]]:
    """Starts executors with the given faults; nothing of them is left after the test."""
    threads, before, open_before = threading.active_count(), threading.enumerate(), sockets()
    executors = []

    def start(faults=None, size: int = 2, **options) -> ProcessExecutor:
        hosts.ensure(size - 1)
        readers = threading.active_count() - threads
        executor = remote.executor_at(hosts.port, faults, size, **options)
        executors.append((executor, readers))
        executor.start()
        return executor

    yield start
    for executor, _ in executors:
        executor.close()
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert [name for name in left if name.startswith("sdk-")] == []
    assert sockets() <= open_before


def test_ranks_on_other_hosts_give_the_sums_of_one_rank(
    ranks: ModuleType, started, hosts: Hosts
) -> None:
    alone = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig())
    alone.start()
    expected = run_step(alone, StepPlan(1)).hidden
    alone.close()
    for size in (2, 4):
        executor = started(size=size)
        found = run_step(executor, StepPlan(1)).hidden
        assert found["sum"] == expected["sum"] and found["double"] == expected["double"]
        assert len(set(found["pids"])) == size and found["pids"][0] == os.getpid()
        assert {int(pid) for pid in found["pids"][1:]} <= {
            worker.process.pid for worker in hosts.workers
        }
        assert executor.on_ranks(ranks.whereabouts) == [(rank, 1) for rank in range(size)]
        executor.close()


def test_an_executor_may_stop_and_start_and_workers_serve_one_engine_after_the_other(
    started, hosts: Hosts
) -> None:
    executor = started()
    pids = run_step(executor, StepPlan(1)).hidden["pids"]
    executor.stop()
    executor.start()
    assert len(run_step(executor, StepPlan(2)).hidden["pids"]) == len(pids)
    executor.close()
    assert run_step(started(), StepPlan(3)).step_id == 3


def test_while_an_engine_runs_nobody_listens(started, hosts: Hosts) -> None:
    executor = started()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", hosts.port), timeout=5)
    assert run_step(executor, StepPlan(1)).step_id == 1


def test_while_an_engine_waits_only_its_address_is_bound(remote: ModuleType, eventually) -> None:
    port = remote.free_port()
    executor = remote.executor_at(port)

    def start() -> None:
        with pytest.raises(EngineClosedError):
            executor.start()

    starting = threading.Thread(target=start)
    starting.start()

    def bound() -> set[str]:
        found = psutil.Process().net_connections("inet")
        return {c.laddr.ip for c in found if c.laddr.port == port}

    assert eventually(lambda: bound() == {"127.0.0.1"})
    executor.break_off()
    starting.join()
    executor.close()
    assert bound() == set()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"rank 1 on .*127\.0\.0\.1.* failed: AlignmentError: 7 heads cannot be dealt"),
        ("kill", r"lost rank 1 on .*127\.0\.0\.1.*: it has ended: the connection was closed"),
        pytest.param("exit", r"lost rank 1 on .*: it has ended", marks=pytest.mark.slow),
        ("stop", r"lost rank 1 on .*127\.0\.0\.1.*: no sign of life for 4 s"),
    ],
)
def test_a_worker_lost_in_a_step_is_named_with_its_host(
    started, hosts: Hosts, eventually: Callable, fault: str, message: str
) -> None:
    executor = started({(1, 2): fault})
    assert run_step(executor, StepPlan(1)).step_id == 1
    with pytest.raises(EngineDeadError, match=message):
        run_step(executor, StepPlan(2))
    with pytest.raises(EngineDeadError, match="a rank was lost in an earlier step"):
        run_step(executor, StepPlan(3))
    executor.close()
    if fault == "stop":
        hosts.close()
        return
    if fault in ("kill", "exit"):  # its connection is closed a moment before it has ended
        assert eventually(hosts.one_has_ended)
    assert run_step(started(), StepPlan(4)).step_id == 4


def test_a_worker_killed_between_steps_is_named(started, hosts: Hosts) -> None:
    executor = started()
    pid = int(run_step(executor, StepPlan(1)).hidden["pids"][1])
    psutil.Process(pid).kill()
    with pytest.raises(EngineDeadError, match=r"lost rank 1 on .*: it has ended"):
        run_step(executor, StepPlan(2))
        run_step(executor, StepPlan(3))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "why"),
    [
        (signal.SIGKILL, "was lost: it has ended: the connection was closed"),
        pytest.param(signal.SIGSTOP, "was lost: no sign of life for 4 s", marks=pytest.mark.slow),
    ],
)
def test_a_worker_whose_engine_is_killed_or_stopped_waits_for_the_next(
    remote: ModuleType, number: signal.Signals, why: str
) -> None:
    port = remote.free_port()
    worker = remote.WorkerProcess(port)
    given = json.dumps({"listen": f"127.0.0.1:{port}"})
    command = [sys.executable, str(HERE / "remote_programs.py"), "steps", given]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None and json.loads(engine.stdout.readline()) == {"running": True}
    engine.send_signal(number)
    assert worker.says(why) and worker.says("waiting for an engine")
    engine.kill()
    engine.communicate()
    executor = remote.executor_at(port)
    executor.start()
    assert run_step(executor, StepPlan(1)).step_id == 1
    executor.close()
    worker.close()


@pytest.mark.slow
def test_a_worker_that_is_delayed_for_a_second_is_waited_for(started, hosts: Hosts) -> None:
    executor = started()
    pid = int(run_step(executor, StepPlan(1)).hidden["pids"][1])
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.5, os.kill, (pid, signal.SIGCONT)).start()
    assert run_step(executor, StepPlan(2)).step_id == 2


@pytest.mark.slow
def test_of_three_ranks_the_one_that_is_the_cause_is_named(started, hosts: Hosts) -> None:
    executor = started({(2, 1): "kill"}, size=4)
    with pytest.raises(EngineDeadError, match=r"^lost rank 2 on"):
        run_step(executor, StepPlan(1))


@pytest.mark.slow
def test_a_rank_in_a_long_step_is_not_taken_for_a_dead_one(started, tmp_path, eventually) -> None:
    executor = started({(1, 1): "hold"}, folder=str(tmp_path))
    threading.Timer(7.0, (tmp_path / "go").touch).start()
    assert run_step(executor, StepPlan(1)).step_id == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"rank 1 on .* failed: AlignmentError: 7 heads"),
        pytest.param("kill", r"lost rank 1 on .*: it has ended", marks=pytest.mark.slow),
        pytest.param("stop", r"lost rank 1 on .*: no sign of life", marks=pytest.mark.slow),
    ],
)
def test_a_worker_that_cannot_build_gives_its_reason(
    started, hosts: Hosts, fault: str, message: str
) -> None:
    with pytest.raises(EngineDeadError, match=message):
        started({(1, 0): fault})
    if fault == "stop":
        hosts.close()


def test_an_error_of_rank_0_sends_the_workers_back_to_waiting(started, hosts: Hosts) -> None:
    executor = started({(0, 1): "raise"})
    with pytest.raises(EngineDeadError, match="rank 0 failed: AlignmentError"):
        run_step(executor, StepPlan(1))
    assert run_step(started(), StepPlan(2)).step_id == 2


def test_close_while_a_step_waits_for_a_worker_ends_it(started, tmp_path, eventually) -> None:
    executor = started({(1, 1): "hold"}, folder=str(tmp_path))
    errors: list[str] = []

    def step() -> None:
        try:
            run_step(executor, StepPlan(1))
        except EngineClosedError as error:
            errors.append(str(error))

    stepping = threading.Thread(target=step)
    stepping.start()
    assert eventually((tmp_path / "holding").exists)
    executor.break_off()
    stepping.join()
    executor.close()
    (tmp_path / "go").touch()
    assert errors == ["the executor was closed while it worked"]


def test_close_while_it_waits_for_workers_ends_the_waiting(remote: ModuleType, eventually) -> None:
    before = threading.enumerate()
    executor = remote.executor_at(remote.free_port())
    errors: list[BaseException] = []

    def start() -> None:
        try:
            executor.start()
        except EngineClosedError as error:
            errors.append(error)

    starting = threading.Thread(target=start)
    starting.start()
    assert eventually(lambda: any(t.name == "sdk-listen" for t in threading.enumerate()))
    executor.close()
    starting.join()
    assert len(errors) == 1
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert not [name for name in left if name.startswith("sdk-")]


@pytest.mark.slow
def test_workers_that_never_come_are_counted_and_the_refused_ones_named(
    remote: ModuleType,
) -> None:
    port = remote.free_port()
    worker = remote.WorkerProcess(port, token="a wrong token of some length")
    assert worker.says("waiting for an engine")
    executor = remote.executor_at(port, size=3, remote={"timeout": 12.0})
    with pytest.raises(
        EngineDeadError,
        match=rf"expected 2 workers at 127\.0\.0\.1:{port} within 12 s, found 0; refused "
        r"127\.0\.0\.1:\d+: it refuses the token",
    ):
        executor.start()
    executor.close()
    assert worker.says(f"RequestError: 127.0.0.1:{port}: it has another token")
    assert worker.process.wait(30) == 2
    worker.close()


@pytest.mark.slow
def test_the_right_worker_gets_in_after_one_with_a_wrong_token(
    remote: ModuleType, hosts: Hosts, started
) -> None:
    hosts.close()
    executor = remote.executor_at(hosts.port)
    starting = threading.Thread(target=executor.start)
    starting.start()
    address, wrong = Address("127.0.0.1", hosts.port), remote.shared("a wrong token")
    error: OSError = ConnectionRefusedError()
    while isinstance(error, ConnectionRefusedError):
        with pytest.raises(OSError, match=r"another token|refused") as found:
            wrong.connect(address, 5)
        error = found.value
    assert isinstance(error, HandshakeError) and error.is_token
    hosts.ensure(1)
    starting.join()
    assert run_step(executor, StepPlan(1)).step_id == 1
    executor.close()


def test_a_taken_port_and_an_address_of_another_machine_are_named(remote: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        executor = remote.executor_at(port)
        with pytest.raises(EngineDeadError, match=f"cannot listen at 127.0.0.1:{port}: Address al"):
            executor.start()
        executor.close()


@pytest.mark.slow
def test_a_worker_says_when_no_engine_comes_and_where(remote: ModuleType) -> None:
    port = remote.free_port()
    worker = remote.WorkerProcess(port, timeout=0.5)
    assert worker.says(f"EngineDeadError: no engine at 127.0.0.1:{port} within 0.5 s: ")
    assert worker.process.wait(30) == 2
    worker.close()


@pytest.mark.slow
def test_a_worker_names_an_address_where_something_else_is(remote: ModuleType) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        worker = remote.WorkerProcess(other.getsockname()[1])
        client, _ = other.accept()
        client.sendall(b"220 mail.example.org ESMTP ready, how may I help you today?\r\n")
        assert worker.says("it is not embedlm")
        client.close()
    assert worker.process.wait(30) == 2
    worker.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("embedlm", "9.9.9"),
        pytest.param("SIMD level", "abacus", marks=pytest.mark.slow),
        pytest.param("model files", "0123", marks=pytest.mark.slow),
        pytest.param("protocol", "embedlm-ranks/9", marks=pytest.mark.slow),
    ],
)
def test_hosts_that_differ_are_an_error_on_every_rank(
    remote: ModuleType, monkeypatch: pytest.MonkeyPatch, key: str, value: str
) -> None:
    from sdk.cluster.executors.remote import ranks

    monkeypatch.setattr(ranks, "facts_of", lambda model, own=ranks.facts_of: own("") | {key: value})
    port = remote.free_port()
    worker = remote.WorkerProcess(port)
    executor = remote.executor_at(port)
    theirs = "unknown" if key == "model files" else ".+"
    text = (
        rf"the hosts differ: {key}: {theirs} on rank 1 on .*127\.0\.0\.1.*, but {value} on rank 0"
    )
    with pytest.raises(EngineDeadError, match=text):
        executor.start()
    executor.close()
    assert worker.says(f"refuses this worker: the hosts differ: {key}: ")
    assert worker.process.wait(30) == 2
    worker.close()


@pytest.mark.slow
def test_a_worker_may_ask_for_its_rank_and_a_taken_one_is_refused(remote: ModuleType) -> None:
    port = remote.free_port()
    second = remote.WorkerProcess(port, rank=2)
    third = remote.WorkerProcess(port, rank=3)
    assert second.says("waiting for an engine")
    executor = remote.executor_at(port, size=4)
    starting = threading.Thread(target=executor.start)
    starting.start()
    time.sleep(2.0)  # the second one is there
    wrong = remote.WorkerProcess(port, rank=7)
    assert wrong.says("refuses this worker: rank 7 is taken, or not in 1..3")
    first = remote.WorkerProcess(port)
    starting.join()
    pids = run_step(executor, StepPlan(1)).hidden["pids"]
    assert pids[1:] == [float(worker.process.pid) for worker in (first, second, third)]
    executor.close()
    for worker in (first, second, third, wrong):
        worker.close()


@pytest.mark.slow
def test_a_worker_once_ends_with_its_engine(remote: ModuleType) -> None:
    port = remote.free_port()
    for faults, line, code in (
        ({}, "the engine was closed", 0),
        ({(0, 1): "raise"}, "EngineDeadError: the engine at 127.0.0.1", 2),
        ({(1, 1): "raise"}, "EngineDeadError: this rank failed: AlignmentError: 7 heads", 2),
    ):
        worker = remote.WorkerProcess(port, once=True)
        executor = remote.executor_at(port, faults)
        executor.start()
        if faults:
            with pytest.raises(EngineDeadError):
                run_step(executor, StepPlan(1))
        executor.close()
        assert worker.says(line)
        assert worker.process.wait(30) == code
        worker.close()


@pytest.mark.slow
def test_a_worker_that_leaves_while_others_are_awaited_is_replaced(remote: ModuleType) -> None:
    port = remote.free_port()
    early = remote.WorkerProcess(port, once=True)
    executor = remote.executor_at(port, size=4)
    starting = threading.Thread(target=executor.start)
    starting.start()
    assert early.says("waiting")
    time.sleep(2.0)
    early.process.kill()
    others = [remote.WorkerProcess(port, once=True) for _ in range(3)]
    starting.join()
    assert run_step(executor, StepPlan(1)).step_id == 1
    executor.close()
    for worker in (early, *others):
        worker.close()


@pytest.mark.slow
def test_tensors_may_have_an_address_of_their_own(remote: ModuleType) -> None:
    before = sockets()
    port = remote.free_port()
    worker = remote.WorkerProcess(port, once=True)
    executor = remote.executor_at(port, remote={"tensor_address": "127.0.0.2"})
    executor.start()
    assert {here.ip for here, there in sockets() - before if there} == {"127.0.0.1", "127.0.0.2"}
    assert run_step(executor, StepPlan(1)).step_id == 1
    executor.close()
    worker.close()


def test_a_message_that_is_not_ours_is_not_sent_and_ends_no_rank(started, hosts: Hosts) -> None:
    hosts.ensure(1)
    executor = started()
    with pytest.raises(CodecError, match="a function is not sent"):
        executor.on_ranks(run_step)
    with pytest.raises(CodecError, match="a object is not sent"):
        executor.launch(StepPlan(1, dropped=(object(),)))
    assert run_step(executor, StepPlan(2)).step_id == 2


def test_a_forked_child_neither_uses_nor_ends_the_ranks(started) -> None:
    executor = started()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_step(executor, StepPlan(1))
        except EngineClosedError:
            code = 0
        executor.close()
        executor._finalizer()  # what an ordinary exit of the child would do
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert run_step(executor, StepPlan(2)).step_id == 2
