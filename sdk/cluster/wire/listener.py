"""Where connections from other machines arrive: those that know the token."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from sdk.api.errors import EngineDeadError
from sdk.api.remote_workers import Address
from sdk.cluster.wire.stream import Stream
from sdk.cluster.wire.tls import SharedToken

logger = logging.getLogger("sdk")

#: Connections that have not proved yet that they know the token, and their time for it.
MAX_STRANGERS = 16
HANDSHAKE_S = 5.0
_MAX_HELLO = 1 << 16
_TICK_S = 0.25


class Arrival(NamedTuple):
    """A connection that knows the token, its first message, and the address it came from."""

    stream: Stream
    hello: object
    peer: str


class Listener:
    """Listens at one address until :meth:`close`. Strangers are refused and logged.

    :param read_hello: reads the first frame of a connection, which has as little time as the
        handshake; without it :class:`Arrival` has none. Raises an ``SdkError`` to refuse.
    :raises EngineDeadError: the address cannot be used, for example because it is taken.
    """

    def __init__(
        self,
        address: Address,
        token: SharedToken,
        read_hello: Callable[[memoryview], object] | None = None,
    ) -> None:
        self._token, self._read_hello = token, read_hello
        #: Why connections were refused.
        self.refused: list[str] = []
        self._arrived: deque[Arrival] = deque()
        self._changed = threading.Condition()
        self._strangers: set[socket.socket] = set()
        self._closed = False
        self._socket = _bound(address)
        self.address = Address(*self._socket.getsockname()[:2])
        self._thread = threading.Thread(target=self._run, name="sdk-listen", daemon=True)
        self._thread.start()

    def accept(self, limit_s: float | None) -> Arrival | None:
        """The next arrival; None after ``limit_s`` seconds.

        :raises EngineDeadError: the listener was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._closed, limit_s)
            if self._closed:
                raise EngineDeadError(f"{self.address} no longer waits for connections")
            return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Stop listening and end the connections that nobody took. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for sock in (self._socket, *self._strangers):  # wakes their threads
                _shut(sock)
        self._thread.join()
        self._socket.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._strangers, HANDSHAKE_S)
            for arrival in self._arrived:
                arrival.stream.close()
            self._arrived.clear()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while not self._closed:
            if not poller.poll(_TICK_S * 1000):
                continue
            try:
                sock = self._socket.accept()[0]
            except OSError:  # it has gone already, or there is no free descriptor now
                time.sleep(0.01)
                continue
            with self._changed:
                room = len(self._strangers) < MAX_STRANGERS and not self._closed
                if room:
                    self._strangers.add(sock)
            if not room:
                _shut(sock)
                sock.close()
                continue
            threading.Thread(
                target=self._greet, args=(sock,), name="sdk-greet", daemon=True
            ).start()

    def _greet(self, sock: socket.socket) -> None:
        arrival = None
        peer = "a closed connection"
        try:
            peer = str(Address(*sock.getpeername()[:2]))
            ends = time.monotonic() + HANDSHAKE_S
            stream = self._token.accept(sock, HANDSHAKE_S)
            hello = None
            if self._read_hello is not None:
                data = stream.receive_frame(ends - time.monotonic(), _MAX_HELLO)
                hello = self._read_hello(data)
            arrival = Arrival(stream, hello, peer)
        except Exception as error:  # whatever a stranger sends, the place is free again
            self._refuse(f"{peer}: {error}")
        with self._changed:
            self._strangers.discard(sock)
            if arrival is not None and not self._closed:
                self._arrived.append(arrival)
            else:
                _shut(sock)
                sock.close()
            self._changed.notify_all()

    def _refuse(self, why: str) -> None:
        if not self._closed:
            self.refused = [*self.refused[-9:], why]
            logger.warning("%s refused a connection: %s", self.address, why)


def _shut(sock: socket.socket) -> None:
    """End a connection, also where a forked child of this process has a copy of it."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def _bound(address: Address) -> socket.socket:
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(
            *address, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, protocol)
    except OSError as error:
        raise EngineDeadError(f"cannot listen at {address}: {error}") from error
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setblocking(False)
        made.bind(where)
        made.listen(MAX_STRANGERS)
    except OSError as error:
        with contextlib.suppress(OSError):
            made.close()
        raise EngineDeadError(
            f"cannot listen at {address}: {error.strerror}; expected a free port and an address "
            "of this machine"
        ) from error
    return made
