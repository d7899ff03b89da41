"""Which adapter is in which slot of the ranks, and which one leaves for another.

A request with an adapter runs only while its adapter is in a slot. There are as many slots as
adapters may run in one step, and all adapters together may take ``max_bytes``. If a waiting request
needs a slot, the adapter leaves that has been unused for the longest time; one that is pinned or
used by a running request stays.

*Order.* Requests that wait for a slot are overtaken by others: without an adapter, or with one that
is in a slot already. So that nobody waits forever, only the first of them in the order of the queue
may claim a slot, and once ``patience`` requests with the adapters that would have to leave have
overtaken it, no more of those start. Then the slot becomes free when the running ones have ended.
"""

from __future__ import annotations

from collections.abc import Iterable

from sdk.api.errors import RequestError
from sdk.api.lora import KnownAdapter
from sdk.engine.scheduling.request import Request


class Resident:
    """One adapter and its slot (-1: none). It can run once it is ``ready``."""

    __slots__ = (
        "error",
        "last_used",
        "num_requests",
        "num_running",
        "pinned",
        "ready",
        "slot",
        "source",
    )

    def __init__(self, source: KnownAdapter) -> None:
        self.source = source
        self.slot = -1
        self.ready = False
        self.pinned = False
        self.num_requests = 0  # unfinished ones that need it
        self.num_running = 0
        self.last_used = 0
        self.error: Exception | None = None  # why it could not be loaded

    @property
    def nbytes(self) -> int:
        """What it takes now."""
        if self.slot < 0:
            return 0
        return self.source.nbytes + (0 if self.ready else self.source.read_bytes)


