"""What the sampler remembers of one request between steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from sdk.kernels.sampling import pack_draw
from sdk.params import SamplingParams
from sdk.sampling.repeats import Repeats
from sdk.sampling.resolved import ResolvedParams
from sdk.sampling.rules import Rules
from sdk.sampling.uniform import XTC, uniform


class RequestState:
    """Tokens so far and the counts derived from them; kept up to date by :meth:`append`."""

    def __init__(
        self,
        params: SamplingParams,
        resolved: ResolvedParams,
        prompt: Sequence[int],
        output: Sequence[int],
        mirostat_mu: float | None = None,
    ) -> None:
        self.params = params
        self.resolved = resolved
        self.output: list[int] = []
        #: Token id -> how often it is in the output (0: in the prompt only).
        self.counts: dict[int, int] = {}
        self.rules = resolved.rules or Rules(params, resolved.end_ids, resolved.bad_words)
        #: Repetitions of the end of prompt and output, for DRY and for ``no_repeat_ngram_size``.
        self.dry = Repeats(resolved.dry_breakers) if params.dry_multiplier else None
        self.ngrams = Repeats() if params.no_repeat_ngram_size else None
        #: Tokens since thinking started; None outside thinking.
        self.thinking: int | None = None
        #: Mirostat's target surprise, and what it becomes when the sampled token is committed.
        self.mu = 2.0 * params.mirostat_tau if mirostat_mu is None else mirostat_mu
        self.next_mu = self.mu
        self.penalized = (
            params.repetition_penalty != 1.0
            or params.presence_penalty != 0.0
            or params.frequency_penalty != 0.0
        )
        self.wants_logprobs = params.logprobs is not None or params.logprob_token_ids is not None
        self.reshaped = bool(
            params.allowed_token_ids is not None
            or resolved.bad_words
            or params.logit_bias
            or (params.min_tokens and resolved.end_ids)
            or params.logits_processors
            or params.dry_multiplier
            or params.no_repeat_ngram_size
            or params.thinking_token_budget is not None
        )
        #: The logits change: by penalties alone, or by what ``processors.process`` does besides.
        self.processed = self.penalized or self.reshaped
        self.greedy = params.greedy
        self.mirostat = params.mirostat_mode != 0
        #: The draw is the whole answer: nothing changes the logits before, nothing is asked after.
        self.plain = not (self.processed or self.wants_logprobs or self.mirostat)
        self._seed = 0 if params.seed is None else params.seed
        self._draw = self._pack()
        self._changing = self.mirostat or params.xtc_probability > 0
        self._extend(prompt, 0)
        self._extend(output, 1)
        self.output = list(output)

    def append(self, token_ids: Iterable[int]) -> None:
        """Take committed tokens into account."""
        ids = list(token_ids)
        self.output += ids
        self._extend(ids, 1)
        self.mu = self.next_mu

    def uniform(self, stream: int, ahead: int = 0) -> float:
        """The random number of ``stream`` for this position, or one so far ``ahead``."""
        return uniform(self._seed, len(self.output) + ahead, stream)

    def draw(self, ahead: int = 0) -> bytes:
        """What decides that position's token but for its random number."""
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
        """Mirostat 2 (Basu et al. 2021): the target that follows a token of ``probability``."""
        error = -math.log2(probability) - self.params.mirostat_tau
        self.next_mu = self.mu - self.params.mirostat_eta * error

    def _extend(self, ids: Sequence[int], weight: int) -> None:
        if self.penalized:
            for token in ids:
                self.counts[token] = self.counts.get(token, 0) + weight
        for repeats in (self.dry, self.ngrams):
            if repeats is not None:
                repeats.extend(ids)
        if self.params.thinking_token_budget is not None:
            for token in ids:
                self._think(token)

    def _think(self, token: int) -> None:
        if token == self.resolved.think_start_id:
            self.thinking = 0
        elif token == self.resolved.think_end_id:
            self.thinking = None
        elif self.thinking is not None:
            self.thinking += 1
