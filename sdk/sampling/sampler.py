"""``Sampler``: the logits of one step's requests -> one token each.

A row's result, to the bit, depends on its own logits and its own request alone (CPU; ties go to the
lowest token id). No random state is read or written: see :mod:`sdk.sampling.uniform`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from sdk.engine.plan import Sampled
from sdk.errors import RequestError
from sdk.kernels.ops import Ops
from sdk.kernels.sampling import GREEDY, SampleBuffers, Tokens, join_draws
from sdk.memory.demand import scored_rows
from sdk.sampling.draws import Draw
from sdk.sampling.logprobs import NO_IDS, scored
from sdk.sampling.processors import process
from sdk.sampling.rows import Scratch
from sdk.sampling.rules import Ids
from sdk.sampling.state import RequestState
from sdk.sampling.uniform import TOKEN


class Sampler:
    """The step's draws, for one model of ``vocab_size`` tokens."""

    def __init__(self, vocab_size: int, ops: Ops) -> None:
        self._ops = ops
        self._scratch = Scratch(vocab_size)

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> list[Sampled | str]:
        """:meth:`Draw.write`, the draw and :meth:`collect` in one."""
        buffers = SampleBuffers(len(draws))
        for row, one in enumerate(draws):
            one.write(row, buffers)
        self._ops.sampling.sample_into(logits, buffers)
        return self.collect(logits, draws, buffers.read(len(draws)))

    def collect(self, logits: Tensor, draws: Sequence[Draw], chosen: Tokens) -> list[Sampled | str]:
        """What became of row ``i`` of ``logits [R or more, V]``, drawn as ``draws`` said.

        A string in place of a result says why that request failed: its logits are not finite (NaN,
        +inf, or nothing but -inf), its parameters forbid every token, a logits processor raised.
        ``logits`` is not changed.
        """
        results: list[Sampled | str] = [
            Sampled(token) if -math.inf < best < math.inf else _why_not(best, probability)
            for token, best, probability in zip(*chosen, strict=True)
        ]
        states = [one.state for one in draws]
        if not all(state.plain for state in states):
            self._process(logits, states, results)
            for i, state in enumerate(states):
                result = results[i]
                if state.mirostat and not state.processed and isinstance(result, Sampled):
                    state.learn(chosen.probabilities[i])
                if state.wants_logprobs and isinstance(result, Sampled):
                    count = state.params.logprobs
                    results[i] = self._scored(
                        logits[i], result.token_id, count, state.rules.scored_ids
                    )
                if state.mirostat and isinstance(result := results[i], Sampled):
                    results[i] = result._replace(mirostat_mu=state.next_mu)
        return results

    def _draw(self, logits: Tensor, states: Sequence[RequestState | None]) -> Tokens:
        """One token per row; without a state it is the argmax."""
        draws: list[bytes] = []
        uniforms: list[float] = []
        for state in states:
            if state is None or state.greedy:
                draws.append(GREEDY)
                uniforms.append(0.0)
            else:
                draws.append(state.draw())
                uniforms.append(state.uniform(TOKEN))
        chosen = self._ops.sampling.sample(logits, join_draws(draws, uniforms))
        for i, state in enumerate(states):
            if state is not None and state.mirostat and math.isfinite(chosen.best[i]):
                state.learn(chosen.probabilities[i])
        return chosen

    def _process(
        self, logits: Tensor, states: Sequence[RequestState], results: list[Sampled | str]
    ) -> None:
        """Replace the results of the finite rows whose requests have callbacks."""
        indices = [
            i for i, s in enumerate(states) if s.processed and isinstance(results[i], Sampled)
        ]
        at_once = scored_rows(logits.shape[1])
        for begin in range(0, len(indices), at_once):
            self._process_some(logits, states, results, indices[begin : begin + at_once])

    def _process_some(
        self,
        logits: Tensor,
        states: Sequence[RequestState],
        results: list[Sampled | str],
        indices: Sequence[int],
    ) -> None:
        """Those of ``indices``, as many as there is room for."""
        # A copy, in memory of the operators' own: the C allocator would keep a piece of each size.
        rows = self._ops.empty(len(indices), logits.shape[1])
        drawing: list[RequestState | None] = []
        for row, i in zip(rows, indices, strict=True):
            _copy(row, logits[i])
            try:
                changed = process(row, states[i])
            except RequestError as error:
                results[i] = str(error)
                drawing.append(None)
                continue
            if changed.data_ptr() != row.data_ptr() or changed.stride() != row.stride():
                _copy(row, changed)
            drawing.append(states[i])
        chosen = self._draw(rows, drawing)
        for i, drawn, token, best in zip(indices, drawing, chosen.tokens, chosen.best, strict=True):
            if drawn is not None:
                results[i] = Sampled(token) if math.isfinite(best) else _why_not(best, 0.0)

    def score(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int, also: Ids = NO_IDS
    ) -> tuple[Sampled, ...]:
        """Score ``token_ids[t]`` against ``logits[t]`` (prompt logprobs), one row at a time.

        Raises RequestError when a row is not finite.
        """
        for best in self._ops.sampling.argmax(logits).best:
            if not math.isfinite(best):
                raise RequestError(
                    f"the model's logits are not finite: their maximum is {best} (in the prompt)"
                )
        return tuple(
            self._scored(row, int(token), num_top, also)
            for row, token in zip(logits, token_ids, strict=True)
        )

    def _scored(self, row: Tensor, token_id: int, num_top: int | None, also: Ids) -> Sampled:
        return scored(row.detach().cpu().numpy(), token_id, num_top, self._scratch, also)


def _copy(target: Tensor, source: Tensor) -> None:
    """One row. Torch would share it out among its threads, beside the engine's own: a step of 8
    requests took 14.5 ms so, and takes 9.8 (two cores, docs/log.md).
    """
    if target.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _why_not(best: float, probability: float) -> str:
    """Why a row whose maximum is not finite has no token: see ``sdk.kernels.sampling.Tokens``."""
    if probability:
        return f"the model's logits are not finite: their maximum is {best}"
    if best == -math.inf:
        return "the request's parameters forbid every token"
    return f"logits are not finite after the request's processors: their maximum is {best}"
