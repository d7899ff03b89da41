"""Where rank 0 waits for the others: connections that know the token, with their first message."""

from __future__ import annotations

import contextlib
import logging
import select
import socket
import threading
import time
from collections import deque
from typing import Any, NamedTuple

from sdk.api.errors import EngineDeadError
from sdk.api.remote_workers import Address
from sdk.cluster.executors.remote.codec import Codec, CodecError
from sdk.cluster.executors.remote.handshake import HandshakeError, answer_handshake
from sdk.cluster.executors.remote.wire import SignedWire, Wire

logger = logging.getLogger("sdk")

#: Connections that have not proved yet that they know the token, and their time for it.
MAX_STRANGERS = 16
HANDSHAKE_S = 5.0
_MAX_HELLO = 1 << 16
_TICK_S = 0.25


class Arrival(NamedTuple):
    """A connection that knows the token, its first message, and the address it came from."""

    signed: SignedWire
    hello: Any
    peer: str


class Listener:
    """Listens at one address until :meth:`close`. Strangers are refused and logged.

    :raises EngineDeadError: the address cannot be used, for example because it is taken.
    """

    def __init__(self, address: Address, token: bytes, codec: Codec) -> None:
        self._token, self._codec = token, codec
        #: Why connections were refused.
        self.refused: list[str] = []
        self._arrived: deque[Arrival] = deque()
        self._changed = threading.Condition()
        self._strangers: set[Wire] = set()
        self._closed = False
        self._socket = _bound(address)
        self.address = Address(*self._socket.getsockname()[:2])
        self._thread = threading.Thread(target=self._run, name="sdk-remote-listen", daemon=True)
        self._thread.start()

    def accept(self, limit_s: float) -> Arrival | None:
        """The next arrival; None after ``limit_s`` seconds.

        :raises EngineDeadError: the listener was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._closed, limit_s)
            if self._closed:
                raise EngineDeadError(f"{self.address} no longer waits for workers")
            return self._arrived.popleft() if self._arrived else None

    def close(self) -> None:
        """Stop listening and end the connections that nobody took. Idempotent."""
        with self._changed:
            if self._closed:
                return
            self._closed = True
            self._changed.notify_all()
            for wire in self._strangers:
                wire.shut()
        self._thread.join()
        self._socket.close()
        with self._changed:
            self._changed.wait_for(lambda: not self._strangers, HANDSHAKE_S)
            for arrival in self._arrived:
                arrival.signed.wire.close()
            self._arrived.clear()

    def _run(self) -> None:
        poller = select.poll()
        poller.register(self._socket, select.POLLIN)
        while not self._closed:
            if not poller.poll(_TICK_S * 1000):
                continue
            try:
                wire = Wire(self._socket.accept()[0])
            except OSError:  # it has gone already, or there is no free descriptor now
                time.sleep(0.01)
                continue
            with self._changed:
                room = len(self._strangers) < MAX_STRANGERS and not self._closed
                if room:
                    self._strangers.add(wire)
            if not room:
                wire.close()
                continue
            threading.Thread(
                target=self._greet, args=(wire,), name="sdk-remote-greet", daemon=True
            ).start()

    def _greet(self, wire: Wire) -> None:
        arrival = None
        peer = wire.peer
        try:
            signed = answer_handshake(wire, self._token, HANDSHAKE_S)
            hello = self._codec.decode(signed.receive(HANDSHAKE_S, _MAX_HELLO))
            arrival = Arrival(signed, hello, peer)
        except HandshakeError as error:
            self._refuse(f"{peer}: {error}")
        except (OSError, EOFError, CodecError) as error:
            self._refuse(f"{peer}: {error}")
        with self._changed:
            self._strangers.discard(wire)
            if arrival is not None and not self._closed:
                self._arrived.append(arrival)
            else:
                wire.close()
            self._changed.notify_all()

    def _refuse(self, why: str) -> None:
        if not self._closed:
            self.refused = [*self.refused[-9:], why]
            logger.warning("%s refused a connection: %s", self.address, why)


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
