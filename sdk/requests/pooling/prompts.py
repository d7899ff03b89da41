"""Reads prompts for calls that generate nothing, as a model's files say for embeddings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from sdk.api.errors import RequestError
from sdk.api.params import SamplingParams
from sdk.quant.embedding_head import EmbeddingHead, Filling
from sdk.requests.pooling.vectors import Wanted, with_text_before
from sdk.requests.prompts.reader import Prompt, PromptReader, as_list


class PoolingPrompts:
    """The prompts of one ``LLM`` for such calls."""

    def __init__(self, reader: PromptReader) -> None:
        self._reader = reader

    def read(
        self,
        prompts: Any,
        truncate: int | None,
        wanted: Wanted | None,
        head: EmbeddingHead | None,
    ) -> list[Prompt]:
        """Prompts; those that were read stay as they are. A text that is cut loses its end.

        ``wanted``: of embeddings, so that the files' prompt is put before texts and their longest
        text counts; None: of hidden states or classes. ``head``: what the files say.

        :raises RequestError: one is invalid or too long.
        """
        if wanted is None:
            params = SamplingParams(truncate_prompt_tokens=truncate)
            read = [self._read_one(item, params) for item in as_list(prompts)]
        else:
            read = list(self._of_embeddings(prompts, truncate, wanted, head))
        if head is None or not (head.filling or head.until_end):
            return read
        return [one if one.images else self._shaped(one, head) for one in read]

    def _of_embeddings(
        self, prompts: Any, truncate: int | None, wanted: Wanted, head: EmbeddingHead | None
    ) -> Iterator[Prompt]:
        params = SamplingParams(truncate_prompt_tokens=truncate)
        text = wanted.text_before(head)
        most = None if head is None else head.max_tokens
        if most is not None and truncate == -1:
            most = min(most, self._reader.max_model_len)
            params = SamplingParams(truncate_prompt_tokens=most)
        skip = 0
        if head is not None and not head.include_prompt and text:
            skip = self._reader.tokens_before(text)
        lower = head is not None and head.lower_case
        for item in as_list(prompts):
            if not isinstance(item, Prompt):
                item = with_text_before(item, text, asked=wanted.asks, lower=lower)
            one = self._read_one(item, params)
            if most is not None and truncate is None and len(one.token_ids) > most:
                raise RequestError(
                    f"prompt: {len(one.token_ids)} tokens, but the model was trained for texts of "
                    f"{most} (max_seq_length in its files); shorten it, or set "
                    "truncate_prompt_tokens=-1 to keep its beginning"
                )
            yield replace(one, skip=skip) if skip and one.text is not None else one

    def _read_one(self, item: Any, params: SamplingParams) -> Prompt:
        return item if isinstance(item, Prompt) else self._reader.read(item, params, room=0)

    def _shaped(self, prompt: Prompt, head: EmbeddingHead) -> Prompt:
        """The text of a dual encoder as long as it was trained with."""
        ids = prompt.token_ids
        if head.until_end:
            ends = self._reader.need_tokenizer("a text of this model").eos_token_ids
            end = next((at for at, one in enumerate(ids) if one in ends), len(ids))
            ids = ids[: end + 1]
        if head.filling is not None:
            ids = self._filled(ids, head.filling)
        return replace(prompt, token_ids=ids)

    def _filled(self, ids: tuple[int, ...], filling: Filling) -> tuple[int, ...]:
        """:raises RequestError: the context is shorter, or the vocabulary has no such token."""
        token = self._reader.need_tokenizer("a text of this model").token_to_id(filling.token)
        most = self._reader.max_model_len
        if token is None or most < filling.length:
            raise RequestError(
                f"prompt: this model reads texts that are filled up to {filling.length} tokens "
                f"with {filling.token!r}; expected that token in the vocabulary and a "
                f"max_model_len of {filling.length}, found {most}"
            )
        more = (token,) * (filling.length - len(ids))
        return more + ids if filling.left else ids + more
