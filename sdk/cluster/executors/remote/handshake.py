"""Both ends of a new connection prove that they know the token, before anything else is read.

Challenge and response: each end sends a random nonce and answers with an HMAC-SHA256, keyed with
the token, of its role and of both greetings. So the token itself is never sent, an answer fits one
connection only, and an answer of one role is not one of the other. Then both derive the keys of
the connection from the token and the nonces (HKDF, RFC 5869). All messages have fixed sizes.

    listener -> MAGIC VERSION nonce
    worker   -> MAGIC VERSION nonce HMAC
    listener -> status HMAC
"""

from __future__ import annotations

import hmac
import os
import struct
import time

from sdk.cluster.executors.remote.wire import TAG, SessionKeys, SignedWire, Wire

#: Of what ranks on different hosts say to each other; also compared in the handshake.
PROTOCOL = 1
_MAGIC = b"embedlm\0"
_VERSION = struct.Struct("<H")
_NONCE = 32
_HELLO = len(_MAGIC) + _VERSION.size + _NONCE
_REFUSED, _ACCEPTED = b"\0", b"\1"


class HandshakeError(OSError):
    """The other end is not one of ours, has another protocol version, or does not know the token.

    ``is_token``: it is the token.
    """

    def __init__(self, message: str, *, is_token: bool = False) -> None:
        super().__init__(message)
        self.is_token = is_token


def answer_handshake(wire: Wire, token: bytes, limit_s: float) -> SignedWire:
    """The listener's part, in ``limit_s`` seconds. :raises HandshakeError: see the class."""
    deadline = time.monotonic() + limit_s
    own = _hello()
    wire.send(own, limit_s)
    theirs = bytes(wire.receive(_HELLO, deadline - time.monotonic()))
    _check_hello(theirs)
    proof = bytes(wire.receive(TAG, deadline - time.monotonic()))
    if not hmac.compare_digest(proof, _proof(token, b"worker", own, theirs)):
        wire.send(_REFUSED + bytes(TAG), deadline - time.monotonic())
        raise HandshakeError("it has a wrong token", is_token=True)
    wire.send(
        _ACCEPTED + _proof(token, b"listener", own, theirs), max(deadline - time.monotonic(), 0.1)
    )
    worker, listener = _session_keys(token, own, theirs)
    return SignedWire(wire, SessionKeys(send=listener, receive=worker))


def open_handshake(wire: Wire, token: bytes, limit_s: float) -> SignedWire:
    """The connecting end's part, in ``limit_s`` seconds. :raises HandshakeError: see the class."""
    deadline = time.monotonic() + limit_s
    theirs = bytes(wire.receive(_HELLO, limit_s))
    _check_hello(theirs)
    own = _hello()
    wire.send(own + _proof(token, b"worker", theirs, own), limit_s)
    answer = bytes(wire.receive(1 + TAG, deadline - time.monotonic()))
    if answer[:1] != _ACCEPTED:
        raise HandshakeError("it refuses the token: both ends need the same one", is_token=True)
    if not hmac.compare_digest(answer[1:], _proof(token, b"listener", theirs, own)):
        raise HandshakeError("it does not know the token", is_token=True)
    worker, listener = _session_keys(token, theirs, own)
    return SignedWire(wire, SessionKeys(send=worker, receive=listener))


def _hello() -> bytes:
    return _MAGIC + _VERSION.pack(PROTOCOL) + os.urandom(_NONCE)


def _check_hello(hello: bytes) -> None:
    if hello[: len(_MAGIC)] != _MAGIC:
        raise HandshakeError("it is not embedlm")
    (version,) = _VERSION.unpack_from(hello, len(_MAGIC))
    if version != PROTOCOL:
        raise HandshakeError(f"it has protocol version {version}, expected {PROTOCOL}")


def _proof(token: bytes, role: bytes, listener: bytes, worker: bytes) -> bytes:
    return hmac.digest(token, b"embedlm " + role + b"\0" + listener + worker, "sha256")


def _session_keys(token: bytes, listener: bytes, worker: bytes) -> tuple[bytes, bytes]:
    """The keys of what the worker and what the listener sends: HKDF with the greetings as salt."""
    info = b"embedlm session"
    secret = hmac.digest(listener + worker, token, "sha256")
    first = hmac.digest(secret, info + b"\1", "sha256")
    return first, hmac.digest(secret, first + info + b"\2", "sha256")
