"""Ranks on several GPUs, without one: gloo or a fake stands in for NCCL (nccl_stand_ins.py).

What NCCL itself does, and what a card does, is not tested here.
"""

from __future__ import annotations

import pickle
import queue
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_card
import fake_cuda
import pytest
import torch
from decoding import config_of, decode

from sdk.api.config import EngineConfig
from sdk.api.errors import EngineClosedError, EngineDeadError
from sdk.cluster.executors import nccl
from sdk.cluster.executors.nccl import Cards, nccl_backend, process_may_end
from sdk.cluster.executors.process import ProcessExecutor
from sdk.cluster.executors.torch_group import Connection, TorchGroup, TorchLink
from sdk.cluster.executors.worker import WorkerStart, answer, join
from sdk.engine.plan import StepPlan
from sdk.engine.rank.runner import ModelRunner
from sdk.engine.rank.runner_config import RunnerConfig
from sdk.executors.local import LocalExecutor
from sdk.kernels import context
from sdk.kernels.errors import CollectiveError
from sdk.kernels.sized_graphs import PieceGraphs
from sdk.loading import load as loading
from sdk.loading.explain import _steps
from sdk.models.parallel import Mesh

TIMES = {"connect_s": 60.0, "limit_s": 60.0}
CPU = torch.device("cpu")