class AdapterSlots:
    """See the module. Not thread-safe: used by the scheduler, and between two steps.

    ``take_wanted`` and ``take_cleared`` say what the ranks have to do; :meth:`loaded` and
    :meth:`failed` report what became of it.
    """

    def __init__(self, num_slots: int, max_bytes: int, patience: int) -> None:
        self.num_slots = num_slots
        self.max_bytes = max_bytes
        self.num_loads = 0
        self._patience = patience
        self._free = list(range(num_slots))[::-1]
        self._known: dict[str, Resident] = {}
        self._wanted: list[Resident] = []
        self._cleared: list[int] = []
        self._removed: set[Resident] = set()  # they leave as soon as no request needs them
        self._clock = 0  # counts uses
        # Of one pass over the waiting requests:
        self._needed: set[Resident] = set()  # by requests earlier in the queue
        self._leaving: set[Resident] = set()  # would have to leave for the first one that waits
        self._claimed = False  # there is such a one
        # Of the request that claims a slot:
        self._claimant: Request | None = None
        self._overtaken = 0

    # ---- facts -----------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of all adapters in slots, with what is being read."""
        return sum(one.nbytes for one in self._known.values())

    def metrics(self) -> dict[str, float]:
        """Counters of :meth:`sdk.LLM.get_metrics`."""
        return {
            "num_loras": sum(one.ready for one in self._known.values()),
            "lora_bytes": self.nbytes,
            "lora_loads": self.num_loads,
        }

    @property
    def ready_keys(self) -> tuple[str, ...]:
        """The keys of the adapters that can run now."""
        return tuple(one.source.key for one in self._known.values() if one.ready)

    @property
    def has_work(self) -> bool:
        """Whether the ranks have something to do before the next step."""
        return bool(self._wanted or self._cleared or self._removed)

    def find(self, key: str) -> Resident | None:
        """The adapter with this key, if it is known."""
        return self._known.get(key)

    def check(self, source: KnownAdapter) -> None:
        """:raises RequestError: it can never get a slot; the message says why."""
        need = source.nbytes + source.read_bytes
        if need > self.max_bytes:
            raise RequestError(
                f"adapter {source.name!r} needs {need} bytes while it is loaded, and lora_memory "
                f"has {self.max_bytes}; raise lora_memory"
            )
        known = self._known.get(source.key)
        if known is None or known.slot < 0:
            self._check_pins(source)

    def _check_pins(self, source: KnownAdapter) -> None:
        """:raises RequestError: pinned adapters would never leave room for this one."""
        known, need = self._known.get(source.key), source.nbytes + source.read_bytes
        pinned = [one for one in self._known.values() if one.pinned and one is not known]
        kept = sum(one.source.nbytes for one in pinned)
        if len(pinned) >= self.num_slots or kept + need > self.max_bytes:
            names = ", ".join(repr(one.source.name) for one in pinned)
            raise RequestError(
                f"adapter {source.name!r} cannot be loaded: {names} are pinned and leave no room "
                f"in {self.num_slots} slots (max_loras) and {self.max_bytes} bytes (lora_memory)"
            )

    # ---- requests --------------------------------------------------------------------------------

    def attach(self, source: KnownAdapter) -> None:
        """A new request needs an adapter. :raises RequestError: it can never run."""
        self.check(source)
        self._know(source).num_requests += 1

    def detach(self, request: Request) -> None:
        """A request has ended."""
        if request.adapter is not None:
            self._known[request.adapter].num_requests -= 1

    def reattach(self, request: Request) -> None:
        """A request that ended in this step goes on (:meth:`RequestQueues.rewind`)."""
        if request.adapter is not None:
            self._known[request.adapter].num_requests += 1

    def _know(self, source: KnownAdapter) -> Resident:
        known = self._known.get(source.key)
        if known is None:
            known = self._known[source.key] = Resident(source)
        return known

    def is_ready(self, request: Request) -> bool:
        """Whether the adapter of a request is in a slot, if it has one."""
        return request.adapter is None or self._known[request.adapter].ready

    def begin_pass(self) -> None:
        """Before the waiting requests are looked at, in order."""
        self._needed.clear()
        self._leaving.clear()
        self._claimed = False

    def may_start(self, request: Request) -> bool:
        """Whether a waiting request can start as far as its adapter is concerned."""
        if request.adapter is None:
            return True
        adapter = self._known[request.adapter]
        self._needed.add(adapter)
        if adapter.ready:
            if adapter not in self._leaving:
                return True
            return self._overtaken < self._patience
        if adapter.slot < 0 and not self._claimed:
            self._claim(request, adapter)
        return False

    def _claim(self, request: Request, adapter: Resident) -> None:
        """Load the adapter of the first request that has no slot, or decide what must leave."""
        self._claimed = True
        if request is not self._claimant:
            self._claimant, self._overtaken = request, 0
        need = adapter.source.nbytes + adapter.source.read_bytes
        idle, busy = self._evictable()
        leaving = self._enough(idle, need)
        if leaving is not None:
            self._load(adapter, leaving)
            return
        leaving = self._enough([*idle, *busy], need)
        self._leaving.update(leaving or ())

    def _evictable(self) -> tuple[list[Resident], list[Resident]]:
        """Adapters that may leave, unused and used ones, the longest unused first."""
        found = sorted(
            (
                one
                for one in self._known.values()
                if one.ready and not one.pinned and one not in self._needed
            ),
            key=lambda one: one.last_used,
        )
        return [x for x in found if not x.num_running], [x for x in found if x.num_running]

    def _enough(self, candidates: Iterable[Resident], need: int) -> list[Resident] | None:
        """The first candidates whose leaving makes room. ``None``: all of them do not."""
        slots, room, leaving = len(self._free), self.max_bytes - self.nbytes, []
        for one in candidates:
            if slots and room >= need:
                break
            leaving.append(one)
            slots += 1
            room += one.nbytes
        return leaving if slots and room >= need else None

    def _load(self, adapter: Resident, leaving: Iterable[Resident]) -> None:
        for one in leaving:
            self._evict(one)
        adapter.slot = self._free.pop()
        self._wanted.append(adapter)

    def _evict(self, adapter: Resident) -> None:
        self._cleared.append(adapter.slot)
        self._free.append(adapter.slot)
        adapter.slot, adapter.ready = -1, False

    def start(self, request: Request) -> None:
        """A request starts: its adapter stays until :meth:`release`."""
        if request.adapter is None:
            return
        adapter = self._known[request.adapter]
        if adapter in self._leaving:
            self._overtaken += 1
        adapter.num_running += 1
        self._touch(adapter)
        for sequence in request.sequences:
            sequence.adapter_slot = adapter.slot

    def release(self, request: Request) -> None:
        """A request no longer runs: it ended or was preempted."""
        if request.adapter is None:
            return
        adapter = self._known[request.adapter]
        adapter.num_running -= 1
        self._touch(adapter)
        for sequence in request.sequences:
            sequence.adapter_slot = -1

    def _touch(self, adapter: Resident) -> None:
        self._clock += 1
        adapter.last_used = self._clock

    # ---- loading ---------------------------------------------------------------------------------

    def take_wanted(self) -> list[Resident]:
        """Adapters to load into their slots, since the last call."""
        wanted, self._wanted = self._wanted, []
        return wanted

    def take_cleared(self) -> list[int]:
        """Slots to empty, since the last call."""
        for one in [one for one in self._removed if not one.num_requests]:
            if one.ready or one.slot < 0:  # else it is being read
                self._forget(one)
        cleared, self._cleared = self._cleared, []
        return cleared

    def loaded(self, adapter: Resident) -> None:
        """An adapter is in its slot."""
        adapter.ready = True
        self.num_loads += 1
        self._touch(adapter)

    def failed(self, adapter: Resident) -> None:
        """An adapter could not be loaded. The requests that waited for it have ended."""
        self._free.append(adapter.slot)
        adapter.slot = -1
        self._forget(adapter)

    def _forget(self, adapter: Resident) -> None:
        if adapter.slot >= 0:
            self._evict(adapter)
        self._removed.discard(adapter)
        del self._known[adapter.source.key]

    # ---- the user --------------------------------------------------------------------------------

    def load(self, source: KnownAdapter, *, pin: bool) -> Resident | None:
        """Give an adapter a slot now. ``None``: it has none, because requests use all of them.

        ``pin``: it stays there until it is unpinned or removed.

        :raises RequestError: it can never be loaded, or an unfinished request could not run if it
            was pinned.
        """
        self.check(source)
        adapter = self._know(source)
        self._removed.discard(adapter)
        if pin and not adapter.pinned:
            self._pin(adapter)
        if adapter.slot < 0:
            self._needed.clear()
            idle, _ = self._evictable()
            leaving = self._enough(idle, source.nbytes + source.read_bytes)
            if leaving is None:
                adapter.pinned = False
                return None
            self._load(adapter, leaving)
        return adapter

    def _pin(self, adapter: Resident) -> None:
        adapter.pinned = True
        try:
            for other in self._known.values():
                if other.num_requests and not other.pinned:  # it may lose its slot until it runs
                    self._check_pins(other.source)
        except RequestError as error:
            adapter.pinned = False
            raise RequestError(
                f"adapter {adapter.source.name!r} cannot be pinned while a request waits for "
                f"another one: {error}"
            ) from None

    def remove(self, key: str) -> None:
        """Let an adapter go once no request needs it, pinned or not."""
        adapter = self._known.get(key)
        if adapter is not None:
            adapter.pinned = False
            self._removed.add(adapter)

    def reload_all(self) -> None:
        """The ranks have lost all adapters. Pinned ones are loaded again, others when needed."""
        self._wanted.clear()
        self._cleared.clear()
        self._free = list(range(self.num_slots))[::-1]
        for one in self._known.values():
            one.slot, one.ready = -1, False
        for one in self._known.values():
            if one.pinned:
                self._load(one, ())
