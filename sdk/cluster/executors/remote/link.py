"""The control connection between rank 0 and a worker on another host.

A thread reads it and says twice a second that this end is alive, so a rank in a long computation
is not taken for a dead one. An end that is silent for four seconds is lost: its process was
stopped, its machine is down, or the network is cut. The silence is counted in ticks instead of
read from the clock, so a process that was itself suspended does not give up the others at once.
"""

from __future__ import annotations

import select
import threading
import time
from collections import deque
from collections.abc import Callable

from sdk.cluster.wire.stream import Buffer, Stream

_TICK_S = 0.5
#: Ticks without a byte from the other end.
_SILENT_TICKS = 8
SILENCE_S = _TICK_S * _SILENT_TICKS
_BEAT, _MESSAGE, _BYE = b"b", b"m", b"e"


class LinkLost(OSError):
    """The other end is gone, or cannot be reached; the message says how that was noticed."""


class Link:
    """Messages in both directions, until one end closes or is lost.

    :param on_lost: called once, by the link's thread, when the other end is gone.
    """

    def __init__(self, stream: Stream, peer: str, on_lost: Callable[[], object]) -> None:
        self.peer = peer
        self._stream, self._on_lost = stream, on_lost
        self._sending = threading.Lock()
        self._arrived: deque[memoryview] = deque()
        self._changed = threading.Condition()
        self._lost: str | None = None
        self._closed = False
        self._next_beat = 0.0
        self._thread = threading.Thread(target=self._read, name="sdk-remote-link", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> str | None:
        """How the other end was lost, or ended; None while it is there."""
        return self._lost

    def send(self, message: Buffer, limit_s: float) -> None:
        """:raises LinkLost: the other end is gone or does not read for ``limit_s`` seconds."""
        try:
            with self._sending:
                self._stream.send_frame(_MESSAGE, message, limit_s=limit_s)
        except (OSError, EOFError) as error:
            self.wait_closed(_TICK_S)  # the thread knows more
            raise LinkLost(self._lost or str(error)) from error

    def receive(self, limit_s: float) -> memoryview | None:
        """The next message; None after ``limit_s`` seconds.

        :raises LinkLost: the other end is gone, and all its messages were received.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._arrived or self._lost is not None, limit_s)
            if self._arrived:
                return self._arrived.popleft()
            if self._lost is not None:
                raise LinkLost(self._lost)
        return None

    def wait_closed(self, limit_s: float) -> bool:
        """Wait until the other end has closed."""
        with self._changed:
            return self._changed.wait_for(lambda: self._lost is not None, limit_s)

    def close(self) -> None:
        """Say goodbye, end the connection and the thread. Idempotent.

        What was sent before arrives: waits until the other end has received it and has closed as
        well, but at most ``SILENCE_S`` seconds each to say goodbye and for its answer.
        """
        self._closed = True
        joins = self._thread is not threading.current_thread()
        if joins and self._lost is None and self._say_goodbye():
            # The thread reads meanwhile. A socket that is closed while bytes arrive resets the
            # connection, and what the other end has not received yet is lost (RFC 1122, 4.2.2.13).
            self.wait_closed(SILENCE_S)
        self._stream.shut()
        if joins:
            self._thread.join()
            self._stream.close()

    def _say_goodbye(self) -> bool:
        if not self._sending.acquire(timeout=_TICK_S):
            return False  # another thread sends, and the other end does not read
        try:
            self._stream.send_frame(_BYE, limit_s=SILENCE_S)
            self._stream.end_sending()
        except OSError:
            return False
        finally:
            self._sending.release()
        return True

    def _read(self) -> None:
        try:
            reason = self._read_messages()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            reason = "it has ended: the connection was closed"
        except (OSError, ValueError) as error:
            reason = f"the connection failed: {error}"
        with self._changed:
            self._lost = reason
            self._changed.notify_all()
        self._stream.shut()
        self._on_lost()

    def _read_messages(self) -> str:
        silent = 0
        while True:
            self._beat()
            try:
                frames = self._stream.read_frames()
            except BlockingIOError:
                silent += 1
                if self._stream.wait(select.POLLIN, _TICK_S):
                    silent = 0
                elif silent >= _SILENT_TICKS:
                    return f"no sign of life for {SILENCE_S:g} s"
                continue
            for frame in frames:
                kind = bytes(frame[:1])
                if kind == _BYE:
                    return "it has ended"
                if kind == _MESSAGE:
                    with self._changed:
                        self._arrived.append(memoryview(frame)[1:])
                        self._changed.notify_all()

    def _beat(self) -> None:
        """Every tick, unless a message is on its way, which shows as much. Never waits for the
        other end: both threads could wait for each other."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + _TICK_S
        if self._sending.acquire(blocking=False):
            try:
                if not self._closed and self._stream.wait(select.POLLOUT, 0.0):
                    self._stream.send_frame(_BEAT, limit_s=SILENCE_S)
            finally:
                self._sending.release()