def on_all(size: int, call: Callable[[int], Any]) -> list[Any]:
    """The results of ``call(rank)`` in one thread for each rank."""
    found: list[Any] = [None] * size

    def run(rank: int) -> None:
        found[rank] = call(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def folder(path: Path) -> str:
    path.mkdir()
    return str(path)


# Groups and links


def test_ranks_add_in_rank_order_and_gather_by_rank(stand_ins: ModuleType, tmp_path: Path) -> None:
    cards = Cards(stand_ins.gloo, "cpu")
    # big + small - big: the order of additions shows in the result
    addends = [torch.full((5, 7), value) for value in (1e8, 1.0, -1e8)]
    expected = (addends[0] + addends[1]) + addends[2]

    def rank(number: int) -> tuple[torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        group = cards.connect(str(tmp_path), number, 3, card=CPU, connect_s=60)
        total, wide = addends[number].clone(), torch.full((4, 6), float(number + 1))
        group.all_reduce(total)
        group.all_reduce(wide[:, 2:5])
        parts = group.all_gather(torch.full((2, 3), float(number), dtype=torch.bfloat16).t())
        group.close()
        return total, wide, parts

    for number, (total, wide, parts) in enumerate(on_all(3, rank)):
        assert torch.equal(total, expected)
        assert torch.equal(wide[:, 2:5], torch.full((4, 3), 6.0))
        assert torch.equal(wide[:, :2], torch.full((4, 2), number + 1.0))
        assert [part.shape for part in parts] == [(3, 2)] * 3
        assert [float(part[0, 0]) for part in parts] == [0.0, 1.0, 2.0]


def test_what_one_end_of_a_link_sends_the_other_receives_in_order(
    stand_ins: ModuleType, tmp_path: Path
) -> None:
    cards = Cards(stand_ins.gloo, "cpu")

    def end(number: int) -> list[float]:
        link = cards.link(str(tmp_path), sends=number == 0, card=CPU, connect_s=60)
        link.reserve(1 << 20)
        x, found = torch.zeros(2, 3), []
        for value in (1.0, 2.0):
            if number == 0:
                link.send(x.fill_(value))
            else:
                link.receive(x)
                found.append(float(x.sum()))
        assert link.waited_seconds == 0.0
        link.close()
        return found

    assert on_all(2, end)[1] == [6.0, 12.0]


class Fake:
    """A backend that computes nothing; ``fails``: where ("begin" or "wait") and with what."""

    def __init__(self, size: int = 2, fails: tuple[str, Exception] | None = None) -> None:
        self._size, self._fails = size, fails
        self.aborted = 0
        self.waiting = lambda: None

    def size(self) -> int:
        return self._size

    def _begin(self, *args: Any) -> Fake:
        self._fail("begin")
        return self

    allreduce = _allgather_base = send = recv = _begin

    def wait(self) -> None:
        self.waiting()
        self._fail("wait")

    def abort(self) -> None:
        self.aborted += 1
        self._fail("abort")

    def _fail(self, where: str) -> None:
        if self._fails is not None and self._fails[0] == where:
            raise self._fails[1]


@pytest.mark.parametrize("size", [2, 3])
def test_the_backend_gets_contiguous_tensors_of_the_card(stand_ins: ModuleType, size: int) -> None:
    calls: list[tuple[Any, ...]] = []
    connection = Connection(stand_ins.Noted(Fake(size), calls))
    group = TorchGroup(connection)
    x = torch.zeros(4, 6, device="meta")  # a device of its own: nothing may come from the CPU
    group.all_reduce(x)
    group.all_reduce(x[:, 1:3])
    group.all_gather(x.half()[:, ::2])
    TorchLink(connection, sends=True).send(x)
    TorchLink(connection, sends=False).receive(x)

    def gathered(count: int, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        whole = ((size * count,), dtype, "meta", True)
        return "_allgather_base", whole, ((count,), dtype, "meta", True)

    own = (4, 6), torch.float32, "meta", True
    assert calls == [
        ("allreduce", own) if size == 2 else gathered(24),
        gathered(8),
        gathered(12, torch.float16),
        ("send", own),
        ("recv", own),
    ]


@pytest.mark.parametrize("where", ["begin", "wait"])
def test_what_the_backend_raises_is_an_error_of_the_collective(where: str) -> None:
    connection = Connection(Fake(fails=(where, RuntimeError("NCCL error: remote process exited"))))
    group, link = TorchGroup(connection), TorchLink(connection, sends=True)
    x = torch.zeros(2, 2)
    for name, call in (
        ("all_reduce", lambda: group.all_reduce(x)),
        ("all_gather", lambda: group.all_gather(x)),
        ("send", lambda: link.send(x)),
        ("receive", lambda: link.receive(x)),
    ):
        with pytest.raises(CollectiveError, match=f"{name}: NCCL error: remote process exited"):
            call()


def test_a_group_that_is_closed_during_an_exchange_aborts_it_and_has_no_result() -> None:
    """On a card the exchange then ends as if it had a result."""
    backend = Fake()
    group = TorchGroup(Connection(backend, nccl._abort))
    backend.waiting = group.close
    with pytest.raises(CollectiveError, match="was closed"):
        group.all_reduce(torch.ones(2))
    group.close()
    assert backend.aborted == 1
    with pytest.raises(CollectiveError, match="was closed"):
        group.all_gather(torch.ones(2))


def test_a_backend_that_cannot_abort_is_closed_all_the_same() -> None:
    backend = Fake(fails=("abort", RuntimeError("gloo does not support abort")))
    link = TorchLink(Connection(backend, nccl._abort), sends=True)
    link.close()
    link.close()
    assert backend.aborted == 1


def test_an_abort_that_hangs_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nccl, "_ABORT_S", 0.05)
    go_on = threading.Event()
    nccl._abort(SimpleNamespace(abort=go_on.wait))
    go_on.set()
    assert "did not end its exchanges within 0.05 s" in caplog.text


# Connecting


def test_ranks_that_do_not_come_are_given_up(stand_ins: ModuleType, tmp_path: Path) -> None:
    cards = Cards(stand_ins.gloo, "cpu")
    with pytest.raises(CollectiveError, match="rank 0 cannot connect to the others: "):
        cards.connect(str(tmp_path), 0, 2, card=CPU, connect_s=0.3)
    with pytest.raises(CollectiveError, match="the receiver cannot connect to the others: "):
        cards.link(folder(tmp_path / "link"), sends=False, card=CPU, connect_s=0.3)


def test_a_rank_that_is_lost_while_nccl_connects_is_given_up(tmp_path: Path) -> None:
    backend, go_on = Fake(size=1), threading.Event()
    backend.waiting = lambda: go_on.wait(30)
    cards = Cards(lambda store, rank, size: backend, "cpu")
    with pytest.raises(CollectiveError, match=r"rank 0 cannot connect .*: no answer within 0\.1 s"):
        cards.connect(str(tmp_path), 0, 1, card=CPU, connect_s=0.1)
    go_on.set()


def test_a_torch_without_nccl_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(nccl._c10d, "ProcessGroupNCCL", raising=False)
    with pytest.raises(CollectiveError, match=r"torch .* has no NCCL: install its build"):
        Cards(kind="cpu").connect(str(tmp_path), 0, 1, card=CPU, connect_s=60)


def test_torch_never_ends_the_process_because_an_exchange_takes_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = []

    class ProcessGroupNCCL:
        class Options:
            _timeout = timedelta(minutes=10)

        def __init__(self, *args: Any) -> None:
            made.append(args)

    monkeypatch.setattr(nccl._c10d, "ProcessGroupNCCL", ProcessGroupNCCL, raising=False)
    nccl_backend("store", 1, 2)
    [(store, rank, size, options)] = made
    assert (store, rank, size) == ("store", 1, 2) and options._timeout >= timedelta(days=100)


def test_a_host_is_told_that_torch_may_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    monkeypatch.delenv(name, raising=False)
    assert f"{name} is not 0 or 2" in str(process_may_end())
    for value in ("0", "2"):
        monkeypatch.setenv(name, value)
        assert process_may_end() is None


def test_rank_r_has_the_card_with_number_r(tmp_path: Path) -> None:
    assert [Cards().of(rank) for rank in (0, 3)] == [torch.device("cuda:0"), torch.device("cuda:3")]
    config = config_of(tmp_path, device="cuda")
    mesh = Mesh(1, 2, TorchGroup(Connection(Fake())), 1, 2, TorchLink, None)
    assert config.device_of(mesh) == "cuda:1" and config.device_of(Mesh()) == "cuda:0"
    first = replace(mesh, stage=0, upstream=None, downstream=TorchLink)
    assert config.device_of(first) == "cuda:3"  # ranks are numbered from the last stage on
    one = replace(config, device="cuda:5")  # of a host that chose it
    assert one.device_of(Mesh()) == "cuda:5"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_ranks_of_an_engine_are_on_cards_if_it_is_on_a_gpu(tmp_path: Path, device: str) -> None:
    options = EngineConfig(model="model.gguf", tensor_parallel_size=2)
    config = config_of(tmp_path, device=device)
    model = SimpleNamespace(model_type="llama")
    facts: Any = SimpleNamespace(config=options, runner_config=config, model_config=model)
    executor = loading._executor(facts, lambda given, mesh: None)
    assert isinstance(executor, ProcessExecutor)
    assert executor._grid.cards == (Cards() if device == "cuda" else None)
    executor.close()


# Processes


@pytest.fixture
def started(ranks: ModuleType, stand_ins: ModuleType, tmp_path: Path):
    """Starts two processes with the given faults; closes them after the test."""
    executors = []

    def start(backend: str, faults=None, **options: Any) -> ProcessExecutor:
        config = ranks.FakeConfig(faults or {}, str(tmp_path))
        cards = Cards(getattr(stand_ins, backend), "cpu")
        executor = ProcessExecutor(ranks.FakeRunner, config, 2, cards=cards, **options)
        executors.append(executor)
        executor.start()
        return executor

    yield start
    (tmp_path / "go").touch()
    for executor in executors:
        executor.close()


def run_step(executor: ProcessExecutor, number: int) -> Any:
    executor.launch(StepPlan(number))
    return executor.result()


@pytest.mark.slow
def test_a_worker_that_ends_is_named_though_the_exchange_does_not_fail(started) -> None:
    executor = started("deaf", {(1, 2): "kill"})
    run_step(executor, 1)
    with pytest.raises(EngineDeadError, match=r"rank 1 was killed \(SIGKILL"):
        run_step(executor, 2)
    with pytest.raises(EngineDeadError, match="a rank was lost in an earlier step"):
        run_step(executor, 3)


@pytest.mark.slow
def test_a_worker_that_does_not_answer_is_given_up_in_time(started) -> None:
    executor = started("deaf", {(1, 2): "hold"}, collective_s=0.5)
    for _ in range(3):  # the limit is that of one call
        run_step(executor, 1)
        time.sleep(0.3)
    with pytest.raises(EngineDeadError, match=r"is alive but does not answer \(.*within 0\.5 s"):
        run_step(executor, 2)


@pytest.mark.slow
def test_an_executor_that_is_closed_in_a_step_has_no_result(
    started, tmp_path: Path, eventually: Callable[[Callable[[], bool]], bool]
) -> None:
    executor = started("deaf", {(1, 2): "hold"})
    folder = Path(executor._children.folder)
    found = run_step(executor, 1).hidden
    assert found["sum"] == torch.arange(64.0).reshape(8, 8).sum(dim=1).tolist()
    assert folder.exists()  # NCCL's backend looks into it as long as it lives

    def close() -> None:
        assert eventually((tmp_path / "holding").exists)
        executor.break_off()

    thread = threading.Thread(target=close)
    thread.start()
    with pytest.raises(EngineClosedError):
        run_step(executor, 2)
    thread.join()
    assert not folder.exists()


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2)], ids=["ranks", "stages"])
def test_the_tokens_are_those_of_one_process(
    golden: Path, stand_ins: ModuleType, size: int, stages: int
) -> None:
    config = config_of(golden / "gguf-Q8_0/model.gguf")
    one = decode(LocalExecutor(ModelRunner, config), 5)
    if stages > 1:
        config = replace(config, stage_layers=(range(1), range(1, 2)))
    cards = Cards(stand_ins.gloo, "cpu")
    found = decode(ProcessExecutor(ModelRunner, config, size, stages=stages, cards=cards), 5)
    same(one, found)


