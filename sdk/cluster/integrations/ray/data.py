"""Classes for ``Dataset.map_batches``: each of their actors has an LLM.

``__call__`` is a coroutine, so Ray Data keeps several batches in flight in one actor (4, or
``RAY_DATA_DEFAULT_ASYNC_BATCH_UDF_MAX_CONCURRENCY``). Their rows share the steps of one engine: a
batch begins while the longest answers of the last one are still being written.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from sdk.api.errors import (
    EngineAsleepError,
    EngineClosedError,
    EngineDeadError,
    RequestError,
    SdkError,
)
from sdk.api.params import SamplingParams
from sdk.async_llm import AsyncLLM
from sdk.cluster.integrations.ray.resources import with_resources
from sdk.llm import LLM
from sdk.quant.safe_repr import safe_repr
from sdk.requests.prompts.reader import is_conversation

Row = dict[str, Any]
OnError = Literal["raise", "column"]
#: No row can succeed after them, so they end the data set.
_FATAL = (EngineAsleepError, EngineClosedError, EngineDeadError)


class _Rows:
    """What :class:`Generate` and :class:`Embed` have in common: columns, errors, the LLM."""

    def __init__(
        self, model: str, column: str, prefix: str, on_error: OnError, options: dict[str, Any]
    ) -> None:
        if on_error not in ("raise", "column"):
            raise RequestError(
                f"on_error: expected 'raise' or 'column', found {safe_repr(on_error)}"
            )
        self.column, self._prefix, self._on_error = column, prefix, on_error
        self.llm = LLM(model, **with_resources(options))

    async def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch with the new columns; rows keep their order."""
        cells = self._cells(batch)
        rows = await _all([self._guarded(_plain(cell)) for cell in cells])
        if not rows:
            return dict(batch)
        added = {self._prefix + name: _column([row[name] for row in rows]) for name in rows[0]}
        taken = sorted(set(added) & set(batch))
        if taken:
            raise RequestError(
                f"the data has a column {taken[0]!r} already: pass another prefix than "
                f"{self._prefix!r}, which is put before the names of new columns"
            )
        return {**batch, **added}

    def _cells(self, batch: Mapping[str, Any]) -> Any:
        if not isinstance(batch, Mapping):
            raise RequestError(
                f"expected batches as dicts of arrays (batch_format='numpy'), found a "
                f"{type(batch).__name__}"
            )
        if self.column not in batch:
            raise RequestError(
                f"column={self.column!r}: the data has the columns {', '.join(map(repr, batch))}"
            )
        return batch[self.column]

    async def _guarded(self, cell: Any) -> Row:
        try:
            row, problem = await self._row(cell)
        except _FATAL:
            raise
        except SdkError as error:
            row, problem = self._failed(), f"{type(error).__name__}: {error}"
            if self._on_error == "raise":
                raise
        if self._on_error == "raise":
            if problem is not None:
                raise RequestError(f"a row failed: {problem}")
            return row
        return {**row, "error": problem}

    async def _row(self, cell: Any) -> tuple[Row, str | None]:
        """The new columns of one row, and what went wrong."""
        raise NotImplementedError

    def _failed(self) -> Row:
        """The new columns of a row that could not run."""
        raise NotImplementedError


