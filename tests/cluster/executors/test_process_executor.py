"""Real processes, real sums; only the model is a fake (rank_runner.py)."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

import psutil
import pytest

import sdk
from sdk.api.errors import AlignmentError, EngineClosedError, EngineDeadError
from sdk.cluster.executors import groups
from sdk.cluster.executors.process import ProcessExecutor
from sdk.engine.plan import StepPlan, StepResult
from sdk.executors.local import LocalExecutor
from sdk.kernels.system import SYSTEM

ROOT = Path(sdk.__file__).parent.parent
HERE = Path(__file__).parent
Poll = Callable[[Callable[[], bool]], bool]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """After every test: no child process, no file and no thread more than before."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    threads = threading.active_count()
    yield
    gc.collect()
    assert [p.cmdline() for p in psutil.Process().children(recursive=True)] == []
    assert list(temporary.iterdir()) == []
    # Those of servers that earlier tests stopped may end meanwhile.
    assert threading.active_count() <= threads


@pytest.fixture
def started(ranks: ModuleType) -> Iterator[Callable[..., ProcessExecutor]]:
    """Starts executors with the given faults; closes them after the test."""
    executors = []

    def start(faults=None, size: int = 2, folder: str = "", **options) -> ProcessExecutor:
        config = ranks.FakeConfig(faults or {}, folder)
        executor = ProcessExecutor(ranks.FakeRunner, config, size, **options)
        executors.append(executor)
        executor.start()
        return executor

    yield start
    for executor in executors:
        executor.close()


def run_step(executor: ProcessExecutor, plan: StepPlan) -> StepResult:
    executor.launch(plan)
    return executor.result()


def worker_of(executor: ProcessExecutor) -> int:
    return int(run_step(executor, StepPlan(100)).hidden["pids"][1])


def settle() -> tuple[int, int]:
    gc.collect()
    return psutil.Process().num_fds(), psutil.Process().num_threads()


@pytest.mark.slow
def test_a_function_runs_on_every_rank_between_steps(ranks: ModuleType, started) -> None:
    alone = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig())
    alone.start()
    assert alone.on_ranks(ranks.whereabouts) == [(0, 0)]
    alone.close()
    executor = started()
    run_step(executor, StepPlan(1))
    assert executor.on_ranks(ranks.whereabouts) == [(0, 1), (1, 1)]
    assert run_step(executor, StepPlan(2)).step_id == 2
    with pytest.raises(EngineDeadError, match="rank 1 failed: AlignmentError: 7 heads"):
        executor.on_ranks(ranks.whereabouts, 1)
    with pytest.raises(EngineDeadError, match="a rank was lost in an earlier step"):
        run_step(executor, StepPlan(3))


@pytest.mark.slow
def test_what_cannot_be_pickled_is_not_sent_and_ends_no_rank(started) -> None:
    executor = started()
    with pytest.raises(Exception, match=r"pickle|local object"):
        executor.on_ranks(lambda runner: None)
    with pytest.raises(Exception, match=r"pickle"):
        executor.launch(StepPlan(1, dropped=(threading.Lock(),)))
    assert run_step(executor, StepPlan(2)).step_id == 2


@pytest.mark.slow
def test_any_number_of_ranks_gives_the_same_sums(ranks: ModuleType, started) -> None:
    alone = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig())
    alone.start()
    expected = run_step(alone, StepPlan(1)).hidden
    for size in (2, 4):
        executor = started(size=size)
        found = run_step(executor, StepPlan(1)).hidden
        assert found["sum"] == expected["sum"] and found["double"] == expected["double"]
        assert len(set(found["pids"])) == size and found["pids"][0] == os.getpid()
        own = float(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)  # nohup ignores it
        assert found["ignores_sigint"] == [own] + [1.0] * (size - 1)
        assert run_step(executor, StepPlan(2)).step_id == 2
    alone.close()


@pytest.mark.slow
def test_two_executors_work_side_by_side(started) -> None:
    one, two = started(), started()
    for step in range(3):
        assert (
            run_step(one, StepPlan(step)).hidden["sum"]
            == run_step(two, StepPlan(step)).hidden["sum"]
        )
    one.close()
    assert run_step(two, StepPlan(9)).step_id == 9