def same(one: list[Any], other: list[Any]) -> None:
    for alone, found in zip(one, other, strict=True):
        assert alone.tokens == found.tokens and alone.tokens[1]
        for name, scores in alone.prompt_logprobs.items():
            expected = [score.logprob for score in scores]
            assert [x.logprob for x in found.prompt_logprobs[name]] == pytest.approx(
                expected, abs=1e-4
            )


# Steps as graphs


class ThreadRanks:
    """The ranks of an executor as threads of this process, so that a test sees into all of them."""

    def __init__(self) -> None:
        self.groups: list[Any] = []
        self._queues: list[tuple[queue.Queue[Any], queue.Queue[Any]]] = []
        self._threads: list[threading.Thread] = []

    def bring_up(self, start: WorkerStart, startup_s: float, collective_s: float) -> Mesh:
        self._folder = tempfile.mkdtemp()
        start = replace(start, place=self._folder)
        for rank in range(1, start.grid.size):
            ends = queue.Queue(), queue.Queue()
            self._queues.append(ends)
            thread = threading.Thread(target=self._serve, args=(replace(start, rank=rank), *ends))
            self._threads.append(thread)
            thread.start()
        mesh, self.groups = start.grid.join(0, start.transport, self._folder, **TIMES)
        return mesh

    def _serve(self, start: WorkerStart, inbox: queue.Queue[Any], out: queue.Queue[Any]) -> None:
        mesh, groups = join(start)
        runner = start.factory(start.config, mesh)
        out.put(("ready",))
        while (message := inbox.get()) is not None:
            try:
                out.put(("done", *answer(runner, mesh, pickle.loads(message))))
            except BaseException as error:
                out.put(("failed", error))
        runner.close()
        for group in groups:
            group.close()

    def pack(self, message: object) -> bytes:
        return pickle.dumps(message)

    def send(self, message: Any, limit_s: float, ranks: range | None = None) -> None:
        for rank, (inbox, _) in enumerate(self._queues, 1):
            if ranks is None or rank in ranks:
                inbox.put(message)

    def expect(self, kind: str, limit_s: float) -> list[tuple[Any, ...]]:
        found = [out.get(timeout=60) for _, out in self._queues]
        assert all(message[0] == kind for message in found), found
        return found

    def watch(self, works: Callable[[], int]) -> None: ...

    def stop(self, patience_s: float = 5.0) -> None:
        self.send(None, 0)
        self._queues = []
        for thread in self._threads:
            thread.join()
        for group in self.groups:
            group.close()
        self.groups = []
        shutil.rmtree(getattr(self, "_folder", ""), ignore_errors=True)


