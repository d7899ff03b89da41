"""The processes of replicas: starting, messages, signs of life, replacing.

One thread moves the messages of all of them. What they mean is up to :class:`Events`.
"""

from __future__ import annotations

import itertools
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from sdk.api.errors import EngineDeadError
from sdk.cluster.replicas.messages import (
    Answer,
    Ended,
    Failed,
    Forked,
    Kill,
    Load,
    Lost,
    ModelRead,
    Prefilled,
    Progress,
    Ready,
    Role,
    Update,
    packed,
)
from sdk.cluster.replicas.parent_process import ParentProcess
from sdk.cluster.wire.local import Channel

logger = logging.getLogger("sdk")

#: A replica that gives no sign of life for so long is killed. It gives one every 0.5 s.
_SILENCE_S = 3.0
#: How often the thread looks for silent replicas.
_TICK_S = 0.25
#: A replica that was lost so often in a row before it was ready is not replaced again.
_MOST_STARTS = 3
#: Seconds that the start of a replica may take once the model is read.
_START_S = 600.0


class Events(Protocol):
    """What the thread tells; all methods must return soon."""

    def ready(self, number: int, message: Ready) -> None:
        """A replica runs, and is empty."""

    def updated(self, number: int, update: Update) -> None:
        """A replica has run a step."""

    def prefilled(self, number: int, message: Prefilled) -> None:
        """A hand-over has ended."""

    def answered(self, number: int, answer: Answer) -> None:
        """A call has ended."""

    def lost(self, number: int, reason: str) -> None:
        """A replica is gone. If it is replaced, it will be ready again."""

    def failed(self, error: EngineDeadError) -> None:
        """No replica is left, and none will be started."""


@dataclass
class _Replica:
    """A replica as it is known here. Only the thread changes it."""

    number: int
    role: Role
    channel: Channel | None = None
    launch: int = -1
    pid: int = 0
    is_ready: bool = False
    heard: float = 0.0
    is_cut: bool = False  # its connection was closed; its parent will say why
    starts: int = 0  # in a row without being ready
    is_due: bool = True  # to be started
    reason: str = ""  # why it was lost