@pytest.mark.slow
def test_gloo_is_bound_to_loopback_alone(started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdk.cluster.executors.process.transport", lambda: "gloo")
    executor = started()
    addresses = {
        connection.laddr.ip
        for pid in (os.getpid(), worker_of(executor))
        for connection in psutil.Process(pid).net_connections("inet")
    }
    assert addresses == {"127.0.0.1"}
    assert run_step(executor, StepPlan(1)).step_id == 1


@pytest.mark.slow
def test_ranks_that_share_memory_have_no_network_socket_and_leave_no_file(
    started, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(SYSTEM, "memory_folder", lambda: str(memory))
    monkeypatch.setattr("sdk.cluster.executors.groups._ENOUGH", 0)
    executor = started()
    assert list(memory.iterdir()) == []
    assert psutil.Process(worker_of(executor)).net_connections("inet") == []
    assert run_step(executor, StepPlan(1)).step_id == 1  # areas grow without the files


def test_the_meeting_place_is_on_a_disk_when_memory_is_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sdk.cluster.executors.groups._ENOUGH", 2**62)
    folder = Path(groups.meeting_place())
    assert folder.parent == Path(tempfile.gettempdir()) and folder.stat().st_mode & 0o77 == 0
    folder.rmdir()


@pytest.mark.slow
def test_the_own_factory_builds_rank_0_and_is_never_pickled(ranks: ModuleType, started) -> None:
    built = []

    def own(config, mesh):
        built.append(mesh.rank)
        return ranks.FakeRunner(config, mesh)

    executor = started(own_factory=own)
    assert built == [0] and run_step(executor, StepPlan(1)).step_id == 1
    assert executor.runner.steps == 1


@pytest.mark.slow
def test_a_worker_killed_between_steps_is_named(started, eventually: Poll) -> None:
    executor = started()
    worker = psutil.Process(worker_of(executor))
    worker.kill()
    with pytest.raises(EngineDeadError, match=r"rank 1 was killed \(SIGKILL"):
        run_step(executor, StepPlan(1))
    with pytest.raises(EngineDeadError, match="earlier step: rank 1 was killed"):
        run_step(executor, StepPlan(2))


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", r"^rank 1 was killed \(SIGKILL, perhaps by the system for lack of memory\)"),
        pytest.param(
            "exit",
            r"^rank 1 ended with exit code 7\nits last messages:\n  a last word$",
            marks=pytest.mark.slow,
        ),
        (
            "raise",
            r"(?s)^rank 1 failed: AlignmentError: 7 heads cannot be dealt out\n.*a last word",
        ),
    ],
)
def test_a_worker_lost_in_a_step_ends_the_step(started, fault: str, message: str) -> None:
    executor = started({(1, 2): fault})
    assert run_step(executor, StepPlan(1)).step_id == 1
    with pytest.raises(EngineDeadError, match=message):
        run_step(executor, StepPlan(2))
    executor.close()


@pytest.mark.slow
def test_of_several_failures_the_cause_is_named_and_not_its_consequences(started) -> None:
    executor = started({(2, 1): "kill"}, size=4)
    with pytest.raises(EngineDeadError, match=r"^rank 2 was killed"):
        run_step(executor, StepPlan(1))


@pytest.mark.slow
def test_a_worker_that_is_stuck_is_given_up(started) -> None:
    executor = started({(1, 1): "stop"}, collective_s=1.0)
    with pytest.raises(EngineDeadError, match=r"rank 1 was stopped by a signal .* \(all_reduce"):
        run_step(executor, StepPlan(1))


@pytest.mark.slow
def test_a_worker_that_a_signal_has_stopped_is_given_up(started) -> None:
    """Before the limit for a worker that computes, which is 300 s: that of this test too."""
    executor = started()
    os.kill(worker_of(executor), signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match=r"rank 1 was stopped by a signal and does not"):
        run_step(executor, StepPlan(1))


@pytest.mark.slow
def test_a_worker_stuck_after_its_last_sum_is_given_up(started, tmp_path: Path) -> None:
    executor = started(collective_s=1.0)
    os.kill(worker_of(executor), signal.SIGSTOP)

    class Lonely:
        entered = staticmethod(nullcontext)

        def launch(self, plan):
            return self

        def result(self):
            return StepResult(1)

        def close(self):
            pass

    executor._runner = Lonely()
    with pytest.raises(EngineDeadError, match=r"does not answer \(rank 1: no answer within 1 s\)"):
        run_step(executor, StepPlan(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("oserror", r"^rank 0 failed: FileNotFoundError: model\.gguf"),
        pytest.param("raise", r"^rank 0 failed: AlignmentError: 7 heads", marks=pytest.mark.slow),
    ],
)
def test_an_error_of_rank_0_ends_the_workers(started, fault: str, message: str) -> None:
    executor = started({(0, 1): fault})
    worker = worker_of(executor)
    with pytest.raises(EngineDeadError, match=message):
        run_step(executor, StepPlan(1))
    assert not psutil.pid_exists(worker)


