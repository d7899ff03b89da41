"""Stages in real processes over real links; only the model is a fake (rank_runner.py)."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import psutil
import pytest

from sdk.api.config import EngineConfig
from sdk.api.errors import EngineClosedError, EngineDeadError
from sdk.api.params import SamplingParams
from sdk.cluster.executors import grid as grids
from sdk.cluster.executors.grid import Grid
from sdk.cluster.executors.process import ProcessExecutor
from sdk.engine.plan import RequestStart, SequenceSpec, StepPlan, StepRow
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.engine.stage_times import StageTimes
from sdk.kernels.system import SYSTEM
from sdk.loading.load import _executor

Poll = Callable[[Callable[[], bool]], bool]


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """After every test: no child process, no shared memory, no descriptor more than before."""
    shared = tmp_path / "memory"
    shared.mkdir()
    monkeypatch.setattr(SYSTEM, "memory_folder", lambda: str(shared))
    monkeypatch.setattr("sdk.cluster.executors.groups._ENOUGH", 0)
    yield
    gc.collect()
    assert psutil.Process().children(recursive=True) == []
    assert list(shared.iterdir()) == []


@pytest.fixture
def started(ranks: ModuleType, tmp_path: Path) -> Iterator[Callable[..., ProcessExecutor]]:
    executors = []

    def start(faults=None, width: int = 1, stages: int = 2, **options) -> ProcessExecutor:
        config = ranks.FakeConfig(faults or {}, str(tmp_path))
        executor = ProcessExecutor(ranks.StageRunner, config, width, stages=stages, **options)
        executors.append(executor)
        executor.start()
        return executor

    yield start
    for executor in executors:
        executor.close()


def start_of(name: str) -> RequestStart:
    return RequestStart(SequenceSpec(name, SamplingParams()), (1, 2), 2, 0, (1,))


def test_ranks_are_numbered_from_the_last_stage_on() -> None:
    grid = Grid(2, 3)
    assert [grid.stage(rank) for rank in range(grid.size)] == [2, 2, 1, 1, 0, 0]
    assert [grid.name(rank) for rank in (0, 3)] == ["rank 0 (stage 2)", "rank 3 (stage 1)"]
    assert Grid(2).name(1) == "rank 1"


def test_links_and_groups_know_how_many_processes_compute_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found: list[int] = []

    def made(*args: Any, processes: int, **options: Any) -> object:
        found.append(processes)
        return object()

    monkeypatch.setattr(grids, "connect", made)
    monkeypatch.setattr(grids, "SharedLink", made)
    Grid(2, 2, 3).join(0, "memory", str(tmp_path), connect_s=1, limit_s=1)
    assert found == [12, 12]


def test_a_link_has_slots_for_all_tensors_of_the_steps_in_flight(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """So that a stage never waits for the next one to read, whatever it sends in a step."""
    found: list[int] = []

    def made(*args: Any, slots: int, **options: Any) -> object:
        found.append(slots)
        return object()

    monkeypatch.setattr(grids, "SharedLink", made)
    for sent in (1, 2):
        grid = Grid(1, 3, sent_per_step=sent)
        grid.join(0, "memory", str(tmp_path), connect_s=1, limit_s=1)
    assert found == [3, 6]


def test_the_ranks_of_a_replica_count_those_of_the_others() -> None:
    config = EngineConfig(model="", tensor_parallel_size=2)
    runner = RunnerConfig(*("", 17, 16, "float16", 128, 8, 128, 1), engines_here=4)
    model = SimpleNamespace(model_type="llama")
    facts: Any = SimpleNamespace(config=config, runner_config=runner, model_config=model)
    executor = _executor(facts, lambda given, mesh: None)
    assert isinstance(executor, ProcessExecutor) and executor._grid.processes == 8
    executor.close()


_SLOW = pytest.mark.slow


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "stages"), [(1, 2), pytest.param(2, 2, marks=_SLOW), pytest.param(1, 3, marks=_SLOW)]
)
def test_steps_pass_through_all_stages_in_the_order_of_their_launches(
    started, width: int, stages: int
) -> None:
    executor = started(width=width, stages=stages)
    assert executor.stages == stages
    for step in range(1, 30):
        executor.launch(StepPlan(step))
        if step >= stages:
            found = executor.result()
            done = step - stages + 1
            assert (found.step_id, found.hidden["value"]) == (done, [float(done + stages)])
    for _ in range(stages - 1):
        executor.result()
    times = executor.stage_times
    assert len(times.computing) == stages and min(times.computing) > 0
    assert max(times.computing) <= times.in_flight


@pytest.mark.slow
def test_earlier_stages_run_ahead_of_the_last_one(
    started, tmp_path: Path, eventually: Poll
) -> None:
    executor = started(stages=3)
    for step in (1, 2, 3):
        executor.launch(StepPlan(step))
    # ranks 2 and 1 are stages 0 and 1; nobody has asked for a result
    assert eventually((tmp_path / "rank-2-step-3").exists)
    assert eventually((tmp_path / "rank-1-step-3").exists)
    assert not list(tmp_path.glob("rank-0-*"))
    assert [executor.result().step_id for _ in range(3)] == [1, 2, 3]


@pytest.mark.slow
def test_sampled_tokens_come_with_the_next_plan(started, ranks: ModuleType) -> None:
    executor = started()
    row = (StepRow("a", 1, 1),)
    executor.launch(StepPlan(1, row))
    executor.launch(StepPlan(2))
    executor.result()
    executor.launch(StepPlan(3, row))
    executor.result()
    executor.result()
    _, seen = executor.on_ranks(ranks.seen_by)
    assert seen == [(1, ()), (2, ()), (3, (("a", (1,)),))]


@pytest.mark.slow
def test_tokens_of_a_request_that_has_gone_are_not_those_of_a_new_one_of_its_name(
    started, ranks: ModuleType
) -> None:
    executor = started()
    executor.launch(StepPlan(1, (StepRow("a", 1, 1), StepRow("b", 1, 1))))
    executor.launch(StepPlan(2, started=(start_of("a"),), dropped=("a",)))
    executor.result()
    executor.launch(StepPlan(3))
    for _ in range(2):
        executor.result()
    _, seen = executor.on_ranks(ranks.seen_by)
    assert seen[-1] == (3, (("b", (1,)),))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "fault", "text"),
    [
        (2, "kill", r"rank 2 \(stage 0\) was killed \(SIGKILL"),
        pytest.param(1, "exit", r"rank 1 \(stage 1\) ended with .* 7.*a last word", marks=_SLOW),
        pytest.param(1, "raise", r"rank 1 \(stage 1\) failed: AlignmentError: 7", marks=_SLOW),
        pytest.param(2, "stop", r"rank 2 \(stage 0\) was stopped .* \(receive", marks=_SLOW),
    ],
)
def test_a_stage_that_fails_is_named(started, rank: int, fault: str, text: str) -> None:
    executor = started({(rank, 2): fault}, stages=3, collective_s=1.0)
    with pytest.raises(EngineDeadError, match=f"(?s){text}"):
        for step in range(1, 6):
            executor.launch(StepPlan(step))
            executor.result()
    with pytest.raises(EngineDeadError, match="a rank was lost in an earlier step"):
        executor.launch(StepPlan(9))


@pytest.mark.slow
def test_a_stage_that_cannot_be_built_is_named(started) -> None:
    with pytest.raises(EngineDeadError, match=r"rank 2 \(stage 0\) failed: AlignmentError"):
        started({(2, 0): "raise"}, stages=3)


@pytest.mark.slow
def test_closing_ends_a_step_that_waits_for_a_stage(started) -> None:
    executor = started({(1, 1): "stop"})
    executor.launch(StepPlan(1))
    raised: list[BaseException] = []

    def wait() -> None:
        try:
            executor.result()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.3)
    executor.break_off()
    thread.join(30)
    assert not thread.is_alive() and isinstance(raised[0], EngineClosedError)


@pytest.mark.slow
def test_stages_can_be_stopped_and_started_again(started) -> None:
    executor = started()
    for _ in range(2):
        executor.launch(StepPlan(1))
        assert executor.result().hidden["value"] == [3.0]
        executor.stop()
        executor.start()


def test_the_time_in_flight_ends_with_the_last_step() -> None:
    times = StageTimes(2)
    assert times.numbers()["pipeline_bubble"] == 0
    times.begin()
    times.begin()
    times.end(1)
    before = times.in_flight
    time.sleep(0.01)
    assert times.in_flight > before
    times.end(0)
    ended = times.in_flight
    times.computing[:] = [ended, ended / 2]
    assert times.in_flight == ended
    found = times.numbers()
    assert found["pipeline_bubble"] == pytest.approx(0.25)
    assert found["stage_1_seconds"] == ended / 2
