"""The process of a rank other than 0: builds its part of the model, then runs the plans it gets.

It ends with the process that started it. A thread watches the control channel, which the kernel
closes when the parent dies, and the parent's process id, in case a forked child of the parent
holds a copy of the channel. (Linux's PR_SET_PDEATHSIG does not help: it fires when the *thread*
that started the worker ends, which may be short-lived.)
"""

from __future__ import annotations

import faulthandler
import os
import select
import shutil
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING, Any

from sdk.cluster.wire.local import Channel, pack
from sdk.engine.executor import RankCall
from sdk.kernels.system import SYSTEM

if TYPE_CHECKING:
    from sdk.cluster.executors.grid import Grid
    from sdk.cluster.executors.groups import RankGroup, Transport
    from sdk.models.parallel import Mesh

# How long to wait for rank 0 inside a collective: the host may be in a debugger for hours.
_PATIENCE_S = 24 * 3600.0
_MAX_STDERR = 1 << 20


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """The first message to a worker: what to build, and its rank."""

    rank: int
    grid: Grid
    #: Where the ranks meet: see :func:`sdk.cluster.executors.groups.connect`.
    place: str
    transport: Transport
    num_threads: int
    connect_s: float
    factory: Callable[[Any, Any], Any]
    config: Any


def main(descriptor: int, parent: int, folder: str) -> None:
    """Run the worker and end the process; ``descriptor`` is its end of the control channel."""
    SYSTEM.leave_signals_to_parent()
    faulthandler.enable()
    channel = Channel(socket.socket(fileno=descriptor))
    threading.Thread(target=_end_with, args=(channel, parent, folder), daemon=True).start()
    try:
        _serve(channel)
    except BaseException as error:
        traceback.print_exc()
        # the type lets rank 0 tell a cause (a rank died) from its effects (collectives fail)
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
    poller.register(channel.socket, 0)  # wakes only on hang-up: the main thread reads messages
    while os.getppid() == parent and not poller.poll(1000):
        pass
    shutil.rmtree(folder, ignore_errors=True)  # a killed parent could not remove it
    os._exit(1)


def _serve(channel: Channel) -> None:
    start: WorkerStart = channel.receive()
    prepare(start)  # takes a second, so only after the watching thread has started
    channel.send(pack(("joining",)))
    mesh, _ = join(start)
    runner = start.factory(start.config, mesh)
    channel.send(pack(("ready",)))
    while (message := channel.receive()) is not None:
        channel.send(pack(("done", *answer(runner, mesh, message))))
        limit_stderr()
    runner.close()


def prepare(start: WorkerStart) -> None:
    """Import torch, set its threads and its GPU, in a process that runs nothing but a rank."""
    import torch

    torch.set_num_threads(start.num_threads)
    if start.grid.cards is not None:
        start.grid.cards.use(start.rank)


def join(start: WorkerStart) -> tuple[Mesh, list[RankGroup]]:
    """Join the other ranks: see :meth:`sdk.cluster.executors.grid.Grid.join`."""
    return start.grid.join(
        start.rank, start.transport, start.place, connect_s=start.connect_s, limit_s=_PATIENCE_S
    )


def answer(runner: Any, mesh: Mesh, message: Any) -> tuple[Any, ...]:
    """Do what rank 0 asks for; what it wants to know of that.

    Of a :class:`RankCall` its result; of a step the slots that were not written, the images that
    could not be encoded, and how long this rank has computed.
    """
    with runner.entered():
        if isinstance(message, RankCall):
            return (message.function(runner, *message.args),)
        begin, waited = monotonic(), mesh.waited_seconds
        result = runner.launch(message).result()
    seconds = monotonic() - begin - (mesh.waited_seconds - waited)
    return dict(result.unwritten), dict(result.unencoded), seconds


def limit_stderr() -> None:
    """Truncate standard error, the parent's unnamed file in append mode; only its end matters."""
    sys.stderr.flush()
    if os.fstat(2).st_size > _MAX_STDERR:
        os.ftruncate(2, 0)
