"""The ranks of one machine, which exchange tensors through shared memory: native/rank_group.hpp."""

from __future__ import annotations

import os
import weakref

from sdk.kernels.cpu.library import find_library
from sdk.kernels.cpu.runtime import check
from sdk.kernels.errors import CollectiveError
from sdk.kernels.lazy_torch import Tensor, torch
from sdk.kernels.system import SYSTEM


def why_not_shared() -> str | None:
    """Why ranks of this machine cannot share memory; ``None`` if they can."""
    if SYSTEM.memory_folder() is None:
        return f"{SYSTEM.name} has no folder in memory that ranks could share"
    found = find_library()
    return found if isinstance(found, str) else None


class _Shared:
    """A native group: see native/rank_group.hpp.

    :param slots: of a link; 0 for other groups.
    :param processes: how many compute at the same time, in this group and in others.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        size: int,
        *,
        connect_s: float,
        limit_s: float,
        processes: int,
        slots: int = 0,
    ) -> None:
        library = find_library()
        if isinstance(library, str):
            raise CollectiveError(library)
        handle = library.embedlm_ranks_create(rank, size, processes, slots, limit_s)
        if not handle:
            raise CollectiveError(f"rank {rank}: out of memory")
        self.handle: int = handle
        self._library = library
        # Native programs hold the handle, and their model holds this group.
        weakref.finalize(self, library.embedlm_ranks_destroy, handle).atexit = False
        joined = library.embedlm_ranks_join(handle, os.fsencode(folder), connect_s)
        check(joined, f"rank {rank} cannot connect to the others")

    def reserve(self, nbytes: int) -> None:
        """Make room for tensors of this size. All ranks call it."""
        check(self._library.embedlm_ranks_reserve(self.handle, nbytes), "reserve")

    def close(self) -> None:
        """Let all exchanges fail, here and on the other ranks. Idempotent.

        The memory is given back with the object.
        """
        self._library.embedlm_ranks_give_up(self.handle)

    def abandon(self) -> None:
        """For a forked child, in which the group does nothing."""


class SharedGroup(_Shared):
    """A :class:`sdk.kernels.groups.CollectiveGroup` in shared memory.

    The native operators use it directly. The ranks meet in ``folder``, best one in memory
    (``/dev/shm``); they need it only until all have joined. Sums are added in the order of the
    ranks.

    :param connect_s: seconds to wait for the others.
    :param limit_s: seconds to wait in an exchange for a rank that is alive. One that has ended is
        noticed after 0.1 to 0.2 s.
    :param processes: how many processes compute at the same time (default: ``size``). With fewer
        CPUs a waiting rank does not spin.
    :raises CollectiveError: the others do not come in time.
    """

    def __init__(
        self,
        folder: str,
        rank: int,
        size: int,
        *,
        connect_s: float,
        limit_s: float,
        processes: int | None = None,
    ) -> None:
        self._size = size
        super().__init__(
            folder, rank, size, connect_s=connect_s, limit_s=limit_s, processes=processes or size
        )

    def all_reduce(self, x: Tensor) -> None:
        """See :class:`sdk.kernels.groups.CollectiveGroup`."""
        total, *others = self._gather("all_reduce", x)
        for other in others:
            total += other
        x.copy_(total)

    def all_gather(self, x: Tensor) -> list[Tensor]:
        """See :class:`sdk.kernels.groups.CollectiveGroup`."""
        return self._gather("all_gather", x)

    def _gather(self, what: str, x: Tensor) -> list[Tensor]:
        x = x.contiguous()
        out = torch.empty((self._size, *x.shape), dtype=x.dtype)
        if x.numel():
            gather = self._library.embedlm_ranks_gather
            check(gather(self.handle, x.data_ptr(), x.nbytes, out.data_ptr()), what)
        return list(out.unbind(0))


class SharedLink(_Shared):
    """One end of a :class:`sdk.kernels.groups.Link` in shared memory, as :class:`SharedGroup`.

    :param sends: which end it is.
    :param slots: tensors that may be on the way (rounded up to a power of two).
    :param processes: as for :class:`SharedGroup`, and ``folder``, ``connect_s``, ``limit_s`` too.
    :raises CollectiveError: the other end does not come in time.
    """

    def __init__(
        self,
        folder: str,
        *,
        sends: bool,
        slots: int,
        connect_s: float,
        limit_s: float,
        processes: int = 2,
    ) -> None:
        super().__init__(
            folder,
            0 if sends else 1,
            2,
            connect_s=connect_s,
            limit_s=limit_s,
            processes=processes,
            slots=1 << max(slots - 1, 0).bit_length(),
        )

    def send(self, x: Tensor) -> None:
        """See :class:`sdk.kernels.groups.Link`."""
        self._transfer("send", x)

    def receive(self, out: Tensor) -> None:
        """See :class:`sdk.kernels.groups.Link`."""
        self._transfer("receive", out)

    def _transfer(self, what: str, x: Tensor) -> None:
        check(self._library.embedlm_ranks_transfer(self.handle, x.data_ptr(), x.nbytes), what)

    @property
    def waited_seconds(self) -> float:
        """How long this end has waited for the other one so far."""
        return float(self._library.embedlm_ranks_waited_ns(self.handle)) * 1e-9
