"""Responses of ``/v1/completions``: texts, perhaps with their prompts and log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from sdk.logprobs import Logprobs as Row
from sdk.openai.objects import Completion, CompletionChoice, CompletionUsage, Logprobs
from sdk.openai.requests import CompletionRequest
from sdk.openai.responses import reason_of, stream_usage, usage_of
from sdk.outputs import CompletionOutput, RequestOutput

#: A token and its log-probabilities; the first token of a prompt has none.
_Scored = tuple[int, Row | None]


class CompletionResponses:
    """Makes the responses to one request, which may have several prompts.

    ``check`` raises if an answer did not end by itself. ``text_of``: the text of token ids. Choice
    ``i`` of prompt ``p`` has the index ``p * n + i``.
    """

    def __init__(
        self,
        model: str,
        check: Callable[[CompletionOutput], None],
        asked: CompletionRequest,
        text_of: Callable[[Sequence[int]], str],
    ) -> None:
        self._check = check
        self._text_of = text_of
        self._echo = asked.echo
        self._scores = asked.scores
        self._n = asked.params.n
        self._facts: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._offsets: dict[int, int] = {}  # characters so far, of each choice of a stream

    @property
    def facts(self) -> dict[str, Any]:
        """``id``, ``created`` and ``model``."""
        return dict(self._facts)

    def whole(self, outputs: Sequence[RequestOutput]) -> Completion:
        """The completions of all prompts, in their order."""
        choices = [
            self._choice(output, answer, number * self._n + answer.index)
            for number, output in enumerate(outputs)
            for answer in output.outputs
        ]
        usage = self._usage(usage_of(outputs))
        return Completion(choices=choices, usage=usage, **self._facts)

    def chunk(self, output: RequestOutput, number: int = 0) -> Completion:
        """What is new in the answers to prompt ``number``."""
        choices = [
            self._choice(output, answer, number * self._n + answer.index)
            for answer in output.outputs
        ]
        return Completion(choices=choices, **self._facts)

    def last_chunk(self, *outputs: RequestOutput) -> Completion:
        """The chunk with the usage of a stream, from the last output of each prompt."""
        usage = self._usage(stream_usage(outputs))
        return Completion(choices=[], usage=usage, **self._facts)

    def _usage(self, found: CompletionUsage) -> CompletionUsage:
        if self._scores:
            return CompletionUsage(found.prompt_tokens, 0, found.prompt_tokens)
        return found

    def _choice(
        self, output: RequestOutput, answer: CompletionOutput, index: int
    ) -> CompletionChoice:
        self._check(answer)
        rows: list[_Scored] = []
        text, reason = answer.text, reason_of(answer)
        first = index not in self._offsets
        if answer.logprobs is not None:
            rows = list(zip(answer.token_ids, answer.logprobs, strict=True))
        if self._scores:
            text, rows, reason = "", [], reason and "length"
        if first:
            self._offsets[index] = 0 if self._echo else len(self._prompt(output))
        if first and self._echo:
            text = self._prompt(output) + text
            if output.prompt_logprobs is not None:
                given = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
                rows = [*given, *rows]
        logprobs = None if answer.logprobs is None else self._logprobs(rows, index)
        return CompletionChoice(index, text, reason, logprobs)

    def _prompt(self, output: RequestOutput) -> str:
        return self._text_of(output.prompt_token_ids) if output.prompt is None else output.prompt

    def _logprobs(self, rows: Sequence[_Scored], index: int) -> Logprobs:
        made = Logprobs(top_logprobs=[])
        assert made.top_logprobs is not None
        for token, row in rows:
            entry = None if row is None else row[token]
            text = None if entry is None else entry.decoded_token
            text = self._text_of([token]) if text is None else text
            made.tokens.append(text)
            made.text_offset.append(self._offsets[index])
            self._offsets[index] += len(text)
            made.token_logprobs.append(None if entry is None else entry.logprob)
            made.top_logprobs.append(None if row is None else self._best(row))
        return made

    def _best(self, row: Row) -> dict[str, float]:
        return {
            self._text_of([token]) if entry.decoded_token is None else entry.decoded_token: (
                entry.logprob
            )
            for token, entry in row.entries()
        }