class InStream:
    """Gloo for tensors of the fake card: an exchange is work of the current stream, as NCCL's."""

    def __init__(self, inner: Any, cuda: fake_cuda.Cuda) -> None:
        self._inner, self._cuda = inner, cuda
        self.size = inner.size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        begin = getattr(self._inner, name)

        def call(*args: Any) -> Any:
            found = fake_card.tensors_of(args)
            assert not found or torch.cuda.current_stream() is not self._cuda.default
            assert self._cuda.capturing_thread != threading.get_ident() or not self._cuda.capturing
            self._cuda.launched(found, found)
            return begin(*fake_card.plain(args))

        return call


class FakeCards:
    """Ranks on a fake card, each in a stream of its own, and what every rank has exchanged."""

    def __init__(
        self, cuda: fake_cuda.Cuda, monkeypatch: pytest.MonkeyPatch, stand_ins: ModuleType
    ) -> None:
        #: How each rank runs its steps.
        self.strategies: dict[int, Any] = {}
        self.exchanges: dict[str, list[tuple[Any, ...]]] = {}
        self._gloo, self._noted = stand_ins.gloo, stand_ins.Noted
        self._cuda = cuda
        opened = context.open_backends

        def open_backends(device: str, *args: Any, **kwargs: Any) -> Any:
            backends, missing = opened("cpu", *args, **kwargs)
            return [fake_card._Backend(backend, cuda) for backend in backends], missing

        monkeypatch.setattr(context, "open_backends", open_backends)

    def runner(self, config: RunnerConfig, mesh: Mesh) -> ModelRunner:
        """A rank on the card."""
        runner = ModelRunner(replace(config, device="cuda:0"), mesh)
        self.strategies[mesh.number] = runner.strategy
        return runner

    def backend(self, store: Any, rank: int, size: int) -> Any:
        place = Path(store.path)
        calls = self.exchanges.setdefault(f"{place.parent.name} {rank}", [])
        return self._noted(InStream(self._gloo(store, rank, size), self._cuda), calls)

    def answers(self, config: RunnerConfig, size: int, stages: int) -> list[Any]:
        self.exchanges.clear()
        executor = ProcessExecutor(
            self.runner,
            config,
            size,
            stages=stages,
            cards=Cards(self.backend, "cpu"),
            workers=ThreadRanks,
        )
        return decode(executor, 6)


