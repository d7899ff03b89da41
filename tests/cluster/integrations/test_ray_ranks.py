"""``distributed_executor_backend="ray"``: ranks that are actors, on one node and on two."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest
import ray
from ray.cluster_utils import Cluster

from sdk import LLM, SamplingParams
from sdk.api.errors import EngineClosedError, EngineDeadError
from sdk.cluster.executors.process import ProcessExecutor
from sdk.cluster.executors.ray_ranks import RayRanks
from sdk.engine.plan import StepPlan
from sdk.kernels.system import SYSTEM
from tests.cluster.executors import rank_runner
from tests.cluster.integrations.conftest import OBJECT_STORE

PROMPTS = ["the cat sat on", "the dog said hello", "a small model"]
PARAMS = SamplingParams(temperature=0, max_tokens=8)
TWO = {"tensor_parallel_size": 2, "num_threads": 2, "max_model_len": 256}
ON_RAY = {**TWO, "distributed_executor_backend": "ray"}


def answers(llm: LLM) -> list[list[int]]:
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in found]


def actors() -> list[psutil.Process]:
    """The processes of ranks on this machine."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if process.name().startswith("ray::RankActor")
    ]


@pytest.fixture
def nothing_left(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[None]:
    """After the test: no rank, no file and no thread more than before, all CPUs given back."""
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(SYSTEM, "memory_folder", lambda: str(memory))
    monkeypatch.setattr("sdk.cluster.executors.groups._ENOUGH", 0)
    cpus, threads = ray.cluster_resources()["CPU"], threading.active_count()
    yield
    gc.collect()
    assert actors() == []
    assert list(memory.iterdir()) == []
    assert threading.active_count() <= threads
    deadline = time.monotonic() + 30
    while ray.available_resources().get("CPU") != cpus and time.monotonic() < deadline:
        time.sleep(0.05)  # Ray counts what was given back some time after
    assert ray.available_resources().get("CPU") == cpus


@pytest.fixture
def started(
    nothing_left: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., ProcessExecutor]]:
    """Starts executors of the fake runner with the given faults; closes them after the test."""
    executors: list[ProcessExecutor] = []

    def start(faults=None, size: int = 2, cpus: int = 1, **options) -> ProcessExecutor:
        config = rank_runner.FakeConfig(faults or {})
        workers = partial(RayRanks, cpus)
        executor = ProcessExecutor(rank_runner.FakeRunner, config, size, workers=workers, **options)
        executors.append(executor)
        executor.start()
        return executor

    yield start
    for executor in executors:
        executor.close()


def run_step(executor: ProcessExecutor, step: int):
    executor.launch(StepPlan(step))
    return executor.result()


@pytest.mark.slow
def test_ranks_on_one_node_share_memory_and_answer_like_child_processes(
    nothing_left: None, tiny: Path
) -> None:
    with LLM(tiny, **TWO) as llm:
        expected = answers(llm)
    before = len(psutil.Process().net_connections("inet"))
    with LLM(tiny, **ON_RAY) as llm:
        assert answers(llm) == expected
        [worker] = actors()
        assert type(llm._driver._engine._executor._children.groups[0]).__name__ == "SharedGroup"
        assert len(psutil.Process().net_connections("inet")) <= before + 4  # Ray's own
        llm.sleep(level=2)
        assert actors() == []
        llm.wake_up()
        assert answers(llm) == expected
    assert not psutil.pid_exists(worker.pid)


@pytest.mark.slow
def test_a_real_model_answers_the_same_and_a_relative_path_means_the_same_file(
    nothing_left: None, smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(smollm2, **TWO) as llm:
        expected = answers(llm)
    monkeypatch.chdir(smollm2.parent)
    with LLM(smollm2.name, **ON_RAY) as llm:
        assert answers(llm) == expected


def listening(pid: int | None = None) -> set[str]:
    """The addresses and ports at which a process listens."""
    found = psutil.Process(pid).net_connections("inet")
    return {f"{x.laddr.ip}:{x.laddr.port}" for x in found if x.status == psutil.CONN_LISTEN}


@pytest.fixture
def other_node(cluster: Cluster, nothing_left: None) -> Iterator[str]:
    """A second node with more CPUs than the first; its id."""
    node = cluster.add_node(num_cpus=4, object_store_memory=OBJECT_STORE)
    yield node.node_id
    cluster.remove_node(node)


@pytest.mark.slow
def test_ranks_on_two_nodes_exchange_over_tcp_and_answer_the_same(
    other_node: str, tiny: Path
) -> None:
    with LLM(tiny, **TWO) as llm:
        expected = answers(llm)
    before = listening()
    # a rank needs four CPUs, and this node has two
    with LLM(tiny, **{**ON_RAY, "num_threads": 8}) as llm:
        workers = llm._driver._engine._executor._children
        assert answers(llm) == expected
        assert type(workers.groups[0]).__name__ == "TorchGroup"
        [rank] = workers._ranks
        assert rank.here.node_id == other_node != ray.get_runtime_context().get_node_id()
        opened = listening() - before
        assert opened and {one.rpartition(":")[0] for one in opened} == {rank.here.address}
        assert not any(one.startswith("127.") for one in listening(rank.here.pid))
    assert listening() <= before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", r"^rank 1: .*\(process \d+ of node"),
        ("raise", r"^rank 1 failed: AlignmentError: 7 heads cannot be dealt out \(process \d+ of"),
    ],
)
def test_a_rank_lost_on_another_node_is_named(
    other_node: str, started, fault: str, message: str
) -> None:
    executor = started({(1, 2): fault}, cpus=4)
    assert run_step(executor, 1).step_id == 1
    assert type(executor._children.groups[0]).__name__ == "TorchGroup"
    with pytest.raises(EngineDeadError, match=message):
        run_step(executor, 2)
    executor.close()


