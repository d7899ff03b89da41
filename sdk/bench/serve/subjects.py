"""What is measured: an engine in this process, or a server behind a URL."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from sdk.bench.serve.http_connection import Address, HttpClient
from sdk.bench.serve.http_target import HttpTarget
from sdk.bench.serve.in_process import InProcess, Streams
from sdk.bench.serve.load import Target


class Subject(Protocol):
    """One row of a comparison. ``name``: for reports; ``apart``: it runs in another process."""

    @property
    def name(self) -> str: ...

    @property
    def apart(self) -> bool: ...

    def connected(self, *, chat: bool) -> AbstractContextManager[Target]:
        """A target for one run, in the event loop that is running."""
        ...


@dataclass(frozen=True, slots=True)
class OwnEngine:
    """An ``LLM`` in this process."""

    name: str
    llm: Streams
    ignore_eos: bool = True
    apart: ClassVar[bool] = False

    @contextlib.contextmanager
    def connected(self, *, chat: bool) -> Iterator[Target]:
        yield InProcess(self.llm, ignore_eos=self.ignore_eos)


@dataclass(frozen=True, slots=True)
class Server:
    """A server with OpenAI's API. ``body``: more parameters of every request."""

    name: str
    address: Address
    model: str
    headers: Mapping[str, str]
    body: Mapping[str, Any]
    ignore_eos: bool = True
    apart: ClassVar[bool] = True

    @contextlib.contextmanager
    def connected(self, *, chat: bool) -> Iterator[Target]:
        client = HttpClient(self.address, self.headers)
        try:
            yield HttpTarget(
                client, self.model, chat=chat, ignore_eos=self.ignore_eos, body=self.body
            )
        finally:
            client.close()


def request_headers(lines: list[str]) -> dict[str, str]:
    """Headers ``"Name: value"``, and the key in ``OPENAI_API_KEY`` if there is one.

    :raises ValueError: this is not a header.
    """
    found = {}
    key = os.environ.get("OPENAI_API_KEY")
    if key:
        found["Authorization"] = f"Bearer {key}"
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or not name.strip() or not f"{name}{value}".isprintable():
            raise ValueError(line)
        found[name.strip()] = value.strip()
    return found
