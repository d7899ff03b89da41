"""A runner with a real sum over the ranks and faults on demand; workers import it by name."""

from __future__ import annotations

import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from sdk.api.errors import AlignmentError
from sdk.engine.plan import StepPlan, StepResult
from sdk.models.parallel import Mesh


@dataclass(frozen=True)
class FakeConfig:
    """``faults``: (rank, step) -> what goes wrong there; step 0 is the build."""

    faults: dict[tuple[int, int], str] = field(default_factory=dict)
    folder: str = ""


def fail(fault: str | None, folder: str) -> None:
    match fault:
        case "raise":
            print("a last word", file=sys.stderr)
            raise AlignmentError("7 heads cannot be dealt out")
        case "oserror":
            raise FileNotFoundError("model.gguf")
        case "interrupt":
            raise KeyboardInterrupt
        case "exit":
            print("a last word", file=sys.stderr, flush=True)
            os._exit(7)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "hold":  # until the test says go on
            Path(folder, "holding").touch()
            # pytest removes the folder when the test has passed, perhaps before this looks again
            while Path(folder).exists() and not Path(folder, "go").exists():
                time.sleep(0.01)
        case "chatter":
            print("x" * 3_000_000, file=sys.stderr, flush=True)


class FakeRunner:
    """Sums fixed rows over the ranks' parts of them; ``hidden`` shows what the ranks said."""

    def __init__(self, config: FakeConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.closed = 0
        self.steps = 0
        fail(config.faults.get((mesh.rank, 0)), config.folder)

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def launch(self, plan: StepPlan) -> FakeRunner:
        """Runs the step; the result is asked for next."""
        self.found = self._step(plan)
        return self

    def result(self) -> StepResult:
        return self.found

    def _step(self, plan: StepPlan) -> StepResult:
        self.steps += 1
        fail(self.config.faults.get((self.mesh.rank, plan.step_id)), self.config.folder)
        parts = torch.arange(64.0).reshape(8, 8).chunk(self.mesh.size, dim=1)
        group = self.mesh.group
        total = parts[self.mesh.rank].sum(dim=1)
        if group is not None:
            group.all_reduce(total)

        def gathered(x: Tensor) -> Tensor:
            return x if group is None else torch.cat(group.all_gather(x))

        # the pattern of a column-parallel layer: every rank holds some of the outputs
        doubled = gathered((2 * total).chunk(self.mesh.size)[self.mesh.rank])
        pids = gathered(torch.tensor([float(os.getpid())]))
        ignoring = float(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)
        quiet = gathered(torch.tensor([ignoring]))
        return StepResult(
            plan.step_id,
            hidden={
                "sum": total.tolist(),
                "double": doubled.tolist(),
                "pids": pids.tolist(),
                "ignores_sigint": quiet.tolist(),
            },
        )

    def close(self) -> None:
        self.closed += 1


class StageRunner:
    """Adds 1 to what the stage before has sent: the first stage begins with the step's id.

    Notes each step in the folder. Rank 0 samples the id of the step for every row.
    """

    native_seconds = 0.0

    def __init__(self, config: FakeConfig, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.seen: list[tuple[int, object]] = []
        fail(config.faults.get((mesh.number, 0)), config.folder)
        mesh.reserve(4)

    def entered(self) -> AbstractContextManager[object]:
        return nullcontext()

    def launch(self, plan: StepPlan) -> StageRunner:
        mesh, config = self.mesh, self.config
        self.seen.append((plan.step_id, plan.sampled))
        fail(config.faults.get((mesh.number, plan.step_id)), config.folder)
        x = torch.tensor([float(plan.step_id)])
        if mesh.upstream is not None:
            mesh.upstream.receive(x)
        x += 1
        if mesh.group is not None:
            mesh.group.all_reduce(x)
            x /= mesh.size
        if mesh.downstream is not None:
            mesh.downstream.send(x)
        Path(config.folder, f"rank-{mesh.number}-step-{plan.step_id}").touch()
        tokens = [(plan.step_id,)] * len(plan.rows) if mesh.samples else []
        self.found = StepResult(plan.step_id, tokens, hidden={"value": x.tolist()})
        return self

    def result(self) -> StepResult:
        return self.found

    def close(self) -> None:
        pass


def seen_by(runner: StageRunner) -> list[tuple[int, object]]:
    """For ``Executor.on_ranks``: the steps it ran, and the tokens that came with them."""
    return runner.seen


def run_step(executor, plan: StepPlan) -> StepResult:
    """One step, from its launch to its result."""
    executor.launch(plan)
    return executor.result()


def whereabouts(runner: FakeRunner, broken_rank: int | None = None) -> tuple[int, int]:
    """For ``Executor.on_ranks``: the rank, and the steps it has run."""
    if runner.mesh.rank == broken_rank:
        raise AlignmentError("7 heads cannot be dealt out")
    return runner.mesh.rank, runner.steps
