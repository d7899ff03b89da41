"""The ranks on other hosts, as rank 0 sees them."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from sdk.api.errors import EngineDeadError
from sdk.api.remote_workers import Address, RemoteWorkers
from sdk.cluster.executors.children import ChildLost, Children, Worker
from sdk.cluster.executors.remote.engine_codec import PROTOCOL, engine_codec
from sdk.cluster.executors.remote.link import Link, LinkLost
from sdk.cluster.executors.remote.tcp_group import TcpGroup
from sdk.cluster.executors.remote.world import Facts, difference, facts_of, host_name
from sdk.cluster.executors.worker import WorkerStart
from sdk.cluster.wire.codec import Codec, CodecError
from sdk.cluster.wire.listener import Arrival, Listener
from sdk.cluster.wire.stream import Stream
from sdk.cluster.wire.tls import SharedToken
from sdk.models.parallel import Mesh

logger = logging.getLogger("sdk")

_TICK_S = 0.25
_SEND_S = 5.0


class RemoteRank(Worker):
    """A rank on another host."""

    def __init__(self, link: Link, codec: Codec, name: str, wanted: int | None) -> None:
        self.rank = 0  # known when all have come
        self.link, self.name, self.wanted = link, name, wanted
        self._codec = codec

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.name}"

    def send(self, message: bytes, limit_s: float) -> None:
        try:
            self.link.send(message, limit_s)
        except LinkLost as error:
            raise ChildLost(f"{self}: {error}") from error

    def receive(self, limit_s: float) -> tuple[Any, ...] | None:
        try:
            data = self.link.receive(limit_s)
            message = None if data is None else self._codec.decode(data)
        except (LinkLost, CodecError) as error:
            raise ChildLost(f"{self}: {error}") from error
        if message is not None and not (isinstance(message, tuple) and message):
            raise ChildLost(f"{self}: expected a message, found {message!r:.100}")
        return message

    def reported(self, message: tuple[Any, ...]) -> EngineDeadError:
        return EngineDeadError(f"{self} failed: {message[1]}")

    def how_it_ended(self, lost: ChildLost) -> EngineDeadError:
        return EngineDeadError(f"lost {lost}")

    def wait(self, seconds: float) -> None:
        self.link.wait_closed(seconds)

    def terminate(self) -> None:
        self.link.close()

    def kill(self) -> None:
        self.link.close()

    def close(self) -> None:
        self.link.close()


class RemoteRanks(Children):
    """Waits for the workers of one engine at an address, and connects all ranks.

    :param codec: the types and functions that are sent; other than those of an engine in tests.
    """

    def __init__(self, options: RemoteWorkers, codec: Codec | None = None) -> None:
        super().__init__()
        self._options = options
        self._codec = codec or engine_codec()
        self._listeners: list[Listener] = []
        self._token: SharedToken | None = None
        self._stopped = False

    def watch(self, works: Callable[[], int]) -> None:
        """Nothing: each link has a heartbeat."""

    def pack(self, message: object) -> bytes:
        return self._codec.encode(message)

    def bring_up(self, start: WorkerStart, startup_s: float, collective_s: float) -> Mesh:
        """See :meth:`Children.bring_up`.

        :raises EngineDeadError: the address cannot be used, not all workers come in time, or their
            hosts differ.
        """
        self.pack(start.config)  # fails if it cannot be sent, before anybody listens
        own = facts_of(getattr(start.config, "model", ""))
        try:
            listener = self._listen(self._options.address)
            self._gather(listener, start.grid.size)
            session = os.urandom(16)
            addresses = self._introduce(start, session, own, startup_s)
            tensors = listener
            if self._options.tensor_address is not None:
                tensors = self._listen(Address(self._options.tensor_address, 0))
                addresses[0] = (tensors.address.host, tensors.address.port)
            self.send(self.pack(("connect", addresses)), _SEND_S)
            peers = self._connections(tensors, start.grid.size, session, startup_s)
            group = TcpGroup(0, peers, collective_s)
        finally:
            self._stop_listening()
        self.groups = [group]
        self._check_all()  # one that was lost before could not give up the group
        return Mesh(0, start.grid.size, group)

    def _listen(self, address: Address) -> Listener:
        if self._token is None:
            self._token = SharedToken(self._options.secret(), PROTOCOL)
        listener = Listener(address, self._token, self._codec.decode)
        self._listeners.append(listener)
        if self._stopped:
            self._stop_listening()
        return listener

    def _gather(self, listener: Listener, size: int) -> None:
        """Wait for all workers, and give them their ranks."""
        deadline = time.monotonic() + self._options.timeout
        while len(self._children) < size - 1:
            arrival = listener.accept(min(_TICK_S, max(deadline - time.monotonic(), 0.0)))
            self._forget_lost()
            if arrival is not None:
                self._welcome(arrival, size)
            elif time.monotonic() >= deadline:
                raise EngineDeadError(self._who_is_missing(listener, size))
        free = set(range(1, size)) - {child.wanted for child in self._ranks()}
        for child in self._ranks():
            child.rank = child.wanted or free.pop()
        self._children.sort(key=lambda child: child.rank)

    def _ranks(self) -> list[RemoteRank]:
        return [child for child in self._children if isinstance(child, RemoteRank)]

    def _welcome(self, arrival: Arrival, size: int) -> None:
        match arrival.hello:
            case ("control", str(host), int() | None as wanted):
                pass
            case _:  # the tensors of an engine that has ended
                arrival.stream.close()
                return
        name = f"{host[:64] if host.isprintable() else 'a host'} ({arrival.peer})"
        link = Link(arrival.stream, name, self._give_up)
        worker = RemoteRank(link, self._codec, name, wanted)
        taken = {child.wanted for child in self._ranks()} - {None}
        if wanted is not None and (not 1 <= wanted < size or wanted in taken):
            why = f"rank {wanted} is taken, or not in 1..{size - 1}"
            logger.warning("a worker on %s was refused: %s", name, why)
            with contextlib.suppress(ChildLost):
                worker.send(self.pack(("refused", why)), _SEND_S)
            worker.close()
            return
        self._children.append(worker)

    def _forget_lost(self) -> None:
        """Others may come in their place."""
        for child in self._ranks():
            if child.link.lost is not None:
                logger.warning("a worker on %s left: %s", child.name, child.link.lost)
                child.close()
                self._children.remove(child)

    def _who_is_missing(self, listener: Listener, size: int) -> str:
        found = [child.name for child in self._ranks()]
        text = (
            f"remote_workers: expected {size - 1} workers at {listener.address} within "
            f"{self._options.timeout:g} s, found {len(found)}"
        )
        if found:
            text += f" ({', '.join(found)})"
        if listener.refused:
            text += f"; refused {'; '.join(listener.refused)}"
        return text

    def _introduce(
        self, start: WorkerStart, session: bytes, own: Facts, startup_s: float
    ) -> list[tuple[str, int] | None]:
        """Tell all what to build, and compare the hosts; where each listens for tensors."""
        for child in self._ranks():
            message = (
                "start",
                child.rank,
                start.grid.size,
                session,
                float(startup_s),
                start.config,
            )
            child.send(self.pack(message), _SEND_S)
        answers = self.expect("joining", startup_s)
        hosts: list[tuple[str, Mapping[str, str]]] = [(f"rank 0 ({host_name()})", own)]
        for child, (_, facts, _) in zip(self._ranks(), answers, strict=True):
            hosts.append((str(child), facts))
        different = difference(hosts)
        if different is not None:
            text = f"the hosts differ: {different}"
            self.send(self.pack(("refused", text)), _SEND_S)
            raise EngineDeadError(text)
        return [None, *(address for _, _, address in answers)]

    def _connections(
        self, listener: Listener, size: int, session: bytes, limit_s: float
    ) -> dict[int, Stream]:
        """The connections of all other ranks for tensors."""
        found: dict[int, Stream] = {}
        try:
            accept_peers(listener, found, set(range(1, size)), session, limit_s, self._check_all)
        except BaseException:
            for stream in found.values():
                stream.close()
            raise
        return found

    def _check_all(self) -> None:
        for child in self._ranks():
            if child.link.lost is not None:
                raise ChildLost(f"{child}: {child.link.lost}")

    def _give_up(self) -> None:
        """A worker is lost: exchanges that wait for it fail. In the thread of its link."""
        for group in list(self.groups):
            if isinstance(group, TcpGroup):
                group.give_up()

    def _stop_listening(self) -> None:
        for listener in self._listeners:
            listener.close()

    def stop(self, patience_s: float = 5.0) -> None:
        """See :meth:`Children.stop`."""
        if os.getpid() == self._owner:
            self._stopped = True
            self._stop_listening()
        super().stop(patience_s)


def accept_peers(
    listener: Listener,
    found: dict[int, Stream],
    wanted: set[int],
    session: bytes,
    limit_s: float,
    check: Callable[[], object],
) -> None:
    """Wait until the ranks ``wanted`` are connected for tensors of ``session``.

    :param check: called meanwhile; raises what ends the waiting.
    :raises EngineDeadError: they do not come within ``limit_s`` seconds.
    """
    deadline = time.monotonic() + limit_s
    while missing := wanted - set(found):
        check()
        arrival = listener.accept(_TICK_S)
        if arrival is None:
            if time.monotonic() >= deadline:
                names = ", ".join(map(str, sorted(missing)))
                raise EngineDeadError(
                    f"rank {names}: no connection for tensors within {limit_s:g} s at "
                    f"{listener.address}"
                )
            continue
        match arrival.hello:
            case ("tensors", bytes() as theirs, int() as rank) if theirs == session:
                if rank in missing:
                    found[rank] = arrival.stream
                    continue
        arrival.stream.close()
