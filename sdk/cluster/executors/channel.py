"""The control channel between rank 0 and one worker: pickled messages over a socket pair.

A message is eight bytes of length, then a pickle. Both ends are the same program and hold the two
ends of an unnamed socket pair, so no other program can write to it. That makes pickle acceptable
here, and nowhere else in this package.
"""

from __future__ import annotations

import pickle
import select
import socket
import struct
from typing import Any

# 256 MiB hold a plan of 30 million prompt tokens: more than any step has, and far less than a
# length read from the wrong bytes.
MAX_MESSAGE = 1 << 28
_HEADER = struct.Struct("<Q")


def pack(message: object) -> bytes:
    """The bytes of a message. :raises ValueError: it is larger than ``MAX_MESSAGE``."""
    data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    if len(data) > MAX_MESSAGE:
        raise ValueError(
            f"control message: expected at most {MAX_MESSAGE} bytes, found {len(data)}"
        )
    return _HEADER.pack(len(data)) + data


class Channel:
    """One end. Raises the errors of sockets: EOFError, OSError, TimeoutError."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def readable(self, seconds: float) -> bool:
        """Wait for a message, or until the other side has closed."""
        poller = select.poll()  # select.select() cannot take descriptors above 1023
        poller.register(self.socket, select.POLLIN)
        return bool(poller.poll(seconds * 1000))

    def send(self, message: bytes, seconds: float | None = None) -> None:
        """Send the bytes from :func:`pack`; waits at most ``seconds`` for the reader."""
        self.socket.settimeout(seconds)
        self.socket.sendall(message)

    def receive(self, seconds: float | None = None) -> Any:
        """The next message. :raises EOFError: the other side has closed."""
        self.socket.settimeout(seconds)
        (size,) = _HEADER.unpack(self._read(_HEADER.size))
        if size > MAX_MESSAGE:
            raise ValueError(f"control message: expected at most {MAX_MESSAGE} bytes, found {size}")
        return pickle.loads(self._read(size))

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        view = memoryview(data)
        while view:
            count = self.socket.recv_into(view)
            if not count:
                raise EOFError("the other side has closed")
            view = view[count:]
        return data

    def close(self) -> None:
        self.socket.close()
