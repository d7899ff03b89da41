"""What a closed engine had comes back by itself: nothing heavy is in a reference cycle."""

from __future__ import annotations

import gc
import os
import signal
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sdk import LLM, EngineDeadError, SamplingParams
from sdk.requests.driving.error_frames import let_go

PARAMS = SamplingParams(max_tokens=3, temperature=0)
FORM = SamplingParams(max_tokens=20, structured_outputs={"json": {"type": "integer"}})
ASK = [{"role": "user", "content": "Hi"}]


def add(first: int, second: int) -> int:
    """Add two numbers."""
    return first + second


@pytest.fixture(autouse=True)
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _stream(llm: LLM) -> None:
    assert list(llm.stream("Hi", PARAMS))
    next(iter(llm.stream("Hi", PARAMS)))  # one that is left early


def _fork(llm: LLM) -> None:
    with llm.fork() as other:
        other.generate("Hi", PARAMS, use_tqdm=False)


USES: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate("Hi", PARAMS, use_tqdm=False),
    "chat": lambda llm: llm.chat(ASK, PARAMS, use_tqdm=False),
    "structure": lambda llm: llm.generate("Hi", FORM, use_tqdm=False),
    "tools": lambda llm: llm.chat(
        ASK, SamplingParams(max_tokens=80), tools=[add], tool_choice="required", use_tqdm=False
    ),
    "stream": _stream,
    "fork": _fork,
    "embed": lambda llm: llm.embed("Hi"),
    "reports": lambda llm: (llm.explain(), llm.get_metrics(), llm.quant_report()),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", USES)
def test_engine_weights_and_vocabulary_go_with_the_last_name(smollm2: Path, name: str) -> None:
    llm = LLM(smollm2, max_model_len=512)
    USES[name](llm)
    jobs = llm._job_maker
    parts: dict[str, Any] = {
        "driver": llm._driver,
        "runner": llm._runner(),
        "engine": llm._driver._engine,
        "tokenizer": jobs._reader.tokenizer,
    }
    if name == "structure":
        tokens = jobs._compiler(jobs._made_compiler)._tokens(lambda: None)  # type: ignore[arg-type,return-value]
        parts["vocabulary"] = tokens.vocabulary
        del tokens
    left = {key: weakref.finalize(part, lambda: None) for key, part in parts.items()}
    del parts, jobs
    llm.close()
    del llm
    assert [key for key, one in left.items() if one.alive] == []


def _held() -> tuple[int, int]:
    """Descriptors, and maps of files that have no name any more."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return len(list(Path("/proc/self/fd").iterdir())), sum("(deleted)" in line for line in maps)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("option", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_files_and_maps_of_a_lost_rank_are_closed_with_the_engine(
    tiny_path: Path, option: str
) -> None:
    options: dict[str, Any] = {"max_model_len": 64, option: 2}
    before = None
    for kill in (False, True):
        llm = LLM(tiny_path, **options)
        llm.generate([[5, 9]], PARAMS, use_tqdm=False)
        parts = {"driver": llm._driver, "engine": llm._driver._engine, "runner": llm._runner()}
        parts["executor"] = llm._driver._engine._executor
        left = {key: weakref.finalize(part, lambda: None) for key, part in parts.items()}
        del parts
        if kill:
            children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                llm.generate([[5, 9]], SamplingParams(max_tokens=50), use_tqdm=False)
        llm.close()
        del llm
        assert [key for key, one in left.items() if one.alive] == []
        before = before or _held()
        assert _held() == before


def test_a_call_that_waits_in_the_middle_survives_the_error_that_it_caught() -> None:
    """Frames of a traceback are cleared when an engine closes: to clear its frame would end it."""

    def caught(keep: list[BaseException]) -> Iterator[str]:
        try:
            raise EngineDeadError("lost")
        except EngineDeadError as error:
            keep.append(error)
        yield "caught"
        yield "goes on"

    def finished(keep: list[BaseException], held: Any) -> None:
        try:
            next(waiting)
        finally:
            try:
                raise EngineDeadError("lost again")
            except EngineDeadError as error:
                keep.append(error)

    class Held:
        pass

    errors: list[BaseException] = []
    waiting = caught(errors)
    held = Held()
    finished(errors, held)
    one = weakref.ref(held)
    del held
    assert one() is not None  # the frame of the call that has ended keeps it
    for error in errors:
        let_go(error)
    assert one() is None
    assert list(waiting) == ["goes on"]
