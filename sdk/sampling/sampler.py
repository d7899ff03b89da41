"""``Sampler``: the logits of one step's requests -> one token each.

A row's result, to the bit, depends on its own logits and its own request alone (CPU; ties go to the
lowest token id). No random state is read or written: see :mod:`sdk.sampling.uniform`.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from sdk.engine.plan import Sampled
from sdk.errors import RequestError
from sdk.params import SamplingParams
from sdk.sampling import candidates, truncation
from sdk.sampling.logprobs import scored
from sdk.sampling.processors import process
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.rows import Scratch
from sdk.sampling.state import RequestState

_NOTHING_RESOLVED = ResolvedParams()
# Rows truncated together on an accelerator: bounds the memory of a sort of [rows, V].
_ROWS = 64
_KEPT_MU = 1024


class Sampler:
    """Per-request sampling state and the step's draw, for one model of ``vocab_size`` tokens."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.vocab_size = vocab_size
        self.device = torch.device(device)
        self._scratch = Scratch(vocab_size)
        self._states: dict[str, RequestState] = {}
        # Mirostat's state cannot be rebuilt from tokens: kept over a preemption (oldest forgotten).
        self._preempted: OrderedDict[str, tuple[int, float]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._states)

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        prompt_token_ids: Sequence[int] = (),
        output_token_ids: Sequence[int] = (),
        resolved: ResolvedParams = _NOTHING_RESOLVED,
    ) -> None:
        """Know a request from now on: a new one, or one resumed with its ``output_token_ids``."""
        state = RequestState(params, resolved, prompt_token_ids, output_token_ids)
        length, mu = self._preempted.pop(request_id, (0, 0.0))
        if length and length == len(output_token_ids):
            state.mu = state.next_mu = mu
        self._states[request_id] = state

    def append(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Committed tokens of a request."""
        self._states[request_id].append(token_ids)

    def drop(self, request_id: str) -> None:
        """Forget a request (finished, aborted or preempted); an unknown id is fine."""
        state = self._states.pop(request_id, None)
        if state is not None and state.params.mirostat_mode and state.output:
            self._preempted[request_id] = (len(state.output), state.mu)
            if len(self._preempted) > _KEPT_MU:
                self._preempted.popitem(last=False)

    def sample(self, logits: Tensor, request_ids: Sequence[str]) -> list[Sampled | str]:
        """Sample row ``i`` of ``logits [R, V]`` float32 for ``request_ids[i]``.

        A string in place of a result says why that request failed: its logits are not finite (NaN,
        +inf, or nothing but -inf), its parameters forbid every token, a logits processor raised.
        ``logits`` is not changed.
        """
        logits = logits.detach()
        states = [self._states[request_id] for request_id in request_ids]
        best, values = _argmax(logits)
        results: list[Sampled | str] = [Sampled(token) for token in best]
        waiting: list[tuple[int, Tensor]] = []
        for i, state in enumerate(states):
            if not math.isfinite(values[i]):
                results[i] = f"the model's logits are not finite: their maximum is {values[i]}"
            elif not state.plain_greedy:
                row = self._processed(logits[i], state)
                if isinstance(row, str):
                    results[i] = row
                elif not state.params.greedy:
                    waiting.append((i, row))
                elif state.processed:
                    results[i] = Sampled(_argmax(row[None])[0][0])
        if logits.device.type == "cpu":
            for i, row in waiting:
                results[i] = Sampled(candidates.draw(row.numpy(), states[i], self._scratch))
        else:
            for start in range(0, len(waiting), _ROWS):
                part = waiting[start : start + _ROWS]
                stacked = torch.stack([row for _, row in part])
                tokens = truncation.draw(stacked, [states[i] for i, _ in part])
                for (i, _), token in zip(part, tokens, strict=True):
                    results[i] = Sampled(token)
        for i, state in enumerate(states):
            result = results[i]
            if state.wants_logprobs and isinstance(result, Sampled):
                params = state.params
                also = params.logprob_token_ids or ()
                results[i] = self._scored(logits[i], result.token_id, params.logprobs, also)
        return results

    def _processed(self, logits: Tensor, state: RequestState) -> Tensor | str:
        """The row after the request's processors, or why there is none."""
        if not state.processed:
            return logits
        try:
            row = process(logits.clone(), state)
        except RequestError as error:
            return str(error)
        value = _argmax(row[None])[1][0]
        if value == -math.inf:
            return "the request's parameters forbid every token"
        if not math.isfinite(value):
            return f"logits are not finite after the request's processors: their maximum is {value}"
        return row

    def score(
        self, logits: Tensor, token_ids: Sequence[int], num_top: int, also: Sequence[int] = ()
    ) -> tuple[Sampled, ...]:
        """Score ``token_ids[t]`` against ``logits[t]`` (prompt logprobs), one row at a time.

        Raises RequestError when a row is not finite.
        """
        results: list[Sampled] = []
        for row, token in zip(logits.detach(), token_ids, strict=True):
            value = _argmax(row[None])[1][0]
            if not math.isfinite(value):
                raise RequestError(
                    f"the model's logits are not finite: their maximum is {value} (in the prompt)"
                )
            results.append(self._scored(row, int(token), num_top, also))
        return tuple(results)

    def _scored(
        self, row: Tensor, token_id: int, num_top: int | None, also: Sequence[int]
    ) -> Sampled:
        return scored(row.cpu().numpy(), token_id, num_top, self._scratch, also)


def _argmax(logits: Tensor) -> tuple[list[int], list[float]]:
    """First index of each row's maximum, and the maximum (NaN if there is one).

    numpy's argmax takes 2 us for 49,152 floats where torch's takes 28.
    """
    if logits.device.type == "cpu":
        array = logits.numpy()
        best = array.argmax(-1)
        return best.tolist(), array[range(len(best)), best].tolist()
    values, indices = logits.max(-1)
    return indices.tolist(), values.tolist()
