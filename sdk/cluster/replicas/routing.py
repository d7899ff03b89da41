"""Distributes requests over replicas.

The default policy, ``"state"``, sends a request to the replica where it should get its first token
first. Replicas report what they have to compute (``report.py``), and between two reports the router
adds what it has sent. The time to the first token is estimated from the tokens ahead and the
request's own tokens, those without a cached prefix, at the speed that the replica has measured. So
a request does not wait behind a long prompt while another replica is idle, and a conversation stays
where its prefix is unless waiting there takes longer than computing it again. Other policies:
``"requests"`` chooses the replica with the fewest unfinished requests, ``"round_robin"`` each in
turn.

Usage, in the process that accepts requests::

    router = Router("state")
    router.joined(0)                      # a replica has started; again after a restart
    replica = router.choose(request)      # also notes that it is sent there now
    replica = router.choose(request, later=True)  # or that it will be: sent(request_id) follows
    router.report(replica, report)        # whenever the replica sends one (Reporter.report)
    router.ended(request.request_id)      # its last output has come, or sending it failed
    lost = router.lost(0)                 # the replica died: choose again for these requests
    router.closing(0)                     # it gets no new requests (before it is stopped)

and in the process of each replica::

    reporter = Reporter(scheduler)        # when the engine was made
    report = reporter.report(received)    # after each step; None: nothing to send

or, in another thread than that of the steps::

    report = driver.observe(lambda: reporter.look(received))
    if report is not None:
        reporter.taken(report)            # and send it

``received`` counts the requests that the replica has taken from its connection since it started.
The router relies on requests arriving in the order of ``choose`` (of ``sent`` for those that are
sent later), and on reports of a replica that was lost not coming after its successor has joined.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias, get_args

from sdk.api.errors import EngineDeadError, RequestError
from sdk.cluster.replicas.prefix_index import Level, PrefixIndex, Prompt
from sdk.cluster.replicas.replica_load import NOTHING, Expected, ReplicaLoad, Routed as Routed, Sent
from sdk.cluster.replicas.report import ReplicaReport
from sdk.quant.safe_repr import safe_repr

RoutingPolicy: TypeAlias = Literal["state", "requests", "round_robin"]
ROUTING_POLICIES: tuple[RoutingPolicy, ...] = get_args(RoutingPolicy)

#: Of the replicas that hold the same part of a prompt, this many are compared: those with the least
#: to do. With up to this many replicas all are compared.
_COMPARED = 8


class Router:
    """Chooses a replica for each request. Deterministic; not thread-safe.

    Replicas are numbers from 0 on. ``clock`` gives seconds.

    :raises RequestError: there is no such policy.
    """

    def __init__(
        self, policy: RoutingPolicy = "state", clock: Callable[[], float] = time.monotonic
    ) -> None:
        if policy not in ROUTING_POLICIES:
            raise RequestError(
                f"routing policy: expected one of {', '.join(ROUTING_POLICIES)}, found "
                f"{safe_repr(policy)}"
            )
        self.policy: RoutingPolicy = policy
        self._clock = clock
        self._replicas: dict[int, ReplicaLoad] = {}
        #: The replicas that get requests, those with the least to do first.
        self._order: list[tuple[float, int, int]] = []
        self._keys: dict[int, tuple[float, int, int]] = {}
        self._alive = 0  # the same replicas as bits
        self._prefixes: PrefixIndex | None = None  # until the first report
        self._expected = Expected()
        self._sorted_for = 0.0  # what was expected when all replicas were put in order
        self._placed: dict[str, int] = {}  # request -> replica
        self._num_chosen = 0

    @property
    def replicas(self) -> list[int]:
        """The replicas that get requests."""
        return sorted(self._keys)

    @property
    def alive(self) -> bool:
        """Whether there is a replica that gets requests."""
        return bool(self._order)

    def unfinished(self, replica: int) -> list[str]:
        """The ids of the unfinished requests that were sent to a replica, in order."""
        load = self._replicas.get(replica)
        return [] if load is None else list(load.unfinished)

    # ---- replicas come and go --------------------------------------------------------------------

    def joined(self, replica: int) -> None:
        """A replica has started and is empty.

        :raises RequestError: it is here already.
        """
        if replica in self._replicas:
            raise RequestError(
                f"replica {replica} has joined already; call lost({replica}) before it joins again"
            )
        load = self._replicas[replica] = ReplicaLoad(replica, self._expected)
        self._sort(load)

    def closing(self, replica: int) -> None:
        """A replica gets no new requests. Those that it has go on."""
        if replica in self._replicas:
            self._replicas[replica].closing = True
            self._unsort(replica)

    def lost(self, replica: int) -> list[str]:
        """A replica is gone, with all its pages. Returns its unfinished requests, in the order in
        which they were sent; the router has forgotten them."""
        load = self._replicas.pop(replica, None)
        if load is None:
            return []
        self._unsort(replica)
        if self._prefixes is not None:
            self._prefixes.clear(replica)
        for request_id in load.unfinished:
            del self._placed[request_id]
        return list(load.unfinished)

    def report(self, replica: int, report: ReplicaReport) -> None:
        """A replica has reported. Reports of a replica that was lost are ignored.

        :raises RequestError: its pages differ from those of the other replicas.
        """
        load = self._replicas.get(replica)
        if load is None:
            return
        if self.policy == "state":
            self._take_keys(replica, report)
        load.reported(report, self._clock())
        self._expected.learn(load.measured, report.answer_tokens)
        self._sort(load)
        self._sort_all()

    def _take_keys(self, replica: int, report: ReplicaReport) -> None:
        """Note which pages a replica holds."""
        prefixes = self._prefixes
        if prefixes is None:
            prefixes = self._prefixes = PrefixIndex(report.page_size, report.kv_type)
        if (report.page_size, report.kv_type) != (prefixes.page_size, prefixes.kv_type):
            raise RequestError(
                f"replica {replica}: expected pages of {prefixes.page_size} tokens and the KV type "
                f"{prefixes.kv_type!r}, as the other replicas have, found {report.page_size} and "
                f"{report.kv_type!r}"
            )
        if report.full:
            prefixes.clear(replica, promised=False)
        prefixes.publish(replica, report.published)
        prefixes.evict(replica, report.evicted)

    # ---- requests come and go --------------------------------------------------------------------

    def choose(self, request: Routed, *, later: bool = False) -> int:
        """The replica that is to run a request. From now on it counts as sent there.

        :param later: it is sent when :meth:`sent` is called. Until then it is unfinished, its pages
            are promised and its answer counts, but not its prompt, which may be handed over.
        :raises EngineDeadError: there is no replica.
        :raises RequestError: a request with this id is unfinished.
        """
        if not self._order:
            raise EngineDeadError("no replica is alive: the request cannot be sent anywhere")
        if request.request_id in self._placed:
            raise RequestError(f"request id {request.request_id!r} is already in use")
        self._num_chosen += 1
        prompt: Prompt | None = None
        levels: list[Level] = []
        if self._prefixes is not None:
            prompt = self._prefixes.prompt(request.token_ids, request.adapter, request.cache_salt)
            levels = self._prefixes.find(prompt)
            replica = self._best(request, levels)
        elif self.policy == "round_robin":
            alive = self.replicas
            replica = alive[self._num_chosen % len(alive)]
        else:
            replica = self._order[0][2]
        self._choose(request, replica, prompt, levels)
        if later:
            self._sort(self._replicas[replica])
        else:
            self.sent(request.request_id)
        return replica

    def sent(self, request_id: str, *, handed_over: bool = False) -> None:
        """A request that was chosen for ``later`` is sent now. Ids of others are ignored.

        :param handed_over: another replica has computed the full pages of its prompt, so its own
            computes only the rest.
        """
        replica = self._placed.get(request_id)
        if replica is not None:
            load = self._replicas[replica]
            load.sent(request_id, handed_over=handed_over)
            self._sort(load)

    def uncached(self, request_id: str) -> int:
        """Prompt tokens of an unfinished request that its replica has to compute, as far as the
        router knows."""
        return self._replicas[self._placed[request_id]].unfinished[request_id].tokens

    def ended(self, request_id: str) -> None:
        """A request has ended, or never reached its replica. Unknown ids are ignored."""
        replica = self._placed.pop(request_id, None)
        if replica is None:
            return
        load = self._replicas[replica]
        sent = load.ended(request_id)
        if self._prefixes is not None:
            self._prefixes.withdraw(replica, request_id, sent.promised)
        if not load.closing:
            self._sort(load)

    def _best(self, request: Routed, levels: Sequence[Level]) -> int:
        """The replica with the lowest score."""
        assert self._prefixes is not None
        now, size = self._clock(), self._prefixes.page_size
        length, least = len(request.token_ids), (float("inf"), 0)
        rest = -1  # all replicas that hold nothing of the prompt
        for level in levels:
            rest &= ~level.replicas
        for replicas, pages in (*levels, Level(rest, 0)):
            tokens = length - pages * size
            pairs = tokens * (length - tokens / 2)
            for place, replica in self._first(replicas):
                score = self._replicas[replica].score(request, tokens, pairs, now)
                least = min(least, (score, place))
        return self._order[least[1]][2]

    def _first(self, replicas: int) -> list[tuple[int, int]]:
        """Some of ``replicas`` (bits) with their places: those with the least to do."""
        order, keys, found = self._order, self._keys, []
        replicas &= self._alive
        if replicas.bit_count() <= _COMPARED < len(order):
            while replicas:  # without looking at all others
                replica = replicas.bit_length() - 1
                replicas ^= 1 << replica
                found.append((bisect_left(order, keys[replica]), replica))
            return found
        for place, (_, _, replica) in enumerate(order):
            if replicas >> replica & 1:
                found.append((place, replica))
                if len(found) == _COMPARED:
                    break
        return found

    def _choose(
        self, request: Routed, replica: int, prompt: Prompt | None, levels: Sequence[Level]
    ) -> None:
        load, length = self._replicas[replica], len(request.token_ids)
        promised, pages, size = list[bytes](), 0, 16
        if prompt is not None and self._prefixes is not None:
            size = self._prefixes.page_size
            pages = next((one.num_pages for one in levels if one.replicas >> replica & 1), 0)
            promised = self._prefixes.promise(replica, request.request_id, prompt)
        sent = Sent(
            request_id=request.request_id,
            tenant=request.tenant,
            priority=request.priority,
            adapter=request.adapter,
            length=length,
            tokens=length - pages * size,
            answer=self._expected.answer_of(request),
            page_size=size,
            promised=promised,
        )
        load.chosen(sent)
        self._placed[request.request_id] = replica

    # ---- the order of the replicas ---------------------------------------------------------------

    def _sort(self, load: ReplicaLoad) -> None:
        """Put a replica where it belongs now. Equal ones: first the one that was sent less."""
        self._unsort(load.index)
        if load.closing:
            return
        key = float(len(load.unfinished))
        if self.policy == "state":
            key = load.score(NOTHING, 0, 0.0, self._clock())
        entry = key, load.num_sent, load.index
        self._keys[load.index] = entry
        self._alive |= 1 << load.index
        insort(self._order, entry)

    def _sort_all(self) -> None:
        """Put idle replicas, which do not report, where they belong once more is known."""
        expected = self._expected.answer * self._expected.seconds.one
        if self.policy == "state" and not 0.8 <= self._sorted_for / expected <= 1.25:
            self._sorted_for = expected
            for load in self._replicas.values():
                self._sort(load)

    def _unsort(self, replica: int) -> None:
        entry = self._keys.pop(replica, None)
        if entry is not None:
            del self._order[bisect_left(self._order, entry)]
            self._alive &= ~(1 << replica)
