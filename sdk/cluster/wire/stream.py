"""A connected socket with deadlines, and the frames on it. All messages between processes use it.

Sockets never block and every wait is a ``poll`` with a deadline: a socket has only one timeout, but
two threads may use it, and a loop may serve many. A frame is eight bytes of length, then as many
bytes. tls.py has the same for connections between machines.
"""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import time
from collections import deque

import numpy as np

Buffer = bytes | bytearray | memoryview
#: 256 MiB hold a plan of 30 million prompt tokens: more than any step has, and far less than a
#: length read from the wrong bytes.
MAX_FRAME = 1 << 28
#: Bytes that are read in one go: memory grows only with what has arrived.
READ_BYTES = 1 << 18
LENGTH = struct.Struct("<Q")
_BUFFERS = 64  # sent in one call
_NO_SIGNAL = getattr(socket, "MSG_NOSIGNAL", 0)


class FrameError(OSError):
    """A frame is longer than its reader takes."""


def frame(data: Buffer) -> bytes:
    """``data`` as one frame. :raises ValueError: it is larger than ``MAX_FRAME``."""
    return frame_header(len(data)) + data


def frame_header(size: int) -> bytes:
    """What comes before ``size`` bytes. :raises ValueError: see :func:`frame`."""
    if size > MAX_FRAME:
        raise ValueError(f"message: expected at most {MAX_FRAME} bytes, found {size}")
    return LENGTH.pack(size)


class Stream:
    """One end of a connection. Raises EOFError, TimeoutError and other OSErrors.

    One thread sends and one receives at a time; :meth:`queue`, :meth:`shut` are for any thread.
    ``limit_s``: seconds, or ``None`` for no limit.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = sock
        self._queued: deque[memoryview] = deque()
        self._frames = FrameReader()
        # kept: memory of this size is mapped and given back for every message otherwise
        self._buffer = np.empty(READ_BYTES, dtype=np.uint8).data

    # ---- without waiting -------------------------------------------------------------------------

    def queue(self, *buffers: Buffer) -> None:
        """Let the next calls of :meth:`flush` send these bytes, which must not change until then.

        From any thread, if all the bytes are one buffer.
        """
        self._queued.extend(memoryview(buffer) for buffer in buffers if len(buffer))

    @property
    def has_queued(self) -> bool:
        """Whether :meth:`flush` has something to send."""
        return bool(self._queued)

    def flush(self) -> bool:
        """Send what the socket takes now; whether that was all."""
        queued = self._queued
        while queued:
            count = min(len(queued), _BUFFERS)
            try:
                if count == 1:
                    sent = self.socket.send(queued[0], _NO_SIGNAL)
                else:
                    batch = [queued[index] for index in range(count)]
                    sent = self.socket.sendmsg(batch, (), _NO_SIGNAL)
            except BlockingIOError:
                return False
            drop(queued, sent)
        return True

    def read_into(self, view: memoryview) -> int:
        """Fill the front of ``view`` with what has come; the number of bytes.

        :raises BlockingIOError: nothing has come.
        """
        count = self.socket.recv_into(view)
        if not count:
            raise EOFError("the other side has closed the connection")
        return count

    def read_some(self) -> memoryview:
        """All that is here, up to about ``READ_BYTES``; valid until the next call. Raises as
        :meth:`read_into` does.
        """
        return self._buffer[: self.read_into(self._buffer)]

    def read_frames(self, most: int = MAX_FRAME) -> list[bytearray]:
        """The frames that are complete after one :meth:`read_some`; do not mix this with
        :meth:`receive`, because it reads ahead. Raises as :meth:`read_into` does.

        :raises FrameError: a frame is longer than ``most``.
        """
        self._frames.feed(self.read_some())
        return self._frames.complete(most)

    # ---- with waiting ----------------------------------------------------------------------------

    def wait(self, event: int, limit_s: float | None) -> bool:
        """Wait until the socket is ready for ``event`` of ``select.poll``, or has failed."""
        descriptor = self.socket.fileno()
        if descriptor < 0:  # another thread has closed it
            raise ConnectionError("the connection was closed")
        poller = select.poll()  # select.select() cannot take descriptors above 1023
        poller.register(descriptor, event)
        return bool(poller.poll(None if limit_s is None else max(limit_s, 0.0) * 1000))

    def send(self, *buffers: Buffer, limit_s: float | None = None) -> None:
        """Send all of these bytes within ``limit_s`` seconds."""
        self.queue(*buffers)
        ends = _deadline(limit_s)
        while not self.flush():
            if not self.wait(select.POLLOUT, _left(ends)):
                raise TimeoutError("the other side does not read")

    def receive(self, count: int, limit_s: float | None = None) -> memoryview:
        """Exactly ``count`` bytes, within ``limit_s`` seconds."""
        # not zeroed, so the memory of bytes that never arrive is not taken
        data = np.empty(count, dtype=np.uint8).data
        at, ends = 0, _deadline(limit_s)
        while at < count:
            try:
                at += self.read_into(data[at:])
            except BlockingIOError:
                if not self.wait(select.POLLIN, _left(ends)):
                    raise TimeoutError("the other side sends nothing") from None
        return data

    def send_frame(self, *buffers: Buffer, limit_s: float | None = None) -> None:
        """Send these bytes as one frame. :raises ValueError: they are more than ``MAX_FRAME``."""
        self.send(frame_header(sum(map(len, buffers))), *buffers, limit_s=limit_s)

    def receive_frame(self, limit_s: float | None = None, most: int = MAX_FRAME) -> memoryview:
        """The next frame. :raises FrameError: it is longer than ``most``."""
        ends = _deadline(limit_s)
        size = frame_size(self.receive(LENGTH.size, limit_s), most)
        return self.receive(size, _left(ends))

    # ---- the end ---------------------------------------------------------------------------------

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


class FrameReader:
    """Cuts what arrives into frames."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, data: Buffer) -> None:
        """More bytes have come."""
        self._received += data

    def complete(self, most: int) -> list[bytearray]:
        """The frames that are complete. :raises FrameError: one is longer than ``most``."""
        received, begin, found = self._received, 0, []
        while len(received) - begin >= LENGTH.size:
            end = begin + LENGTH.size
            end += frame_size(received[begin:end], most)
            if len(received) < end:
                break
            found.append(received[begin + LENGTH.size : end])
            begin = end
        del received[:begin]
        return found


def frame_size(header: Buffer, most: int) -> int:
    """The length that a frame has by its header. :raises FrameError: it is above ``most``."""
    (size,) = LENGTH.unpack(header)
    if size > most:
        raise FrameError(f"message: expected at most {most} bytes, found {size}")
    return int(size)


def drop(buffers: deque[memoryview], count: int) -> None:
    """Remove the first ``count`` bytes, which were sent."""
    while count:
        first = buffers[0]
        if count < len(first):
            buffers[0] = first[count:]
            return
        count -= len(first)
        buffers.popleft()


def _deadline(limit_s: float | None) -> float | None:
    return None if limit_s is None else time.monotonic() + limit_s


def _left(ends: float | None) -> float | None:
    return None if ends is None else ends - time.monotonic()
