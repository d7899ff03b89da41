"""Text completions in the form of llama-cpp-python's dicts."""

from __future__ import annotations

import time
import uuid
from collections.abc import Generator, Iterator, Sequence
from typing import Any

from sdk.api.errors import SdkError
from sdk.api.outputs import CompletionOutput, Logprobs, RequestOutput
from sdk.compat.llama_cpp._sampling import Callbacks
from sdk.requests.typed_outputs import MessageAnswer
from sdk.serving.openai.token_names import Places, TokenNames
from sdk.tokenizer import LLMTokenizer

Response = dict[str, Any]


class CompletionError(SdkError, RuntimeError):
    """A request failed while it ran."""


def check_ended(answer: CompletionOutput) -> None:
    """:raises CompletionError: the answer did not end by itself."""
    if answer.finish_reason in ("error", "abort", "deadline"):
        why = f": {answer.stop_reason}" if answer.stop_reason is not None else ""
        raise CompletionError(f"the request ended with {answer.finish_reason!r}{why}")


def without_end(output: RequestOutput, ends: frozenset[int]) -> RequestOutput:
    """The output without the tokens that ended its answers: llama.cpp does not count them."""
    return output._replace(outputs=[_without_end(answer, ends) for answer in output.outputs])


def _without_end(answer: Any, ends: frozenset[int]) -> Any:
    ids = answer.token_ids
    if answer.finish_reason != "stop" or not ids or ids[-1] not in ends:
        return answer
    shorter = answer._replace(
        token_ids=ids[:-1], logprobs=None if answer.logprobs is None else answer.logprobs[:-1]
    )
    if isinstance(answer, MessageAnswer):  # its message is not one of the tuple's fields
        vars(shorter).update(vars(answer))
    return shorter


class TextCompletions:
    """The responses to one request: they share ``id``, ``created`` and ``model``."""

    def __init__(
        self, model: str, tokenizer: LLMTokenizer, prompt: str, callbacks: Callbacks | None
    ) -> None:
        """``prompt``: its text, if it was given as text."""
        self._facts = {
            "id": f"cmpl-{uuid.uuid4()}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }
        self._tokenizer = tokenizer
        self._prompt = prompt
        self._callbacks = callbacks
        self._names = TokenNames(tokenizer)
        self._places: Places | None = None  # of the answer's tokens, once it has begun

    def whole(self, output: RequestOutput, *, echo: bool) -> Response:
        """The completion."""
        output = without_end(output, self._tokenizer.eos_token_ids)
        [answer] = output.outputs
        reason = self._reason(answer)
        logprobs = None
        if answer.logprobs is not None:
            rows: list[tuple[int, Logprobs | None]] = []
            places: list[int] = []
            if echo:
                rows = self._prompt_rows(output)
                in_prompt = Places(self._tokenizer, skip_special_tokens=False)
                places = in_prompt.following(token for token, _ in rows)
            rows += zip(answer.token_ids, answer.logprobs, strict=True)
            logprobs = self._logprobs(rows, [*places, *self._answer_places(output)])
        counts = len(output.prompt_token_ids), len(answer.token_ids)
        return {
            **self._facts,
            "choices": [_choice(self._prompt * echo + answer.text, logprobs, reason)],
            "usage": {
                "prompt_tokens": counts[0],
                "completion_tokens": counts[1],
                "total_tokens": sum(counts),
            },
        }

    def chunks(self, pieces: Generator[RequestOutput, None, None]) -> Iterator[Response]:
        """The completion piece by piece. Closing the iterator aborts the request."""
        try:
            for output in pieces:
                output = without_end(output, self._tokenizer.eos_token_ids)
                [answer] = output.outputs
                reason = self._reason(answer)
                if answer.text or answer.logprobs:
                    yield self._chunk(output)
                if reason is not None:
                    yield {**self._facts, "choices": [_choice("", None, reason)]}
                    return
        finally:
            pieces.close()

    def _chunk(self, output: RequestOutput) -> Response:
        [answer] = output.outputs
        logprobs = None
        if answer.logprobs:
            rows = list(zip(answer.token_ids, answer.logprobs, strict=True))
            logprobs = self._logprobs(rows, self._answer_places(output))
        return {**self._facts, "choices": [_choice(answer.text, logprobs, None)]}

    def _answer_places(self, output: RequestOutput) -> list[int]:
        """Where the tokens of an output's answer begin: in the prompt and the answer."""
        if self._places is None:
            before = output.prompt_token_ids
            self._places = Places(self._tokenizer, len(self._prompt), before)
        return self._places.following(output.outputs[0].token_ids)

    def _reason(self, answer: CompletionOutput) -> str | None:
        if self._callbacks is not None and self._callbacks.stopped and answer.finished:
            return "stop"
        check_ended(answer)
        return answer.finish_reason

    def _prompt_rows(self, output: RequestOutput) -> list[tuple[int, Logprobs | None]]:
        """The tokens of the prompt without BOS; the first one has no log-probability."""
        assert output.prompt_logprobs is not None
        ids, rows = output.prompt_token_ids, list(output.prompt_logprobs)
        if ids[0] == self._tokenizer.bos_token_id:
            ids, rows = ids[1:], rows[1:]
        return list(zip(ids, [None, *rows[1:]][: len(ids)], strict=True))

    def _logprobs(self, rows: Sequence[tuple[int, Logprobs | None]], places: list[int]) -> Response:
        """Tokens with their ``places`` in the text and their log-probabilities."""
        return {
            "tokens": [self._names[token] for token, _ in rows],
            "text_offset": places,
            "token_logprobs": [row and row[token].logprob for token, row in rows],
            "top_logprobs": [row and self._names.best(row, token) for token, row in rows],
        }


def _choice(text: str, logprobs: Response | None, reason: str | None) -> Response:
    return {"text": text, "index": 0, "logprobs": logprobs, "finish_reason": reason}
