"""How much memory the log-probabilities of requests take until their callers have them."""

from __future__ import annotations

from dataclasses import dataclass

from sdk.errors import RequestError
from sdk.memory.sizes import format_bytes
from sdk.params import SamplingParams

#: A row of at most so many tokens takes less than 1 KiB: it is not counted, as text is not.
FREE_ROW = 20
_ENTRY_BYTES = 12  # id, logit, rank
_WORD_BYTES = 4  # of a whole vocabulary the logits alone
_ROW_BYTES = 512  # the objects around them
#: Of the memory an engine may take, results may take this share beside it.
_SHARE = 8
_LEAST = 16 * 2**20
#: A step in which others decode scores prompt tokens whose logits are of at most this much.
_SCORED_BYTES = 24 * 2**20


@dataclass(slots=True, eq=False)
class ResultRoom:
    """What the results of one request may take; ``held`` from its start to its end."""

    nbytes: int
    held: bool = False


class ResultLimit:
    """What all results of one engine may take together."""

    def __init__(self, nbytes: int, vocab_size: int) -> None:
        self.nbytes = nbytes
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, planned: int, vocab_size: int) -> ResultLimit:
        """For an engine of ``planned`` bytes."""
        return cls(max(planned // _SHARE, _LEAST), vocab_size)

    @property
    def scored_tokens(self) -> int:
        """Prompt tokens to score in a step that others wait for: 128 of 49,152 words, 60 ms."""
        return max(_SCORED_BYTES // (4 * self._vocab_size), 1)

    def room(self, params: SamplingParams, prompt: int, context: int) -> int:
        """Bytes that the results of a request with ``prompt`` tokens may take.

        :raises RequestError: they are more than all results may take, with the numbers.
        """
        also = len(params.logprob_token_ids or ())
        answer = min(params.max_tokens or context, context - prompt)
        rows = (
            ("prompt_logprobs", params.prompt_logprobs, prompt - 1, "prompt tokens"),
            ("logprobs", params.logprobs, params.num_answers * answer, "tokens of answers"),
        )
        total = 0
        for name, count, tokens, what in rows:
            if count is None:
                continue
            row = self._row(count, also)
            if tokens * row > self.nbytes:
                wanted = f"{name}={count}" + (f" with {also} logprob_token_ids" if also else "")
                raise RequestError(
                    f"{wanted}: {tokens} {what} with up to {format_bytes(row)} each need "
                    f"{format_bytes(tokens * row)}, and results may take "
                    f"{format_bytes(self.nbytes)}: {self.nbytes // row} tokens would fit. Ask for "
                    f"fewer tokens, or for at most {FREE_ROW} log-probabilities of each"
                )
            total += tokens * row
        if total > self.nbytes:
            raise RequestError(
                f"prompt_logprobs and logprobs together need {format_bytes(total)}, and results "
                f"may take {format_bytes(self.nbytes)}: ask for fewer tokens, or for one of them"
            )
        return total

    def _row(self, count: int, also: int) -> int:
        """Bytes of the log-probabilities of one position; 0 where they do not count."""
        if count == -1 or count >= self._vocab_size:
            count = self._vocab_size
            return _ROW_BYTES + _WORD_BYTES * count if count > FREE_ROW else 0
        count += also
        return _ROW_BYTES + _ENTRY_BYTES * count if count > FREE_ROW else 0
