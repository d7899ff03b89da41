"""The worker processes of one executor: starting, messages, diagnosis and ending.

Waits for an answer are counted in ticks of one second instead of read from the clock, so a host
that was suspended (Ctrl-Z, a laptop's lid) does not give up its workers when it wakes up.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import spawn
from pathlib import Path
from typing import IO, Any

from sdk.api.errors import EngineDeadError
from sdk.cluster.executors.grid import Grid
from sdk.cluster.executors.groups import RankGroup, meeting_place
from sdk.cluster.executors.worker import WorkerStart
from sdk.cluster.wire.local import Channel, pack
from sdk.kernels.errors import CollectiveError
from sdk.kernels.system import SYSTEM
from sdk.models.parallel import Mesh

_TICK_S = 1.0
_STDERR_LINES, _STDERR_BYTES = 20, 4096
#: A worker that a signal has stopped (SIGSTOP) for so long, while this process runs, is given up.
_STOPPED_S = 3.0
_WATCH_S = 0.5

# Sets signals and sys.path first: until then Ctrl-C would kill the worker, and our package may not
# be importable. -c instead of -m, because -m needs the package on the initial path.
_BOOT = """\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = sys.argv[4:]
from sdk.cluster.executors.worker import main
main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


class ChildLost(Exception):
    """A worker has ended or does not answer; :meth:`Children.diagnose` finds out why."""


class Worker(ABC):
    """One rank other than rank 0, however it is reached."""

    rank: int

    @abstractmethod
    def send(self, message: bytes, limit_s: float) -> None:
        """:raises ChildLost: the worker has ended or does not read."""

    @abstractmethod
    def receive(self, limit_s: float) -> tuple[Any, ...] | None:
        """The next message; None after ``limit_s`` seconds in which this process was running.

        :raises ChildLost: the worker has ended.
        """

    def expect(self, kind: str, limit_s: float) -> tuple[Any, ...]:
        """Wait for the next message, which must be of ``kind``.

        :raises ChildLost: the worker has ended or does not answer.
        :raises EngineDeadError: it reports a failure instead.
        """
        message = self.receive(limit_s)
        if message is None:
            raise ChildLost(f"{self}: no answer within {limit_s:g} s")
        if message[0] != kind:
            raise self.reported(message)
        return message

    def failure(self) -> tuple[int, EngineDeadError]:
        """What is wrong with this worker, and its rank as the likely cause (0: most likely)."""
        try:
            while (message := self.receive(1.0)) is not None:
                if message[0] == "failed":
                    consequence = message[2] == CollectiveError.__name__
                    return (3 if consequence else 0), self.reported(message)
        except ChildLost as lost:
            if (ended := self.how_it_ended(lost)) is not None:
                return 1, ended
        likelihood, why = self.why_silent()
        return likelihood, EngineDeadError(f"{self} {why}")

    def why_silent(self) -> tuple[int, str]:
        """Why a worker that lives does not answer, and how likely it is the cause."""
        return 4, "is alive but does not answer"

    @abstractmethod
    def reported(self, message: tuple[Any, ...]) -> EngineDeadError:
        """The failure that a worker's message reports."""

    @abstractmethod
    def how_it_ended(self, lost: ChildLost) -> EngineDeadError | None:
        """Why a lost worker is gone; None if it is not."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Wait until the worker has ended, at most this long."""

    @abstractmethod
    def terminate(self) -> None:
        """Have the worker end now."""

    @abstractmethod
    def kill(self) -> None:
        """End the worker, whatever it does."""

    @abstractmethod
    def close(self) -> None:
        """Release what this process holds of the worker, which was killed."""


