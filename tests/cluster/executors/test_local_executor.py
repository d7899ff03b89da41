from __future__ import annotations

import os
import threading
from pathlib import Path
from types import ModuleType

import pytest

from sdk.api.errors import AlignmentError, EngineClosedError
from sdk.engine.plan import StepPlan, StepResult
from sdk.executors.local import LocalExecutor


def run_step(executor: LocalExecutor, plan: StepPlan) -> StepResult:
    executor.launch(plan)
    return executor.result()


def test_a_step_runs_in_this_process(ranks: ModuleType) -> None:
    executor = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig())
    executor.start()
    result = run_step(executor, StepPlan(3))
    assert result.step_id == 3
    assert result.hidden["sum"] == [28.0 + 64 * row for row in range(8)]
    assert result.hidden["pids"] == [float(os.getpid())]
    executor.close()


def test_what_the_runner_raises_is_raised_on(ranks: ModuleType) -> None:
    executor = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig({(0, 1): "raise"}))
    executor.start()
    with pytest.raises(AlignmentError, match="7 heads"):
        run_step(executor, StepPlan(1))
    assert run_step(executor, StepPlan(2)).step_id == 2
    executor.close()


def test_close_closes_the_runner_once_and_ends_the_executor(ranks: ModuleType) -> None:
    executor = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig())
    with pytest.raises(EngineClosedError, match="not running"):
        run_step(executor, StepPlan(1))
    executor.start()
    runner = executor.runner
    executor.close()
    executor.close()
    assert runner.closed == 1
    with pytest.raises(EngineClosedError, match="not running"):
        run_step(executor, StepPlan(1))
    with pytest.raises(EngineClosedError, match="not running"):
        executor.result()
    with pytest.raises(EngineClosedError, match="was closed"):
        executor.start()


def test_close_waits_for_a_step_that_runs_and_gives_it_up(
    ranks: ModuleType, tmp_path: Path, eventually
) -> None:
    executor = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig({(0, 1): "hold"}, str(tmp_path)))
    executor.start()
    step = threading.Thread(target=executor.launch, args=(StepPlan(1),))
    step.start()
    assert eventually((tmp_path / "holding").exists)
    runner = executor.runner
    closing = threading.Thread(target=executor.close)
    closing.start()
    assert runner.closed == 0
    (tmp_path / "go").touch()
    closing.join()
    step.join()
    assert runner.closed == 1
    with pytest.raises(EngineClosedError, match="not running"):
        executor.result()


def test_a_forked_child_leaves_the_runner_alone(ranks: ModuleType) -> None:
    executor = LocalExecutor(ranks.FakeRunner, ranks.FakeConfig())
    executor.start()
    pid = os.fork()
    if pid == 0:
        executor.close()
        os._exit(executor.runner.closed)
    assert os.waitpid(pid, 0)[1] == 0
    executor.close()
