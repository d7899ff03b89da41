"""A file of hashed keys: changed by ``embedlm keys``, read by a server while it runs."""

from __future__ import annotations

import json
import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from sdk.api.errors import RequestError
from sdk.kernels.whole_file import replace_file
from sdk.serving.guard.files import FileLock
from sdk.serving.guard.keys import KeyHolder, KeyTable, Secret, new_key

_LOG = logging.getLogger("sdk.serving")
_MOST_FILE_BYTES = 256 * 2**20


def read_keys(path: str | os.PathLike[str]) -> KeyTable:
    """Read a file of keys.

    :raises RequestError: it is not such a file, or others than its owner may change it.
    :raises OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        state = os.fstat(file.fileno())
        if stat.S_IMODE(state.st_mode) & 0o022:
            raise RequestError(
                f"{path}: other users may change it, and so let anyone in; run chmod 600 {path}"
            )
        if state.st_size > _MOST_FILE_BYTES:
            raise RequestError(f"{path}: {state.st_size} bytes are too many for a file of keys")
        data = file.read()
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: expected JSON: {error}") from None
    if not isinstance(value, dict) or value.get("version") != 1 or "holders" not in value:
        raise RequestError(f"{path}: expected a file of `embedlm keys add` (version 1)")
    holders = value["holders"]
    if not isinstance(holders, list):
        raise RequestError(f"{path}: holders: expected a list")
    read = []
    for index, holder in enumerate(holders):
        try:
            read.append(KeyHolder.from_json(holder))
        except RequestError as error:
            raise RequestError(f"{path}: holders[{index}]: {error}") from None
    try:
        return KeyTable(read)
    except RequestError as error:
        raise RequestError(f"{path}: {error}") from None


@contextmanager
def editing(path: str | os.PathLike[str], *, make: bool = False) -> Iterator[dict[str, KeyHolder]]:
    """Change the holders in the block; then the file is replaced, unless the block raises.

    Other processes that edit the file wait. ``make``: a file that does not exist is made.

    :raises OSError: it cannot be read or written.
    """
    target = Path(os.path.realpath(path))  # a link stays a link
    if not make:
        target.stat()
    lock = FileLock(target, wait=True)
    try:
        holders = {} if make and not target.exists() else dict(read_keys(target).holders)
        yield holders
        value = {"version": 1, "holders": [holder.to_json() for holder in holders.values()]}
        replace_file(target, json.dumps(value, indent=1).encode() + b"\n")
    finally:
        lock.release()


def add_key(path: str | os.PathLike[str], holder: KeyHolder, expires: float | None = None) -> str:
    """Add a holder with one new key, and return that key. It is stored nowhere.

    :raises RequestError: there is a holder of this name already.
    """
    key = new_key()
    secret = Secret.of(key, created=int(time.time()), expires=expires)
    with editing(path, make=True) as holders:
        if holder.name in holders:
            raise RequestError(
                f"{holder.name} has a key already; use `rotate` for a new one, or another name"
            )
        holders[holder.name] = replace(holder, secrets=(secret,))
    return key


def rotate_key(path: str | os.PathLike[str], name: str, overlap: float) -> str:
    """Give ``name`` a new key, and return it. Its present keys work for ``overlap`` more seconds.

    :raises RequestError: there is no such holder.
    """
    key, now = new_key(), int(time.time())
    with editing(path) as holders:
        holder = _holder(holders, name, path)
        end = now + overlap
        kept = tuple(
            secret
            if secret.expires is not None and secret.expires < end
            else replace(secret, expires=end)
            for secret in holder.secrets
            if secret.expires is None or secret.expires > now
        )
        if overlap <= 0:
            kept = ()
        holders[name] = replace(holder, secrets=(*kept, Secret.of(key, created=now)))
    return key


def revoke_key(path: str | os.PathLike[str], name: str) -> int:
    """Remove the holder ``name`` with all keys, or the key with the id ``name``.

    Returns the number of keys removed. :raises RequestError: there is neither.
    """
    with editing(path) as holders:
        if name in holders:
            return len(holders.pop(name).secrets)
        for holder in holders.values():
            left = tuple(secret for secret in holder.secrets if secret.id != name)
            if len(left) < len(holder.secrets):
                holders[holder.name] = replace(holder, secrets=left)
                return 1
        raise RequestError(f"{path}: nobody is called {name}, and no key has this id")


def _holder(holders: dict[str, KeyHolder], name: str, path: str | os.PathLike[str]) -> KeyHolder:
    if name not in holders:
        raise RequestError(f"{path}: nobody is called {name}; `embedlm keys list` shows the names")
    return holders[name]


class KeyFile:
    """The keys of a file; reads it again when it has changed.

    Whether it has is asked at most once per ``check_seconds``, with one ``stat``. If the changed
    file cannot be read, the keys read before stay valid and the log says why, once per change. To
    let nobody in any more, revoke the keys or stop the server: removing the file does not.

    May be used from any thread. :raises RequestError, OSError: as :func:`read_keys`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        check_seconds: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = Path(path)
        self._clock = clock
        self._check_seconds = check_seconds
        self._lock = threading.Lock()
        self._checked_at = clock()
        self._state = self._stat()
        self.table = read_keys(path)

    def due(self) -> bool:
        """Whether the file has changed since it was read, as far as is known: cheap."""
        now = self._clock()
        if now - self._checked_at < self._check_seconds:
            return False
        self._checked_at = now
        return self._stat() != self._state

    def reload(self) -> None:
        """Read the file again (30 ms for 10,000 keys). Several calls at a time read it once."""
        with self._lock:
            state = self._stat()
            if state == self._state:
                return
            try:
                self.table = read_keys(self.path)
            except (RequestError, OSError) as error:
                _LOG.error("the keys read before stay valid: %s", error)
            else:
                _LOG.info("%s: %d keys", self.path, len(self.table))
            # Not before: until the table is there, other callers must wait for it.
            self._state = state

    def _stat(self) -> tuple[int, ...] | None:
        try:
            state = self.path.stat()
        except OSError:
            return None
        return (state.st_mtime_ns, state.st_size, state.st_ino)
