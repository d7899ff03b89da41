"""The audit log: who asked which model for how much, and how it ended. Not what was said."""

from __future__ import annotations

import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from sdk.api.errors import RequestError
from sdk.api.sizes import format_bytes
from sdk.kernels.system import SYSTEM
from sdk.quant.safe_repr import safe_repr

_LOG = logging.getLogger("sdk.serving")
#: What looks like a key, wherever it occurs: someone may send one as the name of a model.
_KEY = re.compile(r"\b(sk-[0-9a-f]{12})-[0-9a-f]{48}\b|\b[Bb]earer\s+\S+")
_MOST_TEXT = 256
_MOST_WAITING = 10_000
_MOST_WAITING_BYTES = 64 * 2**20
_RETRY_SECONDS = 1.0
_CLOSE_SECONDS = 5.0


class AuditLog:
    """Append-only JSON lines, written by a thread of its own so that no request waits for a disk.

    ``path``: the file (mode 0600). When it would grow beyond ``max_bytes`` it becomes ``path.1``,
    that becomes ``path.2`` and so on; ``backups`` of them are kept. If another program moves the
    file, a new one is begun.

    A record is one line of ASCII: JSON escapes line breaks, control and other characters, so text
    from a request cannot forge a record. Strings longer than 256 characters are cut, and what looks
    like a key is replaced.

    ``on_error``: what happens while records cannot be written (disk full) and 10,000 of them, or
    64 MiB, wait.
    ``"open"``: requests are served, records are dropped, and the log says later how many.
    ``"closed"``: :attr:`accepting` is false from the first failed write on, so that no request is
    admitted until the waiting records are written; none is lost.

    Begins its thread with the first record; :meth:`close` writes what waits and ends it.

    :raises RequestError: an option is invalid. :raises OSError: the file cannot be opened.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        max_bytes: int = 100 * 2**20,
        backups: int = 5,
        on_error: Literal["open", "closed"] = "open",
    ) -> None:
        if max_bytes < 4096:
            raise RequestError(
                f"audit log: expected at least {format_bytes(4096)} per file, found {max_bytes}"
            )
        if not 0 <= backups <= 1000:
            raise RequestError(f"audit log: expected 0 to 1000 backups, found {backups}")
        if on_error not in ("open", "closed"):
            raise RequestError(
                f"audit log: expected on_error='open' or 'closed', found {safe_repr(on_error)}"
            )
        self.path = Path(path)
        self._max_bytes = max_bytes
        self._backups = backups
        self._closed_on_error = on_error == "closed"
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._dropped = 0
        self._failing = False
        self._ended = False
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._file: int | None = self._open()

    @property
    def accepting(self) -> bool:
        """Whether requests may be admitted; always true with ``on_error="open"``."""
        if not self._closed_on_error:
            return True
        return not self._failing and not self._full()

    def write(self, record: Mapping[str, object]) -> None:
        """Add a record; ``time`` is set if it is missing. Never blocks and never raises."""
        line = _line({"time": _timestamp(time.time()), **record})
        with self._wake:
            if self._ended:
                return
            if self._full() and not self._closed_on_error:
                self._dropped += 1
                return
            self._waiting.append(line)
            self._waiting_bytes += len(line)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="audit-log", daemon=True)
                self._thread.start()
            self._wake.notify()

    def close(self) -> None:
        """Write what waits (for at most 5 s) and end the thread. Idempotent."""
        with self._wake:
            self._ended = True
            self._wake.notify()
        if self._thread is not None:
            self._thread.join(_CLOSE_SECONDS)
        with self._wake:
            if self._waiting:
                _LOG.error("%s: %d records were not written", self.path, len(self._waiting))
                self._waiting.clear()
        if self._file is not None and (self._thread is None or not self._thread.is_alive()):
            os.close(self._file)
            self._file = None

    def _full(self) -> bool:
        return len(self._waiting) >= _MOST_WAITING or self._waiting_bytes >= _MOST_WAITING_BYTES

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._waiting and not self._ended:
                    self._wake.wait()
                if not self._waiting:
                    return
                batch = list(self._waiting)
                dropped, self._dropped = self._dropped, 0
            if dropped:
                batch.append(
                    _line({"time": _timestamp(time.time()), "event": "dropped", "records": dropped})
                )
            written, error = self._append(batch)
            with self._wake:
                for _ in range(min(written, len(self._waiting))):
                    self._waiting_bytes -= len(self._waiting.popleft())
                if dropped and written < len(batch):
                    self._dropped += dropped
                self._report(error)
                if error is not None:
                    if self._ended:
                        return
                    self._wake.wait(_RETRY_SECONDS)

    def _report(self, error: OSError | None) -> None:
        if error is not None and not self._failing:
            _LOG.error("audit log: cannot write %s: %s", self.path, error)
        elif error is None and self._failing:
            _LOG.warning("audit log: %s can be written again", self.path)
        self._failing = error is not None

    def _append(self, batch: list[bytes]) -> tuple[int, OSError | None]:
        """Write the lines; returns how many are in the file completely, and what stopped it."""
        written = 0
        try:
            size = self._ready()
            while written < len(batch):
                if size and size + len(batch[written]) > self._max_bytes:
                    self._rotate()
                    size = 0
                lines, taken = list[bytes](), 0
                for line in batch[written:]:
                    if lines and size + taken + len(line) > self._max_bytes:
                        break
                    lines.append(line)
                    taken += len(line)
                self._write_all(b"".join(lines), size)
                written += len(lines)
                size += taken
        except OSError as error:
            return written, error
        return written, None

    def _write_all(self, data: bytes, size: int) -> None:
        """Write all of ``data`` at the end, which is at ``size``, or nothing of it."""
        assert self._file is not None
        if (count := os.write(self._file, data)) != len(data):
            os.ftruncate(self._file, size)
            raise OSError(f"only {count} of {len(data)} bytes were written; is the disk full?")

    def _ready(self) -> int:
        """Open the file again if it was moved or removed; returns its size."""
        if self._file is not None:
            try:
                here, there = os.fstat(self._file), self.path.stat()
                if (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino):
                    return here.st_size
            except FileNotFoundError:
                pass
            os.close(self._file)
            self._file = None
        self._file = self._open()
        return os.fstat(self._file).st_size

    def _rotate(self) -> None:
        assert self._file is not None
        names = [self.path, *(Path(f"{self.path}.{n}") for n in range(1, self._backups + 1))]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            if newer.exists():
                newer.replace(older)
        if self._backups == 0:
            self.path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None
        self._file = self._open()

    def _open(self) -> int:
        return SYSTEM.open_file(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)


def _timestamp(seconds: float) -> str:
    """UTC with milliseconds, as in RFC 3339."""
    whole = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds))
    return f"{whole}.{int(seconds % 1 * 1000):03d}Z"


def _line(record: Mapping[str, object]) -> bytes:
    clean = {name: _clean(name, value) for name, value in record.items() if value is not None}
    # A lone surrogate is escaped too. NaN is not JSON: readers would stop at the line.
    return json.dumps(clean, ensure_ascii=True, separators=(",", ":")).encode("ascii") + b"\n"


def _clean(name: str, value: object) -> object:
    if isinstance(value, int) and abs(value) < 2**63:
        return value
    if isinstance(value, float):
        return round(value, 6) if abs(value) < 1e300 else str(value)
    if name == "request":  # only there if the host asked for it
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        return _without_keys(text)
    text = _without_keys(str(value))
    return text if len(text) <= _MOST_TEXT else text[: _MOST_TEXT - 3] + "..."


def _without_keys(text: str) -> str:
    return _KEY.sub(lambda found: f"{found[1] or 'Bearer '}...", text)
