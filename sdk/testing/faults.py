"""Faults on demand: a step that fails, is slow, loses a worker, or computes NaN."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from sdk.api.errors import EngineClosedError, EngineDeadError, OutOfMemoryError, RequestError
from sdk.engine.executor import Executor
from sdk.engine.plan import StepPlan, StepResult
from sdk.quant.safe_repr import safe_repr

if TYPE_CHECKING:
    from sdk.llm import LLM

FaultKind = Literal["out_of_memory", "nan_logits", "slow_step", "worker_died"]
T = TypeVar("T")
_INJECTED = "(injected by sdk.testing.fault)"


@dataclass(slots=True)
class Fault:
    """A fault that is waiting or has happened."""

    kind: FaultKind
    at_step: int
    #: Whether it has happened.
    happened: bool = False
    #: For ``nan_logits``: the request that it hit.
    request_id: str | None = None


@contextmanager
def fault(
    llm: LLM,
    kind: FaultKind,
    at_step: int = 0,
    *,
    request_id: str | None = None,
    seconds: float = 0.5,
    sleep: Callable[[float], object] = time.sleep,
) -> Iterator[Fault]:
    """Inject one fault into ``llm``, ``at_step`` steps after the ``with`` statement begins.

    * ``"out_of_memory"``: the step raises an :class:`OutOfMemoryError`. The engine is dead: all
      unfinished and all later requests raise :class:`EngineDeadError`.
    * ``"worker_died"``: a worker of ``tensor_parallel_size > 1`` is killed. The same happens.
    * ``"nan_logits"``: ``request_id`` (default: the first request of the step) has no valid
      logits. It ends with ``finish_reason="error"``, and its pages leave the prefix cache. All
      other requests continue.
    * ``"slow_step"``: the step takes ``seconds`` longer, by ``sleep``. Answers do not change.

    After each of them ``close()`` gives all memory back. ``"nan_logits"`` waits for a step with
    output rows of the request.

    :raises AssertionError: the ``with`` statement ends before the fault has happened.
    :raises RequestError: an argument is wrong, or ``llm`` has no workers.
    """
    if kind not in get_args(FaultKind):
        known = ", ".join(get_args(FaultKind))
        raise RequestError(f"fault: expected one of {known}, found {safe_repr(kind)}")
    if not isinstance(at_step, int) or at_step < 0:
        raise RequestError(
            f"at_step: expected an integer of at least 0, found {safe_repr(at_step)}"
        )
    if not seconds >= 0:
        raise RequestError(f"seconds: expected at least 0, found {safe_repr(seconds)}")
    found = Fault(kind, at_step, request_id=request_id)
    wrapped: list[_FaultyExecutor] = []

    def wrap(inner: Executor) -> Executor:
        workers = _workers(inner) if kind == "worker_died" else []
        wrapped.append(_FaultyExecutor(inner, found, lambda: sleep(seconds), workers))
        return wrapped[0]

    def unwrap(current: Executor) -> Executor:
        return wrapped[0].inner if current is wrapped[0] else current

    llm._driver.wrap_executor(wrap)
    try:
        yield found
    finally:
        wrapped[0].armed = False
        with suppress(EngineClosedError, EngineDeadError, RequestError):  # nothing will run anyway
            llm._driver.wrap_executor(unwrap)
    if not found.happened:
        raise AssertionError(
            f"fault: {kind} at step {at_step} did not happen: {wrapped[0].num_steps} steps ran"
        )


class _FaultyExecutor:
    """An executor with a fault in front of it."""

    def __init__(
        self, inner: Executor, found: Fault, wait: Callable[[], object], workers: list[int]
    ) -> None:
        self.inner = inner
        self.armed = True
        self.num_steps = 0
        self._fault = found
        self._wait = wait
        self._workers = workers
        self._launched: deque[StepPlan] = deque()

    @property
    def native_seconds(self) -> float:
        return self.inner.native_seconds

    def start(self) -> None:
        self.inner.start()

    def launch(self, plan: StepPlan) -> None:
        due, kind = self._is_due(), self._fault.kind
        self.num_steps += 1
        if due and kind == "out_of_memory":
            self._fault.happened = True
            raise OutOfMemoryError(f"the step needs more memory than is free {_INJECTED}")
        if due and kind == "worker_died":
            self._fault.happened = True
            os.kill(self._workers[0], signal.SIGKILL)
        if due and kind == "slow_step":
            self._fault.happened = True
            self._wait()
        self.inner.launch(plan)
        self._launched.append(plan)

    def _is_due(self) -> bool:
        found = self._fault
        return self.armed and not found.happened and self.num_steps >= found.at_step

    def result(self) -> StepResult:
        try:
            result = self.inner.result()
            plan = self._launched.popleft()
        except BaseException:
            self._launched.clear()
            raise
        found = self._fault
        # launch() has counted this step already
        late = self.num_steps - len(self._launched) > found.at_step
        if self.armed and not found.happened and found.kind == "nan_logits" and late:
            return self._without_logits(plan, result)
        return result

    def _without_logits(self, plan: StepPlan, result: StepResult) -> StepResult:
        """The result of a step in which one request's logits are NaN."""
        found = self._fault
        for index, (row, tokens) in enumerate(zip(plan.rows, result.tokens, strict=False)):
            if tokens and _belongs(row.request_id, found.request_id):
                found.happened = True
                found.request_id = found.request_id or row.request_id
                left = [*result.tokens[:index], (), *result.tokens[index + 1 :]]
                why = f"the model's logits are not finite: their maximum is nan {_INJECTED}"
                details = {k: v for k, v in result.details.items() if k != row.request_id}
                errors = {**result.errors, row.request_id: why}
                return result._replace(tokens=left, details=details, errors=errors)
        return result

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.inner.on_ranks(function, *args)

    def break_off(self) -> None:
        self.inner.break_off()

    def stop(self) -> None:
        self.inner.stop()

    def close(self) -> None:
        self.inner.close()


def _belongs(scheduled: str, request_id: str | None) -> bool:
    """Whether a scheduled request is an answer of the caller's request."""
    return request_id is None or scheduled == request_id or scheduled.startswith(f"{request_id}#")


def _workers(executor: Executor) -> list[int]:
    """The process ids of all ranks but the first."""
    workers = [pid for pid in executor.on_ranks(_process_id) if pid != os.getpid()]
    if not workers:
        raise RequestError(
            "fault: worker_died needs an LLM with tensor_parallel_size of at least 2; this one has "
            "no worker processes"
        )
    return workers


def _process_id(runner: object) -> int:
    return os.getpid()


def slow_consumer(
    pieces: Iterable[T], seconds: float = 0.05, *, sleep: Callable[[float], object] = time.sleep
) -> Iterator[T]:
    """Read a stream slowly: ``for piece in slow_consumer(llm.stream(...))``.

    The engine does not wait for slow readers. The request keeps its speed, other requests are not
    delayed, and no piece is lost: pieces that were not read yet wait in memory.
    """
    for piece in pieces:
        sleep(seconds)
        yield piece
