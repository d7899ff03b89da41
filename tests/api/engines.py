"""What tests of an engine under stress share: prompts, gates in a step, threads that answer.

Where the moment matters a logits processor holds the engine in the middle of a step until the test
has done what it wants to do there; nothing waits for a time to pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sdk import LLM, RequestOutput, SamplingParams

ROOT = Path(__file__).parents[2]
LIMIT = 60  # seconds after which a wait that should be over has failed
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SHORT = LONG.clone(max_tokens=8)


def ids(seed: int, length: int = 6) -> dict[str, Any]:
    return {"prompt_token_ids": [3 + (seed * 37 + i * 11) % 400 for i in range(length)]}


def tokens(output: RequestOutput) -> list[int]:
    return list(output.outputs[0].token_ids)


def ask(llm: LLM, *seeds: int, params: SamplingParams = SHORT) -> list[list[int]]:
    return [tokens(output) for output in llm.generate([ids(seed) for seed in seeds], params)]


def books(llm: LLM) -> Any:
    return llm._driver._engine.scheduler


def settle(llm: LLM) -> None:
    """Let the engine take all commands; then nothing runs and no page is held."""
    llm.generate(ids(0), SHORT.clone(max_tokens=1))
    with llm._driver._step_lock:
        books(llm).check()
        assert books(llm).queues.num_running == books(llm).queues.num_waiting == 0
        assert books(llm).pool.num_available == books(llm).pool.capacity


class Gate:
    """A logits processor that stops the engine in its ``at``-th call until ``open``."""

    def __init__(self, at: int = 1) -> None:
        self.calls = 0
        self.at = at
        self.reached, self._open = threading.Event(), threading.Event()

    def __call__(self, generated: Any, logits: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            self.reached.set()
            assert self._open.wait(LIMIT)
        return logits

    def wait(self) -> None:
        assert self.reached.wait(LIMIT)

    def open(self) -> None:
        self._open.set()


class Caller(threading.Thread):
    """Runs ``call`` and keeps what it returned or raised."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self.result: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.result = self._call()
        except BaseException as error:
            self.result = error

    def get(self) -> Any:
        self.join(LIMIT)
        assert not self.is_alive(), "the call hangs"
        return self.result

    def get_or_raise(self) -> Any:
        result = self.get()
        if isinstance(result, BaseException):
            raise result
        return result
