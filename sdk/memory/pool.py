"""One budget for several models: each has what it cannot do without, pages beyond that are lent.

A model takes from the pool, when it is loaded, its weights, its workspace and the pages of one
request of full length: with these it always gets on. Further pages of its KV cache are lent one by
one as requests need them, and stay until another model needs memory: then those nobody uses are
asked back, cached prefixes among them. A model that computes is not interrupted: it gives them back
before its next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sdk.errors import OutOfMemoryError
from sdk.memory.sizes import format_bytes, parse_bytes

logger = logging.getLogger("sdk")


class MemoryPool:
    """A budget shared by all :class:`sdk.LLM` made with ``memory=pool``, from any thread.

    ``budget``: bytes or ``"6GiB"``. ``on_pressure(pool, missing)`` is called, in the thread of the
    model that needs memory, or is to be loaded, when ``missing`` bytes are short although everybody
    gave back what nobody uses: once, until that model got memory again. It may close or ``trim``
    something, and the need is looked at once more. What it raises is logged.
    """

    def __init__(
        self,
        budget: int | str,
        *,
        on_pressure: Callable[[MemoryPool, int], None] | None = None,
    ) -> None:
        self.budget = parse_bytes(budget, "MemoryPool")
        self._on_pressure = on_pressure
        self._lock = threading.Lock()
        self._leases: list[Lease] = []

    @property
    def used(self) -> int:
        """Bytes that models hold or may use at any time."""
        return sum(lease.nbytes for lease in self._leases)

    @property
    def free(self) -> int:
        return self.budget - self.used

    def __str__(self) -> str:
        with self._lock:
            rows = [(lease.name, lease.nbytes) for lease in self._leases]
        rows += [("free", self.budget - sum(size for _, size in rows)), ("budget", self.budget)]
        return "\n".join(f"{format_bytes(size):>10}  {name}" for name, size in rows)

    def lease(self, name: str, nbytes: int) -> Lease:
        """What a model cannot do without. :raises OutOfMemoryError: with what everybody holds."""
        lease = Lease(self, name)
        with self._lock:
            self._leases.append(lease)
        if not lease.take(nbytes, urgent=True):
            lease.close()
            raise OutOfMemoryError(
                f"{name} needs {format_bytes(nbytes)} of a memory pool, "
                f"{format_bytes(max(self.free, 0))} are free:\n{self}\n"
                "what would help: a larger pool, a shorter max_model_len, sleep(2) or close() of "
                "another model"
            )
        return lease

    def make_room(self, nbytes: int) -> None:
        """For a model about to be loaded: what others do not use, then what the host can free."""
        self.collect(nbytes)
        self._tell(nbytes)

    def _tell(self, nbytes: int) -> None:
        """Have the host hear of it, and act, where fewer than ``nbytes`` are free."""
        missing = nbytes - self.free
        if missing <= 0 or self._on_pressure is None:
            return
        try:
            self._on_pressure(self, missing)
        except Exception:
            logger.warning("on_pressure failed", exc_info=True)

    def collect(self, nbytes: int, but: Lease | None = None) -> None:
        """Have models other than ``but`` give back pages nobody uses until ``nbytes`` are free."""
        with self._lock:
            others = [lease for lease in self._leases if lease is not but]
        for lease in others:
            missing = nbytes - self.free
            if missing > 0:
                lease.wanted += missing
                lease.reclaim()


class Lease:
    """What one model holds of a pool; ``wanted`` bytes others ask it to give back."""

    def __init__(self, pool: MemoryPool, name: str) -> None:
        self.pool = pool
        self.name = name
        self.nbytes = 0
        self.wanted = 0
        self._told = False
        #: Gives back now what can be, if the model is not computing.
        self.reclaim: Callable[[], None] = _nothing

    def take(self, nbytes: int, *, urgent: bool = False) -> bool:
        """More of the pool, all or nothing; ``urgent`` asks the other models first."""
        if self._add(nbytes):
            self._told = False
            return True
        if not urgent:
            return False
        self.pool.collect(nbytes, self)
        if self._add(nbytes):
            return True
        if self._told:
            return False
        self._told = True  # not again in every step that waits for memory
        self.pool._tell(nbytes)
        return self._add(nbytes)

    def _add(self, nbytes: int) -> bool:
        with self.pool._lock:
            fits = self.pool.used + nbytes <= self.pool.budget
            if fits:
                self.nbytes += nbytes
            return fits

    def give_back(self, nbytes: int) -> None:
        """Less of the pool."""
        with self.pool._lock:
            self.nbytes -= nbytes
            self.wanted = max(self.wanted - nbytes, 0)

    def close(self) -> None:
        """Give everything back. Idempotent."""
        with self.pool._lock:
            self.nbytes = self.wanted = 0
            if self in self.pool._leases:
                self.pool._leases.remove(self)


def _nothing() -> None:
    """A model that is being loaded has nothing to give back."""