class ReplicaProcesses:
    """A replica of the model that ``load`` names for each of ``roles``.

    The constructor returns when all of them run. ``report``: bytes that were read, and all.

    :raises EngineDeadError: a replica does not start; what the model's files raise in a load.
    """

    def __init__(
        self, roles: Sequence[Role], load: Load, events: Events, report: Callable[[int, int], None]
    ) -> None:
        self._load = load
        #: Replicas that run their steps together start together, and are lost together.
        self._in_lockstep = load.lockstep_redundant is not None
        self._events = events
        self._report = report
        self._launches = itertools.count()
        self.replicas = [_Replica(number, role) for number, role in enumerate(roles)]
        #: Replicas that were started because another one was lost.
        self.num_replaced = 0
        self.parent: ParentProcess | None = None
        self._is_loaded = False
        self._parent_starts = 0  # in a row without a replica that was ready
        self._is_over = False  # closed, or nothing is left to run
        self._error: Exception | None = None  # of the start
        self._thread: threading.Thread | None = None
        self._last_tick = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        try:
            self._start_parent()
            self._await_start()
            self._report = _no_report  # its time is over: later loads are nobody's progress
            self._thread = threading.Thread(target=self._loop, name="sdk-replicas", daemon=True)
            self._thread.start()
        except BaseException:
            self._release()
            raise

    @property
    def num_ready(self) -> int:
        """The replicas that run."""
        return sum(one.is_ready for one in self.replicas)

    def send(self, number: int, message: object) -> bool:
        """Send a message to a replica; ``False`` if it was lost. From any thread.

        :raises RequestError: the message is too large.
        """
        channel = self.replicas[number].channel
        if channel is None:
            return False
        channel.stream.queue(packed(message))
        self._wake()
        return True

    def close(self) -> None:
        """End all processes."""
        self._is_over = True
        self._wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._release()

    # ---- starting --------------------------------------------------------------------------------

    def _start_parent(self) -> None:
        self._is_loaded = False
        self._parent_starts += 1
        self.parent = ParentProcess(self._load)
        self._watch(self.parent.channel, self.parent)

    def _await_start(self) -> None:
        """Wait in the constructor until all replicas run."""
        while not all(one.is_ready for one in self.replicas):
            self._turn()
            if self._error is not None:
                raise self._error
            for one in self.replicas:
                if one.reason:
                    raise EngineDeadError(f"replica {one.number} did not start: {one.reason}")

    def _start_due(self) -> None:
        """Start the replicas that are to be started, if the model is read."""
        if self.parent is None or not self._is_loaded:
            return
        if self._in_lockstep and not all(one.is_due for one in self.replicas):
            return
        for one in self.replicas:
            if not one.is_due:
                continue
            one.launch, one.starts = next(self._launches), one.starts + 1
            try:
                one.channel = self.parent.fork(one.launch, one.role, one.number)
            except OSError as error:  # no descriptor is left, say: tried again soon
                one.reason = f"it cannot be started: {error}"
                self._expect_hope(one.reason)
                continue
            one.is_due, one.is_ready, one.pid, one.heard = False, False, 0, time.monotonic()
            one.is_cut, one.reason = False, ""
            self._watch(one.channel, one)

    def _expect_hope(self, reason: str) -> None:
        """Give up if no replica runs or can be started."""
        for one in self.replicas:
            one.is_due = one.is_due and one.starts < _MOST_STARTS
        if self._in_lockstep and not all(one.is_due for one in self.replicas):
            for one in self.replicas:
                one.is_due = False
        if self._thread is not None and not any(
            one.is_due or one.channel is not None for one in self.replicas
        ):
            self._fail(EngineDeadError(f"all replicas were lost; the last one: {reason}"))

    # ---- the thread ------------------------------------------------------------------------------

    def _loop(self) -> None:
        while not self._is_over:
            try:
                self._turn()
            except Exception as error:
                logger.exception("the thread of the replicas failed")
                self._fail(EngineDeadError(f"the thread of the replicas failed: {error!r}"))

    def _wake(self) -> None:
        with suppress(BlockingIOError, OSError):
            self._waker.send(b"\0")

    def _watch(self, channel: Channel, owner: ParentProcess | _Replica) -> None:
        self._selector.register(channel.socket, selectors.EVENT_READ, owner)

    def _turn(self) -> None:
        """Move messages once, and look for silent replicas."""
        self._flush()
        for key, _ in self._selector.select(_TICK_S):
            owner = key.data
            if owner is None:
                with suppress(BlockingIOError):
                    while self._woken.recv(4096):
                        pass
            elif isinstance(owner, ParentProcess):
                if owner is self.parent:
                    self._read_parent(owner)
            elif owner.channel is not None and owner.channel.socket is key.fileobj:
                self._read(owner)
        now = time.monotonic()
        if now - self._last_tick > _TICK_S:
            self._tick(now)

    def _flush(self) -> None:
        """Send what waits, and be woken when a full socket takes more."""
        owners: list[tuple[Channel | None, ParentProcess | _Replica]] = [
            (one.channel, one) for one in self.replicas
        ]
        if self.parent is not None:
            owners.append((self.parent.channel, self.parent))
        for channel, owner in owners:
            if channel is None or (isinstance(owner, _Replica) and owner.is_cut):
                continue
            events = selectors.EVENT_READ
            try:
                if not channel.stream.flush():
                    events |= selectors.EVENT_WRITE
            except OSError:
                continue  # its end is read below
            if self._selector.get_key(channel.socket).events != events:
                self._selector.modify(channel.socket, events, owner)

    def _tick(self, now: float) -> None:
        """Kill replicas that are silent: stopped, or stuck."""
        late, self._last_tick = now - self._last_tick, now
        for one in self.replicas:
            if late > _SILENCE_S / 2:
                one.heard = now  # this process was stopped, not the replica
            elif (one.is_ready or one.is_cut) and now - one.heard > _SILENCE_S:
                self._lost(one, f"it gave no sign of life for {_SILENCE_S:g} s")
            elif now - one.heard > _START_S:
                self._lost(one, f"it did not start within {_START_S:g} s")
        self._start_due()

    # ---- messages from the parent ----------------------------------------------------------------

    def _read_parent(self, parent: ParentProcess) -> None:
        try:
            messages = parent.channel.read()
        except (EOFError, OSError):
            self._parent_lost(parent)
            return
        for message in messages:
            match message:
                case Progress(done, total):
                    self._report(done, total)
                case ModelRead():
                    self._is_loaded = True
                    self._start_due()
                case Failed(error):
                    self._error = error
                    if self._thread is not None:
                        self._fail(EngineDeadError(f"the model cannot be read again: {error}"))
                case Forked(launch, pid):
                    for one in self.replicas:
                        if one.launch == launch:
                            one.pid = pid
                case Ended(launch, how):
                    for one in self.replicas:
                        if one.launch == launch:
                            self._lost(one, f"its process {how}{parent.last_words()}")

    def _parent_lost(self, parent: ParentProcess) -> None:
        """The parent has ended, and the kernel has killed all replicas with it."""
        words = parent.last_words()
        self._selector.unregister(parent.channel.socket)
        parent.close(0.0)
        self.parent = None
        if self._thread is None:
            self._error = EngineDeadError(f"the parent of the replicas ended{words}")
            return
        logger.warning("the parent of the replicas ended; it is started again%s", words)
        for one in self.replicas:
            self._lost(one, f"the parent of the replicas ended{words}")
        if self._parent_starts >= _MOST_STARTS:
            times = f"the parent of the replicas ended {self._parent_starts} times"
            self._fail(EngineDeadError(f"{times} before a replica was ready{words}"))
        if not self._is_over:
            self._start_parent()

    # ---- messages from replicas ------------------------------------------------------------------

    def _read(self, one: _Replica) -> None:
        assert one.channel is not None
        try:
            messages = one.channel.read()
        except (EOFError, OSError):
            self._selector.unregister(one.channel.socket)
            one.is_cut = True
            return
        one.heard = time.monotonic()
        for message in messages:
            match message:
                case Update():
                    self._events.updated(one.number, message)
                case Prefilled():
                    self._events.prefilled(one.number, message)
                case Answer():
                    self._events.answered(one.number, message)
                case Ready():
                    one.is_ready, one.starts, self._parent_starts = True, 0, 0
                    self._events.ready(one.number, message)
                case Lost(reason, error):
                    if self._thread is None:
                        self._error = error
                    self._lost(one, reason)
                    return

    def _lost(self, one: _Replica, reason: str) -> None:
        """A replica is gone: replace it."""
        if one.channel is None:
            return
        self._drop(one, reason)
        if self._in_lockstep:
            for other in self.replicas:
                if other.channel is not None:
                    self._drop(
                        other, f"it ran in lockstep with replica {one.number}, which is lost"
                    )
        if self._thread is None or self._is_over:
            return
        self._expect_hope(reason)
        self._start_due()

    def _drop(self, one: _Replica, reason: str) -> None:
        """Close the connection of a replica, and kill it if it still runs."""
        assert one.channel is not None
        channel, one.channel = one.channel, None
        one.is_ready, one.reason = False, reason
        if not one.is_cut:
            self._selector.unregister(channel.socket)
        channel.close()
        if self._thread is None or self._is_over:
            return
        logger.warning("replica %d was lost: %s", one.number, reason)
        self._events.lost(one.number, reason)
        one.is_due = True
        self.num_replaced += 1
        if self.parent is not None:
            self.parent.channel.stream.queue(packed(Kill(one.launch)))

    def _fail(self, error: EngineDeadError) -> None:
        logger.error("engine stopped: %s", error)
        self._is_over = True
        self._events.failed(error)

    def _release(self) -> None:
        for one in self.replicas:
            channel, one.channel = one.channel, None
            if channel is not None:
                channel.close()
        parent, self.parent = self.parent, None
        if parent is not None:
            parent.close()
        self._selector.close()
        self._woken.close()
        self._waker.close()


def _no_report(done: int, total: int) -> None:
    """Nobody asks."""