@pytest.fixture
def one(golden: Path) -> list[Any]:
    """The results of one process, on the CPU."""
    return decode(LocalExecutor(ModelRunner, layered(golden, 1)), 6)


@pytest.fixture
def cards(
    one: list[Any], monkeypatch: pytest.MonkeyPatch, stand_ins: ModuleType
) -> Iterator[FakeCards]:
    with fake_cuda.without_a_gpu() as cuda:
        yield FakeCards(cuda, monkeypatch, stand_ins)
        cuda.check()


SHAPES = pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 2), (2, 2)])


def layered(golden: Path, stages: int) -> RunnerConfig:
    config = config_of(golden / "gguf-Q8_0/model.gguf")
    return replace(config, stage_layers=(range(1), range(1, 2))) if stages > 1 else config


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@SHAPES
def test_steps_in_pieces_have_the_tokens_of_one_process_and_the_exchanges_of_single_operators(
    golden: Path, one: list[Any], cards: FakeCards, size: int, stages: int
) -> None:
    config = layered(golden, stages)
    same(one, cards.answers(replace(config, enforce_eager=True), size, stages))
    eagerly = dict(cards.exchanges)
    same(one, cards.answers(config, size, stages))
    assert cards.exchanges == eagerly and all(eagerly.values())
    assert len(cards.strategies) == size * stages
    for number, how in cards.strategies.items():
        assert how.pieces.graphs.sizes, f"rank {number} recorded nothing"
        assert (how.steps_ahead, how.batches_in_flight) == (0, 1)
        assert how.eager_reason == "several ranks launch no step ahead"


@pytest.mark.slow
@pytest.mark.quick_cases(1)
@SHAPES
def test_a_rank_that_cannot_record_makes_the_same_exchanges(
    golden: Path,
    one: list[Any],
    cards: FakeCards,
    monkeypatch: pytest.MonkeyPatch,
    size: int,
    stages: int,
) -> None:
    config = layered(golden, stages)
    capture, failed = PieceGraphs._capture, []

    def failing(graphs: PieceGraphs, size: int) -> Any:
        found = capture(graphs, size)
        rank = threading.current_thread() is not threading.main_thread()
        if rank and size < 64 and not failed:  # of rank 1, or one of the ranks behind it
            failed.append(size)
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return found

    monkeypatch.setattr(PieceGraphs, "_capture", failing)
    same(one, cards.answers(config, size, stages))
    others = [how for number, how in cards.strategies.items() if number]
    assert [bool(how.failed_captures) for how in others].count(True) == 1
    assert all(how.pieces for how in others) and not cards.strategies[0].failed_captures
    if stages == 1:
        zero, other = cards.exchanges["stage-0 0"], cards.exchanges["stage-0 1"]
        assert zero == other and {name for name, *_ in zero} == {"allreduce", "_allgather_base"}
        assert all(dtype == torch.float32 for _, *facts in zero for _, dtype, _, _ in facts)


@pytest.mark.slow
def test_what_is_launched_says_so(golden: Path, cards: FakeCards) -> None:
    cards.answers(layered(golden, 1), 2, 1)
    text = "\n".join(_steps(SimpleNamespace(strategy=cards.strategies[0])))
    assert "decoding: in pieces, like prompts: several ranks launch no step ahead" in text
    assert "with prompts: up to 128 tokens replayed in pieces" in text