@pytest.mark.slow
def test_an_interrupt_in_rank_0_is_raised_on_and_ends_the_workers(started) -> None:
    executor = started({(0, 1): "interrupt"})
    with pytest.raises(KeyboardInterrupt):
        run_step(executor, StepPlan(1))
    with pytest.raises(EngineDeadError, match="earlier step"):
        run_step(executor, StepPlan(2))


@pytest.mark.slow
def test_ctrl_c_does_not_reach_the_worker(started) -> None:
    executor = started()
    os.kill(worker_of(executor), signal.SIGINT)
    assert run_step(executor, StepPlan(1)).step_id == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        pytest.param("kill", r"^rank 1 was killed \(SIGKILL", marks=pytest.mark.slow),
        pytest.param(
            "exit",
            r"^rank 1 ended with exit code 7\nits last messages:\n  a last word$",
            marks=pytest.mark.slow,
        ),
        (
            "raise",
            r"(?s)^rank 1 failed: AlignmentError: 7 heads cannot be dealt out\n.*a last word",
        ),
    ],
)
def test_a_worker_that_cannot_build_gives_its_reason(started, fault: str, message: str) -> None:
    with pytest.raises(EngineDeadError, match=message):
        started({(1, 0): fault})


@pytest.mark.slow
def test_a_worker_that_never_gets_ready_is_given_up(started) -> None:
    with pytest.raises(EngineDeadError, match=r"rank 1 was stopped by a signal and does not"):
        started({(1, 0): "stop"}, startup_s=60.0)  # noticed 3 s after it stops


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "error"),
    [("raise", AlignmentError), pytest.param("oserror", OSError, marks=pytest.mark.slow)],
)
def test_what_rank_0_raises_while_building_is_raised_on(started, fault: str, error: type) -> None:
    with pytest.raises(error):
        started({(0, 0): fault})


@pytest.mark.slow
def test_a_factory_the_worker_cannot_import_is_reported(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = ProcessExecutor(ranks.FakeRunner, ranks.FakeConfig(), 2)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry != str(HERE)])
    with pytest.raises(EngineDeadError, match=r"rank 1 failed: ModuleNotFoundError.*rank_runner"):
        executor.start()
    with pytest.raises(EngineDeadError, match="did not start"):
        run_step(executor, StepPlan(1))
    executor.close()


def test_a_factory_that_cannot_be_pickled_starts_nothing(ranks: ModuleType) -> None:
    executor = ProcessExecutor(lambda config, mesh: None, ranks.FakeConfig(), 2)
    with pytest.raises(Exception, match=r"pickle|local object"):
        executor.start()
    executor.close()


@pytest.mark.parametrize(
    ("python", "message"),
    [("", "sys.executable is empty"), ("/nowhere/python", "cannot start a w")],
)
def test_a_missing_interpreter_is_reported(
    ranks: ModuleType, monkeypatch: pytest.MonkeyPatch, python: str, message: str
) -> None:
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", python)
    executor = ProcessExecutor(ranks.FakeRunner, ranks.FakeConfig(), 2)
    with pytest.raises(EngineDeadError, match=message):
        executor.start()
    executor.close()


@pytest.mark.slow
def test_close_is_idempotent_and_final(ranks: ModuleType, started) -> None:
    executor = started()
    runner = executor.runner
    executor.close()
    executor.close()
    assert runner.closed == 1
    with pytest.raises(EngineClosedError, match="was closed"):
        run_step(executor, StepPlan(1))
    with pytest.raises(EngineClosedError, match="not running"):
        executor.runner  # noqa: B018
    unused = ProcessExecutor(ranks.FakeRunner, ranks.FakeConfig(), 2)
    unused.close()
    with pytest.raises(EngineClosedError, match="was closed"):
        unused.start()


@pytest.mark.parametrize("goes_on", [True, False])
@pytest.mark.slow
def test_close_while_a_step_runs_lets_it_finish_or_ends_it(
    started, tmp_path: Path, eventually: Poll, goes_on: bool
) -> None:
    executor = started({(1, 1): "hold"}, folder=str(tmp_path))
    outcome: list[object] = []

    def step() -> None:
        try:
            outcome.append(run_step(executor, StepPlan(1)).step_id)
        except EngineClosedError as error:
            outcome.append(str(error))

    stepping = threading.Thread(target=step)
    stepping.start()
    assert eventually((tmp_path / "holding").exists)
    closing = threading.Thread(target=executor.close)
    closing.start()
    if goes_on:
        (tmp_path / "go").touch()
    closing.join()
    stepping.join()
    # What is going on may end; its result may be asked for before the close or after it.
    ends = (
        (1, "the executor was closed") if goes_on else ("the executor was closed while it worked",)
    )
    assert len(outcome) == 1 and outcome[0] in ends


