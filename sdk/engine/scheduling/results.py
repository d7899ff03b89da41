"""The memory of requests' log-probabilities until their callers have taken them."""

from __future__ import annotations

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.api.sizes import format_bytes
from sdk.kernels.dataclass import dataclass

#: A row of at most this many tokens takes less than 1 KiB and is not counted, like text.
FREE_ROW = 20
_ENTRY_BYTES = 12  # id, logit, rank
_LOGIT_BYTES = 4  # a whole vocabulary is stored as logits only
_ROW_BYTES = 512  # the objects around them
#: Results may take an eighth of an engine's planned memory, in addition to it.
_BUDGET_SHARE = 8
_MIN_BYTES = 16 * 2**20
#: The logits of scored prompt tokens take at most this much in a step in which others decode.
_SCORED_BYTES = 24 * 2**20


@dataclass(slots=True, eq=False)
class ResultReservation:
    """Memory for the results of one request; ``active`` from its start to its end."""

    nbytes: int
    active: bool = False


class ResultBudget:
    """The memory that all results of one engine may take together."""

    def __init__(self, nbytes: int, vocab_size: int, hidden_size: int = 0) -> None:
        self.nbytes = nbytes
        self._vocab_size = vocab_size
        self._hidden_size = hidden_size

    @classmethod
    def for_plan(cls, planned: int, vocab_size: int, hidden_size: int = 0) -> ResultBudget:
        """The budget of an engine with ``planned`` bytes."""
        return cls(max(planned // _BUDGET_SHARE, _MIN_BYTES), vocab_size, hidden_size)

    @property
    def scored_tokens(self) -> int:
        """Prompt tokens to score in a step in which others decode: 128 with a vocabulary of 49,152,
        which take 60 ms."""
        return max(_SCORED_BYTES // (4 * self._vocab_size), 1)

    def required_bytes(self, params: SamplingParams, prompt: int, context: int) -> int:
        """The most bytes that the results of a request with ``prompt`` tokens may take.

        :raises RequestError: they exceed the budget; the message has the numbers.
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
                    f"{format_bytes(tokens * row)}, but results may take only "
                    f"{format_bytes(self.nbytes)}, enough for {self.nbytes // row} tokens; ask for "
                    f"fewer tokens, or for at most {FREE_ROW} log-probabilities of each"
                )
            total += tokens * row
        if total > self.nbytes:
            raise RequestError(
                f"prompt_logprobs and logprobs together need {format_bytes(total)}, but results "
                f"may take only {format_bytes(self.nbytes)}; ask for fewer tokens, or for only one "
                "of the two"
            )
        return total

    def required_hidden_bytes(self, what: str, tokens: int) -> int:
        """The bytes of a vector for each of a prompt's tokens; ``what`` asks for them.

        :raises RequestError: they exceed the budget; the message has the numbers.
        """
        row = 4 * self._hidden_size
        if tokens * row > self.nbytes:
            raise RequestError(
                f"{what}: {tokens} tokens with {format_bytes(row)} each need "
                f"{format_bytes(tokens * row)}, but results may take only "
                f"{format_bytes(self.nbytes)}, enough for {self.nbytes // row} tokens; shorten the "
                "prompt"
            )
        return tokens * row

    def _row(self, count: int, also: int) -> int:
        """Bytes of the log-probabilities of one position; 0 if they are not counted."""
        if count == -1 or count >= self._vocab_size:
            count = self._vocab_size
            return _ROW_BYTES + _LOGIT_BYTES * count if count > FREE_ROW else 0
        count += also
        return _ROW_BYTES + _ENTRY_BYTES * count if count > FREE_ROW else 0
