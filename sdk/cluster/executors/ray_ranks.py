"""Ranks that are actors of Ray, on this node or on several: ``distributed_executor_backend="ray"``.

Rank 0 stays in the process of the ``LLM``. Every other rank is an actor in a placement group, by
preference on this node. A message to a rank is a call of its actor. Ray reports an actor that died,
and ends all actors when the process that started them ends.

Ranks that share a node exchange tensors through shared memory. If one is on another node, all of
them use TCP at their nodes' addresses. Ray takes the network inside a cluster as trusted, and so do
these connections: they are not encrypted, and whoever can reach the ports can join.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    get_current_placement_group,
    placement_group,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from sdk.api.errors import EngineDeadError, RequestError
from sdk.cluster.executors.children import ChildLost, likeliest
from sdk.cluster.executors.gloo import TcpStore
from sdk.cluster.executors.groups import RankGroup, meeting_place
from sdk.cluster.executors.worker import WorkerStart, answer, join, prepare
from sdk.kernels.errors import CollectiveError
from sdk.kernels.system import SYSTEM
from sdk.models.parallel import Mesh

#: How long a failed rank may take until Ray knows: 0.1 s for an actor on a node that lives.
_DIAGNOSIS_S = 3.0
#: How long this node gets to reserve its CPUs before other nodes are asked.
_HERE_FIRST_S = 2.0


class Whereabouts(NamedTuple):
    """The process of a rank."""

    node_id: str
    address: str
    pid: int


class RankActor:
    """A rank other than 0: what an actor runs. Methods return messages like those of a child."""

    def __init__(self) -> None:
        self._groups: list[RankGroup] = []
        self._mesh: Any = None
        self._runner: Any = None

    def where(self) -> Whereabouts:
        """Also tells that the actor lives."""
        node_id = ray.get_runtime_context().get_node_id()
        return Whereabouts(node_id, ray.util.get_node_ip_address(), os.getpid())

    def start(self, start: WorkerStart) -> tuple[Any, ...]:
        """Join the other ranks and build this one."""
        try:
            prepare(start)
            self._mesh, self._groups = join(start)
            self._runner = start.factory(start.config, self._mesh)
        except Exception as error:
            return self._failed(error)
        return ("ready",)

    def run(self, message: Any) -> tuple[Any, ...]:
        """One step, or one :class:`sdk.engine.executor.RankCall`."""
        try:
            return "done", *answer(self._runner, self._mesh, message)
        except Exception as error:
            return self._failed(error)

    def close(self) -> None:
        """Free everything before the actor is killed."""
        if self._runner is not None:
            self._runner.close()

    def _failed(self, error: Exception) -> tuple[Any, ...]:
        for group in self._groups:
            group.close()  # this process lives on, but nobody may wait for it
        return "failed", f"{type(error).__name__}: {error}", type(error).__name__


class RayRank:
    """One rank as rank 0 sees it: an actor, and the answers that are due."""

    def __init__(self, rank: int, actor: Any) -> None:
        self.rank = rank
        self.actor = actor
        self.here: Whereabouts | None = None
        self._due: deque[Any] = deque()

    def call(self, method: str, *args: Any) -> None:
        """Begin a call; :meth:`expect` gets its result. :raises ChildLost: Ray was shut down."""
        if not ray.is_initialized():  # a call would start a cluster of its own
            raise ChildLost(f"rank {self.rank}: Ray was shut down")
        try:
            self._due.append(getattr(self.actor, method).remote(*args))
        except Exception as error:  # Ray documents none: a handle of an earlier cluster, say
            raise ChildLost(f"rank {self.rank}: {error}") from error

    def next(self, limit_s: float) -> Any:
        """The result of the oldest call that is due.

        :raises ChildLost: the actor died or does not answer.
        """
        try:
            found = ray.get(self._due[0], timeout=limit_s)
        except GetTimeoutError as error:
            raise ChildLost(f"rank {self.rank}: no answer within {limit_s:g} s") from error
        except RayError as error:
            raise ChildLost(f"rank {self.rank}: {_reason(error)}") from error
        self._due.popleft()
        return found

    def expect(self, kind: str, limit_s: float) -> tuple[Any, ...]:
        """Like :meth:`sdk.cluster.executors.children.Child.expect`."""
        message: tuple[Any, ...] = self.next(limit_s)
        if message[0] != kind:
            raise self._reported(message)
        return message

    def failure(self, deadline: float) -> tuple[int, EngineDeadError]:
        """What is wrong with this rank, and how likely it is the cause (0: most likely)."""
        try:
            self.call("where")
            while self._due:
                message = self.next(max(deadline - time.monotonic(), 0.1))
                if message[0] == "failed":
                    consequence = message[2] == CollectiveError.__name__
                    return (3 if consequence else 0), self._reported(message)
        except ChildLost as error:
            if isinstance(error.__cause__, GetTimeoutError):
                return 4, EngineDeadError(f"rank {self.rank} is alive but does not answer")
            return 1, EngineDeadError(f"{error}{self._place()}")
        return 4, EngineDeadError(f"rank {self.rank} is alive and idle")

    def _reported(self, message: tuple[Any, ...]) -> EngineDeadError:
        return EngineDeadError(f"rank {self.rank} failed: {message[1]}{self._place()}")

    def _place(self) -> str:
        here = self.here
        return "" if here is None else f" (process {here.pid} of node {here.address})"

    def kill(self) -> None:
        """End the actor's process; a call in progress fails."""
        with contextlib.suppress(RayError, ValueError):
            ray.kill(self.actor, no_restart=True)

    def wait_until_gone(self, node_id: str, deadline: float) -> None:
        """Return when the process has ended, as far as this node can see it."""
        if self.here is None or self.here.node_id != node_id:
            return
        while time.monotonic() < deadline:
            if not SYSTEM.is_alive(self.here.pid):
                return
            time.sleep(0.01)