@pytest.mark.slow
def test_an_actor_that_is_killed_ends_the_llm_with_its_rank_and_reason(
    nothing_left: None, tiny: Path
) -> None:
    with LLM(tiny, **ON_RAY) as llm:
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=200, ignore_eos=True))
        next(stream)
        [worker] = actors()
        worker.kill()
        with pytest.raises(EngineDeadError, match=rf"rank 1: .*\(process {worker.pid} of node"):
            for _ in stream:
                pass
        with pytest.raises(EngineDeadError):
            answers(llm)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("kill", r"^rank 1: .*\(process \d+ of node"),
        ("raise", r"^rank 1 failed: AlignmentError: 7 heads cannot be dealt out \(process \d+ of"),
    ],
)
def test_a_rank_lost_in_a_step_or_while_it_builds_is_named(
    started, fault: str, message: str
) -> None:
    executor = started({(1, 2): fault})
    assert run_step(executor, 1).step_id == 1
    with pytest.raises(EngineDeadError, match=message):
        run_step(executor, 2)
    with pytest.raises(EngineDeadError, match="a rank was lost in an earlier step"):
        run_step(executor, 3)
    with pytest.raises(EngineDeadError, match=message):
        started({(1, 0): fault})


@pytest.mark.slow
def test_of_several_failures_the_cause_is_named(started) -> None:
    executor = started({(2, 1): "kill"}, size=3)
    with pytest.raises(EngineDeadError, match=r"^rank 2: "):
        run_step(executor, 1)


@pytest.mark.slow
def test_a_rank_that_is_stuck_is_given_up(started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sdk.cluster.executors.ray_ranks._DIAGNOSIS_S", 0.5)
    executor = started({(1, 1): "stop"}, collective_s=1.0)
    with pytest.raises(EngineDeadError, match=r"rank 1 is alive but does not answer \(all_reduce"):
        run_step(executor, 1)


@pytest.mark.slow
def test_ranks_for_which_there_is_no_room_are_refused_and_their_reservation_is_taken_back(
    started,
) -> None:
    with pytest.raises(
        EngineDeadError,
        match=r"Ray has no room for 1 more ranks within 1 s: expected 64 CPUs for each, the "
        r"cluster has 2, of which 2 are free",
    ):
        started(cpus=64, startup_s=1.0)
    assert run_step(started(), 1).step_id == 1


@pytest.mark.slow
def test_close_while_a_step_runs_ends_it(started, tmp_path: Path) -> None:
    executor = started({(1, 1): "stop"})
    outcome: list[str] = []

    def step() -> None:
        try:
            run_step(executor, 1)
        except EngineClosedError as error:
            outcome.append(str(error))

    stepping = threading.Thread(target=step)
    stepping.start()
    [worker] = actors()
    while worker.status() != psutil.STATUS_STOPPED:
        time.sleep(0.01)
    executor.break_off()
    stepping.join(30)
    assert outcome == ["the executor was closed while it worked"]


@pytest.mark.slow
def test_a_forked_child_neither_uses_nor_ends_the_ranks(started) -> None:
    executor = started()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            run_step(executor, 1)
        except EngineClosedError:
            code = 0
        executor.close()
        executor._finalizer()  # what an ordinary exit of the child would do
        os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    assert run_step(executor, 2).step_id == 2


@ray.remote(num_cpus=1)
class Host:
    """An actor with an LLM, whose placement group has a bundle for each rank."""

    def run(self, model: str) -> tuple[list[list[int]], int, int]:
        """The answers, and the placement groups before and while there is an LLM."""
        from ray.util import placement_group_table

        def groups() -> int:
            return sum(one["state"] == "CREATED" for one in placement_group_table().values())

        before = groups()
        with LLM(model, **ON_RAY) as llm:
            return answers(llm), before, groups()


@pytest.mark.slow
def test_an_llm_inside_an_actor_uses_the_bundles_of_its_placement_group(
    nothing_left: None, tiny: Path
) -> None:
    with LLM(tiny, **TWO) as llm:
        expected = answers(llm)
    group = ray.util.placement_group([{"CPU": 1}, {"CPU": 1}])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=0
    )
    host = Host.options(scheduling_strategy=strategy).remote()
    try:
        assert ray.get(host.run.remote(str(tiny)), timeout=120) == (expected, 1, 1)
    finally:
        ray.kill(host)
        ray.util.remove_placement_group(group)


@pytest.mark.slow
def test_ranks_end_with_the_process_that_started_them_and_after_ray_shutdown_nothing_starts(
    cluster: Cluster, started
) -> None:
    executor = started()
    [worker] = actors()
    ray.shutdown()
    try:
        with pytest.raises(EngineDeadError, match=r"rank 1: Ray was shut down"):
            run_step(executor, 1)
        assert not ray.is_initialized()
        psutil.wait_procs([worker], timeout=30)
        assert not worker.is_running()
    finally:
        executor.close()
        ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
