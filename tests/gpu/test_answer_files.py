"""Known answers of a card that are remembered in a file: by engines, and by processes that end."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sdk.kernels.backend import Problem
from sdk.kernels.errors import KernelError
from sdk.kernels.gpu import norm
from sdk.kernels.known_answers.check import NO_FALLBACK, KnownAnswers
from sdk.kernels.known_answers.file import Answer, AnswerFile
from sdk.kernels.operators.norm import Norm
from sdk.kernels.operators.ops import Ops
from tests.gpu.answer_cases import (
    CASES,
    MACHINE,
    answers_of,
    card_ops,
    rows,
    tried,
)


@pytest.fixture
def ops() -> Iterator[Ops]:
    made = card_ops()
    yield made
    made.close()


def test_a_broken_card_is_an_error_that_is_remembered(
    ops: Ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(self: Any, *args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(norm.Normalize, "run", run)
    answers_of(ops, tmp_path)
    with pytest.raises(KernelError, match=r"gpu\.norm .* cannot use the card any more"):
        ops.norm(rows(70), Norm(torch.ones(70), 1e-6))
    (answer,) = AnswerFile(tmp_path, MACHINE).read().values()
    assert "illegal memory access" in answer.reason


def in_a_child(body: Callable[[], None]) -> int:
    """The process that ran it; ``body`` ends it, or it returns."""
    child = os.fork()
    if child == 0:
        try:
            body()
        finally:
            os._exit(0)
    return child


@pytest.mark.parametrize("name", ["norm", "find_places"])
def test_a_check_that_ended_its_process_is_not_tried_again(
    ops: Ops, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    op, like, about = CASES[name]()

    def dies() -> None:
        answers_of(ops, tmp_path)
        kind = type(ops.context.backends[0].implementations(op)[0])
        kind.run = lambda *given: os.kill(os.getpid(), signal.SIGKILL)
        ops.context.kernel(op, like, **about)

    child = in_a_child(dies)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    answers = answers_of(ops, tmp_path)
    if op in NO_FALLBACK:
        with pytest.raises(KernelError, match=r"the process ended during it.* device='cpu'"):
            ops.context.kernel(op, like, **about)
        return
    assert ops.context.kernel(op, like, **about).name == f"reference.{op}"
    assert answers.ran == 0
    (line,) = answers.failures()
    assert "the process ended during it, or was ended because it hung (delete " in line
    (file,) = tmp_path.glob("*.json")
    assert str(file) in line and line.endswith(f"reference.{op} runs {op}")
    file.unlink()
    answers = answers_of(ops, tmp_path)
    tried(ops, name)
    assert answers.ran == 1  # by the kernel itself, and it is right
    assert [answer.reason for answer in AnswerFile(tmp_path, MACHINE).read().values()] == [""]


def test_what_another_process_checks_at_the_moment_is_checked_here_too(
    ops: Ops, tmp_path: Path
) -> None:
    file = AnswerFile(tmp_path, MACHINE)
    done = os.pipe()

    def waits() -> None:
        file.begin("another")
        os.write(done[1], b"x")
        time.sleep(60)

    child = in_a_child(waits)
    try:
        assert os.read(done[0], 1) == b"x"
        answers = answers_of(ops, tmp_path)
        assert file.read() == {}
        assert tried(ops, "combine")[1] is None and answers.ran == 1
        assert len(file.read()) == 1
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert [bool(answer.reason) for answer in file.read().values()] == [True, False]


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_a_check_that_was_interrupted_is_tried_again(
    ops: Ops, tmp_path: Path, error: type[BaseException]
) -> None:
    def check() -> Any:
        raise error

    answers = answers_of(ops, tmp_path)
    with pytest.raises(error):
        answers.ask("name", "gpu.kernel", check)
    again = answers_of(ops, tmp_path)
    assert again.ask("name", "gpu.kernel", lambda: Answer(0.0)) is None and again.ran == 1


def test_a_process_of_another_host_is_not_known_to_have_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = AnswerFile(tmp_path, MACHINE)
    with monkeypatch.context() as patch:
        patch.setattr("socket.gethostname", lambda: "another host")
        file.begin("name")
    assert file.read() == {}
    file.add({"name": Answer(0.0, "running")})  # written by nobody
    file.add({"other": Answer(0.0, "running x")})
    assert file.read() == {"name": Answer(0.0, "running")}


def test_the_second_engine_launches_nothing(ops: Ops, tmp_path: Path) -> None:
    first = answers_of(ops, tmp_path)
    assert tried(ops, "norm")[1] is None and tried(ops, "combine")[1] is None
    assert first.ran == 2
    again = answers_of(ops, tmp_path)
    assert tried(ops, "norm")[1] is None and tried(ops, "combine")[1] is None
    assert again.ran == 0
    assert tried(ops, "group")[1] is None and again.ran == 1  # results add up
    assert len(AnswerFile(tmp_path, MACHINE).read()) == 3


def test_another_machine_or_width_or_type_is_checked_again(ops: Ops, tmp_path: Path) -> None:
    answers_of(ops, tmp_path)
    tried(ops, "combine")
    other = KnownAnswers(ops.context, AnswerFile(tmp_path, MACHINE | {"driver": "2"}))
    kernel = ops.context.backends[0].implementations("combine")[0]
    problem = Problem("combine")
    assert other.reason(kernel, problem, (rows(70), 8, 2, None, None)) is None and other.ran == 1
    again = answers_of(ops, tmp_path)
    assert again.reason(kernel, problem, (rows(70), 8, 2, None, None)) is None and again.ran == 0
    assert again.reason(kernel, problem, (rows(64), 8, 2, None, None)) is None and again.ran == 1
    ops.context._activations = "float16"
    assert again.reason(kernel, problem, (rows(70), 8, 2, None, None)) is None and again.ran == 2
