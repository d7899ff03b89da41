"""The parent of the replicas: a process that reads the model once and forks.

A forked child shares the memory of its parent until one of them writes. So all replicas of a
machine have the packed weights once, on the same huge pages, and a new replica starts in the time
that its KV cache and its recorded step take. With several ranks per replica the ranks read the
weights themselves; the parent then has only imported what they need.

It never runs a step, has no thread when it forks, and does nothing but wait for messages.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import time
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from sdk.cluster.executors.children import exit_text
from sdk.cluster.executors.worker import limit_stderr
from sdk.cluster.replicas.lockstep import LockstepStart
from sdk.cluster.replicas.messages import (
    Ended,
    Failed,
    Fork,
    Forked,
    Kill,
    Load,
    ModelRead,
    Progress,
    sendable,
)
from sdk.cluster.wire.local import Channel, pack
from sdk.kernels.system import SYSTEM

if TYPE_CHECKING:
    from sdk.engine.rank.rank_model import RankModel
    from sdk.loading.load import Loaded, ModelFacts

_TICK_MS = 100
_PROGRESS_S = 0.05


def main(messages: int, descriptors: int) -> None:
    """Serve the socket ``messages``; sockets of replicas come over ``descriptors``."""
    SYSTEM.leave_signals_to_parent()
    faulthandler.enable()
    parent = _Parent(Channel(socket.socket(fileno=messages)), socket.socket(fileno=descriptors))
    try:
        parent.run()
    except (EOFError, OSError):
        pass  # the host is gone
    except BaseException:
        traceback.print_exc()
    finally:
        parent.kill_all()
        sys.stderr.flush()
        os._exit(0)


class _Parent:
    def __init__(self, channel: Channel, descriptors: socket.socket) -> None:
        self._channel = channel
        self._descriptors = descriptors
        self._facts: ModelFacts | None = None
        self._weights: RankModel | None = None
        self._pids: dict[int, int] = {}  # launch -> process
        self._num_replicas = 1
        self._lockstep: LockstepStart | None = None  # of the replicas that started last

    def run(self) -> None:
        """Until the other side closes. :raises EOFError, OSError: it has."""
        host = os.getppid()
        while os.getppid() == host:  # a forked child of the host may keep the socket open
            if self._channel.readable(_TICK_MS / 1000):
                self._take(self._channel.receive())
            self._reap()
            limit_stderr()

    def _take(self, message: Any) -> None:
        match message:
            case Load():
                try:
                    self._load(message)
                except Exception as error:
                    traceback.print_exc()
                    self._send(Failed(sendable(error)))
                    return
                self._send(ModelRead())
            case Fork():
                _, (descriptor,), _, _ = socket.recv_fds(self._descriptors, 1, 1)
                self._fork(message, socket.socket(fileno=descriptor))
            case Kill(launch):
                if launch in self._pids:
                    os.kill(self._pids[launch], signal.SIGKILL)

    def _send(self, message: object) -> None:
        self._channel.send(pack(message))

    # ---- the model -------------------------------------------------------------------------------

    def _load(self, message: Load) -> None:
        import torch

        torch.set_num_threads(1)  # before torch starts threads, which a fork would not copy
        from sdk.cluster.replicas.replica import serve  # noqa: F401 - imported once, for all replicas
        from sdk.engine.rank.rank_model import RankModel
        from sdk.loading.alternatives import checked_plan
        from sdk.loading.load import read_facts
        from sdk.memory.resolve import open_model
        from sdk.models.parallel import Mesh

        config = message.config
        checkpoint = open_model(config)
        try:
            facts = read_facts(config, checkpoint, checked_plan(config, checkpoint))
            self._num_replicas = message.num_replicas
            runner = replace(
                facts.runner_config,
                engines_here=message.num_replicas,
                lockstep_redundant=message.lockstep_redundant,
            )
            facts = self._facts = replace(facts, runner_config=runner)
            if config.num_ranks == 1:
                checkpoint.on_bytes = self._report_progress()
                packing = replace(facts.runner_config, num_threads=message.num_threads)
                self._weights = RankModel.load(packing, Mesh(), checkpoint)
        finally:
            checkpoint.close()
        gc.collect()
        gc.freeze()  # the collector of a child need not touch, and so copy, what was made here

    def _report_progress(self) -> Any:
        last = 0.0

        def report(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= _PROGRESS_S or done >= total:
                last = now
                self._send(Progress(done, total))

        return report

    # ---- replicas --------------------------------------------------------------------------------

    def _fork(self, fork: Fork, sock: socket.socket) -> None:
        launch = fork.launch
        sys.stderr.flush()
        try:
            self._prepare_lockstep(fork.number)
            pid = os.fork()
        except OSError as error:
            sock.close()
            self._send(Ended(launch, f"could not be started: {error}"))
            return
        if pid:
            sock.close()
            self._pids[launch] = pid
            self._send(Forked(launch, pid))
            return
        code = 1
        try:
            SYSTEM.end_with_parent()
            self._channel.forget()
            self._descriptors.close()
            self._pids.clear()
            from sdk.cluster.replicas.replica import serve

            bells = None if self._lockstep is None else self._lockstep.doorbells
            code = serve(lambda: self._make(fork.number), fork.role, sock, fork.number, bells)
        finally:
            sys.stderr.flush()
            os._exit(code)  # nothing of the parent's may be cleaned up here

    def _prepare_lockstep(self, number: int) -> None:
        """What the replicas share that start together, if they run in lockstep."""
        facts = self._facts
        assert facts is not None
        redundant = facts.runner_config.lockstep_redundant
        if redundant is None or (self._lockstep is not None and self._lockstep.take(number)):
            return
        if self._lockstep is not None:
            self._lockstep.close()
        self._lockstep = LockstepStart(self._num_replicas, redundant)
        self._lockstep.take(number)

    def _make(self, number: int) -> Loaded:
        """The engine of replica ``number``, in the forked child."""
        import torch

        from sdk.engine.rank.experts import mixtures
        from sdk.engine.rank.rank_model import RankModel
        from sdk.loading.load import start

        facts = self._facts
        assert facts is not None
        threads = facts.runner_config.num_threads
        torch.set_num_threads(threads)
        shared = [] if self._weights is None else [self._weights]
        for weights in shared:
            weights.ops.restart_threads(threads)

        def own_weights(config: Any, mesh: Any) -> RankModel:
            weights = shared.pop() if shared else RankModel.load(config, mesh)
            if lockstep is None:
                return weights
            lockstep.share(mixtures(weights.model))
            return replace(weights, lockstep=lockstep)

        lockstep = None if self._lockstep is None else self._lockstep.join(number, facts)
        return start(facts, own_weights)

    def _reap(self) -> None:
        for launch, pid in list(self._pids.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._pids[launch]
                self._send(Ended(launch, exit_text(os.waitstatus_to_exitcode(status))))

    def kill_all(self) -> None:
        """Kill the replicas that still run; they would end with this process anyway."""
        for pid in self._pids.values():
            os.kill(pid, signal.SIGKILL)
        if self._lockstep is not None:
            self._lockstep.close()
