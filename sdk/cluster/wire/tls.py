"""Encrypted streams between machines, for everybody who has the same token: TLS 1.3 in both
directions, with a key pair that is derived from the token (certificate.py).

Each end shows the certificate and proves that it has its key, and takes no other certificate. So
whoever does not have the token can neither listen nor connect, nor stand in between, and recorded
connections cannot be read later, even with the token (each has keys of its own, from an exchange of
Diffie and Hellman). docs/security.md says why this way.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections import deque
from typing import cast

import numpy as np

from sdk.api.errors import RequestError
from sdk.api.remote_workers import Address
from sdk.cluster.wire.certificate import key_pair
from sdk.cluster.wire.stream import READ_BYTES, Buffer, Stream, drop
from sdk.kernels.system import SYSTEM

try:
    import ssl
except ImportError:  # Python was built without OpenSSL: all but other machines works
    ssl = None  # type: ignore[assignment]

#: Bytes that are encrypted at a time: 16 records, and what one call sends.
_PIECE = 1 << 18
_RECORD = 1 << 14


class HandshakeError(OSError):
    """The other end is not one of ours, has another protocol, or does not know the token.

    ``is_token``: it is the token.
    """

    def __init__(self, message: str, *, is_token: bool = False) -> None:
        super().__init__(message)
        self.is_token = is_token


class SharedToken:
    """What both ends of encrypted streams know.

    :param protocol: what they say to each other, with its version: ends of different protocols do
        not connect, although they have the same token.
    :raises RequestError: this Python has no TLS 1.3.
    """

    def __init__(self, token: bytes, protocol: str) -> None:
        if ssl is None or not ssl.HAS_TLSv1_3:
            raise RequestError(
                "connections to other machines need Python's ssl module with TLS 1.3; use a Python "
                "that was built with OpenSSL 1.1.1 or later"
            )
        self._protocol = protocol
        pair = key_pair(token)
        self._certificate = pair.certificate
        self._contexts: dict[bool, ssl.SSLContext] = {}
        for server in (False, True):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the certificate is of the token, not of a host
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=pair.certificate_pem)
            _load_key(context, pair.certificate_pem + pair.key_pem)
            context.set_alpn_protocols([protocol])
            self._contexts[server] = context
        self._contexts[True].num_tickets = 0  # no connection resumes another one

    def connect(self, address: Address, limit_s: float) -> Stream:
        """A stream to ``address``. :raises HandshakeError: see the class."""
        ends = time.monotonic() + limit_s
        sock = socket.create_connection(address, timeout=limit_s)
        return self._secured(sock, False, ends - time.monotonic())

    def accept(self, sock: socket.socket, limit_s: float) -> Stream:
        """The stream of a connection that was accepted. :raises HandshakeError: see the class."""
        return self._secured(sock, True, limit_s)

    def _secured(self, sock: socket.socket, server: bool, limit_s: float) -> Stream:
        stream = SecureStream(sock, self._contexts[server], server)
        try:
            try:
                stream.shake_hands(limit_s)
            except ssl.SSLError as error:
                raise _explained(error) from error
            if stream.certificate != self._certificate:
                raise HandshakeError("it does not know the token", is_token=True)
            if stream.protocol != self._protocol:
                raise HandshakeError(
                    f"it does not speak {self._protocol}: it is another release of embedlm, or "
                    "serves something else with the same token"
                )
        except BaseException:
            stream.close()
            raise
        return stream


def _explained(error: ssl.SSLError) -> HandshakeError:
    """What went wrong with the other end."""
    reason = error.reason or ""
    if isinstance(error, ssl.SSLCertVerificationError):
        return HandshakeError("it has another token: both ends need the same one", is_token=True)
    if "UNKNOWN_CA" in reason or "DECRYPT_ERROR" in reason or "BAD_CERTIFICATE" in reason:
        return HandshakeError("it refuses the token: it has another one", is_token=True)
    if "PEER_DID_NOT_RETURN_A_CERTIFICATE" in reason:
        return HandshakeError("it does not know the token", is_token=True)
    return HandshakeError(f"it is not embedlm, or not this protocol ({reason or error})")


def _load_key(context: ssl.SSLContext, text: str) -> None:
    """``ssl`` reads keys from files only: from one in memory where there are such files."""
    with SYSTEM.hidden_file(text) as name:
        context.load_cert_chain(name)


class SecureStream(Stream):
    """A stream through TLS.

    OpenSSL works on memory here, not on the socket: so waits have deadlines as without it, one
    thread can send while another one receives (it allows only one call at a time), and a large
    message takes a call of the system for 256 KiB instead of two for each record of 16 KiB.
    """

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, server: bool) -> None:
        super().__init__(sock)
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._lock = threading.Lock()  # of the three
        self._encrypted: deque[memoryview] = deque()
        self._cipher = np.empty(READ_BYTES, dtype=np.uint8).data

    @property
    def certificate(self) -> bytes | None:
        """That of the other end, after the handshake."""
        return self._tls.getpeercert(binary_form=True)

    @property
    def protocol(self) -> str | None:
        """What both ends speak, after the handshake."""
        return self._tls.selected_alpn_protocol()

    def shake_hands(self, limit_s: float) -> None:
        """Agree on keys. :raises ssl.SSLError: the other end is none of ours."""
        ends = time.monotonic() + limit_s
        while True:
            try:
                try:
                    self._tls.do_handshake()
                    return
                finally:  # also an alert, which tells the other end what is wrong
                    if self._outgoing.pending:
                        self._encrypted.append(memoryview(self._outgoing.read()))
                        self._send_encrypted(ends)
            except ssl.SSLWantReadError:
                self._await_more(ends)

    def _send_encrypted(self, ends: float) -> None:
        while not self.flush():
            if not self.wait(select.POLLOUT, ends - time.monotonic()):
                raise TimeoutError("the other side does not read")

    def _await_more(self, ends: float) -> None:
        while True:
            try:
                self._receive_some()
                return
            except BlockingIOError:
                if not self.wait(select.POLLIN, ends - time.monotonic()):
                    raise TimeoutError("the other side sends nothing") from None

    def _receive_some(self) -> None:
        """Let OpenSSL have what has come. :raises BlockingIOError: nothing has."""
        count = super().read_into(self._cipher)
        with self._lock:
            self._incoming.write(self._cipher[:count])

    def queue(self, *buffers: Buffer) -> None:
        """See the base class."""
        if len(buffers) > 1 and sum(map(len, buffers)) <= _RECORD:
            buffers = (b"".join(buffers),)
        super().queue(*buffers)

    @property
    def has_queued(self) -> bool:
        """See the base class."""
        return bool(self._queued or self._encrypted)

    def flush(self) -> bool:
        """See the base class."""
        queued, encrypted = self._queued, self._encrypted
        while queued or encrypted:
            if not encrypted:
                encrypted.append(self._encrypt())
            try:
                drop(encrypted, self.socket.send(encrypted[0]))
            except BlockingIOError:
                return False
        return True

    def _encrypt(self) -> memoryview:
        """The next queued bytes, up to a piece, as records."""
        with self._lock:
            room = _PIECE
            while room and self._queued:
                piece = self._queued[0][:room]
                done = self._tls.write(piece)  # at most one record
                drop(self._queued, done)
                room -= done
            return memoryview(self._outgoing.read())

    def read_into(self, view: memoryview) -> int:
        """See the base class."""
        while not (count := self._decrypt(view)):
            self._receive_some()
        return count

    def _decrypt(self, view: memoryview) -> int:
        """Fill ``view`` with what has come; 0: there is no complete record."""
        count = 0
        with self._lock:
            try:  # without bytes OpenSSL would raise an exception, which takes 5 us
                while count < len(view) and (self._incoming.pending or self._tls.pending()):
                    found = cast(int, self._tls.read(len(view) - count, view[count:]))
                    if not found:
                        raise EOFError("the other side has closed the connection")
                    count += found
            except ssl.SSLWantReadError:
                pass
        return count
