"""Tokens used per day, kept in a file so that a restart does not forget them."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from sdk.kernels.system import SYSTEM
from sdk.kernels.whole_file import replace_file
from sdk.serving.guard.files import FileLock

_LOG = logging.getLogger("sdk.serving")
SECONDS_PER_DAY = 86_400
#: The journal is rewritten as one line per caller when it is longer than this (about 300,000
#: changes); rewriting 10,000 callers takes some 20 ms.
MOST_JOURNAL_BYTES = 16 * 2**20


class DailyTokens:
    """Tokens by caller since midnight UTC.

    ``path``: a journal; each change appends the line ``[day, name, tokens]``. A request is charged
    when it is admitted and corrected when it ends, so after a crash the requests that were running
    count as if they had used all that they could. Each line is one ``write``: what it holds
    survives the end of the process, but the last seconds may be lost when the machine stops.
    Without ``path`` the counts are forgotten with the process.

    If a write fails (disk full), counting goes on in memory and the log says so once.

    Not thread-safe: :class:`~sdk.serving.guard.usage.Meter` holds a lock.

    :raises RequestError: another process uses the journal. :raises OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str] | None, wall: Callable[[], float]) -> None:
        self._wall = wall
        self._day = self.today()
        self._used: dict[str, int] = {}
        self._path = None if path is None else Path(os.path.realpath(path))
        self._file: int | None = None
        self._bytes = 0
        self._failed = False
        self._lock: FileLock | None = None
        if self._path is not None:
            self._lock = FileLock(self._path)
            try:
                self._read(self._path)
                self._rewrite(self._path, sync=True)
            except BaseException:
                self._lock.release()
                raise

    def today(self) -> int:
        """Days since 1970-01-01 in UTC; leap seconds do not count."""
        return int(self._wall() // SECONDS_PER_DAY)

    def until_midnight(self) -> float:
        """Seconds until the next day begins in UTC."""
        return SECONDS_PER_DAY - self._wall() % SECONDS_PER_DAY

    def used(self, name: str) -> int:
        """Tokens charged to ``name`` today."""
        self._turn_page()
        return self._used.get(name, 0)

    def charge(self, name: str, tokens: int) -> int:
        """Add ``tokens`` (negative: take back) today; returns the day."""
        self._turn_page()
        self._used[name] = self._used.get(name, 0) + tokens
        self._append(name, tokens)
        return self._day

    def correct(self, name: str, day: int, tokens: int) -> None:
        """Add ``tokens`` to a charge of ``day``; nothing if that day is over."""
        self._turn_page()
        if day == self._day and tokens:
            self.charge(name, tokens)

    def close(self) -> None:
        """Close the journal and let other processes use it. Idempotent."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
        if self._lock is not None:
            self._lock.release()

    def _turn_page(self) -> None:
        today = self.today()
        if today > self._day:  # a clock that was set back does not bring a day back
            self._day = today
            self._used.clear()
            if self._path is not None and self._file is not None:
                self._compact(self._path)

    def _append(self, name: str, tokens: int) -> None:
        if self._file is None or self._path is None:
            return
        line = self._line(name, tokens)
        try:
            if os.write(self._file, line) != len(line):
                raise OSError("the disk is full")
        except OSError as error:
            self._fail(error)
            return
        self._bytes += len(line)
        self._failed = False
        if self._bytes > MOST_JOURNAL_BYTES:
            self._compact(self._path)

    def _compact(self, path: Path) -> None:
        try:
            self._rewrite(path, sync=False)
        except OSError as error:
            self._fail(error)

    def _fail(self, error: OSError) -> None:
        if not self._failed:
            _LOG.error(
                "daily quotas are kept in memory only: cannot write %s: %s", self._path, error
            )
        self._failed = True

    def _line(self, name: str, tokens: int) -> bytes:
        day = datetime.fromtimestamp(self._day * SECONDS_PER_DAY, timezone.utc).date().isoformat()
        return json.dumps([day, name, tokens]).encode() + b"\n"

    def _read(self, path: Path) -> None:
        try:
            lines = path.read_bytes().splitlines()
        except FileNotFoundError:
            return
        today = self._line("", 0)[2:12].decode()
        damaged = 0
        for line in lines:
            try:
                day, name, tokens = json.loads(line)
                if not (isinstance(name, str) and type(tokens) is int):
                    raise ValueError
            except (ValueError, TypeError, RecursionError):
                damaged += 1  # the last line of a machine that stopped, or of a full disk
                continue
            if day == today:
                self._used[name] = self._used.get(name, 0) + tokens
        if damaged:
            _LOG.warning("%s: %d damaged lines were ignored", path, damaged)

    def _rewrite(self, path: Path, *, sync: bool) -> None:
        data = b"".join(self._line(name, tokens) for name, tokens in self._used.items() if tokens)
        replace_file(path, data, sync=sync)
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._file = SYSTEM.open_file(path, os.O_WRONLY | os.O_APPEND)
        self._bytes = len(data)
