"""Hands over through TCP, to any machine in a network that both sides trust.

Both sides prove that they know a token before the first frame, by HMAC-SHA-256 over two nonces, so
neither sends it. What follows has checksums but is not encrypted: whoever can read or change
packets of the network can read prompts and change keys and values.
"""

from __future__ import annotations

import hmac
import os
import socket
import time

from sdk.api.errors import RequestError, TransferError
from sdk.cluster.transfer.connector import Offer
from sdk.cluster.transfer.stream import (
    FramedReceiving,
    FramedSending,
    FrameStream,
    OpenStreams,
    accepted,
    checked_seconds,
    close_listening,
)
from sdk.quant.safe_repr import safe_repr

_HELLO = b"EMBEDKV1"
_NONCE = _MAC = 32
_LEAST_TOKEN = 16
#: Seconds that an unknown side gets to prove that it knows the token.
_HANDSHAKE_S = 5.0
#: Seconds that connecting may take. The system of the receiver does it, however busy that is.
_CONNECT_S = 5.0
_BACKLOG = 16


class TcpConnector:
    """Sends to ``host:port``, the address of a :class:`TcpListener` with the same ``token``.

    ``timeout``: seconds for each frame. Steps of the sender's engine must not take longer. Between
    them a sender without news says every 5 s that it waits. A side that dies is noticed at once.
    """

    def __init__(self, token: str, *, timeout: float = 120.0) -> None:
        self._secret = _secret(token)
        self._timeout = checked_seconds(timeout)
        self._streams = OpenStreams()

    def open(self, offer: Offer, destination: str) -> FramedSending:
        """See :class:`sdk.cluster.transfer.connector.KVConnector`."""
        address = _host_port(destination)
        try:
            sock = socket.create_connection(address, min(self._timeout, _CONNECT_S))
        except OSError as error:
            raise TransferError(f"{destination}: no connection: {error}") from error
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = _Connecting(sock, self._timeout, self._secret)
        return FramedSending(self._streams.added(stream), offer)

    def close(self) -> None:
        """See the protocol."""
        self._streams.close()


class TcpListener:
    """Receives at ``host``; port 0 takes a free one. See ``KVListener``."""

    def __init__(
        self, token: str, host: str = "127.0.0.1", port: int = 0, *, timeout: float = 120.0
    ) -> None:
        self._secret = _secret(token)
        self._timeout = checked_seconds(timeout)
        try:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        except (OSError, OverflowError, TypeError) as error:
            raise TransferError(f"cannot listen at {host}:{port}: {error}") from error
        name = self._socket.getsockname()
        self._address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"

    @property
    def address(self) -> str:
        """``host:port`` for senders."""
        return self._address

    def accept(self) -> FramedReceiving | None:
        """See the protocol."""
        sock = accepted(self._socket)
        if sock is None:
            return None
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return FramedReceiving(_Accepted(sock, self._timeout, self._secret))

    def close(self) -> None:
        """See the protocol."""
        close_listening(self._socket)


class _Accepted(FrameStream):
    """The receiver's end; it proves its knowledge last."""

    def __init__(self, sock: socket.socket, timeout: float, secret: bytes) -> None:
        super().__init__(sock, timeout)
        self._secret = secret

    def handshake(self) -> None:
        """HELLO and a nonce; the other's nonce and proof; our proof."""
        ends = time.monotonic() + min(_HANDSHAKE_S, self._timeout)
        own = os.urandom(_NONCE)
        self.send_bytes(_HELLO + own)
        theirs, proof = _split(self.read(_NONCE + _MAC, ends), _NONCE)
        _check(proof, _proof(self._secret, b"sender", own, theirs))
        self.send_bytes(_proof(self._secret, b"receiver", own, theirs))


class _Connecting(_Accepted):
    """The sender's end."""

    def handshake(self) -> None:
        """The same from the other side."""
        ends = time.monotonic() + self._timeout  # the receiver may be busy with others
        hello, theirs = _split(self.read(len(_HELLO) + _NONCE, ends), len(_HELLO))
        if hello != _HELLO:
            raise TransferError(f"expected {_HELLO!r}, found {hello!r}: not a receiver of ours")
        own = os.urandom(_NONCE)
        self.send_bytes(own + _proof(self._secret, b"sender", theirs, own))
        _check(bytes(self.read(_MAC, ends)), _proof(self._secret, b"receiver", theirs, own))


def _split(data: memoryview, at: int) -> tuple[bytes, bytes]:
    return bytes(data[:at]), bytes(data[at:])


def _proof(secret: bytes, role: bytes, receiver_nonce: bytes, sender_nonce: bytes) -> bytes:
    """Differs by role, so that a proof cannot be sent back to the side that made it."""
    return hmac.digest(secret, _HELLO + role + receiver_nonce + sender_nonce, "sha256")


def _check(found: bytes, expected: bytes) -> None:
    if not hmac.compare_digest(found, expected):
        raise TransferError("the other side has another token; pass the same one to both")


def _secret(token: str) -> bytes:
    if not isinstance(token, str) or len(token) < _LEAST_TOKEN:
        raise RequestError(
            f"token: expected a secret of at least {_LEAST_TOKEN} characters, such as "
            "secrets.token_hex(16)"
        )
    return token.encode("utf-8", "surrogatepass")


def _host_port(destination: str) -> tuple[str, int]:
    host, _, port = destination.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise TransferError(f"expected host:port, found {safe_repr(destination)}")
    return host.strip("[]"), int(port)
