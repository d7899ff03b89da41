"""A TCP connection: reads and writes with deadlines, and frames that only the two ends can make.

Sockets are non-blocking and every wait is a ``poll``, because two threads use a connection and a
socket has only one timeout for both.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from sdk.api.remote_workers import Address

#: As for the socket pair of a local worker.
MAX_MESSAGE = 1 << 28
#: Bytes that are read in one go: memory grows only with what has arrived.
CHUNK = 1 << 16
TAG = 32
_HEADER_TAG = 16
_LENGTH, _COUNTER = struct.Struct("<I"), struct.Struct("<Q")
Buffer = bytes | bytearray | memoryview


class ForgedError(OSError):
    """A message was not made by the other end, or is not the next one."""


class Wire:
    """A connected TCP socket. Raises EOFError, TimeoutError and other OSErrors."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock

    @classmethod
    def connect(cls, address: Address, limit_s: float) -> Wire:
        """A connection to ``address``."""
        return cls(socket.create_connection(address, timeout=limit_s))

    @property
    def peer(self) -> str:
        """The address of the other end."""
        with contextlib.suppress(OSError):
            return str(Address(*self.socket.getpeername()[:2]))
        return "a closed connection"

    def wait(self, event: int, seconds: float) -> bool:
        """Wait until the socket is ready for ``event``, or has failed."""
        poller = select.poll()  # select.select() cannot take descriptors above 1023
        poller.register(self.socket, event)
        return bool(poller.poll(max(seconds, 0.0) * 1000))

    def send(self, data: Buffer, limit_s: float) -> None:
        """Send all of ``data`` within ``limit_s`` seconds."""
        view = memoryview(data)
        deadline = time.monotonic() + limit_s
        while view:
            try:
                view = view[self.socket.send(view) :]
            except BlockingIOError:
                if not self.wait(select.POLLOUT, deadline - time.monotonic()):
                    raise TimeoutError("the other side does not read") from None

    def receive(self, count: int, limit_s: float) -> bytearray:
        """Exactly ``count`` bytes, within ``limit_s`` seconds."""
        data = bytearray(count)
        view = memoryview(data)
        deadline = time.monotonic() + limit_s
        while view:
            try:
                found = self.socket.recv_into(view)
            except BlockingIOError:
                if not self.wait(select.POLLIN, deadline - time.monotonic()):
                    raise TimeoutError("the other side sends nothing") from None
                continue
            if not found:
                raise EOFError("the other side has closed the connection")
            view = view[found:]
        return data

    def end_sending(self) -> None:
        """The other end receives what was sent, and then that nothing else comes."""
        self.socket.shutdown(socket.SHUT_WR)

    def shut(self) -> None:
        """End the connection, also for a thread that waits for it. A forked child of this process
        may hold a copy of the socket, so closing it alone would not."""
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close the socket, which no other thread may use any more."""
        self.shut()
        self.socket.close()


class Signer:
    """Tags of one direction: a tag depends on the key, the bytes, and how many came before."""

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._count = 0

    def tag(self, *parts: Any) -> bytes:
        """The tag of the next message, ``TAG`` bytes."""
        mac = self._mac.copy()
        mac.update(_COUNTER.pack(self._count))
        self._count += 1
        for part in parts:
            mac.update(part)
        return mac.digest()


class SessionKeys(NamedTuple):
    """The keys of a connection, one for each direction, as this end uses them."""

    send: bytes
    receive: bytes


class SignedWire:
    """Messages over a connection: none can be made up, changed, repeated, left out or reordered.

    A message is its length, a tag of the length (so nobody else can make this end wait for bytes
    or allocate memory), its bytes, and their tag.
    """

    def __init__(self, wire: Wire, keys: SessionKeys) -> None:
        self.wire = wire
        #: The tags of what this end sends and receives next; also for payloads without a length.
        self.sign, self.check = Signer(keys.send).tag, Signer(keys.receive).tag

    def send(self, message: Buffer, limit_s: float) -> None:
        """Send a message, at most ``MAX_MESSAGE`` bytes. One thread at a time."""
        if len(message) > MAX_MESSAGE:
            raise ValueError(f"message: expected at most {MAX_MESSAGE} bytes, found {len(message)}")
        length = _LENGTH.pack(len(message))
        header = length + self.sign(length)[:_HEADER_TAG]
        self.wire.send(header + message + self.sign(message), limit_s)

    def receive(
        self,
        limit_s: float,
        most: int = MAX_MESSAGE,
        meanwhile: Callable[[], object] | None = None,
    ) -> bytearray:
        """The next message. One thread at a time.

        :param limit_s: for each ``CHUNK`` of it.
        :param meanwhile: called after each chunk, for what must not wait for a large message.
        :raises ForgedError: the message is not the other end's next one, or longer than ``most``.
        """
        header = self.wire.receive(_LENGTH.size + _HEADER_TAG, limit_s)
        length = bytes(header[: _LENGTH.size])
        if not hmac.compare_digest(bytes(header[_LENGTH.size :]), self.check(length)[:_HEADER_TAG]):
            raise ForgedError("a message has a wrong signature")
        (size,) = _LENGTH.unpack(length)
        if size > most:
            raise ForgedError(f"message: expected at most {most} bytes, found {size}")
        message = bytearray()
        while len(message) < size:
            message += self.wire.receive(min(size - len(message), CHUNK), limit_s)
            if meanwhile is not None:
                meanwhile()
        tag = bytes(self.wire.receive(TAG, limit_s))
        if not hmac.compare_digest(tag, self.check(message)):
            raise ForgedError("a message has a wrong signature")
        return message
