"""The process of one rank other than 0: builds its part of the model, then runs what it is sent.

It belongs to the process that started it and ends with it. A thread watches the control channel,
which the kernel closes when the parent dies, and the parent's process id, for the case that a
forked child of the parent keeps a copy of the channel. (Linux's PR_SET_PDEATHSIG is no help: it
fires when the *thread* that started the worker ends, and that may be a short-lived one.)
"""

from __future__ import annotations

import faulthandler
import os
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sdk.executors.base import RankCall
from sdk.executors.channel import Channel, pack

# How long to wait for rank 0 inside a collective: the host may sit in a debugger for hours.
_PATIENCE_S = 24 * 3600.0
_MAX_STDERR = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first message to a worker: what to build, and where it stands."""

    rank: int
    size: int
    folder: str
    num_threads: int
    connect_s: float
    factory: Callable[[Any, Any], Any]
    config: Any


def main(descriptor: int, parent: int, folder: str) -> None:
    """Run the worker and end the process; ``descriptor`` is its end of the control channel."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group: the host decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=descriptor))
    threading.Thread(target=_end_with, args=(channel, parent, folder), daemon=True).start()
    try:
        _serve(channel)
    except BaseException as error:
        traceback.print_exc()
        # the kind tells rank 0 a cause from its consequence: a rank died, the others' sums fail
        failure = ("failed", f"{type(error).__name__}: {error}", type(error).__name__)
        try:
            channel.send(pack(failure), 5.0)
        finally:
            _exit(1)
    _exit(0)


def _exit(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)  # torch's and gloo's destructors have nothing left to do


def _end_with(channel: Channel, parent: int, folder: str) -> None:
    poller = select.poll()
    poller.register(channel.socket, 0)  # wakes on hang-up alone: messages are the main thread's
    while os.getppid() == parent and not poller.poll(1000):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # a parent that was killed could not
    os._exit(1)


def _serve(channel: Channel) -> None:
    start: WorkerStart = channel.receive()
    import torch  # after the watching thread runs: this takes a second

    from sdk.executors.gloo import connect
    from sdk.models.parallel import Mesh

    torch.set_num_threads(start.num_threads)  # this process is ours alone
    channel.send(pack(("joining",)))
    group = connect(
        start.folder, start.rank, start.size, connect_s=start.connect_s, limit_s=_PATIENCE_S
    )
    runner = start.factory(start.config, Mesh(start.rank, start.size, group))
    channel.send(pack(("ready",)))
    while (message := channel.receive()) is not None:
        if isinstance(message, RankCall):
            channel.send(pack(("done", message.function(runner, *message.args))))
        else:
            result = runner.launch(message).result()
            channel.send(pack(("done", dict(result.unwritten))))
        _limit_stderr()
    runner.close()


def _limit_stderr() -> None:
    """Standard error is a nameless file of the parent's, opened for appending; its end matters."""
    sys.stderr.flush()
    if os.fstat(2).st_size > _MAX_STDERR:
        os.ftruncate(2, 0)