class Child(Worker):
    """A child process."""

    def __init__(self, rank: int, name: str, folder: str, python: str, path: list[str]) -> None:
        self.rank, self.name = rank, name
        ours, theirs = socket.socketpair()
        try:
            # An unnamed file cannot be left behind; the worker keeps it below 1 MiB.
            self._stderr = tempfile.TemporaryFile(mode="ab+", buffering=0)  # noqa: SIM115
        except BaseException:
            ours.close()
            theirs.close()
            raise
        try:
            self.process = subprocess.Popen(
                [python, "-c", _BOOT, str(theirs.fileno()), str(os.getpid()), folder, *path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
            )
        except BaseException:
            ours.close()
            self._stderr.close()
            raise
        finally:
            theirs.close()
        self._channel = Channel(ours)

    def __str__(self) -> str:
        return self.name

    def send(self, message: bytes, limit_s: float) -> None:
        try:
            self._channel.send(message, limit_s)
        except OSError as error:
            raise ChildLost(f"{self}: {error}") from error

    def receive(self, limit_s: float) -> tuple[Any, ...] | None:
        stopped = 0
        for _ in range(math.ceil(limit_s / _TICK_S)):
            try:
                if self._channel.readable(min(_TICK_S, limit_s)):
                    message: tuple[Any, ...] = self._channel.receive(limit_s)
                    return message
                # if a forked child of the host holds a copy of the worker's end, no hang-up comes
                if self.process.poll() is not None and not self._channel.readable(0):
                    raise EOFError("the worker has ended")
                stopped = stopped + 1 if SYSTEM.is_stopped(self.process.pid) else 0
                if stopped * _TICK_S >= _STOPPED_S:
                    raise EOFError("the worker was stopped by a signal")
            except (EOFError, OSError) as error:
                raise ChildLost(f"{self}: {error}") from error
        return None

    def how_it_ended(self, lost: ChildLost) -> EngineDeadError | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            how = exit_text(self.process.wait(1.0))
            return EngineDeadError(f"{self} {how}{self._stderr_text()}")
        return None

    def reported(self, message: tuple[Any, ...]) -> EngineDeadError:
        return EngineDeadError(f"{self} failed: {message[1]}{self._stderr_text()}")

    def why_silent(self) -> tuple[int, str]:
        if SYSTEM.is_stopped(self.process.pid):
            return 2, "was stopped by a signal and does not answer"
        return super().why_silent()

    def _stderr_text(self) -> str:
        return last_messages(self._stderr)

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def terminate(self) -> None:
        self.process.terminate()

    def kill(self) -> None:
        self.process.kill()

    def close(self) -> None:
        """Reap the ended process and close the descriptors."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)  # longer only in an uninterruptible system call
        self._channel.close()
        self._stderr.close()


class Children:
    """All workers of one executor, their rendezvous folder, and rank 0's connections to them."""

    def __init__(self) -> None:
        self.groups: list[RankGroup] = []
        self.folder = ""
        self._children: list[Worker] = []
        self._owner = os.getpid()
        self._watching: threading.Thread | None = None
        self._ended = threading.Event()
        #: Seconds that a call may take if nothing else notices lost ranks; ``None``: exchanges do.
        self._call_s: float | None = None
        #: Why the groups were closed while they may have been in use.
        self._given_up = ""

    def bring_up(self, start: WorkerStart, startup_s: float, collective_s: float) -> Mesh:
        """Start all workers and connect all ranks; rank 0's mesh.

        :param start: what the workers are told; each gets its own rank.
        :param startup_s: seconds that a worker may take.
        :param collective_s: seconds that rank 0 waits for a rank in an exchange.
        :raises EngineDeadError: a worker cannot be started.
        :raises CollectiveError: a worker does not connect.
        """
        self.pack(start)  # fails if it cannot be pickled, before a process is started
        self.spawn(start.grid)
        self.introduce(start, startup_s)
        self._call_s = None if start.grid.cards is None else collective_s
        mesh, self.groups = start.grid.join(
            0, start.transport, self.folder, connect_s=startup_s, limit_s=collective_s
        )
        return mesh

    def watch(self, works: Callable[[], int]) -> None:
        """Let exchanges fail that wait for a worker which a signal has stopped.

        An exchange waits in native code, which does not know the other processes. Without this it
        would wait as long as for one that computes. Exchanges of GPU ranks notice nothing at all,
        so there also those fail that wait for a worker that has ended, and those in a call that
        takes longer than the limit. ``works``: the number of the call that may wait for a worker,
        or 0.
        """
        self._watching = threading.Thread(
            target=self._watch, args=(works,), name="sdk-ranks", daemon=True
        )
        self._watching.start()

    def _watch(self, works: Callable[[], int]) -> None:
        processes = [child.process for child in self._children if isinstance(child, Child)]
        stopped = waited = last = 0
        while not self._ended.wait(_WATCH_S):
            stopped = stopped + 1 if any(SYSTEM.is_stopped(one.pid) for one in processes) else 0
            call = works()
            waited, last = waited + 1 if call and call == last else 0, call
            why = ""
            if stopped * _WATCH_S >= _STOPPED_S:
                why = "a rank was stopped by a signal"
            elif self._call_s is not None and any(one.poll() is not None for one in processes):
                why = "a rank has ended"
            elif self._call_s is not None and waited * _WATCH_S >= self._call_s:
                why = f"no answer within {self._call_s:g} s"
            if why and call:
                self._end_call(why)
                return

    def _end_call(self, why: str) -> None:
        """Let exchanges fail, and the call that they are part of: on a GPU they end as if they had
        a result."""
        self._given_up = self._given_up or why
        for group in self.groups:
            group.close()

    def pack(self, message: object) -> bytes:
        """A message for the workers as bytes."""
        return pack(message)

    def spawn(self, grid: Grid) -> None:
        """Start all ranks but rank 0. :raises EngineDeadError: a worker cannot be started."""
        # The interpreter of multiprocessing: hosts that embed Python set it there.
        python = os.fsdecode(spawn.get_executable() or "")
        if not python:
            raise EngineDeadError(
                "cannot start a worker: sys.executable is empty (name an interpreter with "
                "multiprocessing.set_executable, or use only one rank)"
            )
        try:
            self.folder = meeting_place()
            path = import_path()
            for rank in range(1, grid.size):
                self._children.append(Child(rank, grid.name(rank), self.folder, python, path))
        except OSError as error:
            raise EngineDeadError(f"cannot start a worker with {python}: {error}") from error

    def introduce(self, start: WorkerStart, limit_s: float) -> None:
        """Tell every worker what to build, and wait until all are about to connect."""
        for child in self._children:
            own = replace(start, rank=child.rank, place=self.folder)
            child.send(self.pack(own), limit_s)
        self.expect("joining", limit_s)

    def send(self, message: bytes, limit_s: float, ranks: range | None = None) -> None:
        """Send the bytes from :meth:`pack` to these workers (default: all)."""
        for child in self._children:
            if ranks is None or child.rank in ranks:
                child.send(message, limit_s)

    def expect(self, kind: str, limit_s: float) -> list[tuple[Any, ...]]:
        """Wait until every worker has answered with ``kind``; the answers by rank."""
        if self._given_up:
            raise CollectiveError(self._given_up)
        return [child.expect(kind, limit_s) for child in self._children]

    def diagnose(self, error: BaseException) -> EngineDeadError:
        """After ``error`` with the workers: find the one that is the cause, and why."""
        if self._given_up:
            error = CollectiveError(self._given_up)
        return likeliest([child.failure() for child in self._children], error)

    def remove_folder(self) -> None:
        """Remove the rendezvous folder; all ranks are connected, or never will be."""
        if self.folder:
            shutil.rmtree(self.folder, ignore_errors=True)
            # rmtree needs a descriptor, and none may be left; rmdir of an empty folder does not
            with contextlib.suppress(OSError):
                Path(self.folder).rmdir()

    def stop(self, patience_s: float = 5.0) -> None:
        """End every worker: ask, wait ``patience_s`` for all, terminate, kill. Idempotent.

        In a forked child of the owner it only prevents gloo from hanging when objects are freed.
        """
        groups, self.groups = self.groups, []
        if os.getpid() != self._owner:
            for group in groups:
                group.abandon()
            return
        self._ended.set()
        self._given_up = self._given_up or "the workers were stopped"
        watching, self._watching = self._watching, None
        if watching is not None and watching is not threading.current_thread():
            watching.join()
        children, self._children = self._children, []
        if patience_s > 0:
            for child in children:
                with contextlib.suppress(ChildLost):
                    child.send(self.pack(None), 0.5)
            _wait(children, patience_s)
            for child in children:
                child.terminate()
            _wait(children, 1.0)
        for child in children:
            child.kill()
        for child in children:
            child.close()
        for group in groups:
            group.close()
        self.remove_folder()  # after the groups: see Cards.connect


def likeliest(found: list[tuple[int, EngineDeadError]], error: BaseException) -> EngineDeadError:
    """The cause among the failures of all workers after ``error``; see :meth:`Worker.failure`."""
    stopped = (4, EngineDeadError("the workers were stopped"))
    likelihood, cause = min(found, key=lambda item: item[0], default=stopped)
    return EngineDeadError(f"{cause} ({error})") if likelihood > 1 else cause


def _wait(children: list[Worker], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        child.wait(max(deadline - time.monotonic(), 0.0))


def import_path() -> list[str]:
    """Our ``sys.path`` with absolute entries, and the folder that this package came from."""
    path = [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
    root = str(Path(__file__).absolute().parents[3])
    return path if root in path else [root, *path]


def last_messages(stderr: IO[bytes]) -> str:
    """The end of what a process wrote to its standard error, as lines of an error message."""
    size = os.fstat(stderr.fileno()).st_size
    data = bytearray(_STDERR_BYTES)
    count = SYSTEM.read_at(stderr.fileno(), memoryview(data), max(size - _STDERR_BYTES, 0))
    lines = data[:count].decode("utf-8", "replace").splitlines()[-_STDERR_LINES:]
    return "\nits last messages:\n  " + "\n  ".join(lines) if lines else ""


def exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps by the system for lack of memory" if name == "SIGKILL" else ""
    return f"was killed ({name}{hint})"
