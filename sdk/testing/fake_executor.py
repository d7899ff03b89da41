"""An executor without a model: its tokens are those of a script."""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from hashlib import blake2b
from typing import Any

from sdk.api.errors import EngineClosedError, EngineDeadError
from sdk.api.logprobs import Sampled
from sdk.engine.plan import Pooled, RequestStart, StepPlan, StepResult, StepRow
from sdk.testing.fake_tokenizer import END, FakeTokenizer
from sdk.testing.script import ScriptedParams

HIDDEN_SIZE = 32
_Failure = Exception | None


class _Running:
    """A request as this rank knows it."""

    def __init__(self, start: RequestStart) -> None:
        self.start = start
        self.num_computed = start.num_computed
        self.num_generated = len(start.token_ids) - start.num_prompt_tokens
        params = start.spec.resolved
        answers = params.answers if isinstance(params, ScriptedParams) else ()
        index = int(start.request_id.rpartition("#")[2]) if len(answers) > 1 else 0
        self.script, self.error = answers[index] if answers else ((), None)

    @property
    def is_at_end(self) -> bool:
        return self.num_generated >= len(self.script)

    def next_token(self) -> int:
        """The next token of the script, then EOS; the script again where EOS may not come yet."""
        params, number = self.start.spec.params, self.num_generated
        if self.is_at_end and not (params.ignore_eos or number < params.min_tokens):
            return END
        return self.script[number % len(self.script)] if self.script else END


class ScriptedExecutor:
    """See :class:`sdk.engine.executor.Executor`.

    A step takes ``seconds_per_token``, and ``seconds_to_first_token`` more if a prompt starts in
    it. ``sleep`` waits for that time; by default :meth:`break_off` ends the wait.
    """

    native_seconds = 0.0

    def __init__(
        self,
        tokenizer: FakeTokenizer,
        *,
        seconds_per_token: float,
        seconds_to_first_token: float,
        sleep: Callable[[float], object] | None,
        embeddings: Callable[[str], Sequence[float]] | None,
    ) -> None:
        self._tokenizer = tokenizer
        self._seconds = seconds_per_token, seconds_to_first_token
        self._ended = threading.Event()
        self._sleep = sleep or self._ended.wait
        self._embeddings = embeddings
        self._requests: dict[str, _Running] = {}
        self._launched: deque[StepPlan] = deque()

    def start(self) -> None:
        """There is nothing to load."""

    def launch(self, plan: StepPlan) -> None:
        for request_id in plan.dropped:
            self._requests.pop(request_id, None)
        for start in plan.started:
            self._requests[start.request_id] = _Running(start)
        self._launched.append(plan)

    def result(self) -> StepResult:
        """The requests advance here, so that an interrupted wait has changed nothing."""
        try:
            plan = self._launched.popleft()
            each, first = self._seconds
            seconds = each + (first if plan.started else 0.0)
            if plan.rows and seconds:
                self._sleep(seconds)
            if self._ended.is_set():
                raise EngineClosedError("the executor was closed")
            return self._run(plan)
        except BaseException:
            self._launched.clear()
            raise

    def _run(self, plan: StepPlan) -> StepResult:
        tokens: list[tuple[int, ...]] = []
        details: dict[str, tuple[Sampled, ...]] = {}
        scored: dict[str, tuple[Sampled, ...]] = {}
        hidden: dict[str, Pooled] = {}
        errors: dict[str, str] = {}
        for row in plan.rows:
            running = self._requests[row.request_id]
            self._compute(row, running, scored, hidden)
            generates = row.num_output_rows and running.start.spec.negative_of is None
            if not generates or running.start.spec.kind == "embed":
                tokens.append(())
            elif running.error is not None and running.is_at_end:
                if isinstance(running.error, EngineDeadError):
                    raise running.error
                errors[row.request_id] = str(running.error)
                tokens.append(())
            else:
                token = running.next_token()
                running.num_generated += 1
                tokens.append((token,))
                if running.start.spec.params.logprobs is not None:
                    details[row.request_id] = (_certain(token),)
        return StepResult(plan.step_id, tokens, details, scored, hidden, errors)

    def _compute(
        self,
        row: StepRow,
        running: _Running,
        scored: dict[str, tuple[Sampled, ...]],
        hidden: dict[str, Pooled],
    ) -> None:
        """Run the tokens of a row: score those of the prompt, and embed it at its end."""
        start, first = running.start, running.num_computed
        running.num_computed += row.num_scheduled_tokens
        prompt = start.token_ids[: start.num_prompt_tokens]
        if start.spec.params.prompt_logprobs is not None and first < len(prompt):
            scored[row.request_id] = tuple(
                map(_certain, prompt[first + 1 : running.num_computed + 1])
            )
        if start.spec.kind == "embed" and running.num_computed >= len(prompt):
            hidden[row.request_id] = self._pooled(start, prompt)

    def _pooled(self, start: RequestStart, prompt: Sequence[int]) -> Pooled:
        decode = self._tokenizer.decode
        if start.spec.pooling is not None and start.spec.pooling.mode == "token":
            import numpy as np

            vectors = [_unit(_direction(decode([token]))) for token in prompt]
            return np.array(vectors, np.float32)
        if self._embeddings is not None:
            return _unit([float(value) for value in self._embeddings(decode(prompt))])
        words = [_direction(decode([token]).strip().lower()) for token in prompt]
        return _unit([math.fsum(values) for values in zip(*words, strict=True)])

    def on_ranks(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return [partial(function, self)(*args)]

    def break_off(self) -> None:
        self._ended.set()

    def stop(self) -> None:
        self._requests.clear()

    def close(self) -> None:
        self._ended.set()
        self._requests.clear()
        self._launched.clear()


def _certain(token: int) -> Sampled:
    """A token with probability 1."""
    import numpy as np

    from sdk.api.logprobs import Logprobs

    top = Logprobs(np.array([token], np.int32), np.zeros(1, np.float32), np.ones(1, np.int32), 0.0)
    return Sampled(token, 0.0, 1, top)


def _direction(word: str) -> list[float]:
    """A vector that depends only on the word: equal words add up, others are nearly orthogonal."""
    digest = blake2b(word.encode("utf-8"), digest_size=HIDDEN_SIZE).digest()
    return [byte - 127.5 for byte in digest]


def _unit(vector: Sequence[float]) -> list[float]:
    length = math.hypot(*vector) or 1.0
    return [value / length for value in vector]