class Generate(_Rows):
    """Answers to the prompts of a column: ``ds.map_batches(Generate, ...)``.

    ``column`` has texts, lists of token ids, or conversations (lists of messages with ``role`` and
    ``content``), which go through the chat template. New columns:

    * ``generated_text``, ``finish_reason``: see :class:`sdk.CompletionOutput`;
    * ``num_input_tokens``, ``num_generated_tokens``;
    * ``parsed``, with ``returns``: the answer as plain data;
    * ``error``, with ``on_error="column"``: what was wrong with the row, or null. Such a row has no
      text, or no value, and the others go on.

    :param model: as for :class:`sdk.LLM`, on every node that may have an actor.
    :param returns: a Python type or a JSON schema that answers follow.
    :param chat: options of :meth:`sdk.LLM.chat`, such as ``chat_template_kwargs``.
    :param prefix: put before the names of the new columns.
    :param on_error: ``"raise"`` ends the whole data set at the first row that fails.
    :param options: of :class:`sdk.LLM`. ``num_threads`` is by default the actor's ``num_cpus``;
        ``memory`` its ``memory``, if that is given, less 512 MiB for Python with torch and Ray.
    :raises RequestError: an argument is wrong, or with ``on_error="raise"`` a row.
    """

    def __init__(
        self,
        model: str,
        sampling_params: SamplingParams | None = None,
        *,
        column: str = "prompt",
        returns: Any = None,
        chat: Mapping[str, Any] | None = None,
        prefix: str = "",
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        if sampling_params is not None and sampling_params.n != 1:
            raise RequestError(
                f"n: expected 1, found {sampling_params.n}: a row has one answer; repeat rows"
            )
        super().__init__(model, column, prefix, on_error, options)
        self._params, self._returns, self._chat = sampling_params, returns, dict(chat or {})

    async def _row(self, cell: Any) -> tuple[Row, str | None]:
        if is_conversation(cell):
            found = await self.llm.achat(cell, self._params, returns=self._returns, **self._chat)
        else:
            found = await self.llm.agenerate(cell, self._params, returns=self._returns)
        output = _only(found)
        answer = output.outputs[0]
        row = {
            "generated_text": answer.text,
            "finish_reason": answer.finish_reason,
            "num_input_tokens": len(output.prompt_token_ids),
            "num_generated_tokens": len(answer.token_ids),
        }
        problem = str(answer.stop_reason) if answer.finish_reason == "error" else None
        if self._returns is not None:
            row["parsed"], problem = (None, problem) if problem else _value(answer)
        return row, problem

    def _failed(self) -> Row:
        row: Row = {
            "generated_text": None,
            "finish_reason": "error",
            "num_input_tokens": 0,
            "num_generated_tokens": 0,
        }
        return row if self._returns is None else {**row, "parsed": None}


class Embed(_Rows):
    """Embeddings of the texts of a column: ``ds.map_batches(Embed, ...)``.

    New columns: ``embedding`` (float32, ``[hidden_size]``, of length 1), ``num_input_tokens``, and
    with ``on_error="column"`` ``error``; the embedding of a row that failed is all NaN. The other
    arguments are those of :class:`Generate`.
    """

    def __init__(
        self,
        model: str,
        *,
        column: str = "text",
        truncate_prompt_tokens: int | None = None,
        prefix: str = "",
        on_error: OnError = "raise",
        **options: Any,
    ) -> None:
        super().__init__(model, column, prefix, on_error, options)
        self._cut = truncate_prompt_tokens
        self._calls = AsyncLLM(self.llm)

    async def _row(self, cell: Any) -> tuple[Row, str | None]:
        output = _only(await self._calls.embed(cell, truncate_prompt_tokens=self._cut))
        embedding = np.asarray(output.embedding, dtype=np.float32)
        return _embedding(embedding, len(output.prompt_token_ids)), None

    def _failed(self) -> Row:
        size = self.llm.model_config.output_size
        return _embedding(np.full(size, np.nan, dtype=np.float32), 0)


def _embedding(vector: Any, tokens: int) -> Row:
    return {"embedding": vector, "num_input_tokens": tokens}


async def _all(work: list[Any]) -> list[Row]:
    """The results of all; the first failure cancels the others, whose requests are aborted."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        rows: list[Row] = await asyncio.gather(*tasks)
        return rows
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _only(outputs: list[Any]) -> Any:
    if len(outputs) != 1:
        raise RequestError(f"prompt: expected one in each row, found a list of {len(outputs)}")
    return outputs[0]


def _value(answer: Any) -> tuple[Any, str | None]:
    """The value of an answer as plain data, which Arrow can hold, and what is wrong with it."""
    try:
        answer.parsed  # noqa: B018  checks it as the type does
        return json.loads(answer.text), None
    except Exception as error:  # of a validator of the user's type, too
        return None, f"{type(error).__name__}: {error}"


def _plain(value: Any) -> Any:
    """A cell as Ray Data gives it, without numpy and without the nulls that fill up structs."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items() if one is not None}
    return value


def _column(values: list[Any]) -> Any:
    """Vectors as one array, anything else as a list that Ray Data converts."""
    return np.stack(values) if isinstance(values[0], np.ndarray) else values
