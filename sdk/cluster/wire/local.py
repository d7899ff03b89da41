"""Pickled messages between this process and its own children.

Both ends are this program and hold the two ends of an unnamed socket pair, so no other program can
write to it. That makes pickle acceptable here, and nowhere else: codec.py is for other hosts.
"""

from __future__ import annotations

import contextlib
import pickle
import select
import socket
from collections import deque
from typing import Any

from sdk.cluster.wire.stream import Stream, frame


def pack(message: object) -> bytes:
    """The bytes of a message. :raises ValueError: it is larger than ``MAX_FRAME``."""
    return frame(pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL))


class Channel:
    """One end. Raises EOFError, TimeoutError and other OSErrors, and what unpickling raises.

    Programs that talk to one other process wait in :meth:`send` and :meth:`receive`. Loops over
    several of them use ``stream.queue``, ``stream.flush`` and :meth:`read`, which never wait.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.stream = Stream(sock)
        self._arrived: deque[bytearray] = deque()

    @property
    def socket(self) -> socket.socket:
        """To be waited for, where :meth:`read` takes all that has come."""
        return self.stream.socket

    def readable(self, limit_s: float) -> bool:
        """Wait for a message or a part of one, or until the other side has closed."""
        return bool(self._arrived) or self.stream.wait(select.POLLIN, limit_s)

    def send(self, packed: bytes, limit_s: float | None = None) -> None:
        """Send the bytes from :func:`pack`; waits at most ``limit_s`` seconds for the reader."""
        self.stream.send(packed, limit_s=limit_s)

    def receive(self, limit_s: float | None = None) -> Any:
        """The next message. ``limit_s``: for each part of it."""
        while not self._arrived:
            try:
                self._arrived += self.stream.read_frames()
            except BlockingIOError:
                if not self.stream.wait(select.POLLIN, limit_s):
                    raise TimeoutError("the other side sends nothing") from None
        return pickle.loads(self._arrived.popleft())

    def read(self) -> list[Any]:
        """The messages that have come; the others wake a ``poll`` of the socket again."""
        with contextlib.suppress(BlockingIOError):
            return [pickle.loads(data) for data in self.stream.read_frames()]
        return []

    def close(self) -> None:
        """End the connection, also where a forked child of this process has a copy of it."""
        self.stream.close()

    def forget(self) -> None:
        """Close this process's copy: for a forked child, whose parent goes on using it."""
        self.stream.socket.close()
