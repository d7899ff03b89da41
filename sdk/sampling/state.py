"""The sampler's state of one answer between steps."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence

from sdk.api.params import LogitsProcessor, SamplingParams
from sdk.kernels.operators.sampling import Shape, pack_draw
from sdk.sampling.changes import LogitChanges
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.uniform import XTC, uniform


class SamplerState:
    """The tokens so far and the state derived from them; :meth:`append` updates it."""

    def __init__(
        self,
        params: SamplingParams,
        resolved: ResolvedParams,
        prompt: Sequence[int],
        output: Sequence[int],
        mirostat_mu: float | None = None,
        forbidden: Sequence[int] = (),
    ) -> None:
        """``forbidden``: tokens that must not come next."""
        self.params = params
        self.resolved = resolved
        self.output = list(output)
        #: Of callbacks that keep something for each answer: what they return for this prompt.
        self.processors: Sequence[LogitsProcessor] | None = None
        self.prompt = tuple(prompt) if params.logits_processors else ()
        self.changes = LogitChanges(params, resolved)
        self.rules = self.changes.rules
        #: Mirostat's target surprise, and what it becomes when the sampled token is committed.
        self.mu = 2.0 * params.mirostat_tau if mirostat_mu is None else mirostat_mu
        self.next_mu = self.mu
        self.wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        #: Callbacks change the logits, so a kernel cannot draw from them.
        self.processed = bool(params.logits_processors)
        self.greedy = params.greedy
        self.mirostat = params.mirostat_mode != 0
        #: Only the drawn token is needed: no callback before it, nothing else after it.
        self.plain = not (self.processed or self.wants_logprobs or self.mirostat)
        self._seed = 0 if params.seed is None else params.seed
        self._draw = self._pack()
        self._changing = self.mirostat or params.xtc_probability > 0
        self.changes.extend(prompt, 0)
        self.changes.extend(output, 1)
        self.changes.forbid(len(output), forbidden)

    def append(self, token_ids: Iterable[int]) -> None:
        """Add committed tokens."""
        ids = list(token_ids)
        self.output += ids
        self.changes.extend(ids, 1)
        self.mu = self.next_mu

    def fork(self) -> SamplerState:
        """A copy that can be appended to; this one, and its shape, do not change."""
        fork = copy.copy(self)
        fork.output = self.output.copy()
        fork.changes = self.changes.copy()
        return fork

    @property
    def foreseeable(self) -> bool:
        """Whether draws of later tokens depend only on their random numbers, not on the tokens."""
        return not (self.processed or self.mirostat or self.changes.follow(self.output))

    def shape(self) -> Shape | None:
        """How the logits of the next token change; None: they do not, or callbacks change them.

        Valid until :meth:`append`.
        """
        return None if self.processed else self.changes.shape(self.output)

    def uniform(self, stream: int, ahead: int = 0) -> float:
        """The random number of ``stream`` for this position, or for one ``ahead`` of it."""
        return uniform(self._seed, len(self.output) + ahead, stream)

    def draw(self, ahead: int = 0) -> bytes:
        """Everything except the random number that decides that position's token."""
        if not self._changing:
            return self._draw
        params = self.params
        if self.mirostat:
            return self._pack(mirostat_mu=self.mu)
        if self.uniform(XTC, ahead) < params.xtc_probability:
            return self._pack(xtc_threshold=params.xtc_threshold)
        return self._draw

    def _pack(self, **changing: float) -> bytes:
        params = self.params
        return pack_draw(
            temperature=params.temperature,
            min_p=params.min_p,
            typical_p=params.typical_p,
            top_p=params.top_p,
            top_k=max(params.top_k, 0),
            **changing,
        )

    def learn(self, probability: float) -> None:
        """Mirostat 2 (Basu et al. 2021): set the next target after a token of ``probability``."""
        error = -math.log2(probability) - self.params.mirostat_tau
        self.next_mu = self.mu - self.params.mirostat_eta * error
