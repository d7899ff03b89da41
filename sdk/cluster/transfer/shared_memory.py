"""Hands over through shared memory, between processes of one user on one machine.

Frames go over a Unix socket, their payloads through a ring in a memory file (``memfd``) that the
sender makes and passes by descriptor: it writes each payload once, and the receiver reads pages'
rows where they lie. Nothing has a name in a file system, so nothing remains after a crash. Both
sides ask the kernel who the other is. Linux only.
"""

from __future__ import annotations

import mmap
import os
import secrets
import select
import socket
import struct
import time
from contextlib import suppress

import numpy as np

from sdk.api.errors import RequestError, TransferError
from sdk.cluster.transfer.connector import Offer
from sdk.cluster.transfer.messages import (
    Bytes,
    Frame,
    Header,
    Kind,
    pack_count,
    pack_header,
    read_count,
)
from sdk.cluster.transfer.stream import (
    FramedReceiving,
    FramedSending,
    FrameStream,
    OpenStreams,
    checked_seconds,
)
from sdk.cluster.wire.stream import Stream
from sdk.kernels.system import SYSTEM
from sdk.quant.safe_repr import safe_repr

_PREFIX = "embedlm-kv-"
_HELLO = struct.Struct("<8sQ")
_MAGIC = b"EMBEDKVS"
_LEAST_RING, MOST_RING = 1 << 20, 1 << 34
_BACKLOG = 16
_CLOSED = "the connection was closed"


class SharedMemoryConnector:
    """Sends to the address of a :class:`SharedMemoryListener` of the same user.

    ``ring_bytes``: of the memory between the two, for each hand-over. Two groups must fit: two
    pages of all layers at least. If the sides differ in page size, these are pages of the least
    common multiple.
    """

    def __init__(self, *, ring_bytes: int = 32 << 20, timeout: float = 120.0) -> None:
        if not isinstance(ring_bytes, int) or not _LEAST_RING <= ring_bytes <= MOST_RING:
            raise RequestError(
                f"ring_bytes: expected {_LEAST_RING} to {MOST_RING}, found {safe_repr(ring_bytes)}"
            )
        _check_system()
        self._ring_bytes = ring_bytes
        self._timeout = checked_seconds(timeout)
        self._streams = OpenStreams()

    def open(self, offer: Offer, destination: str) -> FramedSending:
        """See :class:`sdk.cluster.transfer.connector.KVConnector`.

        :raises TransferError: also if the ring is too small for the pages of both sides.
        """
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self._timeout)
            sock.connect("\0" + destination)
            stream = _SenderRing(sock, self._timeout, self._ring_bytes)
        except (OSError, ValueError) as error:
            sock.close()
            raise TransferError(f"{destination}: no connection: {error}") from error
        sending = FramedSending(self._streams.added(stream), offer)
        # The receiver frees whole groups. One of up to half the ring always fits, wherever it
        # begins, and even if the end of the ring is skipped because a part does not fit there.
        group = sending.unit // offer.spec.page_size * offer.spec.page_bytes
        if 2 * group > self._ring_bytes:
            sending.close()
            raise _too_small(f"a group of {sending.unit} tokens", group, self._ring_bytes)
        sending.most_bytes = min(sending.most_bytes, self._ring_bytes // 2)
        return sending

    def close(self) -> None:
        """See the protocol."""
        self._streams.close()


class SharedMemoryListener:
    """Receives from processes of this user. See ``KVListener``."""

    def __init__(self, *, timeout: float = 120.0) -> None:
        _check_system()
        self._timeout = checked_seconds(timeout)
        self._address = _PREFIX + secrets.token_hex(16)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind("\0" + self._address)
            self._socket.listen(_BACKLOG)
        except OSError as error:
            self._socket.close()
            raise TransferError(f"cannot listen at a Unix socket: {error}") from error

    @property
    def address(self) -> str:
        """A random name of the abstract namespace, for senders."""
        return self._address

    def accept(self) -> FramedReceiving | None:
        """See the protocol."""
        sock = accepted(self._socket)
        return None if sock is None else FramedReceiving(_ReceiverRing(sock, self._timeout))

    def close(self) -> None:
        """See the protocol."""
        close_listening(self._socket)


class _SenderRing(FrameStream):
    """The sender's end. Positions count all bytes that were ever placed in the ring."""

    def __init__(self, sock: socket.socket, timeout: float, size: int) -> None:
        super().__init__(Stream(sock), timeout)
        self._size = size
        self._file = SYSTEM.sealed_memory(size)
        try:
            # of numpy, which lets other threads run while it copies
            self._ring = np.frombuffer(mmap.mmap(self._file, size), dtype=np.uint8)
        except BaseException:
            os.close(self._file)
            raise
        self._next = self._freed = 0
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def handshake(self) -> None:
        """Pass the memory to a process of the same user."""
        try:
            _check_user(self._stream.socket)
            socket.send_fds(self._stream.socket, [_HELLO.pack(_MAGIC, self._size)], [self._file])
        except OSError as error:
            raise TransferError(f"the connection is lost: {error}") from error

    def send(self, kind: Kind, head: Bytes = b"", payload: Bytes = b"") -> None:
        """See the base class."""
        position = 0
        if len(payload):
            position = self._place(len(payload))
            ring, at = self._ring, position % self._size  # another thread may close meanwhile
            if not len(ring):
                raise TransferError(_CLOSED)
            ring[at : at + len(payload)] = np.frombuffer(payload, dtype=np.uint8)
        self.send_bytes(pack_header(kind, head, payload, position) + bytes(head))

    def _place(self, count: int) -> int:
        """Room for this many bytes in a row; waits until the receiver has freed it."""
        if 2 * count > self._size:
            raise _too_small("a part", count, self._size)
        at = self._next % self._size
        position = self._next + (self._size - at if at + count > self._size else 0)
        # also without need, so that the receiver never waits for this side to read
        while position + count - self._freed > self._size or self._poll.poll(0):
            self._take_freed(super().expect(Kind.FREE))
        self._next = position + count
        return position

    def _take_freed(self, frame: Frame) -> None:
        position = read_count(frame)
        if not self._freed <= position <= self._next:
            raise TransferError(
                f"the receiver freed byte {position}; expected {self._freed} to {self._next}"
            )
        self._freed = position

    def expect(self, *kinds: Kind) -> Frame:
        """See the base class; notes what was freed meanwhile."""
        while (frame := super().expect(Kind.FREE, *kinds)).kind is Kind.FREE:
            self._take_freed(frame)
        return frame

    def close(self) -> None:
        """See the base class. The memory lives until the last view of it is gone."""
        super().close()
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)
        self._ring = np.empty(0, dtype=np.uint8)


