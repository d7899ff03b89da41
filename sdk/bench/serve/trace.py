"""Trace files: one JSON object per line, one request each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sdk.api.errors import RequestError
from sdk.bench.serve.lengths import Lengths
from sdk.bench.serve.workload import Message, Session, Turn

_KEYS = ("at", "prompt", "messages", "input_len", "output_len")
_ASKED = ("prompt", "messages", "input_len")


def read_trace(path: str, scale: float, output_len: Lengths, *, chat: bool) -> tuple[Session, ...]:
    """The sessions of a trace, by time of arrival.

    Each line has ``at`` (seconds), one of ``prompt`` (a text), ``messages`` (a conversation that
    ends with the user, for chats) and ``input_len`` (tokens), and perhaps ``output_len``. Times
    begin with the first request and are divided by ``scale``. A line without ``output_len`` gets
    the one value or the middle of the ``output_len`` given.

    :raises RequestError: names the file, the line and what is wrong with it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected UTF-8 text, found {error.reason}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append(_session(json.loads(line), output_len, chat))
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{path}, line {number}: {error}") from None
    if not found:
        raise RequestError(f"{path}: expected one JSON object per line, found no lines")
    first = min(session.at for session in found)
    moved = [
        Session((session.at - first) / scale, session.opening, session.turns) for session in found
    ]
    return tuple(sorted(moved, key=lambda session: session.at))


def _session(entry: Any, output_len: Lengths, chat: bool) -> Session:
    """:raises ValueError: what is wrong with the entry."""
    if not isinstance(entry, Mapping):
        raise ValueError(f"expected an object, found {_shown(entry)}")
    unknown = sorted(set(entry) - set(_KEYS))
    if unknown:
        raise ValueError(f"unknown key {unknown[0]!r}; expected some of {', '.join(_KEYS)}")
    at = entry.get("at")
    if isinstance(at, bool) or not isinstance(at, int | float) or not 0 <= at < 1e9:
        raise ValueError(f"at: expected seconds, at least 0, found {_shown(at)}")
    asked = [key for key in _ASKED if key in entry]
    if len(asked) != 1:
        raise ValueError(f"expected one of {', '.join(_ASKED)}; found {', '.join(asked) or 'none'}")
    length = _count("output_len", entry.get("output_len", round((output_len.a + output_len.b) / 2)))
    opening: tuple[Message, ...] = ()
    text: str | int
    if "messages" in entry:
        *before, last = _messages(entry["messages"], chat)
        opening, text = tuple(before), last["content"]
    elif "prompt" in entry:
        text = entry["prompt"]
        if not isinstance(text, str) or not text:
            raise ValueError(f"prompt: expected a text, found {_shown(text)}")
    else:
        text = _count("input_len", entry["input_len"])
    return Session(float(at), opening, (Turn(text, length),))


def _messages(found: Any, chat: bool) -> list[Message]:
    if not chat:
        raise ValueError("messages need --chat")
    roles = ("system", "user", "assistant")
    fine = isinstance(found, list) and all(
        isinstance(one, Mapping)
        and set(one) == {"role", "content"}
        and one["role"] in roles
        and isinstance(one["content"], str)
        for one in found
    )
    if not fine or not found or found[-1]["role"] != "user":
        raise ValueError(
            'messages: expected a list of {"role": "system", "user" or "assistant", "content": '
            f"text}} that ends with the user's, found {_shown(found)}"
        )
    return [dict(one) for one in found]


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
        raise ValueError(f"{name}: expected an integer in 1..{2**20}, found {_shown(value)}")
    return value


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:77] + "..."
