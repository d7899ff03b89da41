"""Measures the step costs of a model with an ``LLM`` that is stepped by hand."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sdk.api.errors import RequestError
from sdk.cluster.simulation.costs import StepCosts

if TYPE_CHECKING:
    from sdk.llm import LLM

#: Tokens of prompts, as shares of the most tokens of a step. The last ones take several steps.
_PROMPTS = (1 / 16, 1 / 4, 1 / 2, 1, 2, 8)
_SHORT = 16  # tokens of prompts while decoding is measured
_DECODE_STEPS = 16
_LONG_ROWS = 4
_REPEATS = 3
_LEAST_CONTEXT = 128


def measure_costs(
    model: str, progress: Callable[[str], None] = lambda _: None, **options: Any
) -> StepCosts:
    """The step costs of ``model``; ``options`` of :class:`sdk.LLM`. Takes the quickest of several
    equal steps, as other processes only ever make a step slower.

    :raises RequestError: the context is too short to measure anything.
    :raises SdkError: the model cannot be loaded.
    """
    from sdk.llm import LLM

    with LLM(model, enable_prefix_caching=False, **options) as llm:
        if llm.max_model_len < _LEAST_CONTEXT:
            raise RequestError(
                f"measuring step costs: expected max_model_len of at least {_LEAST_CONTEXT}, found "
                f"{llm.max_model_len}"
            )
        return _Measurement(llm, progress).costs(Path(model).name)


class _Measurement:
    def __init__(self, llm: LLM, progress: Callable[[str], None]) -> None:
        self._llm = llm
        self._progress = progress
        self._draw = random.Random(0)
        self._plan = llm.memory_plan
        self._seqs = llm.config.max_num_seqs
        self._step_tokens = llm.config.step_tokens

    def costs(self, source: str) -> StepCosts:
        rows = sorted({min(2**power, self._seqs) for power in range(9)})
        most = self._llm.max_model_len - 2
        prompts = sorted({min(max(int(share * self._step_tokens), 1), most) for share in _PROMPTS})
        steps = [step for tokens in prompts for step in self._prompt(tokens)]
        fixed, per_token, per_pair = fit_prompts(steps)
        found = [(count, self._decode(count, _SHORT)) for count in rows]
        # where memory is short, not all of many requests run at once
        curve = [(count, seconds) for count, seconds in found if seconds is not None]
        if len(curve) == 1:
            curve.append((2, 2 * curve[0][1]))
        long, many = min(most // 2, 4 * self._step_tokens), min(_LONG_ROWS, self._seqs)
        longer, shorter = self._decode(many, long), self._decode(many, _SHORT)
        more = 0.0 if longer is None or shorter is None else longer - shorter
        return StepCosts(
            decode=tuple(curve),
            prompt_step=fixed,
            per_token=per_token,
            per_pair=per_pair,
            per_key=max(more / (many * max(long - _SHORT, 1)), 0.0),
            page_size=self._plan.page_size,
            num_pages=self._plan.num_pages,
            max_num_seqs=self._seqs,
            max_num_batched_tokens=self._step_tokens,
            max_model_len=self._llm.max_model_len,
            source=source,
        )

    def _prompt(self, tokens: int) -> list[tuple[int, float, float]]:
        """The steps of one prompt: their tokens, the keys that these read, and seconds."""
        self._progress(f"a prompt of {tokens} tokens")
        runs = []
        for _ in range(_REPEATS):
            self._enqueue(1, tokens, 1)
            runs.append([seconds for seconds, _ in self._steps()])
        steps, context = [], 0
        for seconds in map(min, zip(*runs, strict=True)):
            num = min(self._step_tokens, tokens - context)
            steps.append((num, num * (context + num / 2), seconds))
            context += num
        return steps

    def _decode(self, rows: int, context: int) -> float | None:
        """Seconds of a step in which this many requests decode; ``None``: they never all did."""
        self._progress(f"{rows} requests that decode after {context} tokens")
        self._enqueue(rows, context, _DECODE_STEPS + rows * context // self._step_tokens + 2)
        steps = [seconds for seconds, tokens in self._steps() if tokens == rows]
        return min(steps, default=None)

    def _enqueue(self, count: int, tokens: int, answer: int) -> None:
        from sdk.api.params import RequestOutputKind, SamplingParams

        size = self._llm.model_config.vocab_size
        params = SamplingParams(
            temperature=0,
            max_tokens=answer,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        prompts = [[self._draw.randrange(size) for _ in range(tokens)] for _ in range(count)]
        self._llm.enqueue([{"prompt_token_ids": prompt} for prompt in prompts], params)

    def _steps(self) -> list[tuple[float, int]]:
        """Run all steps: the seconds of each, and how many tokens of answers it gave."""
        found = []
        while self._llm.has_unfinished_requests:
            begin = time.perf_counter()
            outputs = self._llm.step()
            seconds = time.perf_counter() - begin
            found.append((seconds, sum(len(one.outputs[0].token_ids) for one in outputs)))
        return found


def fit_prompts(steps: Sequence[tuple[int, float, float]]) -> tuple[float, float, float]:
    """Fixed seconds, seconds per token and seconds per pair of steps with tokens, pairs and
    seconds; none is negative. Least squares of relative errors."""
    import numpy as np

    seconds = np.array([one[2] for one in steps])
    scaled = np.array([(1.0, tokens, pairs) for tokens, pairs, _ in steps]) / seconds[:, None]
    best, least = [0.0, 0.0, 0.0], float("inf")
    for used in ([0, 1, 2], [0, 1], [0, 2], [1, 2], [0], [1], [2]):
        found, *_ = np.linalg.lstsq(scaled[:, used], np.ones(len(steps)), rcond=None)
        error = float(((scaled[:, used] @ found - 1) ** 2).sum())
        if (found >= 0).all() and error < least:
            least, best = error, [0.0, 0.0, 0.0]
            for place, value in zip(used, found, strict=True):
                best[place] = float(value)
    return best[0], best[1], best[2]