class _ReceiverRing(FrameStream):
    """The receiver's end."""

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        super().__init__(Stream(sock), timeout)
        self._ring = memoryview(b"")
        self._seen = self._freed = 0

    def handshake(self) -> None:
        """Map the memory of a process of the same user."""
        try:
            _check_user(self._stream.socket)
            if not self._stream.wait(select.POLLIN, self._timeout):
                raise TimeoutError("the other side sends nothing")
            data, files, _, _ = socket.recv_fds(
                self._stream.socket, _HELLO.size, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as error:
            raise TransferError(f"the connection is lost: {error}") from error
        try:
            if len(data) != _HELLO.size or len(files) != 1:
                raise TransferError("expected shared memory, found none: not a sender of ours")
            self._ring = _mapped(files[0], *_HELLO.unpack(data))
        finally:
            for file in files:
                os.close(file)

    def _payload(self, header: Header, ends: float) -> memoryview:
        ring = self._ring  # another thread may close meanwhile
        count, size = header.payload_bytes, len(ring)
        if not count:
            return memoryview(b"")
        if not size:
            raise TransferError(_CLOSED)
        at = header.position % size
        if header.position < self._seen or at + count > size:
            raise TransferError(
                f"a payload of {count} bytes at {header.position} does not fit into a ring of "
                f"{size} after {self._seen}"
            )
        self._seen = header.position + count
        return ring[at : at + count]

    def release(self) -> None:
        """See the base class."""
        if self._seen > self._freed:
            self._freed = self._seen
            self.send(Kind.FREE, pack_count(self._freed))

    def close(self) -> None:
        """See the base class. The memory lives until the last view of it is gone."""
        super().close()
        self._ring = memoryview(b"")


def accepted(listening: socket.socket) -> socket.socket | None:
    """The next connection; ``None`` after :func:`close_listening`."""
    while True:
        try:
            return listening.accept()[0]
        except ConnectionError:  # it was gone before it was accepted
            continue
        except OSError:
            if listening.fileno() < 0 or not _is_listening(listening):
                return None
            time.sleep(0.1)  # out of descriptors: others may be closed


def _is_listening(sock: socket.socket) -> bool:
    with suppress(OSError):
        return bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def close_listening(sock: socket.socket) -> None:
    """Close a listening socket, also while another thread waits in ``accept``."""
    with suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()


def _too_small(what: str, count: int, size: int) -> TransferError:
    return TransferError(
        f"ring_bytes: {what} of {count} bytes needs a ring of {2 * count}, found {size}; pass a "
        "larger ring_bytes to the connector"
    )


def _mapped(file: int, magic: bytes, size: int) -> memoryview:
    try:
        is_sealed = SYSTEM.is_sealed(file)
    except OSError as error:
        raise TransferError(f"expected a memory file, found another one: {error}") from error
    found = os.fstat(file).st_size
    if magic != _MAGIC or size != found or not _LEAST_RING <= size <= MOST_RING:
        raise TransferError(f"expected a ring of {size} bytes, found {found} in {magic!r}")
    if not is_sealed:
        raise TransferError("the sender's memory is not sealed, so it could be cut")
    try:
        return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise TransferError(f"the sender's memory cannot be mapped: {error}") from error


def _check_system() -> None:
    if not SYSTEM.can_seal:
        raise RequestError(
            "shared memory between engines needs Linux and a Python with os.memfd_create, this is "
            f"{SYSTEM.name}: use TcpConnector and TcpListener"
        )


def _check_user(sock: socket.socket) -> None:
    try:
        SYSTEM.check_peer(sock)
    except PermissionError as error:
        raise TransferError(str(error)) from error
