"""Responses of ``/v1/completions``: texts, perhaps with their prompts and log-probabilities."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from sdk.api.logprobs import Logprobs as Row
from sdk.api.outputs import CompletionOutput, RequestOutput
from sdk.serving.openai.objects import Completion, CompletionChoice, CompletionUsage, Logprobs
from sdk.serving.openai.requests import CompletionRequest
from sdk.serving.openai.responses import reason_of, stream_usage, usage_of
from sdk.serving.openai.token_names import Places, TokenNames, places_in_prompt
from sdk.tokenizer import LLMTokenizer

#: A token and its log-probabilities; the first token of a prompt has none.
_Scored = tuple[int, Row | None]


class CompletionResponses:
    """Makes the responses to one request, which may have several prompts.

    ``check`` raises if an answer did not end by itself. Choice ``i`` of prompt ``p`` has the index
    ``p * n + i``.
    """

    def __init__(
        self,
        model: str,
        check: Callable[[CompletionOutput], None],
        asked: CompletionRequest,
        tokenizer: LLMTokenizer,
    ) -> None:
        self._check = check
        self._tokenizer = tokenizer
        self._names = TokenNames(tokenizer)
        self._skips = asked.params.skip_special_tokens
        self._echo = asked.echo
        self._scores = asked.scores
        self._n = asked.params.n
        self._facts: dict[str, Any] = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
        }
        self._places: dict[int, Places] = {}  # of each choice whose answer has begun

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
        places: list[int] = []
        text, reason = answer.text, reason_of(answer)
        first = index not in self._places
        if first and self._echo:
            text = self._prompt(output) + text
            if output.prompt_logprobs is not None:
                rows += zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
                prompt = list(output.prompt_token_ids)
                places += places_in_prompt(self._tokenizer, prompt, self._prompt(output))
        if first:
            self._places[index] = self._at_answer(output)
        if self._scores:
            text, reason = self._prompt(output) if first else "", reason and "length"
        elif answer.logprobs is not None:
            rows += zip(answer.token_ids, answer.logprobs, strict=True)
            places += self._places[index].following(answer.token_ids)
        logprobs = None if answer.logprobs is None else self._logprobs(rows, places)
        return CompletionChoice(index, text, reason, logprobs, answer.closed or None)

    def _prompt(self, output: RequestOutput) -> str:
        if output.prompt is not None:
            return output.prompt
        return self._tokenizer.decode(output.prompt_token_ids)

    def _at_answer(self, output: RequestOutput) -> Places:
        start, before = len(self._prompt(output)), output.prompt_token_ids
        return Places(self._tokenizer, start, before, skip_special_tokens=self._skips)

    def _logprobs(self, rows: Sequence[_Scored], places: list[int]) -> Logprobs:
        return Logprobs(
            text_offset=places,
            token_logprobs=[None if row is None else row[token].logprob for token, row in rows],
            tokens=[self._names[token] for token, _ in rows],
            top_logprobs=[
                None if row is None else self._names.best(row, token) for token, row in rows
            ],
        )
