"""The target behind a URL: any server with OpenAI's completions or chats."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from sdk.api.errors import SdkError
from sdk.bench.serve.http_connection import HttpClient, ProtocolError
from sdk.bench.serve.load import Prompt, RequestFailed
from sdk.bench.serve.record import Record


class HttpTarget:
    """Asks a server for streamed answers.

    ``body``: more parameters of every request. Only text counts as a piece of an answer: not the
    chunk with the role, which some servers send before the prompt has run.
    """

    def __init__(
        self,
        client: HttpClient,
        model: str,
        *,
        chat: bool,
        ignore_eos: bool = True,
        body: Mapping[str, Any] | None = None,
    ) -> None:
        self._client = client
        self._path = "/chat/completions" if chat else "/completions"
        self._asked = "messages" if chat else "prompt"
        self._body: dict[str, Any] = {
            "model": model,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ignore_eos:
            self._body["ignore_eos"] = True
        self._body |= body or {}

    async def ask(self, prompt: Prompt, output_len: int, record: Record) -> None:
        """See :class:`sdk.bench.serve.load.Target`."""
        body = {**self._body, self._asked: prompt, "max_tokens": output_len}
        answer = _Answer(record)
        record.sent = time.monotonic()
        try:
            response = await self._client.post(self._path, body, answer.event)
        except ProtocolError as error:
            raise RequestFailed(str(error)) from error
        except OSError as error:
            raise RequestFailed("no connection", str(error)) from error
        if response.status != 200:
            said = bytes(response.body[:300]).decode("utf-8", "replace")
            raise RequestFailed(f"HTTP {response.status}", said)
        if answer.error is not None:
            raise RequestFailed(answer.error)
        if not answer.ended:
            raise RequestFailed("no streamed answer" if response.body else "incomplete stream")
        if not record.output_tokens:  # a server without stream_options: one piece is one token
            record.output_tokens = len(record.text)


class _Answer:
    """Reads the events of one answer into a record."""

    def __init__(self, record: Record) -> None:
        self.ended = False
        self.error: str | None = None
        self._record = record

    def event(self, data: bytes) -> None:
        now = time.monotonic()
        if data == b"[DONE]":
            self.ended = True
            return
        try:
            chunk = json.loads(data)
            if "error" in chunk:
                self.error = "error in the stream"
            usage = chunk.get("usage")
            if usage:
                self._record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                self._record.output_tokens = int(usage.get("completion_tokens") or 0)
            for choice in chunk.get("choices") or ():
                text = choice.get("text") or _delta_text(choice.get("delta"))
                if text:
                    self._record.add(now, text)
                # Some servers do not send [DONE].
                self.ended = self.ended or bool(choice.get("finish_reason"))
        except (ValueError, TypeError, AttributeError):
            self.error = "unreadable chunk"


def _delta_text(delta: Mapping[str, Any] | None) -> str:
    """The text of a chat's chunk, whether it is content or reasoning (two names are in use)."""
    if not delta:
        return ""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning") or ""


async def find_model(client: HttpClient, url: str, name: str | None) -> str:
    """The name of the server's model: ``name``, or the first that it lists.

    :raises SdkError: the server is not there, or has no list of models.
    """
    if name is not None:
        return name
    try:
        response = await asyncio.wait_for(client.get("/models"), 30)
    except (OSError, ProtocolError, asyncio.TimeoutError) as error:
        why = str(error) or type(error).__name__
        raise SdkError(f"{url}: the server cannot be reached: {why}") from error
    try:
        return str(json.loads(bytes(response.body))["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise SdkError(
            f"{url}: expected a list of models at {client.path}/models, found HTTP "
            f"{response.status}; name the model: embedlm bench serve MODEL --url {url}"
        ) from None
