"""A request that runs again elsewhere: what its caller has already got is left out.

Answers are bitwise the same wherever they run, so a caller that reads a stream sees no seam.
"""

from __future__ import annotations

from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.api.params import RequestOutputKind
from sdk.engine.engine import Output


class Progress:
    """How much of a request's answers its caller has got."""

    __slots__ = ("_again", "_given", "_is_delta")

    def __init__(self, kind: RequestOutputKind) -> None:
        self._is_delta = kind is RequestOutputKind.DELTA
        self._given: dict[int, tuple[int, int]] = {}  # answer -> tokens, characters
        #: The same of the run that repeats them; ``None`` until a request runs again.
        self._again: dict[int, tuple[int, int]] | None = None

    def restart(self) -> None:
        """The request starts over on another replica."""
        self._again = {}

    def new(self, output: Output) -> Output | None:
        """The output without what was given before; ``None`` if nothing is left of it."""
        if not isinstance(output, RequestOutput):
            return output
        if self._again is None:
            for answer in output.outputs:
                self._count(self._given, answer)
            return output
        answers = [self._shortened(answer) for answer in output.outputs]
        for answer in output.outputs:
            self._count(self._again, answer)
        for index, count in self._again.items():
            self._given[index] = max(count, self._given.get(index, (0, 0)))
        if output.finished:
            return output._replace(outputs=answers)
        if self._is_delta:
            answers = [one for one in answers if one.token_ids or one.text or one.finished]
            return output._replace(outputs=answers) if answers else None
        behind = any(self._again.get(index, (0, 0)) < count for index, count in self._given.items())
        return None if behind else output

    def _count(self, counts: dict[int, tuple[int, int]], answer: CompletionOutput) -> None:
        tokens, characters = len(answer.token_ids), len(answer.text)
        if self._is_delta:
            before = counts.get(answer.index, (0, 0))
            tokens, characters = before[0] + tokens, before[1] + characters
        counts[answer.index] = tokens, characters

    def _shortened(self, answer: CompletionOutput) -> CompletionOutput:
        """A piece of an answer without the part that was given."""
        if not self._is_delta:
            return answer
        assert self._again is not None
        given = self._given.get(answer.index, (0, 0))
        again = self._again.get(answer.index, (0, 0))
        tokens, characters = max(given[0] - again[0], 0), max(given[1] - again[1], 0)
        if not tokens and not characters:
            return answer
        logprobs = answer.logprobs
        return answer._replace(
            token_ids=answer.token_ids[tokens:],
            text=answer.text[characters:],
            logprobs=None if logprobs is None else logprobs[tokens:],
        )
