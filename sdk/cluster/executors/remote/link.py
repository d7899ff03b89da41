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

from sdk.cluster.executors.remote.wire import Buffer, SignedWire

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

    def __init__(self, signed: SignedWire, peer: str, on_lost: Callable[[], object]) -> None:
        self.peer = peer
        self._signed, self._on_lost = signed, on_lost
        self._sending = threading.Lock()
        self._arrived: deque[bytearray] = deque()
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
                self._signed.send(_MESSAGE + message, limit_s)
        except (OSError, EOFError) as error:
            self.wait_closed(_TICK_S)  # the thread knows more
            raise LinkLost(self._lost or str(error)) from error

    def receive(self, limit_s: float) -> bytearray | None:
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
        self._signed.wire.shut()
        if joins:
            self._thread.join()
            self._signed.wire.close()

    def _say_goodbye(self) -> bool:
        if not self._sending.acquire(timeout=_TICK_S):
            return False  # another thread sends, and the other end does not read
        try:
            self._signed.send(_BYE, SILENCE_S)
            self._signed.wire.end_sending()
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
        self._signed.wire.shut()
        self._on_lost()

    def _read_messages(self) -> str:
        silent = 0
        while True:
            self._beat()
            if not self._signed.wire.wait(select.POLLIN, _TICK_S):
                silent += 1
                if silent >= _SILENT_TICKS:
                    return f"no sign of life for {SILENCE_S:g} s"
                continue
            silent = 0
            message = self._signed.receive(SILENCE_S, meanwhile=self._beat)
            kind = bytes(message[:1])
            if kind == _BYE:
                return "it has ended"
            if kind == _MESSAGE:
                del message[:1]
                with self._changed:
                    self._arrived.append(message)
                    self._changed.notify_all()

    def _beat(self) -> None:
        """Every tick, unless a message is on its way, which shows as much. Never waits for the
        other end: both threads could wait for each other."""
        if time.monotonic() < self._next_beat:
            return
        self._next_beat = time.monotonic() + _TICK_S
        if self._sending.acquire(blocking=False):
            try:
                if not self._closed and self._signed.wire.wait(select.POLLOUT, 0.0):
                    self._signed.send(_BEAT, SILENCE_S)
            finally:
                self._sending.release()
