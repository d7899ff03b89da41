"""Starts the parent of the replicas, and talks to it."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from multiprocessing import spawn

from sdk.api.errors import EngineDeadError
from sdk.cluster.executors.children import import_path, last_messages
from sdk.cluster.replicas.messages import Fork, Load, Role, packed
from sdk.cluster.wire.local import Channel

#: Seconds in which the parent and its replicas end by themselves.
_PATIENCE_S = 5.0
_BOOT = """\
import signal, sys
signal.signal(signal.SIGINT, signal.SIG_IGN)
sys.path[:] = sys.argv[3:]
from sdk.cluster.replicas.parent import main
main(int(sys.argv[1]), int(sys.argv[2]))
"""


class ParentProcess:
    """The process of ``sdk/cluster/replicas/parent.py``, as its own parent sees it.

    :raises EngineDeadError: it cannot be started.
    """

    def __init__(self, load: Load) -> None:
        python = os.fsdecode(spawn.get_executable() or "")
        if not python:
            raise EngineDeadError(
                "cannot start replicas: sys.executable is empty (name an interpreter with "
                "multiprocessing.set_executable, or use data_parallel_size=1)"
            )
        with contextlib.ExitStack() as undo:
            try:
                ours, theirs = socket.socketpair()
                undo.callback(ours.close)
                with theirs:
                    self._descriptors, descriptors = socket.socketpair()
                    undo.callback(self._descriptors.close)
                    with descriptors:
                        # An unnamed file cannot be left behind. The replicas write to it too.
                        self._stderr = tempfile.TemporaryFile(  # noqa: SIM115
                            mode="ab+", buffering=0
                        )
                        undo.callback(self._stderr.close)
                        inherited = [theirs.fileno(), descriptors.fileno()]
                        arguments = [*map(str, inherited), *import_path()]
                        self._process = subprocess.Popen(
                            [python, "-c", _BOOT, *arguments],
                            stdin=subprocess.DEVNULL,
                            stdout=subprocess.DEVNULL,
                            stderr=self._stderr,
                            pass_fds=inherited,
                        )
            except OSError as error:
                raise EngineDeadError(f"cannot start replicas with {python}: {error}") from error
            self.channel = Channel(ours)
            self.channel.stream.queue(packed(load))
            undo.pop_all()

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def fork(self, launch: int, role: Role, number: int) -> Channel:
        """Start a replica; the channel to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._descriptors, [b"\0"], [theirs.fileno()])
        self.channel.stream.queue(packed(Fork(launch, role, number)))
        return Channel(ours)

    def last_words(self) -> str:
        """The end of what the parent and the replicas wrote to their standard error."""
        return last_messages(self._stderr)

    def close(self, patience_s: float = _PATIENCE_S) -> None:
        """End the process and with it all replicas. Idempotent."""
        self.channel.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(patience_s)
        self._process.kill()  # the kernel kills the replicas then
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE_S)
        self._descriptors.close()
        self._stderr.close()
