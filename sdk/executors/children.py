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
import time
from dataclasses import replace
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from sdk.errors import EngineDeadError
from sdk.executors.channel import Channel, pack
from sdk.executors.groups import RankGroup, connect, meeting_place
from sdk.executors.worker import WorkerStart
from sdk.kernels.errors import CollectiveError

_TICK_S = 1.0
_STDERR_LINES, _STDERR_BYTES = 20, 4096

# Sets signals and sys.path first: until then Ctrl-C would kill the worker, and our package may not
# be importable. -c instead of -m, because -m needs the package on the initial path.
_BOOT = """\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = sys.argv[4:]
from sdk.executors.worker import main
main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
"""


class ChildLost(Exception):
    """A worker has ended or does not answer; :meth:`Children.diagnose` finds out why."""


class Child:
    """One worker process, rank 1 or above."""

    def __init__(self, rank: int, folder: str, python: str, path: list[str]) -> None:
        self.rank = rank
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

    def send(self, message: bytes, limit_s: float) -> None:
        """:raises ChildLost: the worker has ended or does not read."""
        try:
            self._channel.send(message, limit_s)
        except OSError as error:
            raise ChildLost(f"rank {self.rank}: {error}") from error

    def receive(self, limit_s: float) -> tuple[Any, ...] | None:
        """The next message; None after ``limit_s`` seconds in which this process was running.

        :raises ChildLost: the worker has ended.
        """
        for _ in range(math.ceil(limit_s / _TICK_S)):
            try:
                if self._channel.readable(min(_TICK_S, limit_s)):
                    message: tuple[Any, ...] = self._channel.receive(limit_s)
                    return message
                # if a forked child of the host holds a copy of the worker's end, no hang-up comes
                if self.process.poll() is not None and not self._channel.readable(0):
                    raise EOFError("the worker has ended")
            except (EOFError, OSError) as error:
                raise ChildLost(f"rank {self.rank}: {error}") from error
        return None

    def expect(self, kind: str, limit_s: float) -> tuple[Any, ...]:
        """Wait for the next message, which must be of ``kind``.

        :raises ChildLost: the worker has ended or does not answer.
        :raises EngineDeadError: it reports a failure instead.
        """
        message = self.receive(limit_s)
        if message is None:
            raise ChildLost(f"rank {self.rank}: no answer within {limit_s:g} s")
        if message[0] != kind:
            raise self._reported(message)
        return message

    def failure(self) -> tuple[int, EngineDeadError]:
        """What is wrong with this worker, and its rank as the likely cause (0: most likely)."""
        try:
            while (message := self.receive(1.0)) is not None:
                if message[0] == "failed":
                    consequence = message[2] == CollectiveError.__name__
                    return (2 if consequence else 0), self._reported(message)
        except ChildLost:
            with contextlib.suppress(subprocess.TimeoutExpired):
                how = _exit_text(self.process.wait(1.0))
                return 1, EngineDeadError(f"rank {self.rank} {how}{self._stderr_text()}")
        return 3, EngineDeadError(f"rank {self.rank} is alive but does not answer")

    def _reported(self, message: tuple[Any, ...]) -> EngineDeadError:
        return EngineDeadError(f"rank {self.rank} failed: {message[1]}{self._stderr_text()}")

    def _stderr_text(self) -> str:
        size = os.fstat(self._stderr.fileno()).st_size
        data = os.pread(self._stderr.fileno(), _STDERR_BYTES, max(size - _STDERR_BYTES, 0))
        lines = data.decode("utf-8", "replace").splitlines()[-_STDERR_LINES:]
        return "\nits last messages:\n  " + "\n  ".join(lines) if lines else ""

    def close(self) -> None:
        """Reap the ended process and close the descriptors."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5.0)  # longer only in an uninterruptible system call
        self._channel.close()
        self._stderr.close()


class Children:
    """All workers of one executor, their rendezvous folder, and rank 0's group."""

    def __init__(self) -> None:
        self.group: RankGroup | None = None
        self.folder = ""
        self._children: list[Child] = []
        self._owner = os.getpid()

    def spawn(self, size: int) -> None:
        """Start ranks 1 to ``size`` - 1. :raises EngineDeadError: a worker cannot be started."""
        # The interpreter of multiprocessing: hosts that embed Python set it there.
        python = os.fsdecode(spawn.get_executable() or "")
        if not python:
            raise EngineDeadError(
                "cannot start a worker: sys.executable is empty (name an interpreter with "
                "multiprocessing.set_executable, or use tensor_parallel_size=1)"
            )
        try:
            self.folder = meeting_place()
            path = _import_path()
            for rank in range(1, size):
                self._children.append(Child(rank, self.folder, python, path))
        except OSError as error:
            raise EngineDeadError(f"cannot start a worker with {python}: {error}") from error

    def introduce(self, start: WorkerStart, limit_s: float) -> None:
        """Tell every worker what to build, and wait until all are about to connect."""
        for child in self._children:
            own = replace(start, rank=child.rank, place=self.folder)
            child.send(pack(own), limit_s)
        self.expect("joining", limit_s)

    def connect(self, start: WorkerStart, limit_s: float) -> RankGroup:
        """Join the workers as rank 0. See :func:`sdk.executors.groups.connect`."""
        self.group = connect(
            start.transport,
            self.folder,
            0,
            start.size,
            connect_s=start.connect_s,
            limit_s=limit_s,
        )
        return self.group

    def send(self, message: object, limit_s: float) -> None:
        """Send ``message`` to every worker."""
        data = pack(message)
        for child in self._children:
            child.send(data, limit_s)

    def expect(self, kind: str, limit_s: float) -> list[tuple[Any, ...]]:
        """Wait until every worker has answered with ``kind``; the answers by rank."""
        return [child.expect(kind, limit_s) for child in self._children]

    def diagnose(self, error: BaseException) -> EngineDeadError:
        """After ``error`` with the workers: find the one that is the cause, and why."""
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
        group, self.group = self.group, None
        if os.getpid() != self._owner:
            if group is not None:
                group.abandon()
            return
        children, self._children = self._children, []
        if patience_s > 0:
            for child in children:
                with contextlib.suppress(ChildLost):
                    child.send(pack(None), 0.5)
            _wait(children, patience_s)
            for child in children:
                child.process.terminate()
            _wait(children, 1.0)
        for child in children:
            child.process.kill()
        for child in children:
            child.close()
        self.remove_folder()
        if group is not None:
            group.close()


def likeliest(found: list[tuple[int, EngineDeadError]], error: BaseException) -> EngineDeadError:
    """The cause among the failures of all workers after ``error``; see :meth:`Child.failure`."""
    stopped = (3, EngineDeadError("the workers were stopped"))
    likelihood, cause = min(found, key=lambda item: item[0], default=stopped)
    return EngineDeadError(f"{cause} ({error})") if likelihood > 1 else cause


def _wait(children: list[Child], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.process.wait(max(deadline - time.monotonic(), 0.0))


def _import_path() -> list[str]:
    """Our ``sys.path`` with absolute entries, and the folder that this package came from."""
    path = [str(Path(entry).absolute()) for entry in sys.path if isinstance(entry, str)]
    root = str(Path(__file__).absolute().parents[2])
    return path if root in path else [root, *path]


def _exit_text(code: int) -> str:
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    hint = ", perhaps by the system for lack of memory" if -code == signal.SIGKILL else ""
    return f"was killed ({name}{hint})"
