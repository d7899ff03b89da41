"""One budget for several models: each owns a minimum and borrows KV pages beyond it.

When a model is loaded, it takes its weights, its workspace and the pages of one request of full
length from the pool: with these it always makes progress. It borrows further KV pages one by one as
requests need them, and keeps them until another model needs memory. Then it gives back the unused
ones, including cached prefixes. A model that is computing is not interrupted: it gives pages back
before its next step.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from sdk.api.errors import OutOfMemoryError
from sdk.api.sizes import format_bytes, parse_bytes

logger = logging.getLogger("sdk")


class MemoryPool:
    """A budget shared by all :class:`sdk.LLM` created with ``memory=pool``, from any thread.

    ``budget``: bytes or ``"6GiB"``. ``on_pressure(pool, missing)`` is called if ``missing`` bytes
    are still short after all models gave back their unused pages. It runs in the thread of the
    model that needs memory or is being loaded, and only once until that model gets memory again. It
    may close or ``trim`` models; then the pool tries again. Exceptions it raises are logged.
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
        """Reserve the minimum of a model. :raises OutOfMemoryError: lists what each model holds."""
        lease = Lease(self, name)
        with self._lock:
            self._leases.append(lease)
        if not lease.take(nbytes, urgent=True):
            lease.close()
            raise OutOfMemoryError(
                f"{name} needs {format_bytes(nbytes)} of a memory pool, "
                f"{format_bytes(max(self.free, 0))} are free:\n{self}\n"
                "what would help: a larger pool, a shorter max_model_len, or sleep(2) or close() "
                "of another model"
            )
        return lease

    def make_room(self, nbytes: int) -> None:
        """Free memory for a model about to be loaded: unused pages first, then ``on_pressure``."""
        self.collect(nbytes)
        self._notify(nbytes)

    def _notify(self, nbytes: int) -> None:
        """Call ``on_pressure`` if fewer than ``nbytes`` are free."""
        missing = nbytes - self.free
        if missing <= 0 or self._on_pressure is None:
            return
        try:
            self._on_pressure(self, missing)
        except Exception:
            logger.warning("on_pressure failed", exc_info=True)

    def collect(self, nbytes: int, borrower: Lease | None = None) -> None:
        """Make models other than ``borrower`` return unused pages until ``nbytes`` are free."""
        with self._lock:
            others = [lease for lease in self._leases if lease is not borrower]
        for lease in others:
            missing = nbytes - self.free
            if missing > 0:
                lease.wanted += missing
                lease.reclaim()


class Lease:
    """What one model holds of a pool. Other models have asked it to give back ``wanted`` bytes."""

    def __init__(self, pool: MemoryPool, name: str) -> None:
        self.pool = pool
        self.name = name
        self.nbytes = 0
        self.wanted = 0
        self._notified = False
        #: Gives back unused pages now, if the model is not computing.
        self.reclaim: Callable[[], None] = _nothing

    def take(self, nbytes: int, *, urgent: bool = False) -> bool:
        """Take more from the pool, all or nothing; ``urgent``: make other models return pages."""
        if self._add(nbytes):
            self._notified = False
            return True
        if not urgent:
            return False
        self.pool.collect(nbytes, self)
        if self._add(nbytes):
            return True
        if self._notified:
            return False
        self._notified = True  # once, not in every step that waits for memory
        self.pool._notify(nbytes)
        return self._add(nbytes)

    def _add(self, nbytes: int) -> bool:
        with self.pool._lock:
            fits = self.pool.used + nbytes <= self.pool.budget
            if fits:
                self.nbytes += nbytes
            return fits

    def give_back(self, nbytes: int) -> None:
        """Return some bytes to the pool."""
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
