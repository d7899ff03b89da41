"""``Sampler``: turns the logits of one step's requests into one token each.

On a CPU a row's result depends, bit for bit, only on its own logits and its own request; ties go to
the lowest token id. There is no random state: see :mod:`sdk.sampling.uniform`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from sdk.api.errors import RequestError
from sdk.api.logprobs import Sampled
from sdk.kernels.lazy_torch import Tensor
from sdk.kernels.operators.ops import Ops
from sdk.kernels.operators.sampling import GREEDY, SampleBuffers, Tokens, join_draws
from sdk.kernels.reference.sampling import allow
from sdk.sampling.draws import Draw
from sdk.sampling.extra_rows import scored_rows
from sdk.sampling.logprobs import NO_IDS, scored
from sdk.sampling.processors import process
from sdk.sampling.rows import Scratch
from sdk.sampling.rules import Ids
from sdk.sampling.state import SamplerState
from sdk.sampling.uniform import TOKEN


class Sampler:
    """Draws the tokens of a step, for a model of ``vocab_size`` tokens."""

    def __init__(self, vocab_size: int, ops: Ops) -> None:
        self._ops = ops
        self._scratch = Scratch(vocab_size)

    def sample(
        self, logits: Tensor, draws: Sequence[Draw], masks: SampleBuffers | None = None
    ) -> list[Sampled | str]:
        """:meth:`Draw.write`, the draw and :meth:`collect` in one call."""
        buffers = SampleBuffers(len(draws))
        if masks is not None:
            buffers.masks = masks.masks
        for row, one in enumerate(draws):
            one.write(row, buffers)
            if masks is not None:
                buffers.set_mask(row, int(masks.mask_slots[row]))
        self._ops.sampling.sample_into(logits, buffers)
        return self.collect(logits, draws, buffers.read(len(draws)), buffers)

    def collect(
        self,
        logits: Tensor,
        draws: Sequence[Draw],
        chosen: Tokens,
        masks: SampleBuffers | None = None,
    ) -> list[Sampled | str]:
        """The results of ``draws``, whose rows come first in ``logits [R or more, V]``.

        ``masks`` has the masks of the rows, for those with callbacks.

        A string instead of a result says why that request failed: its logits are not finite (NaN,
        +inf, or only -inf), its parameters forbid every token, or a logits processor raised.
        ``logits`` is not changed.
        """
        results: list[Sampled | str] = [
            Sampled(token) if -math.inf < best < math.inf else _why_not(best, probability)
            for token, best, probability in zip(*chosen, strict=True)
        ]
        states = [one.state for one in draws]
        if not all(state.plain for state in states):
            self._process(logits, states, results, masks)
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

    def replaced(
        self, outcome: Sampled, token_id: int, logits: Tensor, state: SamplerState
    ) -> Sampled:
        """The result if ``token_id`` takes the place of the token drawn from ``logits [V]``."""
        if not state.wants_logprobs:
            return outcome._replace(token_id=token_id)
        count = state.params.logprobs
        found = self._scored(logits, token_id, count, state.rules.scored_ids)
        return found._replace(mirostat_mu=outcome.mirostat_mu)

    def _draw(self, logits: Tensor, states: Sequence[SamplerState | None]) -> Tokens:
        """One token per row; the argmax for a row without a state."""
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
        self,
        logits: Tensor,
        states: Sequence[SamplerState],
        results: list[Sampled | str],
        masks: SampleBuffers | None,
    ) -> None:
        """Replace the results of the finite rows whose requests have callbacks."""
        indices = [
            i for i, s in enumerate(states) if s.processed and isinstance(results[i], Sampled)
        ]
        at_once = scored_rows(logits.shape[1])
        for begin in range(0, len(indices), at_once):
            self._process_some(logits, states, results, indices[begin : begin + at_once], masks)

    def _process_some(
        self,
        logits: Tensor,
        states: Sequence[SamplerState],
        results: list[Sampled | str],
        indices: Sequence[int],
        masks: SampleBuffers | None,
    ) -> None:
        """Process the rows ``indices``, few enough for the workspace. A row's mask comes last."""
        # A copy, in the operators' memory: the C allocator would keep a block of each size.
        rows = self._ops.empty(len(indices), logits.shape[1])
        drawing: list[SamplerState | None] = []
        for row, i in zip(rows, indices, strict=True):
            _copy(row, logits[i])
            try:
                with self._ops.lent():  # the callback is the host's
                    changed = process(row, states[i])
            except RequestError as error:
                results[i] = str(error)
                drawing.append(None)
                continue
            if changed.data_ptr() != row.data_ptr() or changed.stride() != row.stride():
                _copy(row, changed)
                if self._ops.card is not None:
                    self._ops.card.keep(changed)
            if masks is not None and (mask := masks.mask(i)) is not None:
                allow(row, mask)
            drawing.append(states[i])
        chosen = self._draw(rows, drawing)
        for i, drawn, token, best in zip(indices, drawing, chosen.tokens, chosen.best, strict=True):
            if drawn is not None:
                results[i] = Sampled(token) if math.isfinite(best) else _why_not(best, 0.0)

    def score(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int, also: Ids = NO_IDS
    ) -> tuple[Sampled, ...]:
        """Score ``token_ids[t]`` in ``logits[t]`` (prompt logprobs), one row at a time.

        ``num_top`` and ``also``: see :func:`sdk.sampling.logprobs.scored`.

        :raises RequestError: a row is not finite.
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
    """Copy one row. Torch would use its own threads, in addition to the engine's: a step of 8
    requests took 14.5 ms with them, and takes 9.8 ms without (two cores, docs/log.md).
    """
    if target.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def _why_not(best: float, probability: float) -> str:
    """Why a row whose maximum is not finite has no token: see
    ``sdk.kernels.operators.sampling.Tokens``."""
    if probability:
        return f"the model's logits are not finite: their maximum is {best}"
    if best == -math.inf:
        return "the request's parameters forbid every token"
    return f"logits are not finite after the request's processors: their maximum is {best}"