@pytest.mark.slow
def test_many_starts_leave_no_descriptors_and_threads(started) -> None:
    started().close()  # what is made once per process
    before = settle()
    for _ in range(5):
        executor = started()
        run_step(executor, StepPlan(1))
        executor.close()
    assert settle() == before


@pytest.mark.slow
def test_an_executor_that_is_dropped_ends_its_worker(ranks: ModuleType, eventually: Poll) -> None:
    executor = ProcessExecutor(ranks.FakeRunner, ranks.FakeConfig(), 2)
    executor.start()
    worker = worker_of(executor)
    del executor
    gc.collect()
    assert not psutil.pid_exists(worker)


@pytest.mark.slow
def test_an_executor_outlives_the_thread_that_started_it(started) -> None:
    made: list[ProcessExecutor] = []
    thread = threading.Thread(target=lambda: made.append(started()))
    thread.start()
    thread.join()
    assert run_step(made[0], StepPlan(1)).step_id == 1


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_talkative_worker_fills_no_disk(started, eventually: Poll) -> None:
    executor = started({(1, 1): "chatter"})
    run_step(executor, StepPlan(1))
    child = executor._children._children[0]
    assert eventually(lambda: os.fstat(child._stderr.fileno()).st_size == 0)


@pytest.mark.slow
def test_nothing_of_the_host_changes(started) -> None:
    def state() -> tuple[object, ...]:
        import torch

        handlers = [signal.getsignal(number) for number in signal.valid_signals()]
        return handlers, dict(os.environ), Path.cwd(), torch.get_num_threads(), list(sys.path)

    before = state()
    executor = started()
    run_step(executor, StepPlan(1))
    assert state() == before
    executor.close()
    assert state() == before


SCRIPT = """\
import os, sys
sys.path[:0] = {path!r}
import rank_runner
from rank_runner import run_step
from sdk.engine.plan import StepPlan
from sdk.cluster.executors.process import ProcessExecutor
executor = ProcessExecutor(rank_runner.FakeRunner, rank_runner.FakeConfig(), 2)
executor.start()
print("worker", int(run_step(executor, StepPlan(1)).hidden["pids"][1]), flush=True)
"""


def run_script(folder: Path, rest: str) -> subprocess.Popen[str]:
    script = folder / "host.py"
    script.write_text(SCRIPT.format(path=[str(ROOT), str(HERE)]) + rest)
    temporary = folder / "scratch"
    temporary.mkdir()
    return subprocess.Popen(
        [sys.executable, str(script)],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(temporary)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def rest_of(host: subprocess.Popen[str]) -> str:
    """What follows in the output (communicate() would lose what readline() has buffered)."""
    with host:
        assert host.stdout is not None
        return host.stdout.read()


def worker_named(host: subprocess.Popen[str]) -> int:
    assert host.stdout is not None
    word, pid = host.stdout.readline().split()
    assert word == "worker"
    return int(pid)


@pytest.mark.slow
def test_a_script_without_a_guard_runs_once_and_leaves_nothing_at_exit(
    tmp_path: Path, eventually: Poll
) -> None:
    host = run_script(tmp_path, "print('end')\n")
    worker = worker_named(host)
    output = rest_of(host)
    assert (output, host.wait()) == ("end\n", 0)
    assert eventually(lambda: not psutil.pid_exists(worker))
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
def test_the_worker_ends_when_its_host_is_killed(tmp_path: Path, eventually: Poll) -> None:
    host = run_script(tmp_path, "input()\n")
    worker = worker_named(host)
    host.kill()
    host.communicate()
    assert eventually(lambda: not psutil.pid_exists(worker))
    assert list((tmp_path / "scratch").iterdir()) == []


@pytest.mark.slow
def test_the_worker_ends_with_its_host_though_a_forked_child_lives_on(
    tmp_path: Path, eventually: Poll
) -> None:
    host = run_script(
        tmp_path,
        "pid = os.fork()\nif pid == 0:\n    os.close(1)\n    input()\n    os._exit(0)\n"
        "print('forked', pid, flush=True)\nos.waitpid(pid, 0)\n",
    )
    worker = worker_named(host)
    assert host.stdout is not None
    forked = psutil.Process(int(host.stdout.readline().split()[1]))
    host.kill()
    host.wait()
    assert eventually(lambda: not psutil.pid_exists(worker))
    assert forked.is_running()
    forked.kill()
    host.communicate()


@pytest.mark.slow
def test_a_forked_child_of_a_host_exits_in_the_ordinary_way(tmp_path: Path) -> None:
    host = run_script(
        tmp_path,
        "pid = os.fork()\nif pid == 0:\n    sys.exit(5)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "print(run_step(executor, StepPlan(2)).step_id)\n",
    )
    worker_named(host)
    output = rest_of(host)
    assert output == "5\n2\n"
