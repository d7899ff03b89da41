"""Requests of a trace file: our JSON lines, Mooncake's, or the CSV of Azure's public traces."""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

from sdk.api.errors import RequestError
from sdk.cluster.simulation.executor import END
from sdk.cluster.simulation.workload import SimulatedRequest

#: Tokens of a block that a hash id stands for, in Mooncake's traces.
_BLOCK = 512
_AZURE = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]


class TraceEntry(NamedTuple):
    """One request. ``prompt``: its tokens; empty: ``length`` tokens, the blocks of ``hash_ids``."""

    arrival: float
    length: int
    answer: int
    prompt: tuple[int, ...] = ()
    hash_ids: tuple[int, ...] = ()
    kind: str = "trace"


class TraceWorkload:
    """The requests of a trace, except ``num_left_out`` that are longer than ``max_model_len``."""

    def __init__(self, entries: Sequence[TraceEntry], max_model_len: int, seed: int = 0) -> None:
        self._entries = [one for one in entries if one.length + one.answer <= max_model_len]
        self.num_left_out = len(entries) - len(self._entries)
        self._seed = seed

    def arrivals(self) -> Iterator[SimulatedRequest]:
        """All requests, by their arrival."""
        for number, entry in enumerate(self._entries):
            draw = random.Random(f"{self._seed}/{number}")
            yield SimulatedRequest(
                number=number,
                kind=entry.kind,
                arrival=entry.arrival,
                prompt=entry.prompt or self._prompt(entry, draw),
                answer=[*draw.randbytes(entry.answer - 1), END],
                session=number,
                max_tokens=max(2 * entry.answer, 16),
            )

    def next_turn(self, request: SimulatedRequest, now: float) -> None:
        """A trace has its own arrivals."""

    def _prompt(self, entry: TraceEntry, draw: random.Random) -> bytes:
        blocks = [random.Random(f"{self._seed}/b{one}").randbytes(_BLOCK) for one in entry.hash_ids]
        known = b"".join(blocks)[: entry.length]
        return known + draw.randbytes(entry.length - len(known))


def read_trace(path: str | Path, speed: float = 1.0) -> list[TraceEntry]:
    """The requests of a file, by their arrival; times begin at 0 and are divided by ``speed``.

    A line of JSON has ``arrival`` (seconds) or ``timestamp`` (milliseconds, as in Mooncake's
    traces), ``prompt`` (token ids) or ``input_length``, ``output_length``, and perhaps ``hash_ids``
    (equal ids stand for equal blocks of 512 tokens) and ``kind``, a class in the results. A CSV
    has the columns TIMESTAMP, ContextTokens and GeneratedTokens.

    :raises RequestError: names the file, the line and what is wrong. :raises OSError: no file.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected UTF-8 text, found {error.reason}") from None
    is_csv = bool(lines) and lines[0].replace(" ", "").split(",") == _AZURE
    entries = []
    for number, line in enumerate(lines, 1):
        if line.strip() and not (is_csv and number == 1):
            try:
                entries.append(_azure(line) if is_csv else _entry(json.loads(line)))
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{path}, line {number}: {error}") from None
    if not entries:
        raise RequestError(f"{path}: expected one request per line, found none")
    first = min(one.arrival for one in entries)
    moved = [one._replace(arrival=(one.arrival - first) / speed) for one in entries]
    return sorted(moved, key=lambda one: one.arrival)


def _azure(line: str) -> TraceEntry:
    """:raises ValueError: what is wrong with the line."""
    cells = next(csv.reader([line]))
    if len(cells) != len(_AZURE):
        raise ValueError(f"expected {', '.join(_AZURE)}, found {line!r:.60}")
    # seven digits of a second's fraction: one more than Python reads
    time = datetime.fromisoformat(cells[0].strip()[:26])
    prompt, answer = int(cells[1]), int(cells[2])
    return TraceEntry(time.timestamp(), max(prompt, 1), max(answer, 1))


def _entry(found: Any) -> TraceEntry:
    """:raises ValueError: what is wrong with the object."""
    if not isinstance(found, dict):
        raise ValueError(f"expected an object, found {found!r:.60}")
    time = found.get("arrival", found.get("timestamp"))
    if isinstance(time, bool) or not isinstance(time, int | float) or not 0 <= time < 1e15:
        raise ValueError(
            f"expected arrival (seconds) or timestamp (milliseconds) of at least 0, found "
            f"{time!r:.60}"
        )
    prompt = _ids("prompt", found.get("prompt", []))
    hash_ids = _ids("hash_ids", found.get("hash_ids", []))
    length = len(prompt) or _count("input_length", found.get("input_length"))
    kind = found.get("kind", "trace")
    if not isinstance(kind, str):
        raise ValueError(f"kind: expected a name, found {kind!r:.60}")
    answer = _count("output_length", found.get("output_length"))
    seconds = float(time) if "arrival" in found else time / 1000
    return TraceEntry(seconds, length, answer, prompt, hash_ids, kind)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    fine = isinstance(value, list) and all(type(one) is int and 0 <= one < 2**63 for one in value)
    if not fine:
        raise ValueError(f"{name}: expected a list of integers from 0 on, found {value!r:.60}")
    return tuple(value)


def _count(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**24:
        raise ValueError(f"{name}: expected an integer in 1..{2**24}, found {value!r:.60}")
    return value
