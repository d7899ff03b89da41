"""An executor whose steps take what a cost model says, and whose answers are given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from sdk.cluster.simulation.costs import StepCosts
from sdk.engine.plan import RequestStart, StepPlan, StepResult, StepRow

#: Ends every answer. Other tokens are bytes, which Python does not allocate.
END = 256
_TOKENS = tuple((token,) for token in range(END + 1))


class _Running:
    """A request as the ranks know it: how much was computed, and what comes next."""

    __slots__ = ("left", "num_computed")

    def __init__(self, start: RequestStart, answer: Sequence[int]) -> None:
        self.num_computed = start.num_computed
        generated = len(start.token_ids) - start.num_prompt_tokens
        self.left: Iterator[tuple[int, ...]] = map(_TOKENS.__getitem__, answer[generated:])


class CostExecutor:
    """See :class:`sdk.engine.executor.Executor`. One step is in flight at a time.

    ``answers`` has the tokens of each request, the last of them :data:`END`. ``seconds`` is what
    the launched step takes: :meth:`result` waits for it with ``sleep``, if that is given.
    ``slowdown`` multiplies it.
    """

    native_seconds = 0.0

    def __init__(self, costs: StepCosts, sleep: Callable[[float], object] | None = None) -> None:
        self.answers: dict[str, Sequence[int]] = {}
        self.seconds = 0.0
        self.slowdown = 1.0
        self._costs = costs
        self._sleep = sleep
        self._running: dict[str, _Running] = {}
        self._step_id = 0
        #: Of the last step: its rows, those that get a token, and the tokens of its contexts.
        self._rows: Sequence[StepRow] = ()
        self._outputs: list[Iterator[tuple[int, ...]] | None] = []
        self._states: list[_Running] = []
        self._keys = 0
        self._repeated = 0  # steps with the same rows, whose requests were not advanced yet

    def start(self) -> None:
        """There is nothing to load."""

    def launch(self, plan: StepPlan) -> None:
        """Begin a step: sets ``seconds``."""
        self._step_id = plan.step_id
        if plan.rows is self._rows and not (plan.dropped or plan.started):  # all of them decode
            self._repeated += 1
            self._keys += len(self._rows)
            self.seconds = self.slowdown * self._costs.seconds(len(self._rows), self._keys, 0, 0.0)
            return
        for state in self._states:
            state.num_computed += self._repeated
        self._repeated = 0
        for request_id in plan.dropped:
            self._running.pop(request_id, None)
        for start in plan.started:
            answer = self.answers[start.request_id]
            self._running[start.request_id] = _Running(start, answer)
        self._read(plan.rows)

    def _read(self, rows: Sequence[StepRow]) -> None:
        decodes = keys = tokens = 0
        pairs = 0.0
        self._rows, self._states = rows, [self._running[row.request_id] for row in rows]
        for row, state in zip(rows, self._states, strict=True):
            num = row.num_scheduled_tokens
            if num == 1 and row.num_output_rows:
                decodes += 1
                keys += state.num_computed
            else:
                tokens += num
                pairs += num * (state.num_computed + num / 2)
            state.num_computed += num
        self._keys = keys
        self._outputs = [
            state.left if row.num_output_rows else None
            for row, state in zip(rows, self._states, strict=True)
        ]
        self.seconds = self.slowdown * self._costs.seconds(decodes, keys, tokens, pairs)
        if not rows:
            self.seconds = 0.0

    def result(self) -> StepResult:
        """The next token of each request that gets one."""
        if self._sleep is not None:
            self._sleep(self.seconds)
        tokens = [() if left is None else next(left) for left in self._outputs]
        return StepResult(self._step_id, tokens)

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function`` of this executor."""
        return [function(self, *args)]

    def break_off(self) -> None:
        """No step waits for another process."""

    def stop(self) -> None:
        """Forget all requests."""
        self._running.clear()

    def close(self) -> None:
        """Forget all requests."""
        self._running.clear()