class RayRanks:
    """The ranks other than 0 of one executor: a :class:`sdk.cluster.executors.process.Workers`.

    :param cpus: CPUs that Ray reserves for each. Inside an actor that has a placement group of its
        own with a bundle for each rank (the first is rank 0's), those bundles are used instead.
    """

    def __init__(self, cpus: int) -> None:
        self.groups: list[RankGroup] = []
        self._cpus = cpus
        self._ranks: list[RayRank] = []
        self._reserved: PlacementGroup | None = None
        self._store: TcpStore | None = None
        self._folder = ""
        self._owner = os.getpid()

    def bring_up(self, start: WorkerStart, startup_s: float, collective_s: float) -> Mesh:
        """See :meth:`sdk.cluster.executors.children.Children.bring_up`.

        :raises RequestError: this process is not connected to Ray.
        :raises EngineDeadError: Ray has no room for the actors within ``startup_s``.
        :raises ChildLost: an actor cannot start.
        """
        if not ray.is_initialized():
            raise RequestError(
                "distributed_executor_backend='ray': this process is not connected to Ray; call "
                "ray.init() before LLM(...), on one machine for example "
                "ray.init(include_dashboard=False)"
            )
        start = self._introduce(start, startup_s)
        mesh, self.groups = start.grid.join(
            0, start.transport, start.place, connect_s=start.connect_s, limit_s=collective_s
        )
        return mesh

    def pack(self, message: object) -> object:
        """The message itself: Ray serializes it."""
        return message

    def _introduce(self, start: WorkerStart, limit_s: float) -> WorkerStart:
        """Place the ranks, agree on how they exchange tensors, and let them build."""
        strategies = self._place(start.grid.size - 1, limit_s)
        for rank, (strategy, cpus) in enumerate(strategies, 1):
            actor = ray.remote(RankActor).options(
                num_cpus=cpus, max_restarts=0, scheduling_strategy=strategy
            )
            self._ranks.append(RayRank(rank, actor.remote()))
        for one in self._ranks:
            one.call("where")
        for one in self._ranks:
            one.here = one.next(limit_s)
        start = self._meet(start)
        for one in self._ranks:
            one.call("start", replace(start, rank=one.rank))
        return start

    def _place(self, count: int, limit_s: float) -> list[tuple[Any, float]]:
        """Where each actor runs, and its CPUs."""
        group = get_current_placement_group()
        first = 1
        if group is None or group.bundle_count <= count:
            group, first = self._reserve(count, limit_s), 0
        bundles = group.bundle_specs[first : first + count]
        return [
            (
                PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=first + i),
                bundle.get("CPU", 0),
            )
            for i, bundle in enumerate(bundles)
        ]

    def _reserve(self, count: int, limit_s: float) -> PlacementGroup:
        """A placement group of our own: on this node if it has room, else on any."""
        bundles = [{"CPU": float(self._cpus)}] * count
        here = ray.get_runtime_context().get_node_id()
        on_this_node = [{"ray.io/node-id": here}] * count
        for selector, wait_s in ((on_this_node, _HERE_FIRST_S), (None, limit_s)):
            group = placement_group(bundles, "PACK", bundle_label_selector=selector)
            self._reserved = group
            if group.wait(wait_s):
                return group
            remove_placement_group(group)
            self._reserved = None
        raise EngineDeadError(
            f"Ray has no room for {count} more ranks within {limit_s:g} s: expected {self._cpus} "
            f"CPUs for each, the cluster has {ray.cluster_resources().get('CPU', 0):g}, of which "
            f"{ray.available_resources().get('CPU', 0):g} are free"
        )

    def _meet(self, start: WorkerStart) -> WorkerStart:
        here = ray.get_runtime_context().get_node_id()
        if all(one.here is not None and one.here.node_id == here for one in self._ranks):
            self._folder = meeting_place()
            return replace(start, place=self._folder)
        self._store = TcpStore(ray.util.get_node_ip_address(), start.grid.size)
        return replace(start, transport="tcp", place=self._store.place)

    def send(self, message: object, limit_s: float, ranks: range | None = None) -> None:
        """Send ``message`` to these ranks (default: all)."""
        for one in self._ranks:
            if ranks is None or one.rank in ranks:
                one.call("run", message)

    def expect(self, kind: str, limit_s: float) -> list[tuple[Any, ...]]:
        """Wait until every rank has answered with ``kind``; the answers by rank."""
        return [one.expect(kind, limit_s) for one in self._ranks]

    def diagnose(self, error: BaseException) -> EngineDeadError:
        """After ``error`` with the ranks: find the one that is the cause, and why."""
        deadline = time.monotonic() + _DIAGNOSIS_S
        return likeliest([one.failure(deadline) for one in self._ranks], error)

    def watch(self, works: Callable[[], int]) -> None:
        """Nothing: Ray reports what happens to actors."""

    def remove_folder(self) -> None:
        """Remove the meeting place; all ranks are connected, or never will be."""
        if self._store is not None:
            self._store.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            with contextlib.suppress(OSError):  # as in Children
                Path(self._folder).rmdir()

    def stop(self, patience_s: float = 5.0) -> None:
        """End every actor and give back the placement group. Idempotent.

        In a forked child of the owner it only prevents gloo from hanging when objects are freed.
        """
        groups, self.groups = self.groups, []
        if os.getpid() != self._owner:
            for group in groups:
                group.abandon()
            return
        ranks, self._ranks = self._ranks, []
        reserved, self._reserved = self._reserved, None
        if ray.is_initialized():  # otherwise they ended with the cluster
            if patience_s > 0:
                _close(ranks, patience_s)
            for one in ranks:
                one.kill()
            if reserved is not None:
                with contextlib.suppress(RayError):
                    remove_placement_group(reserved)
            here = ray.get_runtime_context().get_node_id()
            deadline = time.monotonic() + 5.0
            for one in ranks:
                one.wait_until_gone(here, deadline)
        self.remove_folder()
        for group in groups:
            group.close()


def _close(ranks: list[RayRank], patience_s: float) -> None:
    """Let ranks that live free what they have."""
    with contextlib.suppress(RayError):
        closing = [one.actor.close.remote() for one in ranks]
        if closing:
            ray.wait(closing, num_returns=len(closing), timeout=patience_s)


def _reason(error: RayError) -> str:
    """The last line of Ray's message, which says why."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1] if lines else type(error).__name__
