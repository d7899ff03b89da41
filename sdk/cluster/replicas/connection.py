"""A socket with messages in both directions that never blocks, for a loop over many sockets."""

from __future__ import annotations

import pickle
import socket
import struct
from collections import deque
from contextlib import suppress
from typing import Any

from sdk.cluster.executors.channel import MAX_MESSAGE
from sdk.cluster.replicas.messages import packed

_HEADER = struct.Struct("<Q")
_READ_BYTES = 1 << 18


class Connection:
    """The messages of :class:`sdk.cluster.executors.channel.Channel`, without waiting for any.

    Not thread-safe, except :meth:`queue`.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._received = bytearray()
        self._waiting: deque[memoryview] = deque()

    def queue(self, message: object) -> None:
        """Send a message with the next calls of :meth:`flush`. From any thread."""
        self._waiting.append(memoryview(packed(message)))

    @property
    def has_waiting(self) -> bool:
        """Whether :meth:`flush` has something to send."""
        return bool(self._waiting)

    def flush(self) -> None:
        """Send what the socket takes now. :raises OSError: the other side is gone."""
        while self._waiting:
            data = self._waiting[0]
            try:
                sent = self.socket.send(data, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            if sent == len(data):
                self._waiting.popleft()
            else:
                self._waiting[0] = data[sent:]

    def read(self) -> list[Any]:
        """The messages that have come. :raises EOFError, OSError: the other side is gone."""
        while True:
            try:
                data = self.socket.recv(_READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                if messages := self._complete():
                    return messages  # the end is found again
                raise EOFError("the other side has closed")
            self._received += data
            if len(data) < _READ_BYTES:
                break
        return self._complete()

    def _complete(self) -> list[Any]:
        messages, begin, received = [], 0, self._received
        while len(received) - begin >= _HEADER.size:
            (size,) = _HEADER.unpack_from(received, begin)
            if size > MAX_MESSAGE:
                raise EOFError(f"expected a message of at most {MAX_MESSAGE} bytes, found {size}")
            end = begin + _HEADER.size + size
            if len(received) < end:
                break
            messages.append(pickle.loads(memoryview(received)[begin + _HEADER.size : end]))
            begin = end
        del received[:begin]
        return messages

    def close(self) -> None:
        self._waiting.clear()
        with suppress(OSError):  # also where a forked child of this process has a copy
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
